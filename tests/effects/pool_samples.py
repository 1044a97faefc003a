"""Pools of random bits in the layouts that engines use, and their pages as bytes."""

import jax
import jax.numpy as jnp
import numpy as np

from purecache.effects import Interpreter, Transfer, TransferKind

FORMS = {
    "slots": {"host_form": "slots"},
    "arrays": {"host_form": "arrays"},
    "staged": {"host_form": "arrays", "copies": "fused"},
}
"""Ways of keeping host pages -> options of the interpreter."""

LAYOUTS = {
    "layers apart, K and V apart": ([{"k": (4, 3, 8), "v": (4, 3, 8)} for _ in range(3)], 0),
    "layers stacked, K and V apart": ({"k": (4, 3, 8), "v": (4, 3, 8)}, 1),
    "all fused": ((3, 2, 4, 3, 8), 2),
    "MLA with an indexer": ({"latent": (4, 24), "indexer": (4, 2)}, 0),
    "axes that differ": ({"k": (5, 4), "v": (5, 4)}, {"k": 0, "v": -1}),
}
"""Name -> (pytree of page shapes, page axis where it is inserted)."""


def is_shape(value):
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


def random_pool(shapes, page_axis, pages, dtype, seed=0):
    """A pool of `pages` pages with random bits: NaN payloads, infinities and negative zeros included."""
    generator = np.random.default_rng(seed)
    dtype = np.dtype(dtype)

    def leaf(shape, axis):
        axis = axis % (len(shape) + 1)
        full = (*shape[:axis], pages, *shape[axis:])
        if dtype.kind == "b":
            return jnp.array(generator.integers(0, 2, full).astype(bool), copy=True)
        bits = generator.integers(0, 256, (*full, dtype.itemsize), dtype=np.uint8)
        return jnp.array(bits.view(dtype)[..., 0], copy=True)

    return jax.tree.map(leaf, shapes, axes_of(shapes, page_axis), is_leaf=is_shape)


def axes_of(shapes, page_axis):
    """The page axis of every leaf, as a pytree like `shapes`."""
    return jax.tree.map(lambda _: page_axis, shapes, is_leaf=is_shape) if isinstance(page_axis, int) else page_axis


def pages_of(pool, page_axis):
    """uint8[pages, bytes of a page]: every page of `pool` over all its leaves."""
    axes = jax.tree.leaves(jax.tree.broadcast(page_axis, pool))
    rows = []
    for array, axis in zip(jax.tree.leaves(pool), axes, strict=True):
        moved = np.ascontiguousarray(np.moveaxis(np.array(array), axis, 0))
        rows.append(moved.reshape(len(moved), -1).view(np.uint8))
    return np.concatenate(rows, axis=1)


def simple(pages=8, **options):
    """An interpreter over one int32 array of `pages` pages of 4 numbers; page p holds 10 * p + (0 .. 3)."""
    values = 10 * np.arange(pages, dtype=np.int32)[:, None] + np.arange(4, dtype=np.int32)
    options = {"host_pages": 8, "device_pages": pages // options.get("ranks", 1)} | options
    return Interpreter(jnp.array(values, copy=True), **options)


def after(values, callback):
    """`values` (int32[m, n]) as the result of a program that calls `callback()` in a worker thread while it runs."""

    def call(_):
        callback()
        return np.int32(0)

    def program(x):
        return x + jax.pure_callback(call, jax.ShapeDtypeStruct((), np.int32), x[0, 0])

    def spin(x):
        # XLA:CPU calls back from the calling thread unless the program has to wait for an input. This is the wait; the
        # range makes the program large enough not to run in the calling thread itself.
        number = jax.lax.fori_loop(0, 20_000_000, lambda k, v: (v * 5 + k) & 0xFFFF, x[0, 0])
        return x + jnp.min(jnp.maximum(jnp.arange(4096, dtype=jnp.int32), jnp.minimum(number, 0)))

    values = jnp.array(values, copy=True)
    first, second = (jax.jit(function).lower(values).compile() for function in (spin, program))
    return second(first(values))


def backup(source, target, *, operation=0, generation=0, rank=0):
    return Transfer(operation, generation, TransferKind.BACKUP, rank, np.array(source), np.array(target))


def load_back(source, target, *, operation=0, generation=0, rank=0):
    return Transfer(operation, generation, TransferKind.LOAD_BACK, rank, np.array(source), np.array(target))


def run(interpreter, transfer):
    """Start one transfer and wait for it; returns its `ok` as a list."""
    interpreter.start(transfer)
    return interpreter.drain()[-1].ok.tolist()
