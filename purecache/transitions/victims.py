"""Choosing victims: the next unlocked leaf of an order, tidying the order on the way."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Column, Scalar, Tier
from purecache.transitions.columns import look, masked
from purecache.transitions.orders import (
    DUE,
    NEWER,
    OLDER,
    drop_entry,
    head_of,
    listed,
    place_between,
    retains,
    rule,
)
from purecache.transitions.scans import repeat


class Cursor(NamedTuple):
    """Where a search for victims stands: the entry to look at, which may be the sentinel that ends a list."""

    entry: jax.Array
    """[] node, or index of a sentinel."""
    head: jax.Array
    """[] sentinel of the list that `entry` is in."""


def _next_entry(state: CacheState, tier: Tier, entry: jax.Array) -> jax.Array:
    direction = jnp.where(rule(state, Scalar.NEWEST_FIRST), OLDER, NEWER)
    return state.orders[tier, direction, entry]


def first_cursor(state: CacheState, tier: Tier, rank: jax.Array) -> Cursor:
    """The end of the first list of a rank that victims are taken from. Read it through `look`."""
    head = state.layout.rows + rank * state.layout.levels
    return Cursor(_next_entry(state, tier, head), head)


def _earliest(state: CacheState, tier: Tier, rank: jax.Array, cursor: Cursor) -> Cursor:
    """Under Policy.RETENTION, the oldest entry of the list in which that has the earliest deadline (of equal ones, the
    first list; a sentinel if all lists are empty); else the cursor as it is."""
    layout, keeps = state.layout, retains(state)
    first = layout.rows + rank * layout.levels

    def better(index: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        entry = state.orders[tier, NEWER, first + index]
        there = entry < layout.rows
        due = state.orders[tier, DUE, jnp.where(there, entry, 0)]
        wins = there & ((best[0] >= layout.rows) | (due < best[2]))
        return tuple(jnp.where(wins, new, old) for new, old in zip((entry, first + index, due), best, strict=True))

    start = (jnp.where(keeps, first, cursor.entry), jnp.where(keeps, first, cursor.head), state.token)
    entry, head, _ = repeat(state.token, jnp.where(keeps, layout.levels, 0), better, start)
    return Cursor(entry, head)


def _is_leaf(state: CacheState, tier: Tier, node: jax.Array) -> jax.Array:
    if tier == Tier.DEVICE:
        return state.nodes[Column.DEVICE_CHILDREN, node] == 0
    return state.nodes[Column.FIRST_CHILD, node] == NONE


def _is_resident(state: CacheState, tier: Tier, node: jax.Array) -> jax.Array:
    """Whether eviction from `tier` concerns this node: on device, or on host alone (locked, while it is loaded)."""
    device, host = state.nodes[Column.DEVICE_PAGE, node] >= 0, state.nodes[Column.HOST_PAGE, node] >= 0
    return device if tier == Tier.DEVICE else host & ~device


def _is_locked(state: CacheState, tier: Tier, node: jax.Array) -> jax.Array:
    locked = state.nodes[Column.DEVICE_LOCKS, node] > 0
    return locked if tier == Tier.DEVICE else locked | (state.nodes[Column.HOST_LOCKS, node] > 0)


def seek(state: CacheState, tier: Tier, rank: jax.Array, cursor: Cursor) -> tuple[CacheState, Cursor]:
    """Move the cursor to the next victim; its entry is a sentinel if there is none.

    Entries that went stale (inner nodes, and locked ones in policies that list them again at unlock) are dropped.
    """
    layout = state.layout
    last = layout.rows + (rank + 1) * layout.levels

    def examine(state: CacheState, cursor: Cursor) -> tuple[Cursor, tuple[jax.Array, ...]]:
        cursor = _earliest(state, tier, rank, cursor)
        at_head = cursor.entry >= layout.rows
        node = jnp.where(at_head, 0, cursor.entry)
        resident, leaf = _is_resident(state, tier, node), _is_leaf(state, tier, node)
        locked = _is_locked(state, tier, node)
        stays = (rule(state, Scalar.KEEPS_LOCKED) | ~locked) & leaf
        follower = jnp.where(
            at_head,
            _next_entry(state, tier, jnp.minimum(cursor.head + 1, last - 1)),
            _next_entry(state, tier, cursor.entry),
        )
        found, stale = ~at_head & resident & leaf & ~locked, ~at_head & ~(resident & stays)
        return cursor, (at_head, found, stale, follower)

    def step(carry: tuple[CacheState, Cursor, jax.Array]) -> tuple[CacheState, Cursor, jax.Array]:
        state, cursor, _ = carry
        state, (cursor, (at_head, found, stale, follower)) = look(state, examine, cursor)
        state = drop_entry(state, tier, masked(stale, cursor.entry))
        ended = at_head & ((cursor.head + 1 == last) | retains(state))
        onward = Cursor(follower, cursor.head + at_head)
        stop = found | ended
        cursor = Cursor(jnp.where(stop, cursor.entry, onward.entry), jnp.where(stop, cursor.head, onward.head))
        return state, cursor, stop

    state, cursor, _ = lax.while_loop(lambda carry: ~carry[2], step, (state, cursor, jnp.bool_(False)))
    return state, cursor


def departing(state: CacheState, tier: Tier, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The entry behind that of a victim, and its deadline: what `step_back` must know once it is gone."""
    return _next_entry(state, tier, node), state.orders[tier, DUE, node]


def step_back(
    state: CacheState,
    tier: Tier,
    rank: jax.Array,
    cursor: Cursor,
    follower: jax.Array,
    left: jax.Array,
    parent: jax.Array,
) -> tuple[CacheState, Cursor]:
    """After a victim left: give its parent, if that is a leaf now, the victim's place, and move the cursor on.

    `follower` is the entry behind the victim, `left` the deadline it had; `parent` may be a root, or NONE if it left
    too.
    """

    def plan(state: CacheState) -> tuple[jax.Array, ...]:
        node = jnp.clip(parent, 0, state.layout.nodes - 1)
        is_node = (parent >= 0) & (parent < state.layout.nodes)
        leaf = is_node & _is_leaf(state, tier, node) & _is_resident(state, tier, node)
        free = ~_is_locked(state, tier, node) | rule(state, Scalar.KEEPS_LOCKED)
        unlisted = ~listed(state, tier, node)
        head = head_of(state, node, rank)
        # Among the entries before the victim there may be locked ones, so its place isn't always the end of the list.
        behind = jnp.where(head == cursor.head, follower, _next_entry(state, tier, head))
        backward = rule(state, Scalar.NEWEST_FIRST)
        beyond = state.orders[tier, jnp.where(backward, NEWER, OLDER), behind]
        older, newer = jnp.where(backward, behind, beyond), jnp.where(backward, beyond, behind)
        return leaf & free & (unlisted | rule(state, Scalar.ALWAYS_NEXT)), head, older, newer

    state, (next_victim, head, older, newer) = look(state, plan)
    # No entry has an earlier deadline than the victim had, so with that one every list stays in order.
    state = place_between(state, tier, masked(next_victim, parent), lambda _: (older, newer, left))
    back = next_victim & (head <= cursor.head)
    entry = jnp.where(back, parent, follower)
    return state, Cursor(entry, jnp.where(back, head, cursor.head))
