"""Device pages that requests hold outside the tree: lent by allocate, handed back by release."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import FREE, LENT, Account, Scalar, Shelf, Tier
from purecache.transitions.columns import book, count, look, masked, when
from purecache.transitions.evict import make_room
from purecache.transitions.pages import free_count, give_pages, of_pool, own_pages, owner_index, take_pages
from purecache.transitions.scans import number_of, some
from purecache.transitions.vocabulary import Lent, Released, Status, Step


def owners_of(state: CacheState, rank: jax.Array, pages: jax.Array, pool: Any = 0) -> jax.Array:
    """[size] owner of each device page: a node, FREE (also out of range) or LENT. Read it through `look`."""
    size = of_pool(state, pool, lambda pool: state.layout.capacity(Tier.DEVICE, pool))
    good = (pages >= 0) & (pages < size)
    owner = state.shelves[Shelf.OWNERS, owner_index(state, Tier.DEVICE, rank, jnp.where(good, pages, 0), pool)]
    return jnp.where(good, owner, FREE)


def all_lent_once(state: CacheState, rank: jax.Array, pages: jax.Array, pool: Any = 0) -> tuple[CacheState, jax.Array]:
    """Whether every page that is not NONE is lent, and none is given twice.

    Twins are found without sorting: each entry signs its page with its own number and looks whose name stands there.
    """
    given = pages >= 0

    def inspect(state: CacheState) -> tuple[CacheState, jax.Array]:
        state, owner = look(state, lambda state: owners_of(state, rank, pages, pool))
        lent = owner == LENT
        signer = LENT - 1 - jnp.arange(pages.shape[0], dtype=jnp.int32)
        mine = masked(given & lent, pages)
        state = own_pages(state, Tier.DEVICE, rank, mine, signer, pool)
        state, signed = look(state, lambda state: owners_of(state, rank, mine, pool))
        state = own_pages(state, Tier.DEVICE, rank, mine, jnp.full_like(mine, LENT), pool)
        return state, ~some(state.token, given & ~(lent & (signed == signer)))

    return lax.cond(some(state.token, given), inspect, lambda state: (state, jnp.bool_(True)), state)


def give_back(state: CacheState, rank: jax.Array, pages: jax.Array, pool: Any = 0) -> CacheState:
    """Free lent pages; NONE entries are skipped. The caller has checked them."""
    number = number_of(state.token, pages >= 0)

    def give(state: CacheState) -> CacheState:
        state = book(state, Account.LENT, Tier.DEVICE, rank, -number, pool)
        return give_pages(state, Tier.DEVICE, rank, pages, pool)

    return when(number > 0, give, state)


def hand_back(state: CacheState, rank: jax.Array, pages: jax.Array, pool: Any = 0) -> CacheState:
    """`give_back` of what a request leaves behind; pages of an allocator outside stay lent, for the caller to free."""
    mine = state.books[Scalar.EXTERNAL] == 0
    return give_back(state, rank, masked(mine, pages), pool)


def allocate(state: CacheState, rank: jax.Array, number: jax.Array, size: int, pool: int = 0) -> Step[Lent]:
    """Lend `number` device pages of a rank to a request, evicting what is needed. All or nothing.

    `size` and `pool` are static.
    """
    good_rank = (rank >= 0) & (rank < state.layout.ranks)
    rank = jnp.where(good_rank, rank, 0)
    good = good_rank & (number >= 0) & (number <= size)
    free = free_count(state, Tier.DEVICE, rank, pool)
    room = free + state.account(Account.EVICTABLE, Tier.DEVICE, rank, pool)
    status = jnp.where(good, jnp.where(number <= room, Status.OK, Status.NO_ROOM), Status.BAD_LENGTH)
    status = jnp.where(good_rank, status, Status.BAD_RANK)
    number = jnp.where(status == Status.OK, number, 0)
    short = jnp.maximum(number - free, 0)
    state, transfers = make_room(count(state, CLOCK=good), rank, short, size, pool)
    state, pages = take_pages(state, Tier.DEVICE, rank, number, size, Account.LENT, pool)
    state = own_pages(state, Tier.DEVICE, rank, pages, jnp.full(size, LENT, jnp.int32), pool)
    return Step(state, transfers, Lent(status, pages))


def release(state: CacheState, rank: jax.Array, pages: jax.Array, pool: int = 0) -> Step[Released]:
    """Take lent pages [size] back (NONE entries are skipped). If any is not lent, nothing is changed."""
    good_rank = (rank >= 0) & (rank < state.layout.ranks)
    rank = jnp.where(good_rank, rank, 0)
    state, good = all_lent_once(state, rank, pages, pool)
    good &= good_rank
    state = when(good, lambda state: give_back(count(state, CLOCK=1), rank, pages, pool), state)
    status = jnp.where(good_rank, jnp.where(good, Status.OK, Status.BAD_PAGE), Status.BAD_RANK)
    return Step(state, (), Released(status))
