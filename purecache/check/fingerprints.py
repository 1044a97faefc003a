"""The fingerprint of a state: equal for states that differ only in names.

Pages, operations, receipts and clocks have no identity, so their numbers are left out. Nodes are named by the prefix
that they stand for; in an exact world also by their ids, on which the runs of consecutive nodes depend.
"""

import jax
import jax.numpy as jnp

from purecache.check.packing import UNREAD
from purecache.check.signatures import chain, lift, mix
from purecache.check.views import View
from purecache.state.layout import (
    BEING_STORED,
    LOCKS,
    NONE,
    PAGES,
    TIERS,
    Account,
    Column,
    Ledger,
    Scalar,
    Tier,
    TransferKind,
)
from purecache.state.value_laws import Values


def fingerprints(view: View, depth: int, exact: bool) -> tuple[jax.Array, jax.Array]:
    """Each [WORDS] uint32: of a state, and of all of it but the eviction orders, from which a search for victims that
    finds none may drop stale entries."""
    names = view.paths
    if exact:
        names = jnp.where(view.live[:, None], mix(names, lift(jnp.arange(view.layout.rows))), names)
    operations = _operations(view, names)
    total = _sum(mix(operations, lift(jnp.full(len(operations), 11))), view.open())
    total += _sum(_nodes(view, names, operations), view.live)
    receipts = view.state.ledger[Ledger.RECEIPT_NODE, : view.layout.max_receipts]
    total += _sum(mix(names[receipts], lift(jnp.full(len(receipts), 13))), receipts != NONE)
    outside = [(Account.LENT, Tier.DEVICE), *((Account.WITHHELD, tier) for tier in TIERS)]
    numbers = [
        view.state.account(account, tier, rank, pool)
        for account, tier in outside
        for rank in range(view.layout.ranks)
        for pool in range(view.layout.pools)
    ]
    total = chain(total, *numbers, view.state.books[Scalar.TIME])
    total = mix(total, _exact_parts(view)) if exact else total
    return mix(total, _orders(view, names)), total


def _sum(words: jax.Array, mask: jax.Array) -> jax.Array:
    """[WORDS] the sum of the masked rows: the same in any order."""
    return jnp.sum(jnp.where(mask[:, None], words, 0), axis=0, dtype=jnp.uint32)


def _operations(view: View, names: jax.Array) -> jax.Array:
    """[max_operations, WORDS] what each operation is, whatever its number."""
    kind, pool = view.operation(Ledger.OPERATION_KIND), view.operation(Ledger.OPERATION_POOL)
    node, number = view.operation(Ledger.OPERATION_NODE), jnp.arange(view.layout.max_operations)
    words = chain(lift(kind), view.operation(Ledger.OPERATION_COUNT), pool, view.operation(Ledger.OPERATION_RANK))
    words = jnp.where((pool == 0)[:, None], mix(words, names[node]), words)
    for index in range(1, view.layout.pools):
        values = Values(view.state, index)
        mine = (values.incoming >= 0) & (values.operation == number[:, None])
        mine |= (kind == TransferKind.STORE)[:, None] & (values.stored == BEING_STORED + number[:, None])
        mine &= view.live & (pool == index)[:, None]
        words += jnp.sum(jnp.where(mine[..., None], mix(names, lift(jnp.int32(17))), 0), axis=1, dtype=jnp.uint32)
    return words


def _nodes(view: View, names: jax.Array, operations: jax.Array) -> jax.Array:
    """[rows, WORDS] what is known of each node."""
    there = [view.column(row) >= 0 for row in PAGES]
    rows = (*LOCKS, Column.HITS, Column.PRIORITY, Column.STORED)
    flags = sum(mask.astype(jnp.int32) << bit for bit, mask in enumerate(there))
    words = chain(names, flags, *(view.column(row) for row in rows))
    for pool in range(1, view.layout.pools):
        values = Values(view.state, pool)
        columns = (values.device, values.host, values.incoming)
        flags = sum((column >= 0).astype(jnp.int32) << bit for bit, column in enumerate(columns))
        stored = jnp.minimum(values.stored, BEING_STORED)
        words = chain(words, flags, values.locks, stored)
        coming = operations[jnp.clip(values.operation, 0, len(operations) - 1)]
        words = jnp.where((values.incoming >= 0)[:, None], mix(words, coming), words)
    return words


def _orders(view: View, names: jax.Array) -> jax.Array:
    """[WORDS] who follows whom in every eviction order, with what deadline."""
    layout, total = view.layout, jnp.zeros(2, jnp.uint32)
    heads = lift(jnp.arange(layout.ranks * layout.levels) + 501)
    every = jnp.concatenate([names, heads])
    for order in range(len(TIERS) * layout.pools):
        older, newer, due = view.state.orders[order]
        listed = (older != NONE) | (jnp.arange(len(newer)) >= layout.rows)
        follows = mix(mix(every, lift(due)), every[newer])
        total += _sum(mix(follows, lift(jnp.full(len(newer), order))), listed)
    return total


def _exact_parts(view: View) -> jax.Array:
    """[WORDS] the stack of free node ids, and the order in hash chains and sibling lists."""
    layout = view.layout
    stack = jnp.arange(layout.rows) < view.state.books[Scalar.FREE_NODES]
    place = lift(jnp.arange(layout.rows))
    total = _sum(mix(place, lift(view.column(Column.FREE_NODES))), stack)
    links = view.state.links
    places = mix(lift(jnp.arange(len(links))), lift(links))
    return total + _sum(places, (links != NONE) & (links != UNREAD))
