"""How fast pages move by every route of the table, with the bytes checked first."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purecache.effects import Interpreter, Transfer, TransferKind
from purecache.effects.pools import describe
from purecache.effects.table import Route, routes


@dataclass(frozen=True)
class Sample:
    """The pool that is measured: `layers` arrays [pages, *page_shape]."""

    layers: int = 8
    page_shape: tuple[int, ...] = (16, 16, 128)
    """Tokens, heads of keys and of values, numbers of a head."""
    dtype: str = "bfloat16"
    pages: int = 128
    """On device, and as many on host."""
    batch: int = 64
    """Pages of a transfer."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers."""
        return self.layers * int(np.prod(self.page_shape)) * np.dtype(self.dtype).itemsize

    def pool(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """The arrays, on the default device, with random bits: NaN payloads included."""
        generator, dtype = np.random.default_rng(seed), np.dtype(self.dtype)
        shape = (self.pages, *self.page_shape, dtype.itemsize)
        rows = (generator.integers(0, 256, shape, dtype=np.uint8).view(dtype)[..., 0] for _ in range(self.layers))
        return tuple(jnp.array(each, copy=True) for each in rows)


def rates(sample: Sample, rounds: int = 10) -> Iterator[dict[str, Any]]:
    """One row per route of the default device's platform; see `measure`. Before them, the plain copies.

    Rows are JSON-ready: a route that can't be used has `problem` instead of rates.
    """
    yield {"path": "host copy"} | _plain(sample, rounds)
    yield {"path": "device copy"} | _on_device(sample, rounds)
    layout = describe(sample.pool(), 0, sample.pages)
    for route in routes(layout):
        row = {"path": f"{route.form} by {route.programs}", "standing": route.standing}
        try:
            yield row | measure(sample, route, rounds)
        except Exception as problem:  # whatever a backend can't do is a fact about it
            yield row | {"problem": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}


def measure(sample: Sample, route: Route, rounds: int) -> dict[str, Any]:
    """backup and load_back in GB/s (1e9 bytes; best of `rounds`), exact (whether every bit survives), programs.

    A round is one transfer of a batch, from the call to the last byte. Raises whatever the backend raises.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plane = Interpreter(
            sample.pool(),
            host_pages=sample.pages,
            device_pages=sample.pages,
            host_form=route.form,  # type: ignore[arg-type]
            copies=route.programs,
            batch_pages=sample.batch,
        )
        plane.warm()
        exact = _exact(plane, sample)
    generator, times = np.random.default_rng(0), {kind: [] for kind in TransferKind}
    for _ in range(1 + rounds):  # one to warm every destination
        ids = [generator.permutation(sample.pages)[: sample.batch].astype(np.int32) for _ in range(2)]
        for kind, (source, target) in ((TransferKind.BACKUP, ids), (TransferKind.LOAD_BACK, ids[::-1])):
            times[kind].append(seconds(lambda kind=kind, s=source, t=target: move(plane, kind, s, t)))
    size = sample.batch * sample.page_bytes
    return {
        "backup": size / min(times[TransferKind.BACKUP][1:]) / 1e9,
        "load_back": size / min(times[TransferKind.LOAD_BACK][1:]) / 1e9,
        "exact": exact,
        "programs": plane.programs(),
        "warnings": sorted({str(each.message) for each in said}),
    }


def recommended(rows: list[dict[str, Any]]) -> str | None:
    """The path whose slower direction is the fastest, of those that keep every bit; None if there is none."""
    usable = [row for row in rows if row.get("exact")]
    return max(usable, key=lambda row: min(row["backup"], row["load_back"]))["path"] if usable else None


def _exact(plane: Interpreter, sample: Sample) -> bool:
    """Whether pages come back as they were: half of the pool goes to host and returns to the other half."""
    half = sample.pages // 2
    low, high = np.arange(half, dtype=np.int32), np.arange(half, 2 * half, dtype=np.int32)
    before = [np.array(array)[:half].view(np.uint8) for array in plane.pool]
    move(plane, TransferKind.BACKUP, low, high)
    move(plane, TransferKind.LOAD_BACK, high, high)
    after = [np.array(array)[half : 2 * half].view(np.uint8) for array in plane.pool]
    return all(bool((a == b).all()) for a, b in zip(after, before, strict=True))


def move(plane: Interpreter, kind: TransferKind, source: np.ndarray, target: np.ndarray) -> None:
    """One transfer, waited for until its last byte is there. Raises RuntimeError if a page of it failed."""
    plane.start(Transfer(0, 0, kind, 0, source, target))
    (done,) = plane.drain()
    jax.block_until_ready(plane.pool)
    if not done.ok.all():
        raise RuntimeError(f"{kind.name.lower()} failed for {int((~done.ok).sum())} of {len(done.ok)} pages")


def _plain(sample: Sample, rounds: int) -> dict[str, Any]:
    source, target = (np.ones((sample.batch, sample.page_bytes), np.uint8) for _ in range(2))
    best = min(seconds(lambda: np.copyto(target, source)) for _ in range(1 + rounds))
    return {"rate": source.nbytes / best / 1e9}


def _on_device(sample: Sample, rounds: int) -> dict[str, Any]:
    array = jnp.ones((sample.batch, sample.page_bytes // 4), jnp.int32)
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)
    best = np.inf
    for _ in range(2 + rounds):
        start = time.perf_counter()
        array = jax.block_until_ready(copy(array))
        best = min(best, time.perf_counter() - start)
    return {"rate": array.nbytes / best / 1e9}


def seconds(action: Callable[[], None]) -> float:
    """Seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
