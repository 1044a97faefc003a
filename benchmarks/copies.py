"""How fast pages move between the tiers, beside a plain copy of the same pages in the same run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purecache.doctor.paths import move, seconds
from purecache.effects import Interpreter, TransferKind

PAGE_KIB = (64, 256, 1024, 2048)
DTYPES = ("float32", "bfloat16")
PATHS = ("loop", "unrolled", "fused")
"""Programs of the CPU backend: over slots, over arrays, and over arrays in the two steps that accelerators take."""
BATCH_PAGES = 64


def rows(quick: bool) -> list[dict[str, Any]]:
    """One row per path, dtype and page size.

    Each row has, for plain, backup and load_back, the rate of the fastest and of the median round in GB/s (1e9 bytes),
    and for the latter two the share of the plain copy at both. A round is one
    transfer of 64 pages, from the call to the last byte; its fixed cost is a part of what is measured.
    """
    found = []
    for path in PATHS:
        for dtype in DTYPES:
            for kib in PAGE_KIB:
                found.append(measure(path, dtype, kib, rounds=15 if quick else 60))
    return found


def measure(path: str, dtype: str, kib: int, rounds: int) -> dict[str, Any]:
    """One row of `rows`."""
    pages = 2 * BATCH_PAGES
    width = (kib << 10) // np.dtype(dtype).itemsize
    pool = jax.jit(lambda: jnp.ones((pages, width), dtype))()
    plane = Interpreter(pool, host_pages=pages, device_pages=pages, copies=path, batch_pages=BATCH_PAGES)
    plane.warm()
    del pool
    original, copy = (aligned(pages, kib << 10) for _ in range(2))
    times: dict[str, list[float]] = {"plain": [], "backup": [], "load_back": []}
    generator = np.random.default_rng(0)
    for _ in range(3 + rounds):  # three to warm every destination
        ids = [generator.permutation(pages)[:BATCH_PAGES].astype(np.int32) for _ in range(2)]
        times["plain"].append(seconds(lambda ids=ids: plain(original, copy, *ids)))
        times["backup"].append(seconds(lambda ids=ids: move(plane, TransferKind.BACKUP, *ids)))
        times["load_back"].append(seconds(lambda ids=ids: move(plane, TransferKind.LOAD_BACK, *ids[::-1])))
    size = BATCH_PAGES * (kib << 10)
    row: dict[str, Any] = {"path": path, "dtype": dtype, "page_kib": kib}
    for name, taken in times.items():
        row[f"{name}_best"] = size / min(taken[3:]) / 1e9
        row[f"{name}_median"] = size / float(np.median(taken[3:])) / 1e9
    for name in ("backup", "load_back"):
        for kind in ("best", "median"):
            row[f"{name}_share_{kind}"] = row[f"{name}_{kind}"] / row[f"plain_{kind}"]
    return row


def aligned(pages: int, size: int) -> np.ndarray:
    """uint8[pages, size] on a 4 KiB boundary: NumPy's own placement gave a third of the rate in some runs."""
    memory = np.ones(pages * size + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + pages * size].reshape(pages, size)


def plain(original: np.ndarray, copy: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
    """The yardstick: one `np.copyto` per page into memory that was written before."""
    for read, written in zip(source.tolist(), target.tolist(), strict=True):
        np.copyto(copy[written], original[read])


def report(quick: bool) -> list[dict[str, Any]]:
    """Print the table, and return its rows."""
    found = []
    print("path     dtype     page KiB | plain      | backup     share       | load back  share     (GB/s best median)")
    for row in rows(quick):
        found.append(row)
        numbers = [
            f"{row[f'{name}_best']:5.1f} {row[f'{name}_median']:5.1f}" for name in ("plain", "backup", "load_back")
        ]
        shares = [f"{row[f'{n}_share_best']:4.2f} {row[f'{n}_share_median']:4.2f}" for n in ("backup", "load_back")]
        print(
            f"{row['path']:8} {row['dtype']:9} {row['page_kib']:8} | {numbers[0]}"
            f" | {numbers[1]} {shares[0]} | {numbers[2]} {shares[1]}",
            flush=True,
        )
    return found
