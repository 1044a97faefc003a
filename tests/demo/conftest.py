from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from small_model import GEOMETRY, Small, small_model

from purecache.demo.engine import Geometry, Programs
from purecache.demo.hybrid_config import HybridConfig, HybridWeights
from purecache.demo.hybrid_engine import HybridPrograms
from purecache.demo.hybrid_sample import sample_config, sample_weights
from purecache.demo.tokenizer import ChatTokenizer
from purecache.demo.weights import ModelConfig, Weights, find_model, load_weights, model_config, open_model


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


@pytest.fixture(scope="session")
def small() -> Small:
    """A tiny model with random weights, for tests of the machinery."""
    return small_model()


@pytest.fixture(scope="session")
def programs(small: Small) -> Programs:
    """Compiled programs of the small model; chunks of 16, pages of 4, batches of 3."""
    return Programs(small.weights, small.config, GEOMETRY)


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
