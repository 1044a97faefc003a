"""Giving everything back: from any state, ending all that is under way and evicting all leaves an empty cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import purecache.transitions as t
from purecache.check.views import pages_in_flight, pages_where, stored_by, view_of
from purecache.check.worlds import World
from purecache.state.cache_state import CacheState
from purecache.state.layout import LENT, NONE, TIERS, Account, Column, Ledger, Scalar, Shelf, Tier

ROUNDS = 2
"""Evictions of a cache that writes back begin backups, which must end before the rest can be evicted."""


def drained(world: World, state: CacheState) -> CacheState:
    """The state after all operations failed, all receipts came back, all pages were released, taken into use and
    evicted."""
    layout = world.config.layout
    state = lax.fori_loop(0, layout.max_receipts, _unlock, state)
    for pool in range(layout.pools):
        state = lax.fori_loop(0, layout.ranks, lambda rank, state, pool=pool: _release(state, rank, pool), state)
        if world.control:
            state = lax.fori_loop(0, layout.ranks, lambda rank, state, pool=pool: _grow(state, rank, pool), state)

    def again(_: jax.Array, state: CacheState) -> CacheState:
        state = lax.fori_loop(0, layout.max_operations, lambda number, state: _fail(world, state, number), state)
        return lax.fori_loop(0, layout.ranks, lambda rank, state: _evict(state, rank), state)

    return lax.fori_loop(0, ROUNDS, again, state)


def is_empty(state: CacheState) -> jax.Array:
    """[] bool: whether all pages are free, all nodes gone, no operation open and no receipt out."""
    layout, books = state.layout, state.books
    good = books[Scalar.FREE_NODES] == layout.nodes
    good &= books[Scalar.VACANT_OPERATIONS] == layout.max_operations
    good &= books[Scalar.VACANT_RECEIPTS] == layout.max_receipts
    for tier in TIERS:
        for pool in range(layout.pools):
            for rank in range(layout.ranks):
                good &= state.account(Account.FREE, tier, rank, pool) == layout.capacity(tier, pool)
    return good & jnp.all(state.nodes[Column.PARENT, : layout.nodes] == NONE)


def _unlock(number: jax.Array, state: CacheState) -> CacheState:
    generation = state.ledger[Ledger.RECEIPT_GENERATION, number]
    return t.unlock(state, t.ReceiptHandle(number, generation)).state


def _release(state: CacheState, rank: jax.Array, pool: int) -> CacheState:
    layout = state.layout
    size, start = layout.capacity(Tier.DEVICE, pool), layout.shelf(Tier.DEVICE, pool)
    owners = lax.dynamic_slice(state.shelves, (Shelf.OWNERS, start + rank * size), (1, size))[0]
    pages = jnp.where(owners == LENT, jnp.arange(size), NONE)
    return (t.release(state, rank, pages, pool) if pool else t.release(state, rank, pages)).state


def _grow(state: CacheState, rank: jax.Array, pool: int) -> CacheState:
    for tier, grow in zip(TIERS, (t.grow_device, t.grow_host), strict=True):
        if capacity := state.layout.capacity(tier, pool):
            state = grow(state, rank, jnp.int32(capacity), capacity, pool).state
    return state


def _fail(world: World, state: CacheState, number: jax.Array) -> CacheState:
    """End an operation of whatever kind: those of other kinds are refused as stale."""
    layout, size = state.layout, world.size
    handle = t.Handle(number, state.ledger[Ledger.OPERATION_GENERATION, number])
    failed = jnp.zeros(size, bool)
    state = t.finish_backup(state, handle, failed).state
    state = t.finish_load_back(state, handle, failed).state
    state = t.finish_store(state, handle, failed).state
    prompt = t.Prompt(
        jnp.zeros(size * layout.page_size, jnp.int32), jnp.int32(0), jnp.zeros(4, jnp.int32), jnp.int32(0)
    )
    for pool in range(layout.pools):
        view = view_of(state, 0)
        rank = jnp.clip(state.ledger[Ledger.OPERATION_RANK, number], 0, layout.ranks - 1)

        def pages(tier: Tier, view: Any = view, rank: Any = rank, pool: int = pool) -> jax.Array:
            return pages_where(pages_in_flight(view, number, tier, pool, rank), size)

        if not pool:
            state = t.finish_prefetch(state, handle, prompt, jnp.int32(0), pages(Tier.HOST), failed).state
            continue
        stored = pages_where(stored_by(view, number, pool), size)
        on_host, on_device = pages(Tier.HOST), pages(Tier.DEVICE)
        state = t.finish_value_backup(state, handle, rank, on_host, failed, pool=pool).state
        state = t.finish_value_load(state, handle, rank, on_device, failed, pool=pool).state
        state = t.finish_value_store(state, handle, stored, failed, pool=pool).state
        state = t.finish_value_prefetch(state, handle, prompt, jnp.int32(0), on_host, failed, pool=pool).state
    return state


def _evict(state: CacheState, rank: jax.Array) -> CacheState:
    layout, at = state.layout, rank
    device, host = layout.device_pages, max(1, layout.host_pages)
    state = t.evict_device(state, at, jnp.int32(device), device).state
    return t.evict_host(state, at, jnp.int32(host), host).state
