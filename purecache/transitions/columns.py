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
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Scalar, Tier
from purecache.transitions.scans import end_of, repeat

View = TypeVar("View")


def look(state: CacheState, view: Callable[..., View], *args: Any) -> tuple[CacheState, View]:
    """`view(state, *args)`, isolated. Returns the state whose later writes come after this read, and the view."""
    seen: list[View] = []

    def always(state: CacheState, *args: Any) -> tuple[Any, jax.Array]:
        seen.append(view(state, *args))
        return seen[-1], state.token

    def never(state: CacheState, *args: Any) -> tuple[Any, jax.Array]:
        # `cond` traces its first branch first, which spares tracing the view once more for its shapes. Made from the
        # token, as every constant here would cost each call an allocation.
        nothing = jax.tree.map(lambda leaf: jnp.broadcast_to(state.token, leaf.shape).astype(leaf.dtype), seen[-1])
        return nothing, ~state.token

    value, token = lax.cond(state.token >= 0, always, never, state, *args)
    return state.replace(token=token), value


def put(state: CacheState, column: str, index: Any, value: Any) -> CacheState:
    """Write `value` at `index` of the array named `column`. Where the last index is NONE, nothing is written."""
    return _write(state, column, index, value, lambda old, new: new)


def add(state: CacheState, column: str, index: Any, value: Any) -> CacheState:
    """Add `value` at `index` of the array named `column`. Where the last index is NONE, nothing is added."""
    return _write(state, column, index, value, lambda old, new: old + new)


def _write(
    state: CacheState, column: str, index: Any, value: Any, change: Callable[[jax.Array, jax.Array], jax.Array]
) -> CacheState:
    array = getattr(state, column)
    *rows, last = index if isinstance(index, tuple) else (index,)
    last = jnp.where(state.token >= 0, last, NONE)
    *rows, last, value = jnp.broadcast_arrays(*rows, last, jnp.asarray(value, array.dtype))
    if not last.ndim:
        return state.replace(**{column: _write_one(array, rows, last, value, change)})

    def one(number: jax.Array, array: jax.Array) -> jax.Array:
        return _write_one(array, [row[number] for row in rows], last[number], value[number], change)

    return state.replace(**{column: repeat(state.token, end_of(state.token, last >= 0), one, array)})


def _write_one(array: jax.Array, rows: list[jax.Array], last: jax.Array, value: jax.Array, change: Any) -> jax.Array:
    # A slice update rather than a scatter, which would keep the transition from becoming one kernel.
    start = [jnp.asarray(each, jnp.int32) for each in (*rows, jnp.maximum(last, 0))]
    old = lax.dynamic_slice(array, start, (1,) * array.ndim, allow_negative_indices=False)
    entry = jnp.where(last >= 0, change(old, value), old)
    return lax.dynamic_update_slice(array, entry, start, allow_negative_indices=False)


def set_entry(array: jax.Array, index: jax.Array, value: Any) -> jax.Array:
    """`array` [n] with `value` at `index`; unchanged if that is NONE. For arrays that are not part of the state."""
    return _write_one(array, [], index, jnp.asarray(value, array.dtype), lambda old, new: new)


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
    entry = lax.iota(jnp.int32, len(Scalar))
    change = sum(jnp.where(entry == Scalar[name], jnp.asarray(value, jnp.int32), 0) for name, value in amounts.items())
    scalars = lax.slice(state.books, (0,), (len(Scalar),)) + change
    return state.replace(books=lax.dynamic_update_slice(state.books, scalars, (0,)))


def book(state: CacheState, account: Any, tier: Tier, rank: Any, amount: Any, pool: Any = 0) -> CacheState:
    """Add `amount` pages to an account of a tier, rank and pool. A program may find out the account; NONE is none."""
    index = masked(jnp.asarray(account) >= 0, state.layout.account(account, tier, rank, pool))
    change = jnp.asarray(amount, state.books.dtype)
    return state.replace(books=_write_one(state.books, [], index, change, lambda old, new: old + new))
