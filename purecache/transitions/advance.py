"""Advance: what time it is, as far as a cache knows."""

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.config import TIME_LIMIT
from purecache.state.layout import Scalar
from purecache.transitions.columns import count
from purecache.transitions.vocabulary import Advanced, Step


def advance(state: CacheState, time: jax.Array) -> Step[Advanced]:
    """Let it be `time`, unless it is later already: time enters as an event, so that decisions can be repeated."""
    later = jnp.minimum(time, TIME_LIMIT - 1) - state.books[Scalar.TIME]
    state = count(state, TIME=jnp.maximum(later, 0), CLOCK=later > 0)
    return Step(state, (), Advanced(state.books[Scalar.TIME]))
