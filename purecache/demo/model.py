"""The forward pass of a llama model over a pool of pages, as one pure function for prefill and for decoding.

Rows come in G groups of Q consecutive positions: a prefill chunk is one group of many rows, a decoding step is many
groups of one row. Rows of a group read the context before the group from the pool, block by block with a running
softmax, and their own group from the values just computed. So the arithmetic of a position depends on its absolute
position and on Q alone: neither on what else is in the batch, nor on page ids, nor on how long other contexts are
(a block past the end of a row's context is masked, and a masked block changes nothing: it adds exact zeros).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from purecache.demo.weights import Layer, ModelConfig, Weights

MASKED = -1e30  # below every score; finite, so that a row without any context stays free of NaN
FLOOR = -1e20


class Pool(NamedTuple):
    """Keys and values of every page, float32[layers, pages, page_size, kv_heads, head_dim] each."""

    keys: jax.Array
    values: jax.Array


class Rows(NamedTuple):
    """What one program run computes; NumPy or JAX arrays."""

    tokens: jax.Array | np.ndarray  # int32[G, Q]; rows past `end` are padding
    start: jax.Array | np.ndarray  # int32[G] absolute position of the first row of each group
    first: jax.Array | np.ndarray  # int32[G] first position whose keys and values are written (earlier ones are cached)
    end: jax.Array | np.ndarray  # int32[G] one past the last position that counts
    tables: jax.Array | np.ndarray  # int32[G, blocks * pages per block] page of each page-sized piece of the context


def make_pool(config: ModelConfig, pages: int, page_size: int) -> Pool:
    """Return a pool of zeros. It is made by a program and not from NumPy, so that it can be donated."""
    shape = (config.layers, pages, page_size, config.kv_heads, config.head_dim)
    return Pool(*jax.jit(lambda: (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)))())


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square norm over the last axis, float32[..., width]."""
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon) * weight


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotary embedding in the half-split layout.

    x: float32[G, Q, heads, head_dim]; cosine, sine: float32[G, Q, 1, head_dim / 2].
    """
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)


class Softmax(NamedTuple):
    """A softmax-weighted sum in the making."""

    peak: jax.Array  # float32[G, K, R]
    total: jax.Array  # float32[G, K, R]
    values: jax.Array  # float32[G, K, R, head_dim]


def absorb(state: Softmax, queries: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> Softmax:
    """Add a block of W positions to the running softmax.

    queries: float32[G, K, R, head_dim], scaled; keys, values: float32[G, W, K, head_dim]; seen: bool[G, 1, 1 or R, W].
    """
    scores = jnp.where(seen, jnp.einsum("gkrd,gwkd->gkrw", queries, keys), MASKED)
    # The floor lies between MASKED and every score: a row that has seen nothing yet gets weights of zero, not of one.
    peak = jnp.maximum(jnp.maximum(state.peak, scores.max(axis=-1)), FLOOR)
    weights = jnp.exp(scores - peak[..., None])
    fade = jnp.exp(state.peak - peak)
    return Softmax(
        peak,
        state.total * fade + weights.sum(axis=-1),
        state.values * fade[..., None] + jnp.einsum("gkrw,gwkd->gkrd", weights, values),
    )


def attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, pool: Pool, layer: int, rows: Rows, block: int
) -> jax.Array:
    """Attention of G groups of Q rows over their context in the pool and over their own group.

    queries: float32[G, Q, heads, head_dim]; keys, values: float32[G, Q, kv_heads, head_dim] of the rows themselves;
    `block`: tokens per step of the loop over the context. Returns float32[G, Q, heads * head_dim].
    """
    groups, count, kv_heads, depth = keys.shape
    # Query heads that share a key head are stacked as rows: one matrix product per key head.
    stacked = queries.reshape(groups, count, kv_heads, -1, depth) * (depth**-0.5)
    stacked = stacked.transpose(0, 2, 3, 1, 4).reshape(groups, kv_heads, -1, depth)
    page_size = pool.keys.shape[2]
    pages_per_block = block // page_size

    def step(index: jax.Array, state: Softmax) -> Softmax:
        pages = lax.dynamic_slice_in_dim(jnp.asarray(rows.tables), index * pages_per_block, pages_per_block, axis=1)
        shape = (groups, block, kv_heads, depth)
        positions = index * block + jnp.arange(block)
        seen = (positions[None, :] < jnp.asarray(rows.start)[:, None])[:, None, None, :]
        return absorb(
            state, stacked, pool.keys[layer, pages].reshape(shape), pool.values[layer, pages].reshape(shape), seen
        )

    state = Softmax(jnp.full(stacked.shape[:3], MASKED), jnp.zeros(stacked.shape[:3]), jnp.zeros_like(stacked))
    blocks = (jnp.max(jnp.asarray(rows.start)) + block - 1) // block
    state = lax.fori_loop(0, blocks, step, state)
    causal = jnp.tril(jnp.ones((count, count), bool))
    causal = jnp.broadcast_to(causal, (queries.shape[2] // kv_heads, count, count)).reshape(1, 1, -1, count)
    state = absorb(state, stacked, keys, values, causal)
    mixed = (state.values / state.total[..., None]).reshape(groups, kv_heads, -1, count, depth)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(groups, count, -1)


def run_layer(
    x: jax.Array, weights: Layer, config: ModelConfig, pool: Pool, index: int, rows: Rows, block: int, waves: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer: x float32[G, Q, width] -> (x, keys, values), the last two float32[G, Q, kv_heads, head_dim]."""
    groups, count, _ = x.shape
    heads, kv_heads, depth = config.heads, config.kv_heads, config.head_dim
    mixed = rms_norm(x, weights.attention_norm, config.epsilon) @ weights.qkv
    mixed = mixed.reshape(groups, count, heads + 2 * kv_heads, depth)
    cosine, sine = waves
    queries, keys = rotate(mixed[:, :, :heads], cosine, sine), rotate(mixed[:, :, heads:-kv_heads], cosine, sine)
    values = mixed[:, :, -kv_heads:]
    x = x + attend(queries, keys, values, pool, index, rows, block) @ weights.output
    gate, up = jnp.split(rms_norm(x, weights.feed_norm, config.epsilon) @ weights.gate_up, 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ weights.down, keys, values


def forward(
    weights: Weights, config: ModelConfig, pool: Pool, rows: Rows, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the rows: (logits of the last row of each group, their keys, their values).

    `block` is a multiple of the page size and divides the context covered by `rows.tables`. Logits are float32[G,
    vocabulary], keys and values float32[layers, G, Q, kv_heads, head_dim], to be stored with `write`. The logits of a
    group without rows (`end <= start`) mean nothing. The pool is only read: a program that reads it inside loops and
    also updates it gets a copy of the whole pool from the compiler, two programs need none.
    """
    tokens, start, first, end, tables = (jnp.asarray(field) for field in rows)
    rows = Rows(tokens, start, first, end, tables)
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    frequencies = config.rope_base ** (-jnp.arange(config.head_dim // 2) / (config.head_dim // 2))
    angles = (positions[..., None] * frequencies)[:, :, None, :]
    waves = jnp.stack([jnp.cos(angles), jnp.sin(angles)])
    x = weights.embedding[tokens]
    keys, values = [], []
    for index, layer in enumerate(weights.layers):
        x, layer_keys, layer_values = run_layer(x, layer, config, pool, index, rows, block, waves)
        keys.append(layer_keys)
        values.append(layer_values)
    last = jnp.take_along_axis(x, jnp.maximum(end - 1 - start, 0)[:, None, None], axis=1)[:, 0]
    logits = jnp.einsum("gd,vd->gv", rms_norm(last, weights.norm, config.epsilon), weights.unembedding)
    return logits, jnp.stack(keys), jnp.stack(values)


def write(pool: Pool, keys: jax.Array, values: jax.Array, rows: Rows) -> Pool:
    """Store keys and values float32[layers, G, Q, kv_heads, head_dim] of the rows in their pages.

    Only positions in [first, end) are written: pages shared with other requests keep what they hold. Donate the pool
    and it is updated in place.
    """
    tokens, start, first, end, tables = (jnp.asarray(field) for field in rows)
    pages, page_size = pool.keys.shape[1:3]
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    place = jnp.minimum(positions // page_size, tables.shape[1] - 1)
    written = (positions >= first[:, None]) & (positions < end[:, None])
    # An id past the end is dropped; -1 would wrap around to the last page.
    page = jnp.where(written, jnp.take_along_axis(tables, place, axis=1), pages)
    offset = positions % page_size
    return Pool(
        pool.keys.at[:, page, offset].set(keys, mode="drop"), pool.values.at[:, page, offset].set(values, mode="drop")
    )
