"""The laws of tail pools, recomputed from the arrays of a state; see `purecache.state.laws`."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import (
    BEING_STORED,
    NONE,
    PAGES,
    RESERVED,
    TIERS,
    Column,
    Ledger,
    Shelf,
    TailColumn,
    Tier,
    TransferKind,
)
from purecache.state.node_columns import counted


class Values:
    """The rows of one tail pool, and whose hands its values are in."""

    def __init__(self, state: CacheState, pool: int) -> None:
        layout, nodes = state.layout, state.nodes
        self.device, self.host, self.incoming = (nodes[layout.page_row(tier, pool)] for tier in Tier)
        self.locks, self.operation, self.stored = (nodes[layout.tail_row(column, pool)] for column in TailColumn)
        self.loading = (self.device < 0) & (self.host >= 0) & (self.incoming >= 0)
        self.writing = (self.host < 0) & (self.incoming >= 0)

    def held(self, tier: Tier) -> tuple[Any, Any, Any]:
        """Which nodes have a value in a tier that may be evicted, that may not, and that is on its way there."""
        if tier == Tier.DEVICE:
            on_device = self.device >= 0
            return on_device & (self.locks == 0), on_device & (self.locks > 0), self.loading
        on_host = self.host >= 0
        return on_host & (self.incoming < 0), on_host & (self.incoming >= 0), self.writing


def broken_value_laws(state: CacheState, xp: ModuleType) -> dict[str, Any]:
    """For each law of the tail pools that arrays alone can show, how often it is broken."""
    layout, nodes = state.layout, state.nodes
    ids = xp.arange(layout.rows)
    live = (nodes[Column.PARENT] != NONE) & (ids < layout.nodes)
    device, host, incoming = (nodes[row] for row in PAGES)
    above = xp.where(live, nodes[Column.PARENT], 0)
    depth = nodes[Column.DEPTH]
    laws = {"the depth of a node is that of its parent plus one": live & (depth != depth[above] + 1)}
    for pool in range(1, layout.pools):
        of, here = f"(pool {pool})", Values(state, pool)
        some = (here.device >= 0) | (here.host >= 0) | (here.incoming >= 0)
        kv = (device >= 0) | (host >= 0) | (incoming >= 0)
        laws |= {
            f"a value on device is on a page on device {of}": live & (here.device >= 0) & (device < 0),
            f"a value on host is on a page {of}": live & (here.host >= 0) & ~kv,
            f"no dead node has a value {of}": ~live & (some | (here.locks != 0)),
            f"a value comes to one tier only {of}": (here.device >= 0) & (here.host >= 0) & (here.incoming >= 0),
            f"a value on its way has an operation {of}": (here.incoming >= 0) & (here.operation < 0),
        }
    totals = {name: xp.sum(mask, dtype=xp.int32) for name, mask in laws.items()}
    for pool in range(1, layout.pools):
        totals |= _operation_laws(state, xp, pool) | _lock_laws(state, xp, pool)
    return totals


def _operation_laws(state: CacheState, xp: ModuleType, pool: int) -> dict[str, Any]:
    layout, ledger, here = state.layout, state.ledger, Values(state, pool)
    kinds = xp.where(ledger[Ledger.OPERATION_POOL] == pool, ledger[Ledger.OPERATION_KIND], NONE)

    def members(*wanted: TransferKind) -> Any:
        of_kind = sum(kinds == kind for kind in wanted) > 0
        return xp.sum(xp.where(of_kind, ledger[Ledger.OPERATION_COUNT], 0))

    orphans = 0
    for tier in TIERS:
        start, size = layout.shelf(tier, pool), layout.ranks * layout.capacity(tier, pool)
        orphans += xp.sum(state.shelves[Shelf.OWNERS, start : start + size] <= RESERVED, dtype=xp.int32)
    moving = members(TransferKind.BACKUP, TransferKind.LOAD_BACK, TransferKind.PREFETCH)
    # What a node that has gone was noted to be is never read.
    live = state.nodes[Column.PARENT] != NONE
    storing = xp.sum(live & (here.stored >= BEING_STORED), dtype=xp.int32)
    return {
        f"every value on its way belongs to an operation (pool {pool})": xp.abs(
            moving - orphans - xp.sum(here.incoming >= 0, dtype=xp.int32)
        ),
        f"every value being stored belongs to an operation (pool {pool})": xp.maximum(
            storing - members(TransferKind.STORE), 0
        ),
    }


def _lock_laws(state: CacheState, xp: ModuleType, pool: int) -> dict[str, Any]:
    """Lock references of a pool: receipts and loads of kv hold the values that their prefixes need."""
    layout, nodes, ledger, law = state.layout, state.nodes, state.ledger, state.layout.tails[pool - 1].law
    kinds = xp.where(ledger[Ledger.OPERATION_POOL] == 0, ledger[Ledger.OPERATION_KIND], NONE)
    loads = xp.where(kinds == TransferKind.LOAD_BACK, ledger[Ledger.OPERATION_NODE], NONE)
    holder = xp.concatenate([ledger[Ledger.RECEIPT_NODE], loads])
    depth = xp.where(holder >= 0, nodes[Column.DEPTH, holder], 0)
    left = depth - law.first_needed(depth, layout.page_size) if law.in_place else depth * 0

    def hold(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        node, left, locks = carry
        index = xp.where((left > 0) & (node >= 0), node, layout.rows)
        locks = locks + counted(xp, index, layout.rows + 1)[: layout.rows].astype(locks.dtype)
        return nodes[Column.PARENT, xp.maximum(node, 0)], left - 1, locks

    start = (holder, left, xp.zeros(layout.rows, holder.dtype))
    *_, locks = _loop(xp, lambda carry: xp.any(carry[1] > 0), hold, start)
    wrong = xp.sum(locks != Values(state, pool).locks, dtype=xp.int32)
    return {f"value locks are those of receipts and loads (pool {pool})": wrong}


def _loop(xp: ModuleType, condition: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
    if xp is not np:
        return lax.while_loop(condition, body, carry)
    while condition(carry):
        carry = body(carry)
    return carry
