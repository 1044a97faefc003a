"""Prefetch: bringing pages from storage to host memory, ahead of the request that needs them.

The reserved host pages belong to the operation until it ends, not to nodes: the tree may change meanwhile, so the end
walks it again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, RESERVED, Account, Column, Ledger, Scalar, Shelf, Stored, Tier, TransferKind
from purecache.transitions.columns import book, count, look, masked, put
from purecache.transitions.evict import evict_host_pages
from purecache.transitions.locks import is_live, lock_path, rank_of, unlock_path
from purecache.transitions.match import valid_prompt
from purecache.transitions.nodes import create_node, has_page
from purecache.transitions.operations import Handle, close_operation, ended, open_operation, storage_may_open
from purecache.transitions.orders import arrive
from purecache.transitions.pages import free_count, give_pages, own_pages, owner_index, take_pages
from purecache.transitions.scans import end_of, first_of, number_of, repeat
from purecache.transitions.standing import set_pages
from purecache.transitions.value_evict import evict_host_values
from purecache.transitions.vocabulary import Finished, NodeHandle, PrefetchBegun, Status, Step
from purecache.transitions.walk import Prompt, find_child, page_at, root_of, size_of


def begin_prefetch(
    state: CacheState, handle: NodeHandle, wanted: jax.Array, size: int, pool: int = 0
) -> Step[PrefetchBegun]:
    """Reserve up to `wanted` (at most `size`, static) host pages for pages of storage that follow a node.

    Old host pages are evicted if need be; with too little room fewer pages are reserved. The node, the anchor, stays in
    the tree until `finish_prefetch`. There is no effect: the caller reads storage into buffers of its own, and writes
    the reserved pages once they have arrived. `size` and `pool` are static; for a tail pool, nothing is locked.
    """
    if pool:
        return _begin_value_prefetch(state, handle, wanted, size, pool)
    state, live = look(state, is_live, handle)
    anchor = masked(live, handle.node)
    state, rank = look(state, rank_of, anchor)
    vacant = storage_may_open(state)
    asked = jnp.where(live & vacant, jnp.clip(wanted, 0, size), 0)
    state = count(state, CLOCK=live)
    state = lock_path(state, Tier.HOST, masked(asked > 0, anchor))
    short = jnp.maximum(asked - free_count(state, Tier.HOST, rank), 0)
    state, _ = evict_host_pages(state, rank, short, size)
    number = jnp.minimum(asked, free_count(state, Tier.HOST, rank))
    state = unlock_path(state, Tier.HOST, masked((asked > 0) & (number == 0), anchor))
    state, operation = open_operation(state, TransferKind.PREFETCH, masked(number > 0, anchor), number)
    state, pages = take_pages(state, Tier.HOST, rank, number, size, Account.IN_FLIGHT)
    state = own_pages(state, Tier.HOST, rank, pages, jnp.full(size, RESERVED, jnp.int32) - operation.operation)
    state = count(state, PREFETCHES_REFUSED=live & (wanted > 0) & (number == 0))
    refusal = jnp.where(wanted > 0, jnp.where(vacant, Status.NO_ROOM, Status.TABLE_FULL), Status.NOTHING)
    status = jnp.where(live, jnp.where(number > 0, Status.OK, refusal), Status.BAD_NODE)
    return Step(state, (), PrefetchBegun(status, operation.operation, operation.generation, number, pages))


def _begin_value_prefetch(
    state: CacheState, handle: NodeHandle, wanted: jax.Array, size: int, pool: int
) -> Step[PrefetchBegun]:
    state, live = look(state, is_live, handle)
    anchor = masked(live, handle.node)
    state, rank = look(state, rank_of, anchor)
    vacant = storage_may_open(state)
    asked = jnp.where(live & vacant, jnp.clip(wanted, 0, size), 0)
    state = count(state, CLOCK=live)
    short = jnp.maximum(asked - free_count(state, Tier.HOST, rank, pool), 0)
    state, _ = evict_host_values(state, rank, short, size, pool)
    number = jnp.minimum(asked, free_count(state, Tier.HOST, rank, pool))
    state, operation = open_operation(state, TransferKind.PREFETCH, masked(number > 0, anchor), number, pool)
    state, pages = take_pages(state, Tier.HOST, rank, number, size, Account.IN_FLIGHT, pool)
    owners = jnp.full(size, RESERVED, jnp.int32) - operation.operation
    state = own_pages(state, Tier.HOST, rank, pages, owners, pool)
    state = count(state, PREFETCHES_REFUSED=live & (wanted > 0) & (number == 0))
    refusal = jnp.where(wanted > 0, jnp.where(vacant, Status.NO_ROOM, Status.TABLE_FULL), Status.NOTHING)
    status = jnp.where(live, jnp.where(number > 0, Status.OK, refusal), Status.BAD_NODE)
    return Step(state, (), PrefetchBegun(status, operation.operation, operation.generation, number, pages))


class _Attach(NamedTuple):
    """Progress of attaching arrived pages to the tree."""

    parent: jax.Array
    """[] node above the next page."""
    going: jax.Array
    """[] bool: no page so far was refused."""
    tip: jax.Array
    """[] the deepest node that got one of the pages and has none on device, or NONE."""
    taken: jax.Array
    """[] pages that became the tree's."""


