"""What storage costs: GB/s of the local store beside raw I/O, and microseconds of the scheduler's thread."""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from purecache import CacheConfig, Interpreter, PrefixCache
from purecache.storage import EndPolicy, Progress, StorageOptions, StorageTier
from purecache.stores import envelope
from purecache.stores.guard import Guard, Kind, Request
from purecache.stores.local import LocalStore
from purecache.stores.memory import MemoryStore
from purecache.stores.names import ObjectRecord
from purecache.stores.staging import StagingRing

PAGES = 64
BATCH = 16
"""Pages of one request, as the storage tier makes them: the guard seals, verifies, and works on two at a time."""
REPEATS = 12
AIM = 0.75
"""Local store over raw, pages of 1 MiB, trailer written and verified."""


def rows(directory: str | None = None) -> Iterator[dict[str, Any]]:
    """One row per page size and operation: GB/s (best and median) of raw file and local store, and their ratio."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        for page_bytes in (256 << 10, 1 << 20):
            yield from one_size(place, page_bytes)


def one_size(place: str, page_bytes: int) -> Iterator[dict[str, Any]]:
    """Rows of one page size: write, read warm, read with the page cache dropped."""
    ring = StagingRing(PAGES, page_bytes)
    slots = ring.acquire(PAGES) or []
    ring_bytes = np.frombuffer(ring.region, np.uint8)
    ring_bytes[:] = np.random.default_rng(0).integers(0, 256, len(ring_bytes), np.uint8)
    buffers = [ring.sealed(slot) for slot in slots]
    size = page_bytes + envelope.TRAILER
    path, root = os.path.join(place, f"raw-{page_bytes}"), os.path.join(place, f"store-{page_bytes}")
    raw = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(raw, 0, ring.stride * PAGES * 2)
    store = LocalStore(root, size, ring.stride * PAGES * 2)
    guard, numbers = Guard(store, workers=2, timeout=60.0), itertools.count()
    data = [os.path.join(root, name) for name in os.listdir(root)]
    state = {"run": 0}

    def raw_write() -> None:
        base = state["run"] % 2 * PAGES
        for place, buffer in enumerate(buffers):
            os.pwrite(raw, buffer, (base + place) * ring.stride)

    def raw_read() -> None:
        for place, buffer in enumerate(buffers):
            os.preadv(raw, [buffer], place * ring.stride)

    def keys() -> list[str]:
        return [f"{state['run']}.{place}" for place in range(PAGES)]

    def through(kind: Kind) -> None:
        for first in range(0, PAGES, BATCH):
            names = keys()[first : first + BATCH]
            assert guard.start(Request(kind, next(numbers), names, buffers[first : first + BATCH]))
        left = PAGES // BATCH
        while left:
            guard.wait(1.0)
            for done in guard.poll():
                assert all(done.answers)
                left -= 1

    def store_write() -> None:
        through(Kind.PUT)

    def store_read() -> None:
        through(Kind.GET)

    def drop() -> None:
        for name in [path, *data]:
            if os.path.isfile(name):
                file = os.open(name, os.O_RDONLY)
                os.fdatasync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)

    def turn() -> None:
        state["run"] += 1

    def nothing() -> None:
        """Between two runs of the same."""

    label = {"page_bytes": page_bytes}
    total = page_bytes * PAGES
    yield label | {"operation": "write"} | paired(raw_write, store_write, turn, total)
    yield label | {"operation": "read, warm"} | paired(raw_read, store_read, nothing, total)
    yield label | {"operation": "read, page cache dropped"} | paired(raw_read, store_read, drop, total)
    guard.close()
    os.close(raw)


def paired(raw: Callable[[], None], store: Callable[[], None], prepare: Callable[[], None], total: int) -> dict:
    """GB/s of both, one after the other in each run; `prepare` comes before each."""
    taken: dict[str, list[float]] = {"raw": [], "store": []}
    for run in range(REPEATS + 1):
        for name, action in (("raw", raw), ("store", store)):
            if name == "raw" or prepare.__name__ != "turn":
                prepare()
            start = time.perf_counter()
            action()
            if run:
                taken[name].append(total / (time.perf_counter() - start) / 1e9)
    best = {f"{name}_best": max(values) for name, values in taken.items()}
    median = {f"{name}_median": float(np.median(values)) for name, values in taken.items()}
    return best | median | {"ratio": best["store_best"] / best["raw_best"]}


def scheduler_rows(pages: int = 64, page_bytes: int = 1 << 18) -> Iterator[dict[str, Any]]:
    """Microseconds of the calling thread per page stored and per page prefetched, with a memory store behind."""
    words = page_bytes // 4
    config = CacheConfig(page_size=16, device_pages=pages, host_pages=pages, load_back_threshold=1)
    record = ObjectRecord("bench", "0", "float32", "words", 16, (0, 1))
    options = StorageOptions(staging_pages=pages, policy=EndPolicy.WAIT_COMPLETE)
    shelf, prompt = _Kept(4 * pages * page_bytes), np.arange(pages * 16, dtype=np.int32)
    found: dict[str, list[float]] = {"stored": [], "prefetched": []}
    for _ in range(4):
        shelf.clear()
        for name in found:
            plane = Interpreter(jnp.zeros((pages, words), jnp.float32), host_pages=pages, device_pages=pages)
            cache = PrefixCache(config, plane)
            tier = StorageTier(cache, shelf, record, options)
            plane.warm()
            tier.warm(pages * 16)
            spent = 0.0
            if name == "stored":
                cache.insert(prompt, cache.allocate(pages))
                cache.drain()
            else:
                started = tier.prefetch(prompt)
            while tier.in_flight:
                start = time.perf_counter()
                cache.tick()
                spent += time.perf_counter() - start
                time.sleep(0.0005)
            if name == "prefetched":
                assert tier.progress(started, 0.0) is Progress.YES
            found[name].append(spent / pages * 1e6)
            tier.detach()
    for name, values in found.items():
        yield {"operation": f"per page {name}", "page_bytes": page_bytes, "us": min(values[1:])}


class _Kept(MemoryStore):
    """A store that outlives its tier."""

    def close(self) -> None:
        """Stay."""


def report() -> list[dict[str, Any]]:
    """Print all rows; returns them."""
    print(f"{PAGES} pages, GB/s best and median    page KiB | raw          | local store  share   aim", flush=True)
    found = []
    for row in rows():
        found.append(row)
        aim = AIM if row["page_bytes"] == 1 << 20 else ""
        print(
            f"{row['operation']:38} {row['page_bytes'] >> 10:5} | {row['raw_best']:5.1f} {row['raw_median']:5.1f} |"
            f" {row['store_best']:5.1f} {row['store_median']:5.1f}  {row['ratio']:.2f}  {aim}",
            flush=True,
        )
    for row in scheduler_rows():
        found.append(row)
        print(f"scheduler thread, {row['operation']:25} {row['us']:6.1f} us", flush=True)
    return found
