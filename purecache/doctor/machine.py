"""Facts about this process: versions, devices, memory, and whether the control plane can run as it should."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purecache.driver import control_device
from purecache.effects.host_memory import locked_memory_limit

BAD_JAXLIB = ("0.11.0", "0.11.1")
"""Every small write inside a loop costs O(array) on CPU with 0.11.1; 0.11.0 was never tested."""
MOST_RATIO = 8.0
"""A write in an array 256 times as large may cost so many times as much. It costs 1, or 256 where arrays are copied."""
_WRITES = 64


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    grave: bool
    """Whether the cache should not be run like this."""
    what: str
    """What is wrong and what to do."""


def facts() -> dict[str, Any]:
    """Versions, devices with their memory kinds and bytes, and the limit of locked memory; JSON-ready."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "purecache": metadata.version("purecache"),
        "processes": jax.process_count(),
        "devices": [_device(device) for device in jax.local_devices()],
        "locked_memory_limit": locked_memory_limit(),
    }


def _device(device: Any) -> dict[str, Any]:
    memory = device.memory_stats() or {}
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "memory_kinds": sorted(kind.kind for kind in device.addressable_memories()),
        "default_memory_kind": device.default_memory().kind,
        "bytes_limit": memory.get("bytes_limit"),
        "bytes_in_use": memory.get("bytes_in_use"),
    }


def findings() -> list[Finding]:
    """What is wrong with this process, gravest first."""
    found = []
    version = metadata.version("jaxlib")
    if version in BAD_JAXLIB:
        found.append(Finding(True, f"jaxlib {version} copies arrays at small writes on CPU: use 0.10.2, or 0.11.2 on"))
    try:
        control_device()
    except RuntimeError as error:
        found.append(Finding(True, str(error)))
    else:
        ratio = write_ratio()
        if ratio > MOST_RATIO:
            found.append(
                Finding(
                    True,
                    f"a small write costs {ratio:.0f} times as much in an array 256 times as large: use another jaxlib",
                )
            )
    kinds = {kind for device in facts()["devices"] for kind in device["memory_kinds"]}
    if "pinned_host" not in kinds:
        found.append(Finding(True, f"no device has pinned host memory, only {sorted(kinds)}: there can be no L2"))
    if jax.default_backend() != "cpu" and jax.config.read("jax_cpu_enable_async_dispatch"):
        advice = 'jax.config.update("jax_cpu_enable_async_dispatch", False) before JAX starts makes it quicker'
        found.append(Finding(False, f"the CPU backend runs only the control plane: {advice}"))
    return sorted(found, key=lambda each: not each.grave)


def write_ratio(rounds: int = 20) -> float:
    """How much more a small write inside a loop costs on CPU in an array of 4 MiB than in one of 16 KiB."""
    device = control_device()

    def writes(array: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _WRITES, lambda k, a: a.at[k * 7].set(k), array)

    def seconds(size: int) -> float:
        array = jax.device_put(jnp.zeros(size, jnp.int32), device)
        program = jax.jit(writes, donate_argnums=0)
        best = np.inf
        for _ in range(rounds):
            start = time.perf_counter()
            array = jax.block_until_ready(program(array))
            best = min(best, time.perf_counter() - start)
        return float(best)

    return seconds(1 << 20) / seconds(1 << 12)


def as_json(found: list[Finding]) -> list[dict[str, Any]]:
    """Findings as dictionaries."""
    return [asdict(each) for each in found]
