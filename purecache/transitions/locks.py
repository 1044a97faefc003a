"""Lock references: what keeps a prefix from being evicted, and the receipts that undo exactly one lock.

A node's references are its own receipts and operations plus its locked children, so locking a path changes only
the part of it that was not locked before. A node with references is protected.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import LOCKS, NONE, TIERS, Account, Column, Ledger, Scalar, Tier
from purecache.transitions.columns import add, count, look, masked, put, when
from purecache.transitions.nodes import is_empty, is_free, prune
from purecache.transitions.orders import touch
from purecache.transitions.standing import evictable, move_between, standing_of
from purecache.transitions.values import hold_values
from purecache.transitions.vocabulary import Locked, NodeHandle, Status, Step, Unlocked


class ReceiptHandle(NamedTuple):
    """What `lock` hands out and `unlock` takes back, once."""

    receipt: jax.Array
    generation: jax.Array


def is_live(state: CacheState, handle: NodeHandle) -> jax.Array:
    """[] bool: whether a handle names a root or a node that has been in the tree since. Read it through `look`."""
    layout, node = state.layout, handle.node
    in_range = (node >= 0) & (node < layout.nodes + layout.ranks) & (handle.clock <= state.books[Scalar.CLOCK])
    safe = jnp.where(in_range, node, 0)
    there = (state.nodes[Column.PARENT, safe] != NONE) & (state.nodes[Column.BORN, safe] <= handle.clock)
    return in_range & ((safe >= layout.nodes) | there)


def hold(state: CacheState, tier: Tier, node: jax.Array, amount: int) -> tuple[CacheState, list[jax.Array]]:
    """Add `amount` (1 or -1) references to `node`, and to its ancestors as far as that locks or unlocks a node.

    Returns the new state and how many pages of each tier that protects or sets free. NONE holds nothing.
    """
    turning = 0 if amount > 0 else 1
    name = "device_locks" if tier == Tier.DEVICE else "host_locks"

    def step(carry: tuple[CacheState, jax.Array, list[jax.Array]]) -> tuple[CacheState, jax.Array, list[jax.Array]]:
        state, node, moved = carry

        def plan(state: CacheState) -> tuple[jax.Array, list[jax.Array]]:
            standing = standing_of(state, node)
            turned = getattr(standing, name) == turning
            unlocked, locked = (evictable(standing._replace(**{name: value})) for value in (0, 1))
            changed = [free & ~held & turned for free, held in zip(unlocked, locked, strict=True)]
            return masked(turned, state.nodes[Column.PARENT, node]), changed

        state, (above, changed) = look(state, plan)
        state = add(state, "nodes", (LOCKS[tier], node), amount)
        return state, above, [total + more for total, more in zip(moved, changed, strict=True)]

    start = (state, node, [state.token for _ in TIERS])
    state, _, moved = lax.while_loop(lambda carry: carry[1] != NONE, step, start)
    return state, moved


def rank_of(state: CacheState, node: jax.Array) -> jax.Array:
    """[] rank of a live node or root; 0 for NONE. Read it through `look`."""
    return jnp.where(node >= 0, state.nodes[Column.RANK, node], 0)


def lock_path(state: CacheState, tier: Tier, node: jax.Array) -> CacheState:
    """Protect `node` and everything above it in `tier`, and on device the values that requests read in place there.

    NONE locks nothing.
    """
    state, rank = look(state, rank_of, node)
    state, moved = hold(state, tier, node, 1)
    state = move_between(state, rank, moved, Account.EVICTABLE, Account.PROTECTED)
    return hold_values(state, rank, node, 1) if tier == Tier.DEVICE else state


def unlock_path(state: CacheState, tier: Tier, node: jax.Array) -> CacheState:
    """Undo one `lock_path`; what is free again comes back into the orders as touched, or goes if it is empty.

    While they were locked, the entries of the path may have been dropped; only its deepest page needs one. That is not
    always the page of `node`, which can have lost it, or have it on host alone.
    """
    state, rank = look(state, rank_of, node)
    state, moved = hold(state, tier, node, -1)
    state = move_between(state, rank, moved, Account.PROTECTED, Account.EVICTABLE)
    if tier == Tier.DEVICE:
        state = hold_values(state, rank, node, -1)
    state, (device, host, empty) = look(state, freed_by, node)
    state = touch(state, Tier.DEVICE, device, rank)
    state = touch(state, Tier.HOST, host, rank)
    return when(empty, lambda state: prune(state, node), state)


def freed_by(state: CacheState, node: jax.Array) -> tuple[jax.Array, ...]:
    """What the end of a lock on `node` frees: the deepest page on device and the deepest one that only host has, of the
    path (NONE if locked still), and whether the node is empty. Read it through `look`.

    A lock on host alone, as storage takes, does not keep a page on device.
    """
    nodes = state.layout.nodes

    def climb_to(found: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def more(node: jax.Array) -> jax.Array:
            return (node >= 0) & (node < nodes) & ~found(node)

        return lax.while_loop(more, lambda node: state.nodes[Column.PARENT, node], node)

    def on_device(node: jax.Array) -> jax.Array:
        return state.nodes[Column.DEVICE_PAGE, node] >= 0

    def loose(node: jax.Array, free: jax.Array) -> jax.Array:
        return masked((node >= 0) & (node < nodes) & free, node)

    device = climb_to(on_device)
    paged = climb_to(lambda node: on_device(node) | (state.nodes[Column.HOST_PAGE, node] >= 0))
    unlocked = state.nodes[Column.DEVICE_LOCKS, device] == 0
    host = loose(paged, ~on_device(paged) & is_free(state, paged))
    return loose(device, on_device(device) & unlocked), host, is_empty(state, node)


def issue(state: CacheState, node: jax.Array) -> tuple[CacheState, ReceiptHandle]:
    """Write a receipt for `node` (NONE: none). There must be a vacant one."""

    def plan(state: CacheState) -> tuple[jax.Array, jax.Array]:
        number = state.ledger[Ledger.RECEIPT_VACANT, state.books[Scalar.VACANT_RECEIPTS] - 1]
        return number, state.ledger[Ledger.RECEIPT_GENERATION, number]

    state, (number, generation) = look(state, plan)
    number = masked(node >= 0, number)
    state = put(state, "ledger", (Ledger.RECEIPT_NODE, number), node)
    return count(state, VACANT_RECEIPTS=-(number >= 0).astype(jnp.int32)), ReceiptHandle(number, generation)


def is_good(state: CacheState, handle: ReceiptHandle) -> jax.Array:
    """[] bool: whether a receipt stands for a lock that was not undone. Read it through `look`."""
    in_range = (handle.receipt >= 0) & (handle.receipt < state.layout.max_receipts)
    row = state.ledger[:, jnp.where(in_range, handle.receipt, 0)]
    return in_range & (row[Ledger.RECEIPT_NODE] != NONE) & (row[Ledger.RECEIPT_GENERATION] == handle.generation)


def redeem(state: CacheState, handle: ReceiptHandle, wanted: jax.Array | bool) -> tuple[CacheState, jax.Array]:
    """Take a receipt back if it is good and `wanted`. Returns the state, and its node or NONE."""

    def plan(state: CacheState) -> tuple[jax.Array, jax.Array]:
        taken = is_good(state, handle) & wanted
        return taken, state.ledger[Ledger.RECEIPT_NODE, jnp.where(taken, handle.receipt, 0)]

    state, (taken, node) = look(state, plan)
    number, top = masked(taken, handle.receipt), state.books[Scalar.VACANT_RECEIPTS]
    state = put(state, "ledger", (Ledger.RECEIPT_NODE, number), NONE)
    state = put(state, "ledger", (Ledger.RECEIPT_GENERATION, number), handle.generation + 1)
    state = put(state, "ledger", (Ledger.RECEIPT_VACANT, masked(taken, top)), number)
    return count(state, VACANT_RECEIPTS=taken.astype(jnp.int32)), masked(taken, node)


def lock(state: CacheState, handle: NodeHandle) -> Step[Locked]:
    """Protect a node and its ancestors from eviction until the receipt is given to `unlock`. The root may be locked."""
    state, live = look(state, is_live, handle)
    vacant = state.books[Scalar.VACANT_RECEIPTS] > 0
    target = masked(live & vacant, handle.node)
    state = count(state, CLOCK=live & vacant)
    state = lock_path(state, Tier.DEVICE, target)
    state, receipt = issue(state, target)
    status = jnp.where(live, jnp.where(vacant, Status.OK, Status.TABLE_FULL), Status.BAD_NODE)
    return Step(state, (), Locked(status, receipt.receipt, receipt.generation))


def unlock(state: CacheState, handle: ReceiptHandle) -> Step[Unlocked]:
    """Undo the lock that this receipt stands for. Refused, without any change, if it was undone before."""
    state, node = redeem(state, handle, True)
    good = node != NONE
    state = unlock_path(count(state, CLOCK=good), Tier.DEVICE, node)
    return Step(state, (), Unlocked(jnp.where(good, Status.OK, Status.BAD_RECEIPT)))
