"""Backup and load back of values of tail pools: which to move, and what becomes of those that arrive.

An operation of a tail pool is known by the pages that it fills: each is owned by the node that waits for it, or by the
operation alone if that node has gone. So its values need not lie side by side, and nothing is locked for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import (
    NONE,
    PAGES,
    RESERVED,
    Account,
    Column,
    Ledger,
    Scalar,
    Shelf,
    TailColumn,
    Tier,
    TransferKind,
)
from purecache.transitions.columns import book, count, look, masked, set_entry
from purecache.transitions.operations import Handle, close_operation, ended, open_operation, transfers_of
from purecache.transitions.pages import free_count, give_pages, owner_index, take_pages
from purecache.transitions.scans import end_of, repeat
from purecache.transitions.value_evict import evict_host_values
from purecache.transitions.values import Value, expect, needed_of, set_value, value_at
from purecache.transitions.vocabulary import Finished, Step, Transfers

Wanted = Callable[[CacheState, jax.Array, Value], jax.Array]
"""Whether a value at a node is to be moved. Read it through `look`."""


def find_values(
    state: CacheState, pool: Any, node: jax.Array, most: jax.Array, size: int, wanted: Wanted
) -> tuple[jax.Array, jax.Array]:
    """The nodes with values to be moved, among `node` and the `most - 1` above it: [size], deepest first, and how many.

    Read it through `look`.
    """

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        node, left, nodes, found = carry
        here = wanted(state, node, value_at(state, node, pool))
        return state.nodes[Column.PARENT, node], left - 1, set_entry(nodes, masked(here, found), node), found + here

    def more(carry: tuple[jax.Array, ...]) -> jax.Array:
        node, left, _, found = carry
        return (left > 0) & (node >= 0) & (node < state.layout.nodes) & (found < size)

    start = (node, most, jnp.full(size, NONE, jnp.int32), state.token)
    _, _, nodes, found = lax.while_loop(more, step, start)
    return nodes, found


def _bare(hits: jax.Array) -> Wanted:
    def wanted(state: CacheState, node: jax.Array, value: Value) -> jax.Array:
        bare = (value.device >= 0) & (value.host < 0) & (value.incoming < 0)
        copied = (state.nodes[Column.HOST_PAGE, node] >= 0) | (state.nodes[Column.INCOMING_PAGE, node] >= 0)
        return bare & copied & (state.nodes[Column.HITS, node] >= hits)

    return wanted


def begin_value_backup(
    state: CacheState, pool: Any, node: jax.Array, rank: jax.Array, hits: jax.Array, size: int
) -> tuple[CacheState, Transfers, jax.Array]:
    """Start copying to host what the path to `node` lacks there of a tail pool: at most `size` values with `hits` hits
    whose kv page is there or on its way. Returns the state, the transfers and their number."""
    most = jnp.int32(state.layout.rows)
    state, (nodes, found) = look(state, lambda state: find_values(state, pool, node, most, size, _bare(hits)))
    asked = jnp.where(state.books[Scalar.VACANT_OPERATIONS] > 0, found, 0)
    short = jnp.maximum(asked - free_count(state, Tier.HOST, rank, pool), 0)
    state, _ = evict_host_values(state, rank, short, size, pool)
    number = jnp.minimum(asked, free_count(state, Tier.HOST, rank, pool))
    state, operation = open_operation(state, TransferKind.BACKUP, masked(number > 0, node), number, pool)
    state, pages = take_pages(state, Tier.HOST, rank, number, size, Account.IN_FLIGHT, pool)

    def one(index: jax.Array, carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
        state, source = carry
        state, page = look(state, lambda state: value_at(state, nodes[index], pool).device)
        state = expect(state, Tier.HOST, rank, pool, nodes[index], pages[index], operation.operation)
        return state, set_entry(source, index, page)

    blank = jnp.full(size, NONE, jnp.int32)
    state, source = repeat(state.token, number, one, (state, blank))
    state = count(state, BACKUP_PAGES=number, BACKUP_REFUSED_PAGES=found - number)
    return state, transfers_of(TransferKind.BACKUP, rank, operation, pages >= 0, source, pages, pool), number


class Missing(NamedTuple):
    """What a load back finds of a tail pool's values that a prefix needs."""

    usable: jax.Array
    """[] bool: each is on device, on host, or being loaded."""
    nodes: jax.Array
    """[size] nodes of those that are on host alone and that nothing loads yet, deepest first."""
    wanted: jax.Array
    """[] how many these are."""
    loading: jax.Array
    """[] how many are being loaded."""
    evictable: jax.Array
    """[] how many on device may be evicted, but not by this load back."""


