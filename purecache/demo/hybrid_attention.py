"""Attention of full and window layers: rows attend to a context that is read block by block, and to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from purecache.demo.model import MASKED, Pool, Softmax, absorb

Block = tuple[jax.Array, jax.Array]
"""Keys and values of a block of the context, float32[G, block, kv_heads, head_dim] each."""


class Context(NamedTuple):
    """What is before the rows of G groups."""

    start: jax.Array  # int32[G] tokens of it, the absolute position of the first row
    used: jax.Array  # bool[G] groups that count
    read: Callable[[jax.Array], Block]  # the block at an index
    block: int  # tokens of a block
    window: int | None  # rows see no further back than this many tokens, themselves included; None: all

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        """First block that a row of any group can see, and one past the last."""
        end = jnp.max(jnp.where(self.used, self.start, 0))
        if self.window is None:
            return jnp.zeros_like(end), -(-end // self.block)
        oldest = jnp.min(jnp.where(self.used, self.start - self.window + 1, end))
        return jnp.maximum(oldest, 0) // self.block, -(-end // self.block)

    def sees(self, index: jax.Array, rows: int) -> jax.Array:
        """Which positions of a block each row sees, bool[G, rows, block]."""
        positions = (index * self.block + jnp.arange(self.block))[None, None, :]
        start = self.start[:, None, None]
        seen = jnp.broadcast_to(positions < start, (len(self.start), rows, self.block))
        if self.window is not None:
            seen &= positions > start + jnp.arange(rows)[None, :, None] - self.window
        return seen


def pages_reader(pool: Pool, layer: int, tables: jax.Array, block: int) -> Callable[[jax.Array], Block]:
    """Read blocks of a layer through page tables int32[G, blocks * pages per block]. Ids below 0 give any page."""
    page_size, kv_heads, depth = pool.keys.shape[2:]
    pages_per_block = block // page_size

    def read(index: jax.Array) -> Block:
        pages = lax.dynamic_slice_in_dim(tables, index * pages_per_block, pages_per_block, axis=1)
        shape = (len(tables), block, kv_heads, depth)
        pages = jnp.maximum(pages, 0)
        return pool.keys[layer, pages].reshape(shape), pool.values[layer, pages].reshape(shape)

    return read


def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, context: Context) -> jax.Array:
    """Attention of G groups of Q rows over their context and over their own group.

    queries: float32[G, Q, heads, head_dim], scaled; keys, values: float32[G, Q, kv_heads, head_dim] of the rows.
    Returns float32[G, Q, heads * head_dim].
    """
    groups, count, kv_heads, depth = keys.shape
    copies = queries.shape[2] // kv_heads
    # Query heads that share a key head are stacked as rows: one matrix product per key head.
    stacked = queries.reshape(groups, count, kv_heads, copies, depth)
    stacked = stacked.transpose(0, 2, 3, 1, 4).reshape(groups, kv_heads, -1, depth)

    def step(index: jax.Array, state: Softmax) -> Softmax:
        seen = context.sees(index, count)
        # The first row sees furthest back. What no row sees may be anything, also a page of somebody else.
        live = seen[:, 0, :, None, None]
        block_keys, block_values = (jnp.where(live, array, 0) for array in context.read(index))
        return absorb(state, stacked, block_keys, block_values, jnp.tile(seen, (1, copies, 1))[:, None])

    state = Softmax(jnp.full(stacked.shape[:3], MASKED), jnp.zeros(stacked.shape[:3]), jnp.zeros_like(stacked))
    state = lax.fori_loop(*context.bounds(), step, state)
    back = jnp.arange(count)[:, None] - jnp.arange(count)
    own = (back >= 0) if context.window is None else (back >= 0) & (back < context.window)
    state = absorb(state, stacked, keys, values, jnp.tile(own, (copies, 1))[None, None])
    mixed = (state.values / state.total[..., None]).reshape(groups, kv_heads, copies, count, depth)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(groups, count, -1)
