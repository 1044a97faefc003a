"""For a person with a TPU or a GPU: how fast pages move by every path of it, in under five minutes.

Correctness comes first: every path takes random bits to host and back before it is timed. Beside the paths stand a
copy on the device and one on the host. `python -m benchmarks --only device --json FILE` keeps everything.
"""

import time
from typing import Any

import jax

from purecache.doctor.machine import facts
from purecache.doctor.paths import Sample, rates, recommended

BUDGET = 270.0
"""Seconds after which no further pool is begun."""
POOLS = (
    Sample(),
    Sample(layers=32, pages=64, batch=32),
    Sample(dtype="float8_e4m3fn"),
    Sample(dtype="int32", page_shape=(8, 2048)),
    Sample(layers=32, page_shape=(64, 16, 128), pages=32, batch=16),
)
"""A usual one, many layers, one byte per number, pages that the host kernel can address, and large pages."""
SMALL = (Sample(layers=2, pages=32, batch=16), Sample(layers=2, pages=32, batch=16, dtype="float8_e4m3fn"))


def report(quick: bool) -> list[dict[str, Any]]:
    """Print one table per pool and the recommended path for it; returns all rows."""
    start, found = time.monotonic(), []
    for device in facts()["devices"][:1]:
        print(f"{device['platform']} {device['kind']}, {len(jax.local_devices())} of them", flush=True)
    for sample in SMALL if quick else POOLS:
        if time.monotonic() - start > BUDGET:
            print("time is up: the pools that are left were not measured", flush=True)
            break
        shape = f"{sample.layers} x {sample.dtype}{list(sample.page_shape)}"
        print(f"\n{shape}, {sample.page_bytes >> 10} KiB per page, {sample.batch} pages per transfer (GB/s)")
        rows = []
        for row in rates(sample, rounds=5 if quick else 20):
            rows.append(row | {"pool": shape})
            print(f"  {row['path']:22} {_numbers(row)}", flush=True)
        print(f"  best here: {recommended(rows) or 'none is exact'}", flush=True)
        found += rows
    return found


def _numbers(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"can't be used: {row['problem']}"
    if "rate" in row:
        return f"{row['rate']:8.2f}"
    exact = "" if row["exact"] else "  BITS CHANGED"
    return f"backup {row['backup']:8.2f}  load back {row['load_back']:8.2f}{exact}"
