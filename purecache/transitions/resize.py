"""Resize: taking pages of a tier out of use, and back into it. The arrays of the state keep the size that they were
made for, so capacity is data, and no program is compiled again.
"""

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, WITHHELD, Account, Column, Shelf, Tier
from purecache.transitions.columns import book, count, look, masked
from purecache.transitions.evict import evict_host_pages, make_room
from purecache.transitions.pages import free_count, give_pages, own_pages, owner_index, take_pages
from purecache.transitions.standing import set_pages
from purecache.transitions.value_evict import evict_host_values
from purecache.transitions.vocabulary import Restored, Status, Step, Transfers, Withheld


def shrink_device(state: CacheState, rank: jax.Array, number: jax.Array, size: int, pool: int = 0) -> Step[Withheld]:
    """Take up to `number` (at most size) device pages of a rank out of use: free ones, then what can be evicted.

    `size` and `pool` are static. What the eviction copies to host is as in `evict_device`.
    """
    state, rank, number, status = _checked(state, rank, number)
    short = jnp.maximum(jnp.minimum(number, size) - free_count(state, Tier.DEVICE, rank, pool), 0)
    state, transfers = make_room(state, rank, short, size, pool)
    return _withhold(state, Tier.DEVICE, rank, number, size, pool, status, transfers)


def shrink_host(state: CacheState, rank: jax.Array, number: jax.Array, size: int, pool: int = 0) -> Step[Withheld]:
    """Take up to `number` (at most size) host pages of a rank out of use: free ones, then what can be evicted, then
    copies of pages that are on device, in the order of their numbers.

    `size` and `pool` are static.
    """
    state, rank, number, status = _checked(state, rank, number)
    limit = jnp.minimum(number, size)
    short = jnp.maximum(limit - free_count(state, Tier.HOST, rank, pool), 0)
    if pool:
        state, _ = evict_host_values(state, rank, short, size, pool)
    else:
        state, _ = evict_host_pages(state, rank, short, size)
        state = _drop_copies(state, rank, limit)
    return _withhold(state, Tier.HOST, rank, number, size, pool, status, ())


def grow_device(state: CacheState, rank: jax.Array, number: jax.Array, size: int, pool: int = 0) -> Step[Restored]:
    """Take up to `number` (at most size) device pages of a rank into use again. `size` and `pool` are static."""
    return _restore(state, Tier.DEVICE, rank, number, size, pool)


def grow_host(state: CacheState, rank: jax.Array, number: jax.Array, size: int, pool: int = 0) -> Step[Restored]:
    """Take up to `number` (at most size) host pages of a rank into use again. `size` and `pool` are static."""
    return _restore(state, Tier.HOST, rank, number, size, pool)


def _checked(
    state: CacheState, rank: jax.Array, number: jax.Array
) -> tuple[CacheState, jax.Array, jax.Array, jax.Array]:
    """The state at its new clock, rank and number, which are 0 where the status says that they were bad."""
    good_rank = (rank >= 0) & (rank < state.layout.ranks)
    good = good_rank & (number >= 0)
    status = jnp.where(good_rank, jnp.where(good, Status.OK, Status.BAD_LENGTH), Status.BAD_RANK)
    return count(state, CLOCK=good), jnp.where(good, rank, 0), jnp.where(good, number, 0), status


def _withhold(
    state: CacheState,
    tier: Tier,
    rank: jax.Array,
    number: jax.Array,
    size: int,
    pool: int,
    status: jax.Array,
    transfers: tuple[Transfers, ...],
) -> Step[Withheld]:
    taken = jnp.minimum(jnp.minimum(number, size), free_count(state, tier, rank, pool))
    state, pages = take_pages(state, tier, rank, taken, size, Account.WITHHELD, pool)
    state = own_pages(state, tier, rank, pages, jnp.full(size, WITHHELD, jnp.int32), pool)
    return Step(state, transfers, Withheld(status, taken, pages))


def _drop_copies(state: CacheState, rank: jax.Array, number: jax.Array) -> CacheState:
    """Free host pages of nodes that are on device too, until `number` are free or nothing more can be.

    Not those that an operation reads. Values of tail pools stay on host: their nodes have a page.
    """

    def copy_at(state: CacheState, page: jax.Array) -> jax.Array:
        """[] the node whose copy may go from this host page, or NONE."""
        node = jnp.maximum(state.shelves[Shelf.OWNERS, owner_index(state, Tier.HOST, rank, page)], 0)
        rows = (Column.DEVICE_PAGE, Column.HOST_PAGE, Column.INCOMING_PAGE, Column.HOST_LOCKS)
        device, host, incoming, locks = (state.nodes[row, node] for row in rows)
        return masked((host == page) & (device >= 0) & (incoming < 0) & (locks == 0), node)

    def step(carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
        state, page = carry
        state, node = look(state, copy_at, page)
        state = set_pages(state, rank, node, host=NONE)
        return give_pages(state, Tier.HOST, rank, masked(node >= 0, page)), page + 1

    def more(carry: tuple[CacheState, jax.Array]) -> jax.Array:
        state, page = carry
        return (page < state.layout.host_pages) & (free_count(state, Tier.HOST, rank) < number)

    return lax.while_loop(more, step, (state, state.token))[0]


def _restore(state: CacheState, tier: Tier, rank: jax.Array, number: jax.Array, size: int, pool: int) -> Step[Restored]:
    state, rank, number, status = _checked(state, rank, number)
    wanted = jnp.minimum(jnp.minimum(number, size), state.account(Account.WITHHELD, tier, rank, pool))

    def step(carry: tuple[CacheState, jax.Array, jax.Array]) -> tuple[CacheState, jax.Array, jax.Array]:
        state, page, restored = carry
        slot = owner_index(state, tier, rank, page, pool)
        state, found = look(state, lambda state: state.shelves[Shelf.OWNERS, slot] == WITHHELD)
        state = book(state, Account.WITHHELD, tier, rank, -found.astype(jnp.int32), pool)
        return give_pages(state, tier, rank, masked(found, page), pool), page + 1, restored + found

    capacity = state.layout.capacity(tier, pool)
    state, _, restored = lax.while_loop(
        lambda carry: (carry[2] < wanted) & (carry[1] < capacity), step, (state, state.token, state.token)
    )
    return Step(state, (), Restored(status, restored))
