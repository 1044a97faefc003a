"""A small hybrid model with random weights. It speaks nonsense, but always the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from purecache.demo.hybrid_config import (
    Attention,
    HybridConfig,
    HybridLayer,
    HybridWeights,
    Kind,
    Recurrent,
    RecurrentShape,
)

PATTERN = (Kind.RECURRENT, Kind.WINDOW, Kind.FULL)


def sample_config(context: int = 8192, window: int = 64, repeats: int = 2) -> HybridConfig:
    """The shape of the sample: `repeats` times a recurrent, a window and a full layer; a token is a byte."""
    return HybridConfig(
        kinds=PATTERN * repeats,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        hidden=96,
        vocabulary=256,
        context=context,
        window=window,
        rope_base=1e6,
        window_rope_base=1e4,
        query_scale=16**-0.5,
        embedding_scale=1.0,
        epsilon=1e-6,
        recurrent=RecurrentShape(heads=4, key_dim=16, value_dim=16),
    )


def sample_weights(config: HybridConfig, seed: int = 0) -> HybridWeights:
    """Random weights for a shape, the same for the same seed.

    They are large, so that attention is sharp and answers are varied: whatever goes wrong changes an answer.
    """
    source = np.random.default_rng(seed)

    def normal(*shape: int, gain: float = 1.0) -> jax.Array:
        """Normal numbers, scaled so that a product with them keeps its size, times the gain."""
        return jnp.asarray(source.normal(0, gain / shape[0] ** 0.5, shape), jnp.float32)

    def near_one(size: int) -> jax.Array:
        return jnp.asarray(source.uniform(0.7, 1.4, size), jnp.float32)

    def mixer(kind: Kind) -> Attention | Recurrent:
        if kind is Kind.RECURRENT:
            return _recurrent(config, source)
        total, depth = config.heads * config.head_dim, config.head_dim
        return Attention(
            normal(config.width, total + 2 * config.kv_heads * depth),
            near_one(depth) * 1.5,
            near_one(depth) * 1.5,
            normal(total, config.width),
        )

    def layer(kind: Kind) -> HybridLayer:
        width = config.width
        return HybridLayer(
            norm=near_one(width),
            mixer=mixer(kind),
            post_norm=near_one(width),
            feed_norm=near_one(width),
            gate_up=normal(width, 2 * config.hidden),
            down=normal(config.hidden, width),
            post_feed_norm=near_one(width),
        )

    layers = tuple(layer(kind) for kind in config.kinds)
    embedding = jnp.asarray(source.normal(0, 1, (config.vocabulary, config.width)), jnp.float32)
    unembedding = jnp.asarray(source.normal(0, 1, (config.vocabulary, config.width)), jnp.float32)
    return HybridWeights(embedding, unembedding, near_one(config.width), layers)


def _recurrent(config: HybridConfig, source: np.random.Generator) -> Recurrent:
    shape = config.recurrent
    assert shape is not None
    values = shape.heads * shape.value_dim

    def matrix(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(source.normal(0, rows**-0.5, (rows, columns)), jnp.float32)

    return Recurrent(
        qkv=matrix(config.width, shape.channels),
        taps=matrix(shape.taps, shape.channels),
        gates=matrix(config.width, 2 * shape.heads),
        # Heads forget half of what they know after 3 to 60 tokens, about.
        fade=jnp.asarray(np.log(source.uniform(0.02, 0.3, shape.heads)), jnp.float32),
        fade_bias=jnp.zeros(shape.heads),
        output_gate=matrix(config.width, values),
        norm=jnp.ones(shape.value_dim),
        output=matrix(values, config.width),
    )