def find_missing(state: CacheState, pool: Any, node: jax.Array, size: int) -> Missing:
    """What of the values that the prefix to `node` needs is not on device. Read it through `look`."""
    number = needed_of(state, node, pool)

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        node, left, usable, loading, evictable = carry
        value = value_at(state, node, pool)
        there = (value.device >= 0) | (value.host >= 0)
        comes = (value.device < 0) & (value.host >= 0) & (value.incoming >= 0)
        free = (value.device >= 0) & (value.locks == 0)
        return state.nodes[Column.PARENT, node], left - 1, usable & there, loading + comes, evictable + free

    start = (node, number, node >= 0, state.token, state.token)
    _, _, usable, loading, evictable = lax.while_loop(lambda carry: carry[1] > 0, step, start)

    def on_host_alone(state: CacheState, node: jax.Array, value: Value) -> jax.Array:
        return (value.device < 0) & (value.host >= 0) & (value.incoming < 0)

    nodes, wanted = find_values(state, pool, node, number, size, on_host_alone)
    return Missing(usable, nodes, wanted, loading, evictable)


def claim_values(
    state: CacheState, pool: Any, rank: jax.Array, missing: Missing, number: jax.Array
) -> tuple[CacheState, Handle]:
    """Open the operation that loads the `number` values of `missing`, all or none, and keep them on host until then.

    Their pages are still to be found: see `load_values`. An operation must be vacant.
    """
    first = masked(number > 0, missing.nodes[0])
    state, operation = open_operation(state, TransferKind.LOAD_BACK, first, number, pool)

    def one(index: jax.Array, state: CacheState) -> CacheState:
        return set_value(state, rank, pool, missing.nodes[index], incoming=0)

    return repeat(state.token, number, one, state), operation


