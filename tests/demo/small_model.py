"""A tiny model, the same in every process."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from purecache.demo.engine import Geometry
from purecache.demo.weights import Layer, ModelConfig, Weights

GEOMETRY = Geometry(page_size=4, chunk=16, batch=3, context=256, block=32)


@dataclass(frozen=True)
class Small:
    config: ModelConfig
    weights: Weights

    def prompt(self, length: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.config.vocabulary, length).astype(np.int32)


def small_model() -> Small:
    """Random weights of a tiny model.

    They are large, so that attention is sharp and answers are varied: whatever goes wrong changes an answer.
    """
    config = ModelConfig(
        layers=2,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        hidden=96,
        vocabulary=300,
        context=256,
        rope_base=1e4,
        epsilon=1e-5,
    )
    source = np.random.default_rng(1)

    def matrix(rows: int, columns: int, gain: float) -> jax.Array:
        return jnp.asarray(source.normal(0, gain / rows**0.5, (rows, columns)), jnp.float32)

    def layer() -> Layer:
        ones = jnp.ones(config.width)
        return Layer(ones, matrix(64, 128, 1.5), matrix(64, 64, 2.0), ones, matrix(64, 192, 1.5), matrix(96, 64, 2.0))

    layers = tuple(layer() for _ in range(config.layers))
    embedding = jnp.asarray(source.normal(0, 1, (config.vocabulary, config.width)), jnp.float32)
    unembedding = jnp.asarray(source.normal(0, 1, (config.vocabulary, config.width)), jnp.float32)
    return Small(config, Weights(embedding, unembedding, jnp.ones(config.width), layers))
