"""The state of a cache: configuration, layout, the immutable pytree, and its laws."""

from purecache.state.cache_state import CacheState, as_jax, empty_state
from purecache.state.config import CacheConfig, ConfigError, Policy, WritePolicy
from purecache.state.layout import NONE, Layout, Tier

__all__ = [
    "NONE",
    "CacheConfig",
    "CacheState",
    "ConfigError",
    "Layout",
    "Policy",
    "Tier",
    "WritePolicy",
    "as_jax",
    "empty_state",
]
