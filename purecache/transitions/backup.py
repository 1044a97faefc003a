"""Backup: copying device pages to host memory, parents first."""

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Account, Column, Scalar, Tier, TransferKind
from purecache.transitions.columns import count, look, masked, put, when
from purecache.transitions.evict import evict_host_pages
from purecache.transitions.locks import is_live, rank_of
from purecache.transitions.nodes import drop_host_subtree, has_page, prune
from purecache.transitions.operations import Handle, close_operation, ended, open_operation, transfers_of
from purecache.transitions.orders import arrive
from purecache.transitions.pages import free_count, give_pages, own_pages, take_pages
from purecache.transitions.scans import end_of, number_of, repeat, some
from purecache.transitions.standing import set_pages
from purecache.transitions.value_transfers import begin_value_backup
from purecache.transitions.vocabulary import BackupBegun, Finished, NodeHandle, Status, Step
from purecache.transitions.walk import ancestor, climb


def _missing(state: CacheState, node: jax.Array, hits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lowest stretch of the path to `node` that host lacks: its deepest node (or NONE) and its length.

    Only nodes with at least `hits` hits count. What lies above the stretch is on host, or on its way there.
    """

    def wanted(node: jax.Array) -> jax.Array:
        safe = jnp.where(node >= 0, node, 0)
        on_device, on_host = state.nodes[Column.DEVICE_PAGE, safe] >= 0, state.nodes[Column.HOST_PAGE, safe] >= 0
        pending = state.nodes[Column.INCOMING_PAGE, safe] >= 0
        inside = (node >= 0) & (node < state.layout.nodes)
        return inside & on_device & ~on_host & ~pending & (state.nodes[Column.HITS, safe] >= hits)

    def inside_tree(node: jax.Array) -> jax.Array:
        return (node >= 0) & (node < state.layout.nodes)

    low = lax.while_loop(lambda n: inside_tree(n) & ~wanted(n), lambda n: state.nodes[Column.PARENT, n], node)

    def up(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        node, length = carry
        return state.nodes[Column.PARENT, node], length + 1

    length = lax.while_loop(lambda carry: wanted(carry[0]), up, (low, jnp.int32(0)))[1]
    return masked(inside_tree(low), low), length


def begin_backup(state: CacheState, handle: NodeHandle, hits: jax.Array, size: int) -> Step[BackupBegun]:
    """Start copying to host what the path to a node lacks there: at most `size` (static) pages with `hits` hits.

    Host pages are reserved, evicting old ones if need be, and stay invisible until `finish_backup`. With too little
    room the deeper pages are left out, and counted as refused. Begun again, it goes on with what is still missing.
    Of each tail pool, values whose page is on host, or on its way there, are copied likewise, the deepest first.
    """
    state, live = look(state, is_live, handle)
    node = masked(live, handle.node)
    state, rank = look(state, rank_of, node)
    state, (low, missing) = look(state, _missing, node, hits)
    vacant = state.books[Scalar.VACANT_OPERATIONS] > 0
    asked = jnp.where(vacant, jnp.minimum(missing, size), 0)
    state = count(state, CLOCK=live)
    short = jnp.maximum(asked - free_count(state, Tier.HOST, rank), 0)
    state, _ = evict_host_pages(state, rank, short, size)
    number = jnp.minimum(asked, free_count(state, Tier.HOST, rank))
    state, low = look(state, ancestor, low, jnp.where(number > 0, missing - number, 0))
    state, nodes = look(state, lambda state: climb(state, low, number, size))
    state, source = look(state, lambda state: state.nodes[Column.DEVICE_PAGE, nodes])
    state, operation = open_operation(state, TransferKind.BACKUP, masked(number > 0, low), number)
    state, target = take_pages(state, Tier.HOST, rank, number, size, Account.IN_FLIGHT)
    state = own_pages(state, Tier.HOST, rank, target, nodes)
    state = put(state, "nodes", (Column.INCOMING_PAGE, nodes), target)
    state = count(state, BACKUP_PAGES=number, BACKUP_REFUSED_PAGES=jnp.where(vacant, asked, missing) - number)
    used = jnp.arange(size) < number
    effects = [transfers_of(TransferKind.BACKUP, rank, operation, used, source, target)]
    values = []
    # The end of the path may have been on host alone, and have made room for what is above it.
    state, there = look(state, is_live, handle)
    for pool in range(1, state.layout.pools):
        state, transfers, begun = begin_value_backup(state, pool, masked(there, node), rank, hits, size)
        effects.append(transfers)
        values.append(begun)
    some_begun = sum(values, number) > 0
    refusal = jnp.where(vacant, Status.NO_ROOM, Status.TABLE_FULL)
    status = jnp.where(some_begun, Status.OK, jnp.where(missing > 0, refusal, Status.NOTHING))
    reply = BackupBegun(jnp.where(live, status, Status.BAD_NODE), number, tuple(values))
    return Step(state, tuple(effects), reply)


def leading_run(token: jax.Array, ok: jax.Array, members: jax.Array) -> jax.Array:
    """[size] bool: members (deepest first) that arrived and whose ancestors in the operation all did."""
    index = jnp.arange(ok.shape[0], dtype=jnp.int32)
    return (index < members) & (index >= end_of(token, (index < members) & ~ok))


def finish_backup(state: CacheState, handle: Handle, ok: jax.Array) -> Step[Finished]:
    """End a backup. `ok` [size] says which pages arrived, deepest first; the leading run of the prefix is published.

    The rest is rolled back: host pages are freed, and a page that has left the device meanwhile is gone for good,
    with everything that only host has below it.
    """
    size = ok.shape[0]
    state, members = close_operation(state, TransferKind.BACKUP, handle, size)
    number = jnp.where(members.good, members.number, 0)
    state, nodes = look(state, lambda state: climb(state, members.node, number, size))
    state, rank = look(state, rank_of, masked(members.good, members.node))
    state, anchored = look(state, _anchored, nodes, number)
    arrived = leading_run(state.token, ok, number) & anchored
    state, target = look(state, lambda state: masked(nodes != NONE, state.nodes[Column.INCOMING_PAGE, nodes]))
    state = count(state, CLOCK=members.good)
    state = set_pages(state, rank, nodes, host=masked(arrived, target), incoming=NONE)
    state = give_pages(state, Tier.HOST, rank, masked(~arrived, target))
    state, pending = look(state, lambda state: (nodes != NONE) & (state.nodes[Column.DEVICE_PAGE, nodes] < 0))
    state = _list_arrivals(state, rank, nodes, arrived & pending)
    lost = pending & ~arrived
    state = when(some(state.token, lost), lambda state: _forget(state, rank, nodes, lost), state)
    published = number_of(state.token, arrived)
    state = count(state, BACKUP_FAILED_PAGES=number - published)
    return Step(state, (), ended(state, members, published))


def _anchored(state: CacheState, nodes: jax.Array, number: jax.Array) -> jax.Array:
    """[] bool: the node above an operation is a root or has, or waits for, a page itself."""
    top = nodes[jnp.maximum(number - 1, 0)]
    parent = state.nodes[Column.PARENT, jnp.maximum(top, 0)]
    return (parent >= state.layout.nodes) | has_page(state, parent)


def _list_arrivals(state: CacheState, rank: jax.Array, nodes: jax.Array, listed: jax.Array) -> CacheState:
    """List pages that are now on host alone, deepest first: in the order in which they left the device."""

    def one(index: jax.Array, state: CacheState) -> CacheState:
        return arrive(state, Tier.HOST, masked(listed[index], nodes[index]), rank)

    return repeat(state.token, end_of(state.token, listed), one, state)


def _forget(state: CacheState, rank: jax.Array, nodes: jax.Array, lost: jax.Array) -> CacheState:
    """Drop what hangs below nodes that lost their only page, and the nodes themselves as far as nothing holds them."""

    def one(index: jax.Array, state: CacheState) -> CacheState:
        def drop(state: CacheState) -> CacheState:
            return prune(drop_host_subtree(state, nodes[index], rank), nodes[index])

        return when(lost[index], drop, state)

    return repeat(state.token, nodes.shape[0], one, state)
