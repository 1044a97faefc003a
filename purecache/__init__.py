"""A hierarchical KV cache for JAX LLM serving, written as a pure state machine."""

from purecache.answers import CacheError, Inserted, Load, Loading, Match, Receipt, Refusal
from purecache.cache import PrefixCache
from purecache.effects import Interpreter
from purecache.state import CacheConfig, ConfigError, Policy, WritePolicy

__all__ = [
    "CacheConfig",
    "CacheError",
    "ConfigError",
    "Inserted",
    "Interpreter",
    "Load",
    "Loading",
    "Match",
    "Policy",
    "PrefixCache",
    "Receipt",
    "Refusal",
    "WritePolicy",
]
