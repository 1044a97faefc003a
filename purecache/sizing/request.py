"""One request through the real transitions, as one pure function: what a scheduler calls one after the other.

Nothing is copied here, so every transfer ends at once, well. Pages are of one token: see `purecache.workloads.paging`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Scalar
from purecache.transitions import (
    Handle,
    NodeHandle,
    Offer,
    Prompt,
    ReceiptHandle,
    Status,
    allocate,
    begin_backup,
    begin_load_back,
    finish,
    finish_backup,
    finish_load_back,
    lock,
    match,
)
from purecache.transitions.columns import masked, set_entry
from purecache.transitions.scans import end_of, repeat
from purecache.transitions.vocabulary import Inserted, LoadBegun, Matched


class Found(NamedTuple):
    """What a request found, in pages."""

    device: jax.Array
    """[]."""
    host: jax.Array
    """[] what was loaded back."""
    fits: jax.Array
    """[] 0 if the device cannot hold it: it found nothing, and left nothing."""


BACKUPS = 8
"""Stretches of one path that are backed up after an insert; more are left to its next use."""


def serve(state: CacheState, tokens: jax.Array, pages: jax.Array, matched: jax.Array) -> tuple[CacheState, Found]:
    """Match, load back, lock, allocate, insert and unlock, back up.

    tokens: [size] a page each, of which `pages` [] count; the first `matched` [] of them may be found. It is a chain of
    native functions rather than one, which takes LLVM ten times as long to compile.
    """
    state, found = native(_find)(state, tokens, matched)
    state, (begun, writes) = native(_begin_load)(state, found)
    state, _ = native(_end_load)(state, begun, writes)
    state, (taken, more) = native(_take)(state, found, begun, pages)
    state, inserted = native(_give)(state, tokens, pages, taken)
    state, backups = native(_back_up)(state, inserted)
    state, _ = native(_settle)(state, more, backups)
    none = jnp.where(taken.fits, 1, 0)
    device = none * found.device_length
    return state, Found(device, none * taken.have - device, none)


def native(function: Callable[..., tuple[CacheState, Any]]) -> Callable[..., tuple[CacheState, Any]]:
    """`function`, which returns a state and an answer, called as one native function: see `purecache.programs`.

    As there, arguments and answer travel as one vector each.
    """
    shapes: list[Any] = []

    def packed(state: CacheState, vector: jax.Array) -> tuple[CacheState, jax.Array]:
        state, answer = function(state, *_unpacked(vector, *shapes[0]))
        shapes.append(_shapes_of(answer))
        return state, _packed(state, answer)

    def call(state: CacheState, *args: Any) -> tuple[CacheState, Any]:
        shapes[:] = [_shapes_of(args)]
        state, vector = jax.jit(packed)(state, _packed(state, args))
        marked: Any = set_xla_metadata(vector, inlineable="false", xla_cpu_small_call="true")
        return state, _unpacked(marked, *shapes[1])

    return call


def _shapes_of(values: Any) -> tuple[list[jax.ShapeDtypeStruct], Any]:
    leaves, structure = jax.tree.flatten(values)
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves], structure


def _packed(state: CacheState, values: Any) -> jax.Array:
    """All numbers in one vector."""
    leaves = [jnp.ravel(leaf).astype(jnp.int32) for leaf in jax.tree.leaves(values)]
    return jnp.concatenate(leaves or [state.token[None]])


def _unpacked(vector: jax.Array, shapes: list[jax.ShapeDtypeStruct], structure: Any) -> Any:
    ends = np.cumsum([0, *(math.prod(leaf.shape) for leaf in shapes)]).tolist()
    leaves = [
        lax.slice(vector, (start,), (end,)).reshape(leaf.shape).astype(leaf.dtype)
        for leaf, start, end in zip(shapes, ends, ends[1:], strict=False)
    ]
    return jax.tree.unflatten(structure, leaves)


class _Operations(NamedTuple):
    """Backups that are under way, in the order in which they began. Several entries may name one."""

    operation: jax.Array
    generation: jax.Array


class _Taken(NamedTuple):
    fits: jax.Array
    have: jax.Array
    """[] pages that need not be computed."""
    pages: jax.Array
    """[size] device pages of the request."""
    receipt: ReceiptHandle


def _find(state: CacheState, tokens: jax.Array, matched: jax.Array) -> tuple[CacheState, Matched]:
    state, _, found = match(state, _prompt(state, tokens, matched))
    return state, found


def _prompt(state: CacheState, tokens: jax.Array, pages: jax.Array) -> Prompt:
    return Prompt(tokens, pages, jnp.broadcast_to(state.token, (4,)), state.token)


def _begin_load(state: CacheState, found: Matched) -> tuple[CacheState, tuple[LoadBegun, _Operations]]:
    """Begin to bring what only host has to the device."""
    node = NodeHandle(masked(found.length > found.device_length, found.node), found.clock)
    state, (writes, _), begun = begin_load_back(state, node, found.device_pages.shape[0])
    return state, (begun, _Operations(writes.operation, writes.generation))


def _end_load(state: CacheState, begun: LoadBegun, writes: _Operations) -> tuple[CacheState, tuple[()]]:
    """End it, after what was evicted for it has been written."""
    handle, size = Handle(begun.operation, begun.generation), begun.pages.shape[0]
    state, _ = _settle(state, writes)

    def end(_: jax.Array, state: CacheState) -> CacheState:
        return finish_load_back(state, handle, _all_well(state, size)).state

    return repeat(state.token, (begun.operation >= 0).astype(jnp.int32), end, state), ()


def _take(
    state: CacheState, found: Matched, begun: LoadBegun, pages: jax.Array
) -> tuple[CacheState, tuple[_Taken, _Operations]]:
    """Lock what was found, and allocate the rest."""
    size, known = found.device_pages.shape[0], found.device_length
    index = jnp.arange(size, dtype=jnp.int32)
    loaded = begun.status == Status.OK
    have = jnp.where(loaded, found.length, known)
    state, _, locked = lock(state, NodeHandle(jnp.where(loaded, found.node, found.device_node), found.clock))
    state, (writes,), lent = allocate(state, state.token, pages - have, size)
    mine = jnp.where(index < known, found.device_pages, begun.pages[jnp.maximum(index - known, 0)])
    every = jnp.where(index < have, mine, lent.pages[jnp.maximum(index - have, 0)])
    fits = lent.status == Status.OK
    receipt = ReceiptHandle(locked.receipt, locked.generation)
    taken = _Taken(fits, have, masked(fits & (index < pages), every), receipt)
    return state, (taken, _Operations(writes.operation, writes.generation))


def _give(state: CacheState, tokens: jax.Array, pages: jax.Array, taken: _Taken) -> tuple[CacheState, Inserted]:
    """Insert what was computed, and unlock."""
    prompt = _prompt(state, tokens, jnp.where(taken.fits, pages, 0))
    state, _, inserted = finish(state, prompt, Offer(taken.pages, state.token, state.token), taken.receipt)
    return state, inserted


def _back_up(state: CacheState, inserted: Inserted) -> tuple[CacheState, _Operations]:
    """Begin the backups that the write policy wants, stretch by stretch."""
    node, size = NodeHandle(inserted.node, inserted.clock), inserted.pages.shape[0]
    none = jnp.broadcast_to(~state.token, (BACKUPS,))

    def stretch(carry: tuple[CacheState, jax.Array, jax.Array, _Operations]) -> Any:
        state, left, number, begun = carry
        state, (effect,), reply = begin_backup(state, node, state.books[Scalar.BACKUP_HITS], size)
        begun = _Operations(
            set_entry(begun.operation, number, effect.operation[0]),
            set_entry(begun.generation, number, effect.generation[0]),
        )
        left = jnp.where(reply.status == Status.OK, left - reply.number, 0)
        return state, left, number + 1, begun

    start = (state, inserted.wanted, state.token, _Operations(none, none))
    carry = lax.while_loop(lambda carry: (carry[1] > 0) & (carry[2] < BACKUPS), stretch, start)
    return carry[0], carry[3]


def _settle(state: CacheState, *begun: _Operations) -> tuple[CacheState, tuple[()]]:
    """End all backups, in the order in which they began."""
    operation, generation = (jnp.concatenate(each) for each in zip(*begun, strict=True))
    size = begun[0].operation.shape[0]

    def one(index: jax.Array, state: CacheState) -> CacheState:
        current = operation[index]
        before = jnp.where(index > 0, operation[jnp.maximum(index - 1, 0)], NONE)

        def end(_: jax.Array, state: CacheState) -> CacheState:
            return finish_backup(state, Handle(current, generation[index]), _all_well(state, size)).state

        return repeat(state.token, ((current >= 0) & (current != before)).astype(jnp.int32), end, state)

    return repeat(state.token, end_of(state.token, operation >= 0), one, state), ()


def _all_well(state: CacheState, size: int) -> jax.Array:
    return jnp.broadcast_to(state.token >= 0, (size,))
