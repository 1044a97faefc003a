"""The two idioms by which a transition reads and writes big arrays without copying them.

XLA copies a whole array when a computation both reads an old value of it and writes it, unless the read is isolated in
a computation of its own *and* the write depends on its result. So every transition reads through `look`, which is a
conditional that is always taken (the compiler cannot know that) and hands on the state's `token`; and it writes through
`put` and `add`, whose index depends on the token. The tests look for copies in the compiled programs.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Account, Scalar, Tier

View = TypeVar("View")


def look(state: CacheState, view: Callable[..., View], *args: Any) -> tuple[CacheState, View]:
    """`view(state, *args)`, isolated. Returns the state whose later writes come after this read, and the view."""
    shapes = jax.eval_shape(view, state, *args)

    def always(state: CacheState, *args: Any) -> tuple[Any, jax.Array]:
        return view(state, *args), state.token

    def never(state: CacheState, *args: Any) -> tuple[Any, jax.Array]:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), jnp.int32(NONE)

    value, token = lax.cond(state.token >= 0, always, never, state, *args)
    return state.replace(token=token), value


def put(state: CacheState, column: str, index: Any, value: Any) -> CacheState:
    """Write `value` at `index` of the array named `column`. Where the last index is NONE, nothing is written."""
    return _write(state, column, index, value, lambda old: value, "set")


def add(state: CacheState, column: str, index: Any, value: Any) -> CacheState:
    """Add `value` at `index` of the array named `column`. Where the last index is NONE, nothing is added."""
    return _write(state, column, index, value, lambda old: old + value, "add")


def _write(
    state: CacheState, column: str, index: Any, value: Any, new: Callable[[jax.Array], Any], scatter: str
) -> CacheState:
    array = getattr(state, column)
    *rows, last = index if isinstance(index, tuple) else (index,)
    last = jnp.where(state.token >= 0, last, NONE)
    if any(jnp.ndim(each) for each in (*rows, last)):
        at = getattr(array.at[(*rows, last)], scatter)
        return state.replace(**{column: at(value, mode="drop", wrap_negative_indices=False)})
    # For one entry the same as a slice update: it compiles to a third of the kernels.
    start = [jnp.asarray(each, jnp.int32) for each in (*rows, jnp.maximum(last, 0))]
    old = lax.dynamic_slice(array, start, (1,) * array.ndim, allow_negative_indices=False)
    entry = jnp.where(last >= 0, new(old), old)
    return state.replace(**{column: lax.dynamic_update_slice(array, entry, start, allow_negative_indices=False)})


def masked(condition: Any, index: Any) -> jax.Array:
    """`index` where `condition` holds, NONE elsewhere: a `put` there writes nothing."""
    return jnp.where(condition, index, NONE)


def when(condition: jax.Array, change: Callable[[CacheState], CacheState], state: CacheState) -> CacheState:
    """`change(state)` if `condition`, else `state`. For rare branches with many writes.

    Within `change`, do not read an array after its last write there: at the end of a branch XLA then copies it.
    """
    return lax.cond(condition, change, lambda unchanged: unchanged, state)


def count(state: CacheState, **amounts: Any) -> CacheState:
    """Add to named scalars, for instance `count(state, CLOCK=1)`."""
    change = sum(
        np.eye(len(Scalar), dtype=np.int32)[Scalar[name]] * jnp.asarray(amount, jnp.int32)
        for name, amount in amounts.items()
    )
    return state.replace(books=state.books.at[: len(Scalar)].add(change))


def book(state: CacheState, account: Account, tier: Tier, rank: Any, amount: Any) -> CacheState:
    """Add `amount` pages to an account of a tier and rank."""
    return state.replace(books=state.books.at[state.layout.account(account, tier, rank)].add(amount))
