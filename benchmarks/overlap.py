"""What a request that runs feels of another one's load back: the steps of the one, timed while the other's pages come.

A step donates the pool, writes a page of it and computes; its result is waited for, as a scheduler does that samples a
token. Three ways to load the same pages: by one program between slots and pool, dispatched at once; staged, with the
scatter dispatched at once, so that the next step waits for the bytes; staged, with the scatter once they are there.
"""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purecache.effects import Interpreter, Transfer, TransferKind

WAYS = {
    "one program": ({"copies": "loop"}, False),
    "staged, at once": ({"copies": "fused"}, True),
    "staged, when there": ({"copies": "fused"}, False),
}
"""Way -> options of the interpreter, and whether it hurries."""
PAGE_KIB, WIDTH, DEPTH = 1024, 512, 8


def report(quick: bool) -> list[dict[str, Any]]:
    """Print a row per way, and return the rows. All ways take turns in one run."""
    pages, rounds = (32, 4) if quick else (128, 8)
    planes = {way: (_plane(pages, **options), hurries) for way, (options, hurries) in WAYS.items()}
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(1 + rounds):
        for way, (plane, hurries) in planes.items():
            found[way].append(_load(plane, hurries, pages))
    print(f"load back of {pages * PAGE_KIB / 1024:.0f} MiB beside steps; milliseconds, median of {rounds} rounds")
    print("way                 | step alone | longest step meanwhile | until loaded")
    rows = []
    for way, each in found.items():
        numbers = {name: float(np.median([row[name] for row in each[1:]])) for name in each[0]}
        rows.append({"way": way} | numbers)
        print(
            f"{way:19} | {numbers['alone']:10.1f} | {numbers['longest']:22.1f} | {numbers['loaded']:12.1f}", flush=True
        )
    return rows


@partial(jax.jit, donate_argnums=0)
def _step(pool: jax.Array, x: jax.Array, page: jax.Array) -> tuple[jax.Array, jax.Array]:
    for _ in range(DEPTH):
        x = jnp.tanh(x @ x)
    row = jax.lax.bitcast_convert_type(x[0, :1], jnp.int32)
    return jax.lax.dynamic_update_slice(pool, jnp.broadcast_to(row, (1, pool.shape[1])), (page, 0)), x.sum()


def _plane(pages: int, **options: Any) -> Interpreter:
    pool = jax.jit(lambda: jnp.ones((2 * pages, PAGE_KIB * 256), jnp.int32))()
    plane = Interpreter(
        pool, host_pages=pages, device_pages=2 * pages, batch_pages=pages, staging_pages=pages, **options
    )
    del pool
    plane.warm()
    ids = np.arange(pages, dtype=np.int32)
    plane.start(Transfer(0, 0, TransferKind.BACKUP, 0, ids, ids))
    plane.drain()
    return plane


def _load(plane: Interpreter, hurries: bool, pages: int) -> dict[str, Any]:
    """Milliseconds of a step alone, of the longest one while pages come, and until all are in the pool."""
    x = jnp.full((WIDTH, WIDTH), 1e-3, jnp.float32)

    def step() -> float:
        start = time.perf_counter()
        plane.pool, answer = _step(plane.pool, x, np.int32(2 * pages - 1))
        jax.block_until_ready(answer)
        return 1e3 * (time.perf_counter() - start)

    jax.block_until_ready(plane.pool)
    alone = min(step() for _ in range(5))
    ids = np.arange(pages, dtype=np.int32)
    start, steps = time.perf_counter(), []
    plane.start(Transfer(0, 0, TransferKind.LOAD_BACK, 0, ids, ids))
    if hurries:
        plane.hurry()
    while True:
        steps.append(step())
        if plane.poll():
            break
    steps.append(step())  # this one sees the last pages
    jax.block_until_ready(plane.pool)
    return {"alone": alone, "longest": max(steps), "loaded": 1e3 * (time.perf_counter() - start)}
