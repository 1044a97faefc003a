"""Taking a snapshot of a state: which nodes, and in what order of heat."""

from collections.abc import Callable, Iterator
from itertools import zip_longest

import numpy as np

from purecache.namespaces import Namespace, namespace_digest
from purecache.snapshots.origins import Origin
from purecache.snapshots.snapshot import Snapshot
from purecache.state import NONE, CacheConfig, CacheState
from purecache.state.layout import TIERS, Column, Ledger, Stored, TransferKind

OriginOf = Callable[[bytes], tuple[Namespace, int | None] | None]


def snapshot_of(config: CacheConfig, state: CacheState, origin_of: OriginOf) -> Snapshot:
    """The prefixes of a state. `origin_of`: as `Inputs.origin_of`."""
    nodes = np.asarray(state.nodes)
    tokens = np.asarray(state.tokens).reshape(-1, config.page_size)
    live = np.flatnonzero(nodes[Column.PARENT, : config.layout.nodes] != NONE)
    live = live[np.argsort(nodes[Column.DEPTH, live], kind="stable")]
    place = np.full(config.layout.rows, NONE, np.int32)
    origins = np.full(config.layout.rows, NONE, np.int32)
    known: dict[Origin, int] = {}
    kept = []
    for node in live.tolist():
        above = int(nodes[Column.PARENT, node])
        if above >= config.layout.nodes:
            origin = _origin(np.ascontiguousarray(nodes[Column.NAMESPACE : Column.NAMESPACE + 4, node]), origin_of)
            if origin is not None:
                origins[node] = known.setdefault(origin, len(known))
        if (origins[node] if above >= config.layout.nodes else place[above]) != NONE:
            place[node] = len(kept)
            kept.append(node)
    ids = np.array(kept, np.int32)
    parents = place[nodes[Column.PARENT, ids]]  # roots have no place
    return Snapshot(
        settings={"page_size": config.page_size, "bigrams": config.bigrams, "ranks": config.ranks},
        origins_known=tuple(known),
        parents=parents,
        tokens=tokens[ids],
        origins=origins[ids],
        ranks=nodes[Column.RANK, ids],
        hits=nodes[Column.HITS, ids],
        priorities=nodes[Column.PRIORITY, ids],
        stored=(nodes[Column.STORED, ids] != Stored.NO).astype(np.int32),
        tips=_tips(parents, place[by_heat(state)]),
        unnamed=len(live) - len(kept),
    )


def _origin(digest: np.ndarray, origin_of: OriginOf) -> Origin | None:
    """What a namespace digest int32[4] was made from, or None."""
    found = origin_of(digest.tobytes())
    if found is None:
        return None
    ranked = namespace_digest(found[0], rank=0, first_token=found[1])
    return Origin(found[0], no_rank=bool((ranked != digest).any()), first_token=found[1])


def _tips(parents: np.ndarray, order: np.ndarray) -> np.ndarray:
    """int32[m]: the nodes of `order` (NONE among them is skipped) that are not above an earlier one of them."""
    covered = np.zeros(len(parents), bool)
    tips = []
    for node in order.tolist():
        if node == NONE or covered[node]:
            continue
        tips.append(node)
        while node != NONE and not covered[node]:
            covered[node] = True
            node = int(parents[node])
    return np.array(tips, np.int32)


def by_heat(state: CacheState) -> np.ndarray:
    """int32[n]: every node once or more, the hottest first; the ranks take turns.

    Per rank: what requests hold or is being loaded, then the eviction orders from their newest end (device before host,
    higher levels before lower ones), then what is in none of them, the youngest first. For LRU that is recency. FIFO
    and FILO know only when pages came.
    """
    per_rank = [list(_rank_by_heat(state, rank)) for rank in range(state.layout.ranks)]
    merged = (node for row in zip_longest(*per_rank) for node in row if node is not None)
    return np.fromiter(merged, np.int32)


def _rank_by_heat(state: CacheState, rank: int) -> Iterator[int]:
    layout, ledger = state.layout, np.asarray(state.ledger)
    nodes, orders = np.asarray(state.nodes), np.asarray(state.orders)
    loading = ledger[Ledger.OPERATION_KIND] == TransferKind.LOAD_BACK
    held = np.concatenate([ledger[Ledger.RECEIPT_NODE], ledger[Ledger.OPERATION_NODE, loading]])
    held = held[(held >= 0) & (held < layout.nodes)]
    yield from held[nodes[Column.RANK, held] == rank].tolist()
    for tier in TIERS:
        older = orders[layout.order(tier), 0]
        for level in range(layout.levels - 1, -1, -1):
            head = layout.head(rank, level)
            entry = int(older[head])
            while entry != head:
                yield entry
                entry = int(older[entry])
    live = (nodes[Column.PARENT, : layout.nodes] != NONE) & (nodes[Column.RANK, : layout.nodes] == rank)
    rest = np.flatnonzero(live)
    yield from rest[np.lexsort((-nodes[Column.DEPTH, rest], -nodes[Column.BORN, rest]))].tolist()
