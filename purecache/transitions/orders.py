"""Eviction orders: linked lists of candidates, oldest first, and how the rules of a policy use them.

An order holds *tips*. A touch moves only the deepest node of a path, in O(1): its ancestors are as recent as it is and
can't be victims before it. Taking a victim cleans up what moved on: an inner node's entry is dropped, and when a
leaf goes, its parent, now a leaf, takes its place. So the order of victims is that of an exact list of all pages, and
the work is proportional to the pages evicted.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.config import Policy
from purecache.state.layout import NONE, Column, Scalar
from purecache.transitions.columns import look, masked, put

OLDER, NEWER, DUE = 0, 1, 2
"""Rows of an order: the neighbour towards the oldest entry, and towards the newest; and its deadline, under
Policy.RETENTION: when it was used last, plus the retention of its list."""


def rule(state: CacheState, name: Scalar) -> jax.Array:
    """[] bool: one of the rules that make the policy of this state (which is data, not a shape)."""
    return state.books[name] > 0


def level(state: CacheState, hits: jax.Array, priority: jax.Array) -> jax.Array:
    """[] which list of the order a node belongs to: lists are emptied from level 0 upwards."""
    top, policy = state.layout.levels - 1, state.books[Scalar.POLICY]
    # Under RETENTION the first list is for pages that were not kept, whose priority is below 0.
    by_hits, by_priority = jnp.clip(hits - 1, 0, top), jnp.clip(priority + (policy == Policy.RETENTION), 0, top)
    flat = jnp.where(policy == Policy.SLRU, jnp.minimum(by_hits, 1), 0)
    prioritised = (policy == Policy.PRIORITY) | (policy == Policy.RETENTION)
    return jnp.where(policy == Policy.LFU, by_hits, jnp.where(prioritised, by_priority, flat))


def retains(state: CacheState) -> jax.Array:
    """[] bool: whether the entries of the orders have deadlines."""
    return state.books[Scalar.POLICY] == Policy.RETENTION


def retention_of(state: CacheState, head: jax.Array) -> jax.Array:
    """[] how long the pages of a list are kept, by its sentinel."""
    return state.books[state.layout.retention + (head - state.layout.rows) % state.layout.levels]


def head_of(state: CacheState, node: jax.Array, rank: jax.Array) -> jax.Array:
    """[] index of the sentinel of the list that a node belongs to."""
    chosen = level(state, state.nodes[Column.HITS, node], state.nodes[Column.PRIORITY, node])
    return state.layout.rows + rank * state.layout.levels + chosen


def place(state: CacheState, tier: Any, node: jax.Array, rank: jax.Array, newest: jax.Array | bool) -> CacheState:
    """Move `node` to the newest or the oldest end of its list in the order of `tier`. NONE places nothing.

    Its deadline is that of a page used now; at the oldest end it has passed.
    """

    def ends(state: CacheState) -> tuple[jax.Array, ...]:
        head = head_of(state, node, rank)
        oldest, last = state.orders[tier, NEWER, head], state.orders[tier, OLDER, head]
        due = state.books[Scalar.TIME] + retention_of(state, head)
        return jnp.where(newest, last, head), jnp.where(newest, head, oldest), jnp.where(newest, due, 0)

    return place_between(state, tier, node, ends)


def place_between(
    state: CacheState, tier: Any, node: jax.Array, ends: Callable[[CacheState], tuple[jax.Array, ...]]
) -> CacheState:
    """Move `node` between the neighbouring entries `ends(state)`: older, newer, and its deadline if it has one.

    NONE places nothing.
    """

    def plan(state: CacheState) -> tuple[jax.Array, ...]:
        return state.orders[tier, OLDER, node], state.orders[tier, NEWER, node], *ends(state)

    state, (left, right, older, newer, *due) = look(state, plan)
    there = (older == node) | (newer == node) | (node < 0)
    linked = (left != NONE) & ~there
    target = masked(~there, node)
    state = _join(state, tier, masked(linked, left), masked(linked, right))
    state = _join(state, tier, masked(~there, older), target)
    state = _join(state, tier, target, masked(~there, newer))
    return put(state, "orders", (tier, DUE, masked(retains(state), node)), due[0]) if due else state


def _join(state: CacheState, tier: Any, older: jax.Array, newer: jax.Array) -> CacheState:
    """Make two entries neighbours. NONE for both joins nothing."""
    state = put(state, "orders", (tier, NEWER, older), newer)
    return put(state, "orders", (tier, OLDER, newer), older)


def drop_entry(state: CacheState, tier: Any, node: jax.Array) -> CacheState:
    """Take `node` out of the order of `tier`, if it is in it. NONE drops nothing."""
    state, (left, right) = look(state, lambda state: (state.orders[tier, OLDER, node], state.orders[tier, NEWER, node]))
    linked = (left != NONE) & (node >= 0)
    target = masked(linked, node)
    state = _join(state, tier, masked(linked, left), masked(linked, right))
    state = put(state, "orders", (tier, OLDER, target), NONE)
    return put(state, "orders", (tier, NEWER, target), NONE)


def listed(state: CacheState, tier: Any, node: jax.Array) -> jax.Array:
    """[] bool: whether a node has an entry in the order of a tier. Read it through `look`."""
    return state.orders[tier, OLDER, node] != NONE


def arrive(state: CacheState, tier: Any, node: jax.Array, rank: jax.Array) -> CacheState:
    """List `node`, whose page is new in `tier`, as the newest."""
    return place(state, tier, node, rank, True)


def touch(state: CacheState, tier: Any, node: jax.Array, rank: jax.Array) -> CacheState:
    """Note that a path down to `node` was used. Policies that order by arrival do not move it."""
    return arrive(state, tier, masked(rule(state, Scalar.MOVES), node), rank)
