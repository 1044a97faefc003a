"""The forward pass of a hybrid model over its pools, as one pure function for prefill and for decoding.

Rows come in G groups of Q consecutive positions, as in `model.py`. There are two ways to compute them:

- Models without recurrent layers compute the rows of all groups together. The last bits of a position depend on its
  absolute position, on where its group begins, and on Q.
- Models with recurrent layers (`config.exact`) compute group by group and token by token, always with the same shapes.
  A token of a prefill reads the tokens before it from the pool or from the rows that were just computed, whichever has
  them: the bits are the same. So nothing depends on where computing began, or whether it was prefill or decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from purecache.demo.hybrid_attention import Block, Context, attend, pages_reader
from purecache.demo.hybrid_config import STATE, Attention, HybridConfig, HybridLayer, HybridWeights, Kind, Recurrent
from purecache.demo.hybrid_pools import HybridRows, Pools, States, empty_states
from purecache.demo.model import Pool, rms_norm, rotate
from purecache.demo.recurrent import recur

Reader = Callable[[str, int], Callable[[jax.Array], Block]]
"""Gives the reader of blocks for a pool and a layer of it."""


def forward(
    weights: HybridWeights, config: HybridConfig, pools: Pools, rows: HybridRows, block: int
) -> tuple[jax.Array, dict[str, Any]]:
    """Compute the rows: (logits of the last row of each group, what is to be stored with `write`).

    `block`: tokens of context per step of attention, a multiple of the page size that divides the context covered by
    the page tables. Logits are float32[G, vocabulary]; those of a group without rows (`end <= start`) mean nothing. The
    pools are only read.
    """
    rows = HybridRows(*(jnp.asarray(field) for field in rows))
    if not config.exact:
        return _together(weights, config, pools, rows, block)

    def group(row: HybridRows) -> tuple[jax.Array, dict[str, Any]]:
        return _one_by_one(weights, config, pools, HybridRows(*(field[None] for field in row)), block)

    logits, fresh = lax.map(group, rows)
    # The axis of groups comes after the axis of layers, as in the pools.
    return logits[:, 0], jax.tree.map(lambda array: jnp.moveaxis(array[:, :, 0], 0, 1), fresh)


def _together(
    weights: HybridWeights, config: HybridConfig, pools: Pools, rows: HybridRows, block: int
) -> tuple[jax.Array, dict[str, Any]]:
    def reader(name: str, layer: int) -> Callable[[jax.Array], Block]:
        return pages_reader(pools[name], layer, rows.table_of(name), block)

    tokens, start, end = (jnp.asarray(field) for field in (rows.tokens, rows.start, rows.end))
    x, keys, _ = _layers(weights, config, tokens, start, end > start, reader, None, block)
    last = jnp.take_along_axis(x, jnp.maximum(end - 1 - start, 0)[:, None, None], axis=1)[:, 0]
    return _logits(last, weights, config), dict(keys)


def _one_by_one(
    weights: HybridWeights, config: HybridConfig, pools: Pools, rows: HybridRows, block: int
) -> tuple[jax.Array, dict[str, Any]]:
    """The same for one group, one row after the other."""
    tokens, start, end = (jnp.asarray(field) for field in (rows.tokens, rows.start, rows.end))
    count, shape = tokens.shape[1], (config.kv_heads, config.head_dim)

    def step(index: jax.Array, carry: tuple[Any, dict[str, Pool], States]) -> tuple[Any, dict[str, Pool], States]:
        _, made, states = carry

        def reader(name: str, layer: int) -> Callable[[jax.Array], Block]:
            paged, own = pages_reader(pools[name], layer, rows.table_of(name), block), made[name]

            def read(number: jax.Array) -> Block:
                back = number * block + jnp.arange(block) - start
                row = jnp.clip(back, 0, count - 1)
                mine = (back >= 0)[None, :, None, None]
                keys, values = paged(number)
                return jnp.where(mine, own.keys[layer, 0, row][None], keys), jnp.where(
                    mine, own.values[layer, 0, row][None], values
                )

            return read

        token = lax.dynamic_slice_in_dim(tokens, index, 1, axis=1)
        x, fresh, states = _layers(weights, config, token, start + index, end > start, reader, states, block)
        made = {
            name: jax.tree.map(
                lambda rows, row: lax.dynamic_update_slice_in_dim(rows, row, index, axis=2), made[name], new
            )
            for name, new in fresh.items()
        }
        return x, made, states

    made = {
        name: Pool(*(jnp.zeros((config.layers_of(Kind(name)), 1, count, *shape)) for _ in range(2)))
        for name in config.pools
        if name != STATE
    }
    begin = _states_before(config, pools[STATE], rows)
    x, made, states = lax.fori_loop(0, end[0] - start[0], step, (jnp.zeros((1, 1, config.width)), made, begin))
    return _logits(x[:, 0], weights, config), made | {STATE: states}


def _states_before(config: HybridConfig, pool: States, rows: HybridRows) -> States:
    slots = jnp.maximum(jnp.asarray(rows.slots), 0)
    empty = empty_states(config, config.layers_of(Kind.RECURRENT), len(slots))

    def chosen(zeros: jax.Array, array: jax.Array) -> jax.Array:
        new = (jnp.asarray(rows.start) == 0).reshape(1, -1, *[1] * (array.ndim - 2))
        return jnp.where(new, zeros, array[:, slots])

    return jax.tree.map(chosen, empty, pool)


def _layers(
    weights: HybridWeights,
    config: HybridConfig,
    tokens: jax.Array,
    start: jax.Array,
    used: jax.Array,
    reader: Reader,
    states: States | None,
    block: int,
) -> tuple[jax.Array, dict[str, Pool], Any]:
    """All layers: tokens int32[G, Q] from `start` on -> (residual stream, keys and values by pool, states after it).

    Keys and values are float32[layers, G, Q, kv_heads, head_dim]. With recurrent layers Q is 1.
    """
    x = weights.embedding[tokens] * config.embedding_scale
    waves = {kind: _waves(config, kind, start, tokens.shape[1]) for kind in (Kind.FULL, Kind.WINDOW)}
    made: dict[str, list[Any]] = {kind.value: [] for kind in config.kinds}
    for kind, layer in zip(config.kinds, weights.layers, strict=True):
        own, index = made[kind.value], len(made[kind.value])
        y = rms_norm(x, layer.norm, config.epsilon)
        if isinstance(layer.mixer, Recurrent):
            assert states is not None
            y, state = recur(y[:, 0], layer.mixer, config, jax.tree.map(lambda array, i=index: array[i], states))
            y = y[:, None]
            own.append(state)
        else:
            window = config.window if kind is Kind.WINDOW else None
            context = Context(start, used, reader(kind.value, index), block, window)
            y, pair = _attention(y, layer.mixer, config, context, waves[kind])
            own.append(pair)
        x = _fed(x + rms_norm(y, layer.post_norm, config.epsilon), layer, config)
    stacked = {name: jax.tree.map(lambda *arrays: jnp.stack(arrays), *entries) for name, entries in made.items()}
    after = stacked.pop(STATE, None)
    return x, stacked, after


def _waves(config: HybridConfig, kind: Kind, start: jax.Array, count: int) -> jax.Array:
    """Cosines and sines of the rotary embedding, float32[2, G, Q, 1, head_dim / 2]."""
    half = config.head_dim // 2
    base, scale = (config.rope_base, config.rope_scale) if kind is Kind.FULL else (config.window_rope_base, 1.0)
    positions = start[:, None] + jnp.arange(count)
    angles = (positions[..., None] * (base ** (-jnp.arange(half) / half) / scale))[:, :, None, :]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def _attention(
    x: jax.Array, weights: Attention, config: HybridConfig, context: Context, waves: jax.Array
) -> tuple[jax.Array, Pool]:
    """A full or window layer: x float32[G, Q, width] -> (x, keys and values float32[G, Q, kv_heads, head_dim])."""
    heads, kv_heads, depth = config.heads, config.kv_heads, config.head_dim
    mixed = (x @ weights.qkv).reshape(*x.shape[:2], heads + 2 * kv_heads, depth)
    cosine, sine = waves
    queries = rotate(rms_norm(mixed[:, :, :heads], weights.query_norm, config.epsilon), cosine, sine)
    keys = rotate(rms_norm(mixed[:, :, heads:-kv_heads], weights.key_norm, config.epsilon), cosine, sine)
    values = mixed[:, :, -kv_heads:]
    return attend(queries * config.query_scale, keys, values, context) @ weights.output, Pool(keys, values)


def _fed(x: jax.Array, layer: HybridLayer, config: HybridConfig) -> jax.Array:
    gate, up = jnp.split(rms_norm(x, layer.feed_norm, config.epsilon) @ layer.gate_up, 2, axis=-1)
    fed = (jax.nn.gelu(gate, approximate=True) * up) @ layer.down
    return x + rms_norm(fed, layer.post_feed_norm, config.epsilon)


def _logits(last: jax.Array, weights: HybridWeights, config: HybridConfig) -> jax.Array:
    """float32[G, width] of the last rows -> float32[G, vocabulary]."""
    return jnp.einsum("gd,vd->gv", rms_norm(last, weights.norm, config.epsilon), weights.unembedding)
