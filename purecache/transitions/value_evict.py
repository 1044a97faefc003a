"""Eviction of values of tail pools, oldest first, with or without a copy on host."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Account, Ledger, Scalar, Tier, TransferKind
from purecache.transitions.columns import add, count, look, masked, set_entry
from purecache.transitions.operations import Handle, open_operation
from purecache.transitions.orders import NEWER
from purecache.transitions.pages import free_count, give_pages, take_pages
from purecache.transitions.values import expect, first_head, set_value, value_at
from purecache.transitions.vocabulary import Transfers


class WriteBack(NamedTuple):
    """Progress of copying values of one pool to host while they are evicted: one operation for all of them."""

    handle: Handle
    """The operation, NONE while there is none."""
    source: jax.Array
    """[size] device pages, NONE for values that are not copied."""
    target: jax.Array
    """[size] host pages."""


def no_write_back(size: int) -> WriteBack:
    """Nothing copied yet; for up to `size` values."""
    none, blank = jnp.int32(NONE), jnp.full(size, NONE, jnp.int32)
    return WriteBack(Handle(none, none), blank, blank)


def write_back_of(rank: jax.Array, pool: Any, sweep: WriteBack) -> Transfers:
    """The effect."""
    operation, generation = (masked(sweep.target >= 0, each) for each in sweep.handle)
    kind = jnp.int32(TransferKind.BACKUP)
    return Transfers(kind, jnp.asarray(pool, jnp.int32), rank, operation, generation, sweep.source, sweep.target)


def _oldest(state: CacheState, tier: Tier, pool: Any, rank: jax.Array) -> jax.Array:
    """[] the next victim, or NONE. Read it through `look`."""
    entry = state.orders[state.layout.order(tier, pool), NEWER, first_head(state, rank)]
    return masked(entry < state.layout.rows, entry)


def evict_host_value(
    state: CacheState, rank: jax.Array, pool: Any, condition: jax.Array
) -> tuple[CacheState, jax.Array]:
    """Free the oldest host value of a pool, if there is one and `condition`. Returns the state and the page or NONE."""

    def oldest(state: CacheState) -> tuple[jax.Array, jax.Array]:
        node = masked(condition, _oldest(state, Tier.HOST, pool, rank))
        return node, masked(node >= 0, value_at(state, node, pool).host)

    state, (node, page) = look(state, oldest)
    state = give_pages(set_value(state, rank, pool, node, host=NONE), Tier.HOST, rank, page, pool)
    return count(state, EVICTED_HOST_PAGES=page >= 0), page


def evict_host_values(
    state: CacheState, rank: jax.Array, number: jax.Array, size: int, pool: Any
) -> tuple[CacheState, jax.Array]:
    """Free up to `number` (at most size) host pages of a tail pool. Returns the state and the pages, [size]."""

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        state, freed, pages, _ = carry
        state, page = evict_host_value(state, rank, pool, jnp.bool_(True))
        return state, freed + (page >= 0), set_entry(pages, freed, page), page

    limit = jnp.minimum(number, size)
    start = (state, state.token, jnp.full(size, NONE, jnp.int32), state.token)
    state, _, pages, _ = lax.while_loop(lambda carry: (carry[3] >= 0) & (carry[1] < limit), step, start)
    return state, pages


def write_back_value(
    state: CacheState, rank: jax.Array, pool: Any, node: jax.Array, wanted: jax.Array, entry: Any, sweep: WriteBack
) -> tuple[CacheState, WriteBack]:
    """Give the value at `node` a host page and a place in the operation that fills it.

    If it is `wanted`, has none, and there is room for both. `entry`: where in the transfers it goes.
    """

    def bare(state: CacheState) -> tuple[jax.Array, jax.Array]:
        value = value_at(state, node, pool)
        return (value.device >= 0) & (value.host < 0) & (value.incoming < 0), value.device

    def copy(carry: tuple[CacheState, WriteBack]) -> tuple[CacheState, WriteBack]:
        state, sweep = carry
        state, _ = evict_host_value(state, rank, pool, free_count(state, Tier.HOST, rank, pool) == 0)
        opens = sweep.handle.operation < 0
        possible = ~opens | (state.books[Scalar.VACANT_OPERATIONS] > 0)
        granted = (free_count(state, Tier.HOST, rank, pool) > 0) & possible
        state, opened = open_operation(state, TransferKind.BACKUP, masked(granted & opens, node), jnp.int32(0), pool)
        handle = jax.tree.map(lambda old, new: jnp.where(granted & opens, new, old), sweep.handle, opened)
        state = add(state, "ledger", (Ledger.OPERATION_COUNT, masked(granted, handle.operation)), 1)
        state, target = take_pages(state, Tier.HOST, rank, granted.astype(jnp.int32), 1, Account.IN_FLIGHT, pool)
        state = expect(state, Tier.HOST, rank, pool, masked(granted, node), target[0], handle.operation)
        state = count(state, BACKUP_PAGES=granted, BACKUP_REFUSED_PAGES=~granted)
        place = masked(granted, entry)
        return state, WriteBack(
            handle, set_entry(sweep.source, place, source), set_entry(sweep.target, place, target[0])
        )

    state, (is_bare, source) = look(state, bare)
    return lax.cond(wanted & is_bare, copy, lambda carry: carry, (state, sweep))


def evict_device_values(
    state: CacheState, rank: jax.Array, number: jax.Array, size: int, pool: Any
) -> tuple[CacheState, jax.Array, WriteBack]:
    """Free up to `number` (at most size) device pages of a tail pool. Returns the state, the pages [size] and, under
    write back, what is copied. The kv of the nodes stays."""

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        state, node, freed, pages, sweep = carry
        wanted = state.books[Scalar.WRITE_BACK] > 0
        # From the end, so that the oldest ends up as the oldest on host: see `finish_values`.
        state, sweep = write_back_value(state, rank, pool, node, wanted, size - 1 - freed, sweep)
        state, page = look(state, lambda state: value_at(state, node, pool).device)
        state = give_pages(set_value(state, rank, pool, node, device=NONE), Tier.DEVICE, rank, page, pool)
        state, following = look(state, lambda state: _oldest(state, Tier.DEVICE, pool, rank))
        return state, following, freed + 1, set_entry(pages, freed, page), sweep

    limit = jnp.minimum(number, size)
    state, first = look(state, lambda state: _oldest(state, Tier.DEVICE, pool, rank))
    start = (state, first, state.token, jnp.full(size, NONE, jnp.int32), no_write_back(size))
    state, _, freed, pages, sweep = lax.while_loop(lambda carry: (carry[1] != NONE) & (carry[2] < limit), step, start)
    return count(state, EVICTED_DEVICE_PAGES=freed), pages, sweep
