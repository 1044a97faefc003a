"""Loops over small arrays, in the form that costs a compiled transition least.

XLA allocates a few buffers per call for every reduction and every constant outside a fusion of its program. A
transition has dozens, and these allocations would take longer than its work. A `while_loop` that counts by the state's
`token` (see `columns`) has neither, and ends as a plain loop of the native function.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def repeat(token: jax.Array, times: Any, step: Callable[[jax.Array, Carry], Carry], start: Carry) -> Carry:
    """`step(index, carry)` for every index from 0, `times` times."""

    def body(carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        index, value = carry
        return index - ~token, step(index, value)

    return lax.while_loop(lambda carry: carry[0] < times, body, (token, start))[1]


def first_of(token: jax.Array, flags: jax.Array) -> jax.Array:
    """[] index of the first of `flags` [size] that is set; size if none is."""
    size = flags.shape[0]

    def unset(index: jax.Array) -> jax.Array:
        return (index < size) & ~flags[jnp.minimum(index, size - 1)]

    return lax.while_loop(unset, lambda index: index - ~token, token)


def end_of(token: jax.Array, flags: jax.Array) -> jax.Array:
    """[] index behind the last of `flags` [size] that is set; 0 if none is."""

    def unset(end: jax.Array) -> jax.Array:
        return (end > 0) & ~flags[jnp.maximum(end - 1, 0)]

    return lax.while_loop(unset, lambda end: end + ~token, token + flags.shape[0])


def some(token: jax.Array, flags: jax.Array) -> jax.Array:
    """[] bool: whether any of `flags` [size] is set."""
    return first_of(token, flags) < flags.shape[0]


def number_of(token: jax.Array, flags: jax.Array) -> jax.Array:
    """[] how many of `flags` [size] are set."""
    return repeat(token, flags.shape[0], lambda index, total: total + flags[index], token)


def total_of(token: jax.Array, values: jax.Array) -> jax.Array:
    """[] sum of `values` [size], of their dtype."""
    start = token.astype(values.dtype)
    return repeat(token, values.shape[0], lambda index, total: total + values[index], start)
