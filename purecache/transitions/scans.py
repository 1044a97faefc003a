"""Loops over small arrays, in the form that costs a compiled transition least.

XLA allocates a few buffers per call for every reduction and every constant outside a fusion of its program. A
transition has dozens, and these allocations would take longer than its work. A `while_loop` that counts by the state's
`token` (see `columns`) has neither, and ends as a plain loop of the native function.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")

CHUNK = 16
"""Flags that a scan of a long array looks over at once."""
LONG = 512
"""Length from which that is worth its time in the compiler."""


def repeat(token: jax.Array, times: Any, step: Callable[[jax.Array, Carry], Carry], start: Carry) -> Carry:
    """`step(index, carry)` for every index from 0, `times` times."""

    def body(carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        index, value = carry
        return index - ~token, step(index, value)

    return lax.while_loop(lambda carry: carry[0] < times, body, (token, start))[1]


def first_of(token: jax.Array, flags: jax.Array) -> jax.Array:
    """[] index of the first of `flags` [size] that is set; size if none is."""
    start = token
    if _has_chunks(flags):
        start = _first_from(token, _by_chunk(operator.or_, flags), token) * CHUNK
    return _first_from(token, flags, start)


def _first_from(token: jax.Array, flags: jax.Array, start: jax.Array) -> jax.Array:
    size = flags.shape[0]

    def unset(index: jax.Array) -> jax.Array:
        return (index < size) & ~flags[jnp.minimum(index, size - 1)]

    return lax.while_loop(unset, lambda index: index - ~token, start)


def end_of(token: jax.Array, flags: jax.Array) -> jax.Array:
    """[] index behind the last of `flags` [size] that is set; 0 if none is."""
    end = token + flags.shape[0]
    if _has_chunks(flags):
        end = _end_before(token, _by_chunk(operator.or_, flags), token + flags.shape[0] // CHUNK) * CHUNK
    return _end_before(token, flags, end)


def _end_before(token: jax.Array, flags: jax.Array, end: jax.Array) -> jax.Array:
    def unset(end: jax.Array) -> jax.Array:
        return (end > 0) & ~flags[jnp.maximum(end - 1, 0)]

    return lax.while_loop(unset, lambda end: end + ~token, end)


def some(token: jax.Array, flags: jax.Array) -> jax.Array:
    """[] bool: whether any of `flags` [size] is set."""
    return first_of(token, flags) < flags.shape[0]


def number_of(token: jax.Array, flags: jax.Array) -> jax.Array:
    """[] how many of `flags` [size] are set."""
    counts = flags.astype(jnp.int32)
    return total_of(token, _by_chunk(operator.add, counts) if _has_chunks(flags) else counts)


def total_of(token: jax.Array, values: jax.Array) -> jax.Array:
    """[] sum of `values` [size], of their dtype."""
    start = token.astype(values.dtype)
    return repeat(token, values.shape[0], lambda index, total: total + values[index], start)


def _has_chunks(values: jax.Array) -> bool:
    return values.shape[0] % CHUNK == 0 and values.shape[0] >= LONG


def _by_chunk(join: Callable[[jax.Array, jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """[size / CHUNK] each chunk joined to one value: elementwise, so that it is done in vector registers."""
    rows = values.reshape(-1, CHUNK)
    return functools.reduce(join, (rows[:, place] for place in range(CHUNK)))
