"""Values of tail pools: whose hands they are in, their orders, and which of them a prefix needs.

A value on device may be evicted when nothing holds a lock reference on it, one on host when it is not being loaded; at
a leaf or not. The order of a tail pool in a tier lists exactly those, so its oldest entry is the next victim. Values
that become newest together are listed deeper newer: what leaves a window first is evicted first.

The number of a pool may be an int or found out by the program: what is done for every pool is compiled once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, RESERVED, TIERS, Account, Column, TailColumn, Tier
from purecache.transitions.columns import add, book, look, masked, put, set_entry, when
from purecache.transitions.orders import OLDER, drop_entry, place_between
from purecache.transitions.pages import give_pages, of_pool, own_pages
from purecache.transitions.scans import repeat


class Value(NamedTuple):
    """What is known of the value of one pool at a node."""

    device: jax.Array
    host: jax.Array
    incoming: jax.Array
    locks: jax.Array


def every_pool(state: CacheState, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`step(pool, carry)` for every tail pool."""
    if state.layout.pools <= 2:
        return step(1, carry) if state.layout.tails else carry
    return repeat(state.token, len(state.layout.tails), lambda index, carry: step(index + 1, carry), carry)


def first_needed(state: CacheState, pool: Any, depth: Any) -> Any:
    """The law of a tail pool: the first page on which a prefix of `depth` pages needs a value."""
    layout = state.layout
    laws = [tail.law for tail in layout.tails]
    return of_pool(state, pool, lambda pool: laws[pool - 1].first_needed(depth, layout.page_size) if pool else 0)


def value_at(state: CacheState, node: jax.Array, pool: Any) -> Value:
    """The value of a pool at a node. Read it through `look`."""
    layout = state.layout
    device, host, incoming = (state.nodes[layout.page_row(tier, pool), node] for tier in Tier)
    return Value(device, host, incoming, state.nodes[layout.tail_row(TailColumn.LOCKS, pool), node])


def value_account(value: Value, tier: Tier) -> jax.Array:
    """The account of a value in a tier: EVICTABLE, PROTECTED, IN_FLIGHT or NONE. Elementwise."""
    on_host, moving = value.host >= 0, value.incoming >= 0
    if tier == Tier.DEVICE:
        held = jnp.where(value.locks > 0, Account.PROTECTED, Account.EVICTABLE)
        return jnp.where(value.device >= 0, held, jnp.where(on_host & moving, Account.IN_FLIGHT, NONE))
    held = jnp.where(moving, Account.PROTECTED, Account.EVICTABLE)
    return jnp.where(on_host, held, jnp.where(moving, Account.IN_FLIGHT, NONE))


def set_value(state: CacheState, rank: jax.Array, pool: Any, node: jax.Array, **pages: Any) -> CacheState:
    """Write the `device`, `host` or `incoming` page of a value, and keep accounts and orders true. NONE: nothing.

    A value that may be evicted from now on is listed as the newest.
    """
    state, before = look(state, lambda state: value_at(state, node, pool))
    after = before._replace(**{name: jnp.asarray(page, jnp.int32) for name, page in pages.items()})
    for name in pages:
        row = state.layout.page_row(Tier[name.upper()], pool)
        state = put(state, "nodes", (row, node), getattr(after, name))
    for tier in TIERS:
        if "incoming" in pages or tier.name.lower() in pages:
            state = _account(state, rank, pool, node, before, after, tier, NONE)[0]
    return state


def _account(
    state: CacheState, rank: jax.Array, pool: Any, node: jax.Array, before: Value, after: Value, tier: Tier, newer: Any
) -> tuple[CacheState, Any]:
    """Book and list a value that has changed. `newer`: the entry that it goes before, NONE for the end.

    Returns the state, and the entry that an older value would go before.
    """
    old, new = value_account(before, tier), value_account(after, tier)
    changed = (node >= 0) & (old != new)
    state = book(state, masked(changed, old), tier, rank, -1, pool)
    state = book(state, masked(changed, new), tier, rank, 1, pool)
    order, arrives = state.layout.order(tier, pool), changed & (new == Account.EVICTABLE)
    state = drop_entry(state, order, masked(changed & (old == Account.EVICTABLE), node))
    state = list_before(state, order, masked(arrives, node), rank, newer)
    return state, jnp.where(arrives, node, newer)


