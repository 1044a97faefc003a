"""Device pages that requests hold outside the tree: lent by allocate, handed back by release."""

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import FREE, LENT, Account, Scalar, Shelf, Tier
from purecache.transitions.columns import book, count, look, masked, when
from purecache.transitions.evict import evict_device_pages
from purecache.transitions.pages import free_count, give_pages, own_pages, owner_index, take_pages
from purecache.transitions.scans import number_of, some
from purecache.transitions.vocabulary import Lent, Released, Status, Step


def owners_of(state: CacheState, rank: jax.Array, pages: jax.Array) -> jax.Array:
    """[size] owner of each device page: a node, FREE (also out of range) or LENT. Read it through `look`."""
    good = (pages >= 0) & (pages < state.layout.device_pages)
    owner = state.shelves[Shelf.OWNERS, owner_index(state, Tier.DEVICE, rank, jnp.where(good, pages, 0))]
    return jnp.where(good, owner, FREE)


def all_lent_once(state: CacheState, rank: jax.Array, pages: jax.Array) -> tuple[CacheState, jax.Array]:
    """Whether every page that is not NONE is lent, and none is given twice.

    Twins are found without sorting: each entry signs its page with its own number and looks whose name stands there.
    """
    given = pages >= 0

    def inspect(state: CacheState) -> tuple[CacheState, jax.Array]:
        state, owner = look(state, owners_of, rank, pages)
        lent = owner == LENT
        signer = LENT - 1 - jnp.arange(pages.shape[0], dtype=jnp.int32)
        mine = masked(given & lent, pages)
        state = own_pages(state, Tier.DEVICE, rank, mine, signer)
        state, signed = look(state, owners_of, rank, mine)
        state = own_pages(state, Tier.DEVICE, rank, mine, jnp.full_like(mine, LENT))
        return state, ~some(state.token, given & ~(lent & (signed == signer)))

    return lax.cond(some(state.token, given), inspect, lambda state: (state, jnp.bool_(True)), state)


def give_back(state: CacheState, rank: jax.Array, pages: jax.Array) -> CacheState:
    """Free lent pages; NONE entries are skipped. The caller has checked them."""
    number = number_of(state.token, pages >= 0)

    def give(state: CacheState) -> CacheState:
        return give_pages(book(state, Account.LENT, Tier.DEVICE, rank, -number), Tier.DEVICE, rank, pages)

    return when(number > 0, give, state)


def hand_back(state: CacheState, rank: jax.Array, pages: jax.Array) -> CacheState:
    """`give_back` of what a request leaves behind; pages of an allocator outside stay lent, for the caller to free."""
    mine = state.books[Scalar.EXTERNAL] == 0
    return give_back(state, rank, masked(mine, pages))


def allocate(state: CacheState, rank: jax.Array, number: jax.Array, size: int) -> Step[Lent]:
    """Lend `number` device pages of a rank to a request, evicting what is needed. All or nothing. `size` is static."""
    good_rank = (rank >= 0) & (rank < state.layout.ranks)
    rank = jnp.where(good_rank, rank, 0)
    good = good_rank & (number >= 0) & (number <= size)
    room = free_count(state, Tier.DEVICE, rank) + state.account(Account.EVICTABLE, Tier.DEVICE, rank)
    status = jnp.where(good, jnp.where(number <= room, Status.OK, Status.NO_ROOM), Status.BAD_LENGTH)
    status = jnp.where(good_rank, status, Status.BAD_RANK)
    number = jnp.where(status == Status.OK, number, 0)
    short = jnp.maximum(number - free_count(state, Tier.DEVICE, rank), 0)
    state, _, transfers = evict_device_pages(count(state, CLOCK=good), rank, short, size)
    state, pages = take_pages(state, Tier.DEVICE, rank, number, size, Account.LENT)
    state = own_pages(state, Tier.DEVICE, rank, pages, jnp.full(size, LENT, jnp.int32))
    return Step(state, (transfers,), Lent(status, pages))


def release(state: CacheState, rank: jax.Array, pages: jax.Array) -> Step[Released]:
    """Take lent pages [size] back (NONE entries are skipped). If any is not lent, nothing is changed."""
    good_rank = (rank >= 0) & (rank < state.layout.ranks)
    rank = jnp.where(good_rank, rank, 0)
    state, good = all_lent_once(state, rank, pages)
    good &= good_rank
    state = when(good, lambda state: give_back(count(state, CLOCK=1), rank, pages), state)
    status = jnp.where(good_rank, jnp.where(good, Status.OK, Status.BAD_PAGE), Status.BAD_RANK)
    return Step(state, (), Released(status))
