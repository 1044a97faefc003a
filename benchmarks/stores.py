"""What stores answer for batches of 64 pages, beside the local store in the same run: see docs/stores.md."""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np

from purecache.stores import Fetch, Presence, Store
from purecache.stores.registry import open_store
from purecache.stores.staging import StagingRing

BATCH, ROUNDS = 64, 7
SIZES = (256 << 10, 1 << 20)


def report(urls: Sequence[str] = (), quick: bool = False) -> list[dict]:
    """Measure the local store and those of `urls`, in turns, and print a line for each.

    `{size}` in a URL stands for the bytes of a page: stores with slots need a directory per size.
    """
    rows = []
    print("64 pages: put, get GB/s (and of the local store); questions     page     put          get        exists")
    for size in SIZES[:1] if quick else SIZES:
        with tempfile.TemporaryDirectory() as directory:
            local = f"local://{directory}?capacity={(BATCH * (ROUNDS + 2)) * (size + 8192)}"
            named = [url.replace("{size}", str(size)) for url in urls]
            rows += _compared([local, *named], size, 3 if quick else ROUNDS)
    return rows


def _compared(urls: Sequence[str], size: int, rounds: int) -> list[dict]:
    ring = StagingRing(BATCH, size)
    slots = ring.acquire(BATCH) or []
    buffers = [ring.sealed(slot) for slot in slots]
    stores = [open_store(url, len(buffers[0])) for url in urls]
    times: list[dict[str, list[float]]] = [{"put": [], "get": [], "exists": []} for _ in stores]
    source = np.random.default_rng(0)
    for store in stores:
        store.register(ring.region)
    for turn in range(rounds):
        keys = [f"bench-{size}-{turn}-{index}" for index in range(BATCH)]
        content = source.integers(0, 255, (BATCH, len(buffers[0])), np.uint8)
        for store, taken in zip(stores, times, strict=True):
            _one_turn(store, keys, buffers, content, taken)
    rows = []
    for url, store, taken in zip(urls, stores, times, strict=True):
        store.clear()
        store.close()
        row = {"store": url.partition("?")[0].partition(":")[0], "page": size}
        moved = BATCH * size / 1e9
        row |= {name: moved / min(taken[name]) for name in ("put", "get")}
        row["exists_ms"] = 1e3 * statistics.median(taken["exists"])
        rows.append(row)
        local = rows[0]
        print(
            f"{row['store']:60} {size >> 10:5} KiB {row['put']:5.2f} ({row['put'] / local['put']:4.2f})"
            f" {row['get']:5.2f} ({row['get'] / local['get']:4.2f}) {row['exists_ms']:7.2f} ms,"
            f" {BATCH / row['exists_ms'] * 1e3:,.0f} keys/s",
            flush=True,
        )
    return rows


def _one_turn(
    store: Store, keys: list[str], buffers: list[memoryview], content: np.ndarray, taken: dict[str, list[float]]
) -> None:
    for buffer, page in zip(buffers, content, strict=True):
        buffer[:] = page.data
    stored = _timed(taken["put"], lambda: store.put(keys, buffers, time.monotonic() + 60))
    for buffer in buffers:
        buffer[:64] = bytes(64)
    asked = _timed(taken["exists"], lambda: store.exists(keys, time.monotonic() + 60))
    found = _timed(taken["get"], lambda: store.get(keys, buffers, time.monotonic() + 60))
    if stored != [True] * BATCH or asked != [Presence.YES] * BATCH or found != [Fetch.HIT] * BATCH:
        raise RuntimeError(f"{type(store).__name__} does not have all that it was given: too small?")
    if any(bytes(buffer) != page.tobytes() for buffer, page in zip(buffers, content, strict=True)):
        raise RuntimeError(f"{type(store).__name__} gave other bytes back")


def _timed(taken: list[float], call: Callable[[], list]) -> list:
    begun = time.perf_counter()
    answer = call()
    taken.append(time.perf_counter() - begun)
    return answer
