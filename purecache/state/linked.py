"""Laws that take a walk: sibling lists, hash chains, eviction orders and free-lists of a NumPy state."""

from collections.abc import Iterator

import numpy as np

from purecache.state.cache_state import CacheState
from purecache.state.layout import LOCKS, NONE, PAGES, TIERS, Column, Scalar, Tier
from purecache.state.value_laws import broken_value_links


def broken_links(state: CacheState) -> list[str]:
    """Violations found by following every list of a state whose arrays are NumPy arrays."""
    live = np.flatnonzero(state.nodes[Column.PARENT, : state.layout.nodes] != NONE)
    found = [*_siblings(state, live), *_chains(state, live), *_free_nodes(state, live)]
    for tier in TIERS:
        found += _orders(state, tier, live)
    return [*found, *broken_value_links(state)]


def _siblings(state: CacheState, live: np.ndarray) -> Iterator[str]:
    nodes = state.nodes
    parents = [*live, *range(state.layout.nodes, state.layout.nodes + state.layout.ranks)]
    seen = 0
    for parent in parents:
        child, before = nodes[Column.FIRST_CHILD, parent], NONE
        while child != NONE and seen <= len(live):
            if nodes[Column.PARENT, child] != parent or nodes[Column.PREVIOUS_SIBLING, child] != before:
                yield f"sibling links of node {child} do not fit its parent {parent}"
            child, before, seen = nodes[Column.NEXT_SIBLING, child], child, seen + 1
    if seen != len(live):
        yield f"the sibling lists hold {seen} nodes, {len(live)} are live"


def _chains(state: CacheState, live: np.ndarray) -> Iterator[str]:
    layout, links = state.layout, state.links
    chained = []
    for bucket in range(layout.buckets):
        node = links[bucket]
        while node != NONE and len(chained) <= layout.nodes:
            chained.append(node)
            node = links[layout.buckets + node]
    needed = [node for node in live if node != state.nodes[Column.PARENT, node] + 1]
    if sorted(chained) != sorted(needed):
        yield f"hash chains hold {len(chained)} nodes, {len(needed)} need them"
    pages = state.tokens.reshape(layout.rows, layout.page_size)
    twins = {}
    for node in live:
        parent = state.nodes[Column.PARENT, node]
        space = tuple(state.nodes[Column.NAMESPACE : Column.NAMESPACE + 4, node]) if parent >= layout.nodes else ()
        key = (parent, space, pages[node].tobytes())
        if key in twins:
            yield f"nodes {twins[key]} and {node} are the same page of the same parent"
        twins[key] = node


def _free_nodes(state: CacheState, live: np.ndarray) -> Iterator[str]:
    free = state.nodes[Column.FREE_NODES, : state.books[Scalar.FREE_NODES]]
    if len(np.unique(free)) != len(free) or np.intersect1d(free, live).size:
        yield "the stack of free nodes holds a live node, or one twice"


def _orders(state: CacheState, tier: Tier, live: np.ndarray) -> Iterator[str]:
    layout = state.layout
    older, newer = state.orders[tier]
    entries: dict[int, int] = {}
    for rank in range(layout.ranks):
        for level in range(layout.levels):
            head = layout.head(rank, level)
            entry, before = newer[head], head
            while entry != head and len(entries) <= layout.nodes:
                if older[entry] != before or entry in entries or entry >= layout.rows:
                    yield f"the {tier.name} order is broken at entry {entry}"
                    return
                entries[int(entry)] = rank
                entry, before = newer[entry], entry
    dead = sorted(set(entries) - set(live.tolist()))
    if dead:
        yield f"the {tier.name} order lists dead nodes {dead[:4]}"
    if np.count_nonzero(older[: layout.rows] != NONE) != len(entries):
        yield f"nodes believe to be in the {tier.name} order that are not"
    device, host, incoming = (state.nodes[row] for row in PAGES)
    locked = (state.nodes[LOCKS[0]] > 0) | ((state.nodes[LOCKS[1]] > 0) & (tier == Tier.HOST))
    for node in live:
        if tier == Tier.DEVICE:
            victim = device[node] >= 0 and state.nodes[Column.DEVICE_CHILDREN, node] == 0
        else:
            alone = host[node] >= 0 and device[node] < 0 and incoming[node] < 0
            victim = alone and state.nodes[Column.FIRST_CHILD, node] == NONE
        if victim and not locked[node] and entries.get(int(node)) != state.nodes[Column.RANK, node]:
            yield f"node {node} could be evicted from {tier.name} but is not listed there"
