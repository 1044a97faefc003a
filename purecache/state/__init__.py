"""The state of a cache: configuration, layout, the immutable pytree, and its laws."""

from purecache.state.cache_state import CacheState, as_jax, empty_state
from purecache.state.config import CacheConfig, ConfigError, Policy, WritePolicy
from purecache.state.layout import NONE, Layout, Tier
from purecache.state.pools import Checkpoint, Chunk, Law, PoolSpec, WholePrefix, Window

__all__ = [
    "NONE",
    "CacheConfig",
    "CacheState",
    "Checkpoint",
    "Chunk",
    "ConfigError",
    "Law",
    "Layout",
    "Policy",
    "PoolSpec",
    "Tier",
    "WholePrefix",
    "Window",
    "WritePolicy",
    "as_jax",
    "empty_state",
]
