"""Free-lists: taking pages of a tier and rank from their stack, and putting them back."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.layout import FREE, NONE, Account, Shelf, Tier
from purecache.transitions.columns import book, look, masked, put
from purecache.transitions.scans import end_of, repeat


def free_count(state: CacheState, tier: Tier, rank: jax.Array, pool: Any = 0) -> jax.Array:
    """[] free pages of a tier, rank and pool."""
    return state.account(Account.FREE, tier, rank, pool)


def owner_index(state: CacheState, tier: Tier, rank: jax.Array, page: jax.Array, pool: Any = 0) -> jax.Array:
    """Index in the rows of `shelves` of a page of a tier and rank; NONE stays NONE."""
    first, size = (
        of_pool(state, pool, functools.partial(each, tier)) for each in (state.layout.shelf, state.layout.capacity)
    )
    return jnp.where(page >= 0, first + rank * size + page, NONE)


def of_pool(state: CacheState, pool: Any, value: Callable[[int], Any]) -> Any:
    """`value(pool)`, where the pool is an int or an int32 [] that a program finds out."""
    if isinstance(pool, int):
        return value(pool)
    return sum(jnp.where(pool == each, value(each), 0) for each in range(state.layout.pools))


def take_pages(
    state: CacheState, tier: Tier, rank: jax.Array, number: jax.Array, size: int, account: Account | None, pool: Any = 0
) -> tuple[CacheState, jax.Array]:
    """Take `number` (at most size, at most what is free) pages off the free-list and book them under `account`.

    None: the caller books them.

    Returns the new state and the pages, [size], NONE beyond `number`. The caller writes their owners.
    """
    index = jnp.arange(size, dtype=jnp.int32)
    slot = owner_index(state, tier, rank, free_count(state, tier, rank, pool) - 1 - index, pool)
    state, pages = look(state, lambda state: state.shelves[Shelf.FREE_PAGES, slot])
    state = book(state, Account.FREE, tier, rank, -number, pool)
    state = state if account is None else book(state, account, tier, rank, number, pool)
    return state, masked(index < number, pages)


def give_pages(state: CacheState, tier: Tier, rank: jax.Array, pages: jax.Array, pool: Any = 0) -> CacheState:
    """Put those `pages` [] or [size] that are not NONE on the free-list, so that the last of them is taken first.

    The caller takes them off the account that they were booked under.
    """
    if pages.ndim:
        return repeat(
            state.token,
            end_of(state.token, pages >= 0),
            lambda index, state: give_pages(state, tier, rank, pages[index], pool),
            state,
        )
    slot = owner_index(state, tier, rank, free_count(state, tier, rank, pool), pool)
    state = put(state, "shelves", (Shelf.FREE_PAGES, masked(pages >= 0, slot)), pages)
    state = put(state, "shelves", (Shelf.OWNERS, owner_index(state, tier, rank, pages, pool)), FREE)
    return book(state, Account.FREE, tier, rank, (pages >= 0).astype(jnp.int32), pool)


def own_pages(
    state: CacheState, tier: Tier, rank: jax.Array, pages: jax.Array, owners: Any, pool: Any = 0
) -> CacheState:
    """Write who owns each page that is not NONE: a node, FREE or LENT."""
    return put(state, "shelves", (Shelf.OWNERS, owner_index(state, tier, rank, pages, pool)), owners)
