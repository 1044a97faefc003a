"""Many configurations of one trace: runs of the one program, in threads."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from purecache.capacity import Fleet
from purecache.sizing.distances import LruCurve
from purecache.sizing.program import TraceProgram
from purecache.state import CacheConfig, Policy, WritePolicy
from purecache.traces.hardware import Hardware
from purecache.workloads import PagedTrace, Request

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Sized:
    """One configuration, and what it finds. Capacities in pages."""

    device_pages: int
    host_pages: int
    disk_pages: int
    policy: str
    write: str
    rates: dict[str, float]
    """By tier: share of the tokens of all prompts."""
    saved: dict[str, float]
    """By tier: seconds of prefill, less those of loading."""
    too_large: int
    """Requests that the device cannot hold."""

    @property
    def rate(self) -> float:
        """Share of the tokens that some tier has."""
        return sum(self.rates.values())

    @property
    def seconds(self) -> float:
        """Saved by all tiers."""
        return sum(self.saved.values())


@dataclass(frozen=True)
class Sweep:
    """All configurations of a trace."""

    rows: tuple[Sized, ...]
    agree: tuple[int, int]
    """How many runs under LRU with write through found what the stack distances say, request by request, and how many
    there were to compare: those whose device holds every request."""
    compile_seconds: float
    run_seconds: float
    """Of all runs of the program, in threads."""
    threads: int
    runs: int
    """Runs of the program: sizes of the disk need none of their own."""


def sweep(
    trace: PagedTrace,
    hardware: Hardware,
    curve: LruCurve,
    configs: Iterable[CacheConfig],
    disks: Iterable[int] = (0,),
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Sweep:
    """Run a trace through every configuration, with every size of a disk below those with host memory.

    The disk is LRU over all pages that were used, as if each were touched there as well, however the tiers above evict.
    threads: default: one per core. `progress(requests)`: of all runs together.
    """
    every, began = list(configs), time.perf_counter()
    largest = replace(
        every[0],
        device_pages=max(each.device_pages for each in every),
        host_pages=max(each.host_pages for each in every),
    )
    program = TraceProgram(trace, largest)
    compiled = time.perf_counter()
    threads = min(threads or os.cpu_count() or 1, len(every))
    lock, done = threading.Lock(), [0]

    def run(config: CacheConfig) -> np.ndarray:
        parts = []
        for part in program.run(config):
            parts.append(part)
            with lock:
                done[0] += len(part)
                if progress is not None:
                    progress(done[0])
        return np.concatenate(parts)

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(run, every))
    ended = time.perf_counter()
    rows, agree, compared = [], 0, 0
    for config, each in zip(every, found, strict=True):
        if (
            config.policy is Policy.LRU
            and config.write is WritePolicy.WRITE_THROUGH
            and config.device_pages >= trace.largest
        ):
            union = curve.by_request(max(config.device_pages, config.host_pages))
            device = curve.by_request(config.device_pages)
            agree += bool((each[:, 0] == device).all() and (each[:, :2].sum(axis=1) == union).all())
            compared += 1
        for disk in disks if config.host_pages else (0,):
            rows.append(_sized(trace, hardware, curve, config, each, disk))
    return Sweep(tuple(rows), (agree, compared), compiled - began, ended - compiled, threads, len(every))


def _sized(
    trace: PagedTrace, hardware: Hardware, curve: LruCurve, config: CacheConfig, found: np.ndarray, disk: int
) -> Sized:
    above = found[:, :2].sum(axis=1)
    below = np.maximum(curve.by_request(disk) - above, 0) * found[:, 2] if disk else np.zeros_like(above)
    tokens = np.column_stack([found[:, :2], below]).astype(np.int64) * trace.page_tokens
    whole = max(int(trace.tokens.sum()), 1)
    return Sized(
        device_pages=config.device_pages,
        host_pages=config.host_pages,
        disk_pages=disk,
        policy=config.policy.name.lower(),  # type: ignore[union-attr]
        write=str(config.write.value),  # type: ignore[union-attr]
        rates={tier: float(tokens[:, place].sum()) / whole for place, tier in enumerate(TIERS)},
        saved=hardware.saved(tokens),
        too_large=int((found[:, 2] == 0).sum()),
    )


def seconds_of_model(trace: PagedTrace, sizes: Iterable[tuple[int, int]]) -> float:
    """Seconds that the plain Python model of `purecache capacity` takes for sizes in pages, one after the other.

    It knows LRU with write through only.
    """
    requests = [Request(int(trace.sizes[each]), tuple(trace.pages(each).tolist())) for each in range(len(trace))]
    began = time.perf_counter()
    for device, host in sizes:
        Fleet(1, device, host, 0, block=1).run(requests)
    return time.perf_counter() - began
