"""A sketch of how often pages were used that the tree may have forgotten: count-min with aging.

Four rows of counters; a prefix counts in one place of each row, and was used at most as often as the lowest of the four
says. When ten times as many uses were counted as a row has counters, all counters are halved, so that old fame fades.
(Cormode and Muthukrishnan, "An improved data stream summary", 2005; aging as in TinyLFU, Einziger et al., 2017.)
It is the end of `links`; a cache without one has no code for it.
"""

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.layout import SKETCH_ROWS
from purecache.transitions.columns import add, look, masked, put, set_entry, when
from purecache.transitions.scans import number_of, repeat
from purecache.transitions.walk import Prompt, size_of

AGING = 10
"""Uses per counter of a row until all are halved."""
_ODD = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)
"""Multipliers of the rows (of xxHash and MurmurHash)."""


def remembered(state: CacheState, prompt: Prompt, counted: jax.Array) -> tuple[CacheState, jax.Array]:
    """How often each prefix of a prompt was used before, [size], at most; `counted` [size] bool: which are used now."""
    size = size_of(state, prompt)
    if not state.layout.sketch:
        return state, jnp.zeros(size, jnp.int32)
    state, places = look(state, _places, prompt)
    state, before = look(state, lambda state: jnp.min(state.links[places], axis=0))
    state = add(state, "links", masked(counted[None], places).T.reshape(-1), 1)
    last = state.links.shape[0] - 1
    state, uses = look(state, lambda state: state.links[last])
    uses += number_of(state.token, counted)
    aged = uses >= AGING * state.layout.sketch
    state = put(state, "links", last, jnp.where(aged, uses // 2, uses))
    return when(aged, _halve, state), before


def _places(state: CacheState, prompt: Prompt) -> jax.Array:
    """[rows, size] where each prefix of a prompt counts: by the hash of all its tokens, with the secret keys."""
    layout, size = state.layout, size_of(state, prompt)
    keys = state.books[layout.hash_keys : layout.retention].view(jnp.uint32).reshape(2, layout.hashed_words)

    def weighed(words: jax.Array, first: int) -> jax.Array:
        lower, upper = (row[first : first + words.shape[-1]] for row in keys)
        return jnp.sum((words & 0xFFFF) * lower + (words >> 16) * upper, axis=-1, dtype=jnp.uint32)

    pages = weighed(prompt.tokens.view(jnp.uint32).reshape(size, layout.page_size), 0)
    start = weighed(prompt.namespace.view(jnp.uint32), layout.page_size + 1) + prompt.rank.astype(jnp.uint32)

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        above, hashes = carry
        own = (above ^ (above >> 15)) * jnp.uint32(_ODD[0]) + pages[index]
        return own, set_entry(hashes, index, own)

    hashes = repeat(state.token, prompt.pages, step, (start, jnp.zeros(size, jnp.uint32)))[1]
    shift = 33 - layout.sketch.bit_length()
    rows = [((hashes ^ (hashes >> 16)) * jnp.uint32(odd) >> shift).astype(jnp.int32) for odd in _ODD]
    return jnp.stack([layout.sketch_at + number * layout.sketch + row for number, row in enumerate(rows)])


def _halve(state: CacheState) -> CacheState:
    def one(index: jax.Array, state: CacheState) -> CacheState:
        place = state.layout.sketch_at + index
        state, uses = look(state, lambda state: state.links[place])
        return put(state, "links", place, uses // 2)

    return repeat(state.token, SKETCH_ROWS * state.layout.sketch, one, state)
