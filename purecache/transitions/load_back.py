"""Load back: bringing pages that only host has to the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Account, Column, Scalar, Tier, TransferKind
from purecache.transitions.backup import leading_run
from purecache.transitions.columns import add, count, look, masked, put, when
from purecache.transitions.evict import make_room
from purecache.transitions.locks import is_live, lock_path, rank_of, unlock_path
from purecache.transitions.nodes import drop_host_page
from purecache.transitions.operations import Handle, close_operation, ended, open_operation, transfers_of
from purecache.transitions.orders import arrive
from purecache.transitions.pages import free_count, give_pages, own_pages, take_pages
from purecache.transitions.scans import end_of, first_of, number_of, repeat
from purecache.transitions.standing import set_pages
from purecache.transitions.value_transfers import (
    Missing,
    claim_values,
    find_missing,
    load_values,
)
from purecache.transitions.values import needed_of
from purecache.transitions.vocabulary import Finished, LoadBegun, NodeHandle, Status, Step, Transfers
from purecache.transitions.walk import climb


class _Chain(NamedTuple):
    """The part of a path that is not on device, as a load back finds it."""

    usable: jax.Array
    """[] bool: every page of it is on host."""
    length: jax.Array
    """[] pages that are not on device."""
    needed: jax.Array
    """[] of these, the pages that no other operation is loading; they are the deepest, unless it is `doomed`."""
    doomed: jax.Array
    """[] bool: a page is being loaded below one that isn't, because a load of that one has failed: it will be rolled
    back."""
    unprotected: jax.Array
    """[] evictable pages above it, which loading protects."""


def _chain(state: CacheState, node: jax.Array) -> _Chain:
    nodes = state.layout.nodes

    def off_device(node: jax.Array) -> jax.Array:
        return (node >= 0) & (node < nodes) & (state.nodes[Column.DEVICE_PAGE, node] < 0)

    def up(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        node, usable, length, needed, doomed = carry
        on_host = state.nodes[Column.HOST_PAGE, node] >= 0
        idle = state.nodes[Column.INCOMING_PAGE, node] < 0
        doomed |= idle & (needed < length)
        return state.nodes[Column.PARENT, node], usable & on_host, length + 1, needed + idle, doomed

    start = (node, node >= 0, jnp.int32(0), jnp.int32(0), jnp.bool_(False))
    anchor, usable, length, needed, doomed = lax.while_loop(lambda carry: off_device(carry[0]), up, start)

    def loose(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (carry[0] >= 0) & (state.nodes[Column.DEVICE_LOCKS, carry[0]] == 0)

    def protect(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state.nodes[Column.PARENT, carry[0]], carry[1] + 1

    unprotected = lax.while_loop(loose, protect, (anchor, jnp.int32(0)))[1]
    return _Chain(usable, length, needed, doomed, unprotected)


class _Plan(NamedTuple):
    """All that is missing on device of a prefix."""

    chain: _Chain
    values: tuple[Missing, ...]
    """Per tail pool."""
    longest: jax.Array
    """[] pages of the chain, or nodes on which a pool needs values: the larger number."""


def _plan(state: CacheState, node: jax.Array, size: int) -> _Plan:
    chain = _chain(state, node)
    values = tuple(find_missing(state, pool, node, size) for pool in range(1, state.layout.pools))
    longest = chain.length
    for pool in range(1, state.layout.pools):
        longest = jnp.maximum(longest, needed_of(state, node, pool))
    return _Plan(chain, values, longest)


def _verdict(state: CacheState, live: jax.Array, plan: _Plan, rank: jax.Array, size: int) -> jax.Array:
    """[] status: whether all that is missing may be loaded."""
    chain = plan.chain

    def room(pool: int) -> jax.Array:
        free = free_count(state, Tier.DEVICE, rank, pool)
        return free + state.account(Account.EVICTABLE, Tier.DEVICE, rank, pool)

    fits, usable = chain.needed <= room(0) - chain.unprotected, chain.usable
    operations, needed, coming = (chain.needed > 0).astype(jnp.int32), chain.needed, chain.length - chain.needed
    for pool, missing in enumerate(plan.values, 1):
        wanted = missing.wanted
        fits, usable = fits & (wanted <= room(pool) - missing.evictable), usable & missing.usable
        operations, needed, coming = operations + (wanted > 0), needed + wanted, coming + missing.loading
    tokens = chain.needed * state.layout.page_size
    enough = (tokens >= state.books[Scalar.LOAD_BACK_TOKENS]) | (needed > chain.needed)
    status = jnp.where(fits, Status.OK, Status.NO_ROOM)
    status = jnp.where(state.books[Scalar.VACANT_OPERATIONS] >= operations, status, Status.TABLE_FULL)
    status = jnp.where(enough, status, Status.BELOW_THRESHOLD)
    status = jnp.where((needed > 0) & ~chain.doomed, status, Status.JOINED)
    status = jnp.where((needed + coming > 0) & usable, status, Status.NOTHING)
    status = jnp.where(plan.longest <= size, status, Status.BAD_LENGTH)
    return jnp.where(live, status, Status.BAD_NODE)


def begin_load_back(state: CacheState, handle: NodeHandle, size: int) -> Step[LoadBegun]:
    """Start bringing the path to a node to the device: all of it, or nothing and the reason.

    Room is what is free plus what can be evicted without the path itself. Source and destination are pinned until
    `finish_load_back`. Pages that another operation is loading already are joined. Where such a load is doomed, because
    a page above it could not be loaded, nothing is begun until it has ended. `size` (static) bounds the chain.
    What the prefix needs of each tail pool is brought along, by an operation of that pool.
    """
    state, live = look(state, is_live, handle)
    safe = jnp.where(live, handle.node, state.layout.nodes)
    state, rank = look(state, rank_of, safe)
    state, plan = look(state, lambda state: _plan(state, safe, size))
    status, chain = _verdict(state, live, plan, rank, size), plan.chain
    go = status == Status.OK
    refused = live & ((status == Status.NO_ROOM) | (status == Status.TABLE_FULL) | (status == Status.BELOW_THRESHOLD))
    state = count(state, CLOCK=live, LOADS_REFUSED=refused)
    pinned, number = masked(go, safe), jnp.where(go, chain.needed, 0)
    state = lock_path(lock_path(state, Tier.HOST, pinned), Tier.DEVICE, pinned)
    # Before the evictions, whose write back would take the last vacant operations.
    state, operation = open_operation(state, TransferKind.LOAD_BACK, masked(number > 0, pinned), number)
    state, loads = _claim_values(state, rank, go, plan)
    short = jnp.maximum(number - free_count(state, Tier.DEVICE, rank), 0)
    state, write_back = make_room(state, rank, short, size)
    wanted = jnp.where(go | (status == Status.JOINED), chain.length, 0)
    state, nodes = look(state, lambda state: climb(state, safe, wanted, size))
    members = masked(jnp.arange(size) < number, nodes)
    state, target = take_pages(state, Tier.DEVICE, rank, number, size, Account.IN_FLIGHT)
    state = own_pages(state, Tier.DEVICE, rank, target, members)
    state = put(state, "nodes", (Column.INCOMING_PAGE, members), target)
    state, source = look(state, lambda state: state.nodes[Column.HOST_PAGE, members])
    state, pages = look(state, lambda state: masked(nodes != NONE, state.nodes[Column.INCOMING_PAGE, nodes]))
    index = jnp.arange(size, dtype=jnp.int32)
    total = number_of(state.token, nodes != NONE)
    shallowest_first = jnp.where(index < total, pages[jnp.maximum(total - 1 - index, 0)], NONE)
    used = members != NONE
    transfers = transfers_of(TransferKind.LOAD_BACK, rank, operation, used, source, target)
    state, effects = _load_values(state, rank, plan, loads, size)
    # Without an operation on kv, the prefix was pinned for the evictions only.
    idle = masked(number == 0, pinned)
    state = unlock_path(unlock_path(state, Tier.DEVICE, idle), Tier.HOST, idle) if effects else state
    reply = LoadBegun(status, operation.operation, operation.generation, number, shallowest_first)
    return Step(state, (*write_back, transfers, *effects), reply)


def _claim_values(
    state: CacheState, rank: jax.Array, go: jax.Array, plan: _Plan
) -> tuple[CacheState, list[tuple[Handle, jax.Array]]]:
    """Open an operation per tail pool that has values to load; these, and how many values."""
    loads = []
    for pool, missing in enumerate(plan.values, 1):
        number = jnp.where(go, missing.wanted, 0)
        state, operation = claim_values(state, pool, rank, missing, number)
        loads.append((operation, number))
    return state, loads


def _load_values(
    state: CacheState, rank: jax.Array, plan: _Plan, loads: list[tuple[Handle, jax.Array]], size: int
) -> tuple[CacheState, list[Transfers]]:
    """Make room for the values of each tail pool and reserve their pages; the effects."""
    effects: list[Transfers] = []
    for pool, (missing, (operation, number)) in enumerate(zip(plan.values, loads, strict=True), 1):
        short = jnp.maximum(number - free_count(state, Tier.DEVICE, rank, pool), 0)
        state, write_back = make_room(state, rank, short, size, pool)
        state, transfers = load_values(state, pool, rank, missing, operation, number)
        effects += [*write_back, transfers]
    return state, effects


def finish_load_back(state: CacheState, handle: Handle, ok: jax.Array) -> Step[Finished]:
    """End a load back. `ok` [size] says which pages arrived, deepest first; the leading run of the prefix is published.

    The rest is rolled back: its device pages are freed and host still has it.
    """
    size = ok.shape[0]
    state, members = close_operation(state, TransferKind.LOAD_BACK, handle, size)
    number = jnp.where(members.good, members.number, 0)
    state, nodes = look(state, lambda state: climb(state, members.node, number, size))
    state, rank = look(state, rank_of, masked(members.good, members.node))
    state, parents = look(state, lambda state: masked(nodes != NONE, state.nodes[Column.PARENT, nodes]))
    anchor = parents[jnp.maximum(number - 1, 0)]

    def on_device(state: CacheState) -> jax.Array:
        return (anchor >= state.layout.nodes) | (state.nodes[Column.DEVICE_PAGE, anchor] >= 0)

    state, anchored = look(state, on_device)
    arrived = leading_run(state.token, ok, number) & anchored
    state, target = look(state, lambda state: masked(nodes != NONE, state.nodes[Column.INCOMING_PAGE, nodes]))
    state = count(state, CLOCK=members.good)
    state = set_pages(state, rank, nodes, device=masked(arrived, target), incoming=NONE)
    state = give_pages(state, Tier.DEVICE, rank, masked(~arrived, target))
    state = add(state, "nodes", (Column.DEVICE_CHILDREN, masked(arrived, parents)), 1)
    deepest = first_of(state.token, arrived)
    tip = masked(deepest < size, nodes[jnp.minimum(deepest, size - 1)])
    state = arrive(state, Tier.DEVICE, tip, rank)
    pinned = masked(members.good, members.node)
    state = unlock_path(unlock_path(state, Tier.DEVICE, pinned), Tier.HOST, pinned)
    state = _leave_host(state, rank, masked(arrived & (state.books[Scalar.EXCLUSIVE] > 0), nodes))
    published = number_of(state.token, arrived)
    state = count(state, LOADED_PAGES=published, LOAD_FAILED_PAGES=number - published)
    return Step(state, (), ended(state, members, published))


def _leave_host(state: CacheState, rank: jax.Array, nodes: jax.Array) -> CacheState:
    """Free the host pages of `nodes` [size] that are on device, but for those that storage is reading."""

    def one(index: jax.Array, state: CacheState) -> CacheState:
        state, held = look(state, lambda state: state.nodes[Column.HOST_LOCKS, nodes[index]] > 0)
        leaves = (nodes[index] != NONE) & ~held
        return when(leaves, lambda state: drop_host_page(state, nodes[index], rank), state)

    return repeat(state.token, end_of(state.token, nodes >= 0), one, state)
