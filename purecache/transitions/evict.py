"""Eviction of device and host pages, leaf first, in the order of the policy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, PAGES, Account, Column, Scalar, Tier, TransferKind
from purecache.transitions.columns import add, count, look, masked, put, set_entry, when
from purecache.transitions.nodes import drop_host_page, drop_host_subtree, list_bared, remove_empty
from purecache.transitions.operations import Handle, extend_operation, open_operation
from purecache.transitions.orders import arrive, drop_entry
from purecache.transitions.pages import free_count, give_pages, own_pages, take_pages
from purecache.transitions.scans import end_of
from purecache.transitions.standing import set_pages
from purecache.transitions.value_evict import (
    WriteBack,
    evict_device_values,
    evict_host_values,
    no_write_back,
    write_back_of,
    write_back_value,
)
from purecache.transitions.values import drop_values
from purecache.transitions.victims import Cursor, departing, first_cursor, seek, step_back
from purecache.transitions.vocabulary import Evicted, Status, Step, Transfers


def evict_host_pages(state: CacheState, rank: jax.Array, number: jax.Array, size: int) -> tuple[CacheState, jax.Array]:
    """Free up to `number` (at most size) host pages. Returns the state and the pages, [size], NONE beyond."""

    def step(carry: tuple[CacheState, Cursor, jax.Array, jax.Array]) -> tuple[CacheState, Cursor, jax.Array, jax.Array]:
        state, cursor, freed, pages = carry
        node = cursor.entry

        def plan(state: CacheState) -> tuple[jax.Array, ...]:
            parent, page = state.nodes[Column.PARENT, node], state.nodes[Column.HOST_PAGE, node]
            return parent, page, *departing(state, Tier.HOST, node)

        state, (parent, page, follower, due) = look(state, plan)
        state, stays = remove_empty(drop_host_page(state, node, rank), node)
        state = list_bared(state, masked(stays != parent, stays))
        state, cursor = step_back(state, Tier.HOST, rank, cursor, follower, due, masked(stays == parent, parent))
        state, cursor = seek(state, Tier.HOST, rank, cursor)
        return state, cursor, freed + 1, set_entry(pages, freed, page)

    limit, rows = jnp.minimum(number, size), state.layout.rows
    state, start = look(state, lambda state: first_cursor(state, Tier.HOST, rank))
    state, cursor = lax.cond(
        limit > 0, lambda state: seek(state, Tier.HOST, rank, start), lambda state: (state, start), state
    )
    carry = (state, cursor, jnp.int32(0), jnp.full(size, NONE, jnp.int32))
    state, _, freed, pages = lax.while_loop(lambda carry: (carry[2] < limit) & (carry[1].entry < rows), step, carry)
    return count(state, EVICTED_HOST_PAGES=freed), pages


def evict_host(state: CacheState, rank: jax.Array, number: jax.Array, size: int, pool: int = 0) -> Step[Evicted]:
    """Free up to `number` host pages of a rank: leaves that are on host alone, or values of a tail pool, oldest first.

    `size` and `pool` are static.
    """
    good = (rank >= 0) & (rank < state.layout.ranks)
    rank, number, state = jnp.where(good, rank, 0), jnp.where(good, number, 0), count(state, CLOCK=good)
    if pool:
        state, pages = evict_host_values(state, rank, number, size, pool)
    else:
        state, pages = evict_host_pages(state, rank, number, size)
    return Step(state, (), Evicted(jnp.where(good, Status.OK, Status.BAD_RANK), end_of(state.token, pages >= 0), pages))


class _Sweep(NamedTuple):
    """Progress of one eviction of device pages."""

    cursor: Cursor
    freed: jax.Array
    pages: jax.Array
    last: jax.Array
    """[] the node last given to the open operation, NONE if there is none."""
    handle: Handle
    """The open operation."""
    transfers: Transfers
    values: tuple[WriteBack, ...]
    """Per tail pool: copies of the values that leave with the pages."""
    left: tuple[jax.Array, ...]
    """Per tail pool [size]: pages of the values that left."""


def _reserve_backup(state: CacheState, rank: jax.Array, node: jax.Array, sweep: _Sweep) -> tuple[CacheState, _Sweep]:
    """Give `node` a host page and a place in an operation that fills it, if there is room for both."""
    state, above = look(state, lambda state: state.nodes[Column.PARENT, jnp.maximum(sweep.last, 0)])
    joins = (sweep.last != NONE) & (above == node)
    short = free_count(state, Tier.HOST, rank) == 0
    state, _ = evict_host_pages(state, rank, short.astype(jnp.int32), 1)
    vacant = state.books[Scalar.VACANT_OPERATIONS] > 0
    granted = (free_count(state, Tier.HOST, rank) > 0) & (joins | vacant)
    state = extend_operation(state, sweep.handle, granted & joins)
    state, opened = open_operation(state, TransferKind.BACKUP, masked(granted & ~joins, node), jnp.int32(1))
    handle = jax.tree.map(lambda old, new: jnp.where(granted & ~joins, new, old), sweep.handle, opened)
    state, target = take_pages(state, Tier.HOST, rank, granted.astype(jnp.int32), 1, Account.IN_FLIGHT)
    state = own_pages(state, Tier.HOST, rank, target[0], node)
    state, source = look(state, lambda state: state.nodes[Column.DEVICE_PAGE, node])
    state = put(state, "nodes", (Column.INCOMING_PAGE, masked(granted, node)), target[0])
    entry, transfers = sweep.freed, sweep.transfers
    transfers = transfers._replace(
        operation=set_entry(transfers.operation, entry, masked(granted, handle.operation)),
        generation=set_entry(transfers.generation, entry, masked(granted, handle.generation)),
        source=set_entry(transfers.source, entry, masked(granted, source)),
        target=set_entry(transfers.target, entry, target[0]),
    )
    refused = (~granted).astype(jnp.int32)
    state = count(state, BACKUP_PAGES=1 - refused, BACKUP_REFUSED_PAGES=refused)
    return state, sweep._replace(last=jnp.where(granted, node, sweep.last), handle=handle, transfers=transfers)


def _leave_device(state: CacheState, rank: jax.Array, node: jax.Array) -> tuple[CacheState, jax.Array]:
    """Free the device page of a leaf and its values there. The node stays if host has it or will have it, else it goes.

    Returns the state and the pages of the values, [tail pools].
    """

    def plan(state: CacheState) -> tuple[jax.Array, ...]:
        device, host, incoming = (state.nodes[row, node] for row in PAGES)
        return state.nodes[Column.PARENT, node], device, host >= 0, incoming >= 0

    state, values = drop_values(state, rank, node, Tier.DEVICE)
    state, (parent, page, on_host, pending) = look(state, plan)
    state = give_pages(set_pages(state, rank, node, device=NONE), Tier.DEVICE, rank, page)
    state = add(state, "nodes", (Column.DEVICE_CHILDREN, parent), -1)
    state = drop_entry(state, Tier.DEVICE, node)
    state = arrive(state, Tier.HOST, masked(on_host, node), rank)
    lost = ~on_host & ~pending

    state = when(lost, lambda state: drop_host_subtree(state, node, rank, whole=True), state)
    return count(state, DROPPED_PAGES=lost), values


def _copy_values(state: CacheState, rank: jax.Array, node: jax.Array, copied: jax.Array, sweep: _Sweep) -> Any:
    """Copy the values of a victim to host too, under write back or if its page is `copied` there."""

    def kept(state: CacheState) -> jax.Array:
        return (state.nodes[Column.HOST_PAGE, node] >= 0) | (state.nodes[Column.INCOMING_PAGE, node] >= 0)

    state, stays = look(state, kept)
    wanted = stays & (copied | (state.books[Scalar.WRITE_BACK] > 0))
    values = []
    for pool, progress in enumerate(sweep.values, 1):
        state, value = write_back_value(state, rank, pool, node, wanted, sweep.freed, progress)
        values.append(value)
    return state, sweep._replace(values=tuple(values))


def evict_device_pages(
    state: CacheState, rank: jax.Array, number: jax.Array, size: int
) -> tuple[CacheState, jax.Array, tuple[jax.Array, ...], tuple[Transfers, ...]]:
    """Free up to `number` (at most size) device pages of pool 0, and the values that go with them.

    Returns the state, the pages [size], those of each tail pool, and the write-back transfers of every pool.
    """

    def step(carry: tuple[CacheState, _Sweep]) -> tuple[CacheState, _Sweep]:
        state, sweep = carry
        node = sweep.cursor.entry

        def plan(state: CacheState) -> tuple[jax.Array, ...]:
            bare = (state.nodes[Column.HOST_PAGE, node] < 0) & (state.nodes[Column.INCOMING_PAGE, node] < 0)
            # A page with children on host is worth a copy under every policy: without it they are lost too.
            least = state.books[Scalar.WRITE_BACK]
            wanted = (least > 0) & (state.nodes[Column.HITS, node] >= least)
            wanted |= state.nodes[Column.FIRST_CHILD, node] != NONE
            parent, page = state.nodes[Column.PARENT, node], state.nodes[Column.DEVICE_PAGE, node]
            return bare & wanted, parent, page, *departing(state, Tier.DEVICE, node)

        state, (wanted, parent, page, follower, due) = look(state, plan)
        state, sweep = lax.cond(
            wanted,
            lambda state, sweep: _reserve_backup(state, rank, node, sweep),
            lambda state, sweep: (state, sweep),
            state,
            sweep,
        )
        state, sweep = _copy_values(state, rank, node, wanted, sweep)
        state, values = _leave_device(state, rank, node)
        state, cursor = step_back(state, Tier.DEVICE, rank, sweep.cursor, follower, due, parent)
        state, cursor = seek(state, Tier.DEVICE, rank, cursor)
        pages = set_entry(sweep.pages, sweep.freed, page)
        left = tuple(set_entry(old, sweep.freed, values[place]) for place, old in enumerate(sweep.left))
        return state, sweep._replace(cursor=cursor, freed=sweep.freed + 1, pages=pages, left=left)

    limit, rows = jnp.minimum(number, size), state.layout.rows
    state, cursor = look(state, lambda state: first_cursor(state, Tier.DEVICE, rank))
    state, cursor = lax.cond(
        limit > 0, lambda state: seek(state, Tier.DEVICE, rank, cursor), lambda state: (state, cursor), state
    )
    none, blank = jnp.int32(NONE), jnp.full(size, NONE, jnp.int32)
    transfers = Transfers(jnp.int32(TransferKind.BACKUP), jnp.int32(0), rank, blank, blank, blank, blank)
    values = tuple(no_write_back(size) for _ in state.layout.tails)
    left = tuple(blank for _ in values)
    sweep = _Sweep(cursor, jnp.int32(0), blank, none, Handle(none, none), transfers, values, left)
    state, sweep = lax.while_loop(
        lambda carry: (carry[1].freed < limit) & (carry[1].cursor.entry < rows), step, (state, sweep)
    )
    copies = [write_back_of(rank, pool, values) for pool, values in enumerate(sweep.values, 1)]
    every = (sweep.transfers, *copies)
    return count(state, EVICTED_DEVICE_PAGES=sweep.freed), sweep.pages, sweep.left, every


def make_room(
    state: CacheState, rank: jax.Array, number: jax.Array, size: int, pool: int = 0
) -> tuple[CacheState, tuple[Transfers, ...]]:
    """Free up to `number` (at most size) device pages of a pool. Returns the state and the write-back transfers."""
    if pool:
        state, _, sweep = evict_device_values(state, rank, number, size, pool)
        return state, (write_back_of(rank, pool, sweep),)
    state, _, _, every = evict_device_pages(state, rank, number, size)
    return state, every


def evict_device(state: CacheState, rank: jax.Array, number: jax.Array, size: int, pool: int = 0) -> Step[Evicted]:
    """Free up to `number` device pages of a rank, in the order of the policy; values of a tail pool, oldest first.

    `size` and `pool` are static.

    Under write back, or when host children depend on it, a page is copied to host: the effect must be dispatched
    before the freed pages are written again.
    """
    good = (rank >= 0) & (rank < state.layout.ranks)
    rank = jnp.where(good, rank, 0)
    number, state = jnp.where(good, number, 0), count(state, CLOCK=good)
    values: tuple[jax.Array, ...] = ()
    if pool:
        state, pages, sweep = evict_device_values(state, rank, number, size, pool)
        every: tuple[Transfers, ...] = (write_back_of(rank, pool, sweep),)
    else:
        state, pages, values, every = evict_device_pages(state, rank, number, size)
    status = jnp.where(good, Status.OK, Status.BAD_RANK)
    return Step(state, every, Evicted(status, end_of(state.token, pages >= 0), pages, values))
