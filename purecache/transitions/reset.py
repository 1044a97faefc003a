"""Reset: forget every prefix, at once."""

import jax.numpy as jnp

from purecache.state.cache_state import CacheState, empty_arrays
from purecache.state.layout import FREE, LENT, TIERS, WITHHELD, Account, Ledger, Scalar, Shelf, Tier
from purecache.transitions.vocabulary import ResetDone, Step


def reset(state: CacheState) -> Step[ResetDone]:
    """Empty the tree. Pages that requests hold stay lent to them, those out of use stay so; receipts and unfinished
    operations become stale.

    With an allocator outside the cache, all device pages are lent then.

    The one transition whose work is proportional to the capacity.
    """
    layout = state.layout
    arrays = {name: jnp.asarray(array) for name, array in empty_arrays(layout).items()}
    withheld = state.shelves[Shelf.OWNERS] == WITHHELD
    lent = state.shelves[Shelf.OWNERS] == LENT
    on_device = jnp.arange(layout.shelf_length) < layout.shelf(Tier.HOST)
    lent |= on_device & (state.books[Scalar.EXTERNAL] > 0) & ~withheld
    fresh = arrays["books"].at[Scalar.TIME].set(state.books[Scalar.TIME])
    fresh = fresh.at[Scalar.CLOCK].set(state.books[Scalar.CLOCK] + 1)
    books = state.books.at[layout.account(0, 0, 0) : layout.hash_keys].set(0)
    books = jnp.where(jnp.arange(layout.books) < Scalar.POLICY, fresh, books)
    stacks = []
    for tier, pool in [(tier, pool) for tier in TIERS for pool in range(layout.pools)]:
        size, ranks, start = layout.capacity(tier, pool), layout.ranks, layout.shelf(tier, pool)
        kinds = [mask[start : start + ranks * size].reshape(ranks, size) for mask in (lent, withheld)]
        shelf = kinds[0] | kinds[1]
        # The free pages of a stack come first, highest first as in a new cache; what lies behind them is never read.
        stacks.append((size - 1 - jnp.argsort(shelf[:, ::-1], axis=1, stable=True)).reshape(-1))
        numbers = [jnp.sum(mask, axis=1, dtype=jnp.int32) for mask in (~shelf, *kinds)]
        for account, number in zip((Account.FREE, Account.LENT, Account.WITHHELD), numbers, strict=True):
            books = books.at[layout.account(account, tier, jnp.arange(ranks), pool)].set(number)
    ledger = arrays["ledger"]
    for row in (Ledger.OPERATION_GENERATION, Ledger.RECEIPT_GENERATION):
        ledger = ledger.at[row].set(state.ledger[row] + 1)
    shelves = jnp.stack(
        [jnp.concatenate(stacks).astype(jnp.int32), jnp.where(withheld, WITHHELD, jnp.where(lent, LENT, FREE))]
    )
    arrays |= {"shelves": shelves, "books": books, "ledger": ledger, "token": state.token}
    return Step(CacheState(**arrays, layout=layout), (), ResetDone(jnp.sum(lent, dtype=jnp.int32)))
