"""Reset: forget every prefix, at once."""

import jax.numpy as jnp

from purecache.state.cache_state import CacheState, empty_arrays
from purecache.state.layout import FREE, LENT, TIERS, Account, Operation, Receipt, Scalar
from purecache.transitions.vocabulary import ResetDone, Step


def reset(state: CacheState) -> Step[ResetDone]:
    """Empty the tree. Pages that requests hold stay lent to them; receipts and unfinished operations become stale.

    The one transition whose work is proportional to the capacity.
    """
    layout, arrays = state.layout, empty_arrays(state.layout)
    lent = state.owners == LENT
    stacks, free = [], []
    for tier in TIERS:
        start, size = layout.shelf(tier), layout.capacity(tier)
        shelf = lent[start : start + layout.pools * layout.ranks * size].reshape(-1, size)
        descending = jnp.arange(size, dtype=jnp.int32)[::-1]
        # Pages that are free come first, highest first, as in a new cache; the rest of a stack is never read.
        order = jnp.argsort(shelf[:, ::-1], axis=1, stable=True)
        stacks.append(descending[order].reshape(-1))
        free.append(jnp.sum(~shelf, axis=1, dtype=jnp.int32).reshape(layout.pools, layout.ranks))
    accounts = jnp.zeros_like(state.accounts).at[Account.FREE].set(jnp.stack(free))
    capacity = jnp.array([layout.capacity(tier) for tier in TIERS])[:, None, None]
    accounts = accounts.at[Account.LENT].set(capacity - jnp.stack(free))
    scalars = state.scalars.at[Scalar.CLOCK].add(1).at[Scalar.FREE_NODES].set(layout.nodes)
    scalars = scalars.at[Scalar.VACANT_RECEIPTS].set(layout.max_receipts)
    scalars = scalars.at[Scalar.VACANT_OPERATIONS].set(layout.max_operations)
    receipts = jnp.asarray(arrays["receipts"]).at[Receipt.GENERATION].set(state.receipts[Receipt.GENERATION] + 1)
    operations = jnp.asarray(arrays["operations"])
    operations = operations.at[Operation.GENERATION].set(state.operations[Operation.GENERATION] + 1)
    state = CacheState(
        **{name: jnp.asarray(array) for name, array in arrays.items()}
        | {
            "hash_keys": state.hash_keys,
            "free_pages": jnp.concatenate(stacks),
            "owners": jnp.where(lent, LENT, FREE),
            "accounts": accounts,
            "receipts": receipts,
            "operations": operations,
            "scalars": scalars,
            "token": state.token,
        },
        layout=layout,
    )
    return Step(state, (), ResetDone(jnp.sum(lent, dtype=jnp.int32)))
