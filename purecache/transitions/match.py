"""Match: the longest usable prefix of a prompt, with or without touching it."""

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import TIERS, Scalar, Tier
from purecache.transitions.columns import count, look, masked
from purecache.transitions.orders import touch
from purecache.transitions.scans import first_of
from purecache.transitions.values import deepest_valid, first_needed, touch_values
from purecache.transitions.vocabulary import Matched, Step
from purecache.transitions.walk import Prompt, root_of, size_of, walk


def usable_prefix(state: CacheState, prompt: Prompt) -> Matched:
    """The usable part of a prompt's path: device pages first, then pages that only host has.

    Each part ends where the law of every pool holds.
    """
    size = size_of(state, prompt)
    layout, index = state.layout, jnp.arange(size, dtype=jnp.int32)
    rows = [layout.page_row(tier, pool) for pool in range(layout.pools) for tier in TIERS]
    path = walk(state, prompt, *rows)
    nodes, known = path.nodes[:size], index < path.length
    pages = [masked(known, column[:size]) for column in path.columns]
    (device, *values), (host, *on_host) = pages[::2], pages[1::2]
    device_length = first_of(state.token, device < 0)
    length = first_of(state.token, (device < 0) & (host < 0))
    root = root_of(state, prompt.rank)

    def last(length: jax.Array) -> jax.Array:
        return jnp.where(length > 0, nodes[jnp.maximum(length - 1, 0)], root)

    device_length, full = jnp.minimum(device_length, path.length), jnp.minimum(length, path.length)
    device_length = deepest_valid(state, device_length, [value >= 0 for value in values])
    either = [(here >= 0) | (there >= 0) for here, there in zip(values, on_host, strict=True)]
    length = deepest_valid(state, full, either)
    clock = state.books[Scalar.CLOCK]
    needed = []
    for pool, value in enumerate(values, 1):
        first = first_needed(state, pool, device_length)
        needed.append(masked((index >= first) & (index < device_length), value))
    return Matched(device_length, length, last(device_length), last(length), clock, full, device, tuple(needed))


def valid_prompt(state: CacheState, prompt: Prompt) -> Prompt:
    """The prompt, with a rank or length that is out of range turned into an empty prompt of rank 0."""
    good = (prompt.rank >= 0) & (prompt.rank < state.layout.ranks) & (prompt.pages >= 0)
    pages = jnp.minimum(prompt.pages, size_of(state, prompt))
    return prompt._replace(pages=jnp.where(good, pages, 0), rank=jnp.where(good, prompt.rank, 0))


def peek(state: CacheState, prompt: Prompt) -> Matched:
    """The longest usable prefix of `prompt`. Changes nothing."""
    return usable_prefix(state, valid_prompt(state, prompt))


def match(state: CacheState, prompt: Prompt) -> Step[Matched]:
    """The longest usable prefix of `prompt`, which is touched: it becomes the most recently used."""
    prompt = valid_prompt(state, prompt)
    state, matched = match_if(state, prompt, True)
    on_device = masked(matched.device_length > 0, matched.device_node)
    state = touch_values(state, Tier.DEVICE, on_device, prompt.rank)
    return Step(state, (), matched)


def match_if(state: CacheState, prompt: Prompt, noted: jax.Array | bool) -> tuple[CacheState, Matched]:
    """The longest usable prefix, which is touched and counted if `noted`; but not its values on device."""
    prompt = valid_prompt(state, prompt)
    state, matched = look(state, usable_prefix, prompt)
    on_device = (matched.device_length > 0) & noted
    on_host = (matched.length > matched.device_length) & noted
    state = count(
        state,
        CLOCK=noted,
        MATCHED_DEVICE_PAGES=jnp.where(noted, matched.device_length, 0),
        MATCHED_HOST_PAGES=jnp.where(noted, matched.length - matched.device_length, 0),
        MATCHED_MISS_PAGES=jnp.where(noted, prompt.pages - matched.length, 0),
    )
    state = touch(state, Tier.DEVICE, masked(on_device, matched.device_node), prompt.rank)
    state = touch(state, Tier.HOST, masked(on_host, matched.node), prompt.rank)
    return touch_values(state, Tier.HOST, masked(on_host, matched.node), prompt.rank), matched


def match_many(state: CacheState, prompts: Prompt) -> Step[Matched]:
    """`match` of several prompts in order, in one call: every leaf of `prompts` and the reply has a leading axis."""

    def one(state: CacheState, prompt: Prompt) -> tuple[CacheState, Matched]:
        step = match(state, prompt)
        return step.state, step.reply

    state, matched = lax.scan(one, state, prompts)
    return Step(state, (), matched)