def load_values(
    state: CacheState, pool: Any, rank: jax.Array, missing: Missing, operation: Handle, number: jax.Array
) -> tuple[CacheState, Transfers]:
    """Give the values of `claim_values` their device pages, which must be free; the effect."""
    size = missing.nodes.shape[0]
    state, pages = take_pages(state, Tier.DEVICE, rank, number, size, None, pool)

    def one(index: jax.Array, carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
        state, source = carry
        node = missing.nodes[index]
        state, page = look(state, lambda state: value_at(state, node, pool).host)
        state = expect(state, Tier.DEVICE, rank, pool, node, pages[index], operation.operation)
        return state, set_entry(source, index, page)

    state, source = repeat(state.token, number, one, (state, jnp.full(size, NONE, jnp.int32)))
    return state, transfers_of(TransferKind.LOAD_BACK, rank, operation, pages >= 0, source, pages, pool)


def finish_values(
    state: CacheState,
    handle: Handle,
    rank: jax.Array,
    pages: jax.Array,
    ok: jax.Array,
    kind: TransferKind,
    pool: int,
) -> Step[Finished]:
    """End a backup or load back of a tail pool. `pages` [size] are all that it fills, `ok` [size] says which arrived.

    Each that arrived is published by itself, if its node still has a kv page where it needs one; the others are rolled
    back. `kind` and `pool` are static.
    """
    backup = kind == TransferKind.BACKUP
    tier = Tier.HOST if backup else Tier.DEVICE
    rank = jnp.clip(rank, 0, state.layout.ranks - 1)
    state, complete = look(state, lambda state: _fills(state, handle, rank, pages, tier, pool))
    named = handle._replace(operation=masked(complete, handle.operation))
    state, members = close_operation(state, kind, named, state.layout.rows, pool)
    pages = masked(members.good, pages)
    state = count(state, CLOCK=members.good)
    last = end_of(state.token, pages >= 0)

    def one(number: jax.Array, carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
        state, published = carry
        # The deepest come first in an effect, and are listed as the newest.
        index = last - 1 - number
        state, (node, anchored) = look(state, lambda state: _waiting(state, rank, pages[index], tier, pool))
        arrived = (node >= 0) & anchored & ok[index]
        name = tier.name.lower()
        state = set_value(state, rank, pool, masked(arrived, node), **{name: pages[index]}, incoming=NONE)
        state = set_value(state, rank, pool, masked(~arrived, node), incoming=NONE)
        state = book(state, masked(node < 0, Account.IN_FLIGHT), tier, rank, -1, pool)
        return give_pages(state, tier, rank, masked(~arrived, pages[index]), pool), published + arrived

    state, published = repeat(state.token, last, one, (state, state.token))
    number = jnp.where(members.good, members.number, 0)
    if backup:
        state = count(state, BACKUP_FAILED_PAGES=number - published)
    else:
        state = count(state, LOADED_PAGES=published, LOAD_FAILED_PAGES=number - published)
    return Step(state, (), ended(state, members, published))


def _fills(state: CacheState, handle: Handle, rank: jax.Array, pages: jax.Array, tier: Tier, pool: int) -> jax.Array:
    """[] bool: whether `pages` of a rank are all that an operation fills. Read it through `look`."""
    layout = state.layout
    number = jnp.clip(handle.operation, 0, layout.max_operations - 1)

    def mine(page: jax.Array) -> jax.Array:
        inside = (page >= 0) & (page < layout.capacity(tier, pool))
        owner = state.shelves[Shelf.OWNERS, owner_index(state, tier, rank, jnp.where(inside, page, 0), pool)]
        node = jnp.maximum(owner, 0)
        waits = state.nodes[layout.page_row(Tier.INCOMING, pool), node] == page
        waits &= state.nodes[layout.tail_row(TailColumn.OPERATION, pool), node] == number
        return inside & (((owner >= 0) & waits) | (owner == RESERVED - number))

    found = repeat(state.token, pages.shape[0], lambda k, found: found + mine(pages[k]), state.token)
    return found == state.ledger[Ledger.OPERATION_COUNT, number]


def _waiting(state: CacheState, rank: jax.Array, page: jax.Array, tier: Tier, pool: int) -> tuple[jax.Array, jax.Array]:
    """The node that waits for a page of an operation, or NONE, and whether it may have it. Read it through `look`."""
    owner = state.shelves[Shelf.OWNERS, owner_index(state, tier, rank, page, pool)]
    on_device, on_host, coming = (state.nodes[row, jnp.maximum(owner, 0)] >= 0 for row in PAGES)
    return masked(owner >= 0, owner), on_device | ((tier == Tier.HOST) & (on_host | coming))


def finish_value_backup(
    state: CacheState, handle: Handle, rank: jax.Array, pages: jax.Array, ok: jax.Array, pool: int
) -> Step[Finished]:
    """`finish_values` of a backup."""
    return finish_values(state, handle, rank, pages, ok, TransferKind.BACKUP, pool)


def finish_value_load(
    state: CacheState, handle: Handle, rank: jax.Array, pages: jax.Array, ok: jax.Array, pool: int
) -> Step[Finished]:
    """`finish_values` of a load back."""
    return finish_values(state, handle, rank, pages, ok, TransferKind.LOAD_BACK, pool)
