"""Device pools of a hybrid model: one pytree per pool, each with page ids of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from purecache.demo.hybrid_config import KV, STATE, WINDOW, HybridConfig, Kind
from purecache.demo.model import Pool

PAGE_AXIS = 1  # of every array of every pool


class States(NamedTuple):
    """States of all recurrent layers, one slot per sequence. Slots are the pages of this pool."""

    memory: jax.Array  # float32[layers, slots, heads, key_dim, value_dim]
    tail: jax.Array  # float32[layers, slots, taps - 1, channels] inputs of the convolution, the newest last


Pools = Mapping[str, Any]
"""Pools by name: a Pool of keys and values for "kv" and "window", States for "state"."""


class HybridRows(NamedTuple):
    """What one program run computes: G groups of Q consecutive positions. NumPy or JAX arrays."""

    tokens: jax.Array | np.ndarray  # int32[G, Q]; rows past `end` are padding
    start: jax.Array | np.ndarray  # int32[G] absolute position of the first row of each group
    first: jax.Array | np.ndarray  # int32[G] first position whose keys and values are written (earlier ones are cached)
    end: jax.Array | np.ndarray  # int32[G] one past the last position that counts
    tables: jax.Array | np.ndarray  # int32[G, n] kv page of each page-sized piece of the context
    windows: jax.Array | np.ndarray  # int32[G, n] window page of each, -1 for pages out of the window
    slots: (
        jax.Array | np.ndarray
    )  # int32[G] slot with the state before `start` (0: none is read), gets the one at `end`

    @classmethod
    def empty(cls, groups: int, rows: int, table: int) -> HybridRows:
        """NumPy rows without any group in use, for page tables of `table` entries."""
        ids = np.full((groups, table), -1, np.int32)
        start, first, end = (np.zeros(groups, np.int32) for _ in range(3))
        return cls(
            np.zeros((groups, rows), np.int32), start, first, end, ids, ids.copy(), np.full(groups, -1, np.int32)
        )

    def table_of(self, name: str) -> jax.Array:
        """The page tables of pool "kv" or "window"."""
        return jnp.asarray(self.tables if name == KV else self.windows)


def make_pools(config: HybridConfig, pages: Mapping[str, int], page_size: int) -> dict[str, Any]:
    """Return the pools of a model, of `pages[name]` pages (slots) of zeros each.

    They are made by a program and not from NumPy, so that they can be donated, and bound to a device, as what comes out
    of the cache's copies is: programs are compiled once for both.
    """

    def zeros() -> dict[str, Any]:
        pools: dict[str, Any] = {}
        for name in config.pools:
            layers = config.layers_of(Kind(name))
            if name == STATE:
                pools[name] = empty_states(config, layers, pages[name])
            else:
                shape = (layers, pages[name], page_size, config.kv_heads, config.head_dim)
                pools[name] = Pool(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
        return pools

    return jax.jit(zeros, out_shardings=SingleDeviceSharding(jax.devices()[0]))()


def empty_states(config: HybridConfig, layers: int, slots: int) -> States:
    """States before the first token."""
    shape = config.recurrent
    assert shape is not None
    return States(
        jnp.zeros((layers, slots, shape.heads, shape.key_dim, shape.value_dim), jnp.float32),
        jnp.zeros((layers, slots, shape.taps - 1, shape.channels), jnp.float32),
    )


def write(pools: Pools, fresh: Pools, rows: HybridRows) -> dict[str, Any]:
    """Store what `forward` computed for the rows: keys and values in their pages, states in their slots.

    Only keys and values of positions in [first, end) with a page are written, and states of groups with a slot: pages
    shared with other requests keep what they hold. Donate the pools and they are updated in place.
    """
    rows = HybridRows(*(jnp.asarray(field) for field in rows))
    written = dict(pools)
    for name in (KV, WINDOW):
        if name in pools:
            written[name] = _written(pools[name], fresh[name], rows, rows.table_of(name))
    if STATE in pools:
        slots = pools[STATE].memory.shape[PAGE_AXIS]
        # An id past the end is dropped; -1 would wrap around to the last slot.
        used = (rows.end > rows.start) & (rows.slots >= 0)
        target = jnp.where(used, rows.slots, slots)
        written[STATE] = jax.tree.map(
            lambda pool, new: pool.at[:, target].set(new, mode="drop"), pools[STATE], fresh[STATE]
        )
    return written


def _written(pool: Pool, fresh: Pool, rows: HybridRows, table: jax.Array) -> Pool:
    pages, page_size = pool.keys.shape[PAGE_AXIS : PAGE_AXIS + 2]
    positions = rows.start[:, None] + jnp.arange(rows.tokens.shape[1])
    place = jnp.minimum(positions // page_size, table.shape[1] - 1)
    page = jnp.take_along_axis(table, place, axis=1)
    meant = (positions >= rows.first[:, None]) & (positions < rows.end[:, None]) & (page >= 0)
    page, offset = jnp.where(meant, page, pages), positions % page_size
    return jax.tree.map(lambda array, new: array.at[:, page, offset].set(new, mode="drop"), pool, fresh)