def finish_prefetch(
    state: CacheState, handle: Handle, prompt: Prompt, first: jax.Array, pages: jax.Array, ok: jax.Array
) -> Step[Finished]:
    """End a prefetch. `pages` [size] are the reserved ones, for the pages `first` and following of `prompt`.

    `ok` [size] says which arrived. Their leading run is inserted: where the tree has got such a page on host by now,
    or is just getting it, the prefetched one is freed; a node that is on device only adopts it. All others are freed.
    """
    size = pages.shape[0]
    state, (complete, rank, held) = look(state, reserved, handle, pages)
    named = handle._replace(operation=masked(complete, handle.operation))
    state, members = close_operation(state, TransferKind.PREFETCH, named, size)
    number = jnp.where(members.good, members.number, 0)
    held = masked(members.good, held)
    prompt = valid_prompt(state, prompt)
    fits = (prompt.rank == rank) & (first >= 0)
    prompt = prompt._replace(rank=rank)
    arrived = jnp.minimum(first_of(state.token, ~(ok & (held >= 0))), prompt.pages - first)
    state = count(state, CLOCK=members.good)
    state, (anchor, found) = look(state, follow, prompt, first)
    start = _Attach(anchor, fits & found & (anchor == members.node), state.token + NONE, state.token)

    def one(index: jax.Array, carry: tuple[CacheState, _Attach]) -> tuple[CacheState, _Attach]:
        state, attach = carry
        return _attach_or_free(state, prompt, first + index, held[index], index < arrived, attach)

    state, attach = repeat(state.token, end_of(state.token, held >= 0), one, (state, start))
    state = arrive(state, Tier.HOST, attach.tip, rank)
    state = unlock_path(state, Tier.HOST, masked(members.good, members.node))
    state = count(state, PREFETCHED_PAGES=attach.taken, PREFETCH_FAILED_PAGES=number - jnp.maximum(arrived, 0))
    return Step(state, (), ended(state, members, attach.taken))


def reserved(
    state: CacheState, handle: Handle, pages: jax.Array, pool: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether `pages` [size] are all that an operation has reserved, its rank, and those that it has."""
    number = jnp.clip(handle.operation, 0, state.layout.max_operations - 1)
    rank = jnp.maximum(state.ledger[Ledger.OPERATION_RANK, number], 0)
    inside = (pages >= 0) & (pages < state.layout.capacity(Tier.HOST, pool))
    slot = owner_index(state, Tier.HOST, rank, jnp.where(inside, pages, 0), pool)
    mine = inside & (state.shelves[Shelf.OWNERS, slot] == RESERVED - number)
    complete = number_of(state.token, mine) == state.ledger[Ledger.OPERATION_COUNT, number]
    return complete, rank, masked(mine, pages)


def follow(state: CacheState, prompt: Prompt, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The node at the end of the first `pages` pages of a prompt, and whether all of them are in the tree."""

    def step(index: jax.Array, node: jax.Array) -> jax.Array:
        child = child_of(state, prompt, index, jnp.maximum(node, 0))
        return masked(node >= 0, child)

    node = repeat(state.token, jnp.clip(pages, 0, size_of(state, prompt)), step, root_of(state, prompt.rank))
    return node, node >= 0


def child_of(state: CacheState, prompt: Prompt, index: jax.Array, parent: jax.Array) -> jax.Array:
    """[] the node of page `index` below `parent`, or NONE."""
    tokens, after = page_at(state, prompt.tokens, index), parent + 1
    same = (page_at(state, state.tokens, after) == tokens) & (state.nodes[Column.PARENT, after] == parent)
    runs_on = first_of(state.token, ~same) == state.layout.page_size
    return jnp.where(runs_on, after, find_child(state, parent, tokens, prompt.namespace))


def _attach_or_free(
    state: CacheState, prompt: Prompt, index: jax.Array, page: jax.Array, arrived: jax.Array, attach: _Attach
) -> tuple[CacheState, _Attach]:
    """Give one reserved page (NONE: none) to the node of page `index` of the prompt, or back to the free-list."""
    rank, parent = prompt.rank, attach.parent

    def plan(state: CacheState) -> tuple[jax.Array, ...]:
        safe = jnp.maximum(parent, 0)
        anchored = (safe >= state.layout.nodes) | has_page(state, safe)
        node = child_of(state, prompt, index, safe)
        there = jnp.maximum(node, 0)
        bare = (state.nodes[Column.HOST_PAGE, there] < 0) & (state.nodes[Column.INCOMING_PAGE, there] < 0)
        on_device = state.nodes[Column.DEVICE_PAGE, there] >= 0
        return anchored, node, bare, (node >= 0) & on_device

    state, (anchored, node, bare, on_device) = look(state, plan)
    room = (node >= 0) | (state.books[Scalar.FREE_NODES] > 0)
    going = attach.going & arrived & anchored & room & (page >= 0)
    created = going & (node < 0)

    def create(carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
        tokens = page_at(state, prompt.tokens, index)
        return create_node(carry[0], parent, tokens, prompt.namespace, rank, 0, 0)

    state, node = jax.lax.cond(created, create, lambda carry: carry, (state, node))
    taken = going & (created | bare)
    owner = masked(taken, node)
    state = book(state, Account.IN_FLIGHT, Tier.HOST, rank, -(page >= 0).astype(jnp.int32))
    state = set_pages(state, rank, owner, host=page)
    state = own_pages(state, Tier.HOST, rank, masked(taken, page), node)
    state = put(state, "nodes", (Column.STORED, owner), Stored.YES)
    state = give_pages(state, Tier.HOST, rank, masked(~taken, page))
    tip = jnp.where(taken & ~on_device, node, attach.tip)
    return state, _Attach(jnp.where(going, node, parent), going, tip, attach.taken + taken)
