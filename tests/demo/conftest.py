from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purecache.demo.engine import Geometry, Programs
from purecache.demo.hybrid_config import HybridConfig, HybridWeights
from purecache.demo.hybrid_engine import HybridPrograms
from purecache.demo.hybrid_sample import sample_config, sample_weights
from purecache.demo.tokenizer import ChatTokenizer
from purecache.demo.weights import Layer, ModelConfig, Weights, find_model, load_weights, model_config, open_model


@pytest.fixture(autouse=True)
def _no_cache_directory_of_the_user(tmp_path, monkeypatch):
    """The demo stores pages in the user's cache directory: not those of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@dataclass(frozen=True)
class Model:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]
    config: ModelConfig
    weights: Weights
    tokenizer: ChatTokenizer


@pytest.fixture(scope="session")
def model() -> Model:
    """The real model, read once per test process."""
    metadata, tensors = open_model(find_model())
    config = model_config(metadata)
    return Model(metadata, tensors, config, load_weights(tensors, config), ChatTokenizer(metadata))


@dataclass(frozen=True)
class Small:
    config: ModelConfig
    weights: Weights

    def prompt(self, length: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.config.vocabulary, length).astype(np.int32)


@pytest.fixture(scope="session")
def small() -> Small:
    """Random weights of a tiny model, for tests of the machinery.

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


@pytest.fixture(scope="session")
def programs(small: Model) -> Programs:
    """Compiled programs of the small model; chunks of 16, pages of 4, batches of 3."""
    return Programs(small.weights, small.config, Geometry(page_size=4, chunk=16, batch=3, context=256, block=32))


@dataclass(frozen=True)
class Hybrid:
    config: HybridConfig
    weights: HybridWeights

    def prompt(self, length: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.config.vocabulary, length).astype(np.int32)


@pytest.fixture(scope="session")
def hybrid() -> Hybrid:
    """Random weights of a small model with recurrent, window and full layers; windows of 12 tokens."""
    config = sample_config(context=128, window=12)
    return Hybrid(config, sample_weights(config))


@pytest.fixture(scope="session")
def hybrid_programs(hybrid: Hybrid) -> HybridPrograms:
    """Its compiled programs; chunks of 16, pages of 4, batches of 3."""
    return HybridPrograms(
        hybrid.weights, hybrid.config, Geometry(page_size=4, chunk=16, batch=3, context=128, block=32)
    )
