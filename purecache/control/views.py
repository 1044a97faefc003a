"""What an operator looks at, as plain data: sizes, hot prefixes, locks and who holds them."""

from typing import Any

import numpy as np

from purecache.answers import Receipt
from purecache.cache import PrefixCache
from purecache.snapshots import Snapshot
from purecache.snapshots.snapshot import Prefix
from purecache.state import NONE, CacheConfig, CacheState
from purecache.state.layout import TIERS, Account, Column, Ledger, TransferKind

SHOWN_TOKENS = 16
"""First tokens of a prefix that are told."""


def stats_of(cache: PrefixCache) -> dict[str, Any]:
    """Pages by pool, tier, rank and account, the counters, and those of storage. Runs on the cache's thread."""
    config, storage = cache.config, cache._driver.storage
    pages = {
        pool: {
            tier.name.lower(): [
                {each.name.lower(): cache.pages(each, tier, rank, pool) for each in Account}
                for rank in range(config.ranks)
            ]
            for tier in TIERS
        }
        for pool in config.pool_names
    }
    about = {"page_size": config.page_size, "ranks": config.ranks, "policy": config.policy.name.lower()}  # type: ignore[union-attr]
    about |= {"device_pages": config.device_pages, "host_pages": config.host_pages, "write": str(config.write)}
    stored = None if storage is None else storage.counters() | {"in_flight": storage.in_flight}
    return {"config": about, "clock": cache.clock, "pages": pages, "counters": cache.counters(), "storage": stored}


def hot_of(snapshot: Snapshot, number: int) -> list[dict[str, Any]]:
    """The `number` hottest prefixes, the hottest first."""
    return [_shown(prefix) for prefix, _ in zip(snapshot.prefixes(), range(number), strict=False)]


def _shown(prefix: Prefix) -> dict[str, Any]:
    return {
        "tokens": len(prefix.tokens),
        "first_tokens": prefix.tokens[:SHOWN_TOKENS].tolist(),
        "namespace": repr(prefix.namespace),
        "rank": prefix.rank,
        "pages": len(prefix.nodes),
        "pages_stored": prefix.pages_stored,
        "hits": prefix.hits,
        "priority": prefix.priority,
    }


def locks_of(state: CacheState, config: CacheConfig, holders: dict[Receipt, str]) -> list[dict[str, Any]]:
    """Every receipt and every unfinished operation, and what it holds: the path down to its node.

    holders: the pins by receipt; who holds the others is known to the scheduler alone, which is told their numbers.
    """
    layout, ledger, nodes = state.layout, np.asarray(state.ledger), np.asarray(state.nodes)
    tokens = np.asarray(state.tokens).reshape(-1, config.page_size)
    found: list[dict[str, Any]] = []
    for number in np.flatnonzero(ledger[Ledger.RECEIPT_NODE, : layout.max_receipts] != NONE).tolist():
        node, generation = ledger[[Ledger.RECEIPT_NODE, Ledger.RECEIPT_GENERATION], number].tolist()
        name = holders.get(Receipt(number, generation))
        by = f"request (receipt {number}.{generation})" if name is None else f"pin {name}"
        found.append({"by": by} | _held(nodes, tokens, config, node))
    for number in np.flatnonzero(ledger[Ledger.OPERATION_KIND, : layout.max_operations] != NONE).tolist():
        kind, node, count, generation = ledger[: Ledger.OPERATION_GENERATION + 1, number].tolist()
        pool = config.pool_names[max(0, int(ledger[Ledger.OPERATION_POOL, number]))]
        name = TransferKind(kind).name.lower().replace("_", " ")
        by = f"{name} of {count} pages of {pool} (operation {number}.{generation})"
        found.append({"by": by} | (_held(nodes, tokens, config, node) if pool == config.pool_names[0] else {}))
    return found


def _held(nodes: np.ndarray, tokens: np.ndarray, config: CacheConfig, node: int) -> dict[str, Any]:
    path = []
    while 0 <= node < config.layout.nodes and nodes[Column.PARENT, node] != NONE:
        path.append(node)
        node = int(nodes[Column.PARENT, node])
    path.reverse()
    pages = {tier.name.lower(): int((nodes[config.layout.page_row(tier), path] >= 0).sum()) for tier in TIERS}
    first = tokens[path].reshape(-1)[:SHOWN_TOKENS].tolist() if path else []
    rank = int(nodes[Column.RANK, path[0]]) if path else int(nodes[Column.RANK, node])
    return {"rank": rank, "pages": len(path), "on": pages, "first_tokens": first}
