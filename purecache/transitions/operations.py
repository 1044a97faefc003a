"""Unfinished operations: numbers, generations, and the nodes that an operation covers.

An operation is (kind, deepest node, count): its members are that node and its ancestors. Its number is used again
once it ends, with a new generation, so that a late completion is recognised.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Column, Ledger, Scalar, TransferKind
from purecache.transitions.columns import add, count, look, masked, put
from purecache.transitions.vocabulary import Finished, Status, Transfers


class Handle(NamedTuple):
    """Name of an unfinished operation."""

    operation: jax.Array
    generation: jax.Array


class Members(NamedTuple):
    """What an operation that ends was about."""

    good: jax.Array
    """[] bool: the handle named an unfinished operation of the right kind, with no more members than were reported."""
    node: jax.Array
    """[] its deepest node."""
    number: jax.Array
    """[] number of members."""


def open_operation(
    state: CacheState, kind: TransferKind, node: jax.Array, members: jax.Array, pool: Any = 0
) -> tuple[CacheState, Handle]:
    """Begin an operation on `node` and its `members - 1` next ancestors. NONE begins none. One must be vacant."""
    top = state.books[Scalar.VACANT_OPERATIONS]

    def plan(state: CacheState) -> tuple[jax.Array, jax.Array]:
        number = state.ledger[Ledger.OPERATION_VACANT, top - 1]
        return number, state.ledger[Ledger.OPERATION_GENERATION, number]

    state, (number, generation) = look(state, plan)
    number = masked(node >= 0, number)
    state = put(state, "ledger", (Ledger.OPERATION_KIND, number), kind)
    state = put(state, "ledger", (Ledger.OPERATION_NODE, number), node)
    state = put(state, "ledger", (Ledger.OPERATION_COUNT, number), members)
    state = put(state, "ledger", (Ledger.OPERATION_POOL, number), pool)
    state, rank = look(state, lambda state: state.nodes[Column.RANK, node])
    state = put(state, "ledger", (Ledger.OPERATION_RANK, number), rank)
    return count(state, VACANT_OPERATIONS=-(node >= 0).astype(jnp.int32)), Handle(number, generation)


def storage_may_open(state: CacheState) -> jax.Array:
    """[] bool: whether an operation of storage may begin: a quarter of the table is kept for device and host."""
    return state.books[Scalar.VACANT_OPERATIONS] > state.layout.max_operations // 4


def extend_operation(state: CacheState, handle: Handle, condition: jax.Array) -> CacheState:
    """Let an operation that was opened in this transition cover one more ancestor."""
    return add(state, "ledger", (Ledger.OPERATION_COUNT, masked(condition, handle.operation)), 1)


def close_operation(
    state: CacheState, kind: TransferKind, handle: Handle, size: int, pool: int = 0
) -> tuple[CacheState, Members]:
    """End an operation of at most `size` members.

    A handle that names none, or one of another kind or pool or with more members, changes nothing but a counter.
    """

    def plan(state: CacheState) -> Members:
        in_range = (handle.operation >= 0) & (handle.operation < state.layout.max_operations)
        row = state.ledger[:, jnp.where(in_range, handle.operation, 0)]
        good = (row[Ledger.OPERATION_GENERATION] == handle.generation) & (row[Ledger.OPERATION_KIND] == kind)
        good &= row[Ledger.OPERATION_POOL] == pool
        node, members = row[Ledger.OPERATION_NODE], row[Ledger.OPERATION_COUNT]
        return Members(in_range & good & (members <= size), node, members)

    state, members = look(state, plan)
    number, top = masked(members.good, handle.operation), state.books[Scalar.VACANT_OPERATIONS]
    state = put(state, "ledger", (Ledger.OPERATION_KIND, number), NONE)
    state = put(state, "ledger", (Ledger.OPERATION_GENERATION, number), handle.generation + 1)
    state = put(state, "ledger", (Ledger.OPERATION_VACANT, masked(members.good, top)), number)
    closed = members.good.astype(jnp.int32)
    return count(state, VACANT_OPERATIONS=closed, STALE_COMPLETIONS=1 - closed), members


def transfers_of(
    kind: TransferKind,
    rank: jax.Array,
    operation: Handle,
    used: jax.Array,
    source: jax.Array,
    target: jax.Array,
    pool: Any = 0,
) -> Transfers:
    """The effect of an operation: its `used` [size] entries of `source` and `target` [size]."""
    return Transfers(
        kind=jnp.int32(kind),
        pool=jnp.asarray(pool, jnp.int32),
        rank=rank,
        operation=masked(used, operation.operation),
        generation=masked(used, operation.generation),
        source=masked(used, source),
        target=target,
    )


def ended(state: CacheState, members: Members, published: jax.Array) -> Finished:
    """The reply of a transition that has closed an operation."""
    status = jnp.where(members.good, Status.OK, Status.STALE)
    return Finished(status, published, masked(members.good, members.node), state.books[Scalar.CLOCK])