def list_before(state: CacheState, order: Any, node: jax.Array, rank: jax.Array, newer: Any) -> CacheState:
    """Put `node` right before the entry `newer`, or at the new end if that is NONE. NONE lists nothing."""
    behind = jnp.where(newer == NONE, first_head(state, rank), newer)
    return place_between(state, order, node, lambda state: (state.orders[order, OLDER, behind], behind))


def first_head(state: CacheState, rank: jax.Array) -> jax.Array:
    """[] sentinel of the list of a rank in the orders of tail pools."""
    return (state.layout.rows + rank * state.layout.levels).astype(jnp.int32)


def drop_values(state: CacheState, rank: jax.Array, node: jax.Array, tier: Tier) -> tuple[CacheState, jax.Array]:
    """Free the values at a node in a tier. NONE: nothing.

    On host the node is about to go: the page of a value on its way stays with its operation until that ends.
    Returns the state and the freed page of each pool, [tail pools], or NONE.
    """

    def one(pool: Any, carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
        state, freed = carry
        state, value = look(state, lambda state: value_at(state, node, pool))
        page = masked(node >= 0, value.device if tier == Tier.DEVICE else value.host)
        if tier == Tier.HOST:
            state = _orphan(state, rank, pool, masked(value.incoming >= 0, node), value)
        state = set_value(state, rank, pool, masked(page >= 0, node), **{tier.name.lower(): NONE})
        state = give_pages(state, tier, rank, page, pool)
        return state, set_entry(freed, jnp.asarray(pool) - 1, page)

    return every_pool(state, one, (state, jnp.full(len(state.layout.tails), NONE, jnp.int32)))


def _orphan(state: CacheState, rank: jax.Array, pool: Any, node: jax.Array, value: Value) -> CacheState:
    """Leave the page that a node waits for to its operation, which frees it. NONE: nothing."""

    def leave(state: CacheState) -> CacheState:
        row = state.layout.tail_row(TailColumn.OPERATION, pool)
        state, operation = look(state, lambda state: state.nodes[row, node])
        loading = value.host >= 0
        state = set_value(state, rank, pool, node, incoming=NONE)
        for tier, mine in ((Tier.DEVICE, loading), (Tier.HOST, ~loading)):
            page = masked(mine, value.incoming)
            state = book(state, Account.IN_FLIGHT, tier, rank, mine.astype(jnp.int32), pool)
            state = own_pages(state, tier, rank, page, RESERVED - operation, pool)
        return state

    return when(node >= 0, leave, state)


def needed_of(state: CacheState, node: jax.Array, pool: Any) -> jax.Array:
    """[] on how many nodes, `node` and those above it, its prefix needs values. 0 for NONE. Read it through `look`."""
    depth = state.nodes[Column.DEPTH, jnp.maximum(node, 0)]
    return jnp.where(node >= 0, depth - first_needed(state, pool, depth), 0)


def climb_needed(
    state: CacheState, node: jax.Array, pool: Any, step: Callable[[CacheState, jax.Array, Any], Any]
) -> CacheState:
    """`step(state, node, newer)` on every node on which the prefix to `node` needs a value, deepest first.

    It returns the state and what it wants to be given as `newer` next; at first that is NONE.
    """
    state, number = look(state, lambda state: needed_of(state, node, pool))

    def up(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        state, node, newer, left = carry
        state, newer = step(state, node, newer)
        state, above = look(state, lambda state: state.nodes[Column.PARENT, node])
        return state, above, newer, left - 1

    return lax.while_loop(lambda carry: carry[3] > 0, up, (state, node, state.token + NONE, number))[0]


def hold_values(state: CacheState, rank: jax.Array, node: jax.Array, amount: int) -> CacheState:
    """Add `amount` (1 or -1) lock references to the values that requests read in place. NONE: nothing."""
    in_place = [tail.law.in_place for tail in state.layout.tails]

    def one(pool: Any, state: CacheState) -> CacheState:
        row = state.layout.tail_row(TailColumn.LOCKS, pool)
        wanted = of_pool(state, pool, lambda pool: int(pool > 0 and in_place[pool - 1]))

        def turn(state: CacheState, node: jax.Array, newer: Any) -> tuple[CacheState, Any]:
            state, before = look(state, lambda state: value_at(state, node, pool))
            state = add(state, "nodes", (row, node), amount)
            after = before._replace(locks=before.locks + amount)
            return _account(state, rank, pool, node, before, after, Tier.DEVICE, newer)

        return climb_needed(state, masked(jnp.asarray(wanted) > 0, node), pool, turn)

    return every_pool(state, one, state) if any(in_place) else state


def touch_values(state: CacheState, tier: Tier, node: jax.Array, rank: jax.Array) -> CacheState:
    """Make the listed values that the prefix to `node` needs in `tier` the newest. NONE: nothing."""

    def one(pool: Any, state: CacheState) -> CacheState:
        order = state.layout.order(tier, pool)

        def renew(state: CacheState, node: jax.Array, newer: Any) -> tuple[CacheState, Any]:
            state, listed = look(state, lambda state: state.orders[order, OLDER, node] != NONE)
            state = list_before(state, order, masked(listed, node), rank, newer)
            return state, jnp.where(listed, node, newer)

        return climb_needed(state, node, pool, renew)

    return every_pool(state, one, state)


def deepest_valid(state: CacheState, depth: jax.Array, present: Sequence[jax.Array]) -> jax.Array:
    """[] the longest prefix, at most `depth` pages, for which the law of every tail pool holds.

    `present`: per tail pool bool [size], which pages have a value.
    """

    def settle(pool: int, depth: jax.Array) -> jax.Array:
        there = present[pool - 1]

        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            depth, page = carry
            # A law does not decrease, so behind a page without a value no prefix is valid that this one was not.
            return jnp.where(there[page - 1], depth, page - 1), page - 1

        return lax.while_loop(lambda carry: carry[1] > first_needed(state, pool, carry[0]), step, (depth, depth))[0]

    def settle_all(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        depth = carry[0]
        for pool in range(1, state.layout.pools):
            depth = settle(pool, depth)
        return depth, carry[0]

    if not present:
        return depth
    return lax.while_loop(lambda carry: carry[0] != carry[1], settle_all, (depth, depth + 1))[0]


def adopt_value(state: CacheState, rank: jax.Array, pool: Any, node: jax.Array, page: jax.Array) -> CacheState:
    """Make a lent device page the value at a node, which has none on device. NONE: nothing.

    A value that is being loaded there is left to its operation: who offers this one may need it before that ends.
    """
    state, value = look(state, lambda state: value_at(state, node, pool))
    state = _orphan(state, rank, pool, masked((value.host >= 0) & (value.incoming >= 0), node), value)
    state = set_value(state, rank, pool, node, device=page)
    state = own_pages(state, Tier.DEVICE, rank, masked(node >= 0, page), node, pool)
    return book(state, Account.LENT, Tier.DEVICE, rank, -(node >= 0).astype(jnp.int32), pool)


def expect(
    state: CacheState, tier: Tier, rank: jax.Array, pool: Any, node: jax.Array, page: jax.Array, operation: jax.Array
) -> CacheState:
    """Note that `operation` brings the value at a node to `page` of a tier, which is booked already. NONE: nothing."""
    state = put(state, "nodes", (state.layout.page_row(Tier.INCOMING, pool), node), page)
    state = put(state, "nodes", (state.layout.tail_row(TailColumn.OPERATION, pool), node), operation)
    return own_pages(state, tier, rank, masked(node >= 0, page), node, pool)
