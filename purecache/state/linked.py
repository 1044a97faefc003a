"""Laws of what is linked: sibling lists, hash chains, eviction orders, free node ids.

Written without walks, so that they hold for NumPy and JAX alike and for many states at once: links must fit pairwise,
and following them by doubling (n steps in log n rounds) must lead to the end of a list.
"""

from types import ModuleType
from typing import Any

import numpy as np

from purecache.state.cache_state import CacheState
from purecache.state.layout import LOCKS, NONE, PAGES, TIERS, Column, Scalar, Tier
from purecache.state.value_laws import Values


def link_laws(state: CacheState, xp: ModuleType) -> dict[str, Any]:
    """For each law of the lists, how often it is broken: int scalars of `xp` (numpy or jax.numpy)."""
    links = _Links(state, xp)
    laws = _sibling_laws(links) | _chain_laws(links) | _twin_laws(links) | _free_node_laws(links)
    for tier in TIERS:
        laws |= _order_laws(links, tier)
    for pool in range(1, state.layout.pools):
        for tier in TIERS:
            laws |= _value_order_laws(links, tier, pool)
    return laws


class _Links:
    """The columns that the lists are made of."""

    def __init__(self, state: CacheState, xp: ModuleType) -> None:
        layout = state.layout
        self.state, self.xp, self.layout = state, xp, layout
        self.ids = xp.arange(layout.rows)
        self.is_root = (self.ids >= layout.nodes) & (self.ids < layout.nodes + layout.ranks)
        self.parent = state.nodes[Column.PARENT]
        self.live = (self.parent != NONE) & (self.ids < layout.nodes)
        self.above = xp.where(self.live, self.parent, 0)

    def total(self, mask: Any) -> Any:
        """How often `mask` holds."""
        return self.xp.sum(mask, dtype=self.xp.int32)

    def at(self, index: Any, size: int | None = None) -> Any:
        """`index`, kept inside of an array even where it is damaged."""
        return self.xp.clip(index, 0, (size or self.layout.rows) - 1)

    def times(self, nodes: Any, mask: Any) -> Any:
        """[rows] how many of the masked entries name each node."""
        rows = self.layout.rows
        index = self.xp.where(mask & (nodes >= 0) & (nodes < rows), nodes, rows).reshape(-1)
        length = {} if self.xp is np else {"length": rows + 1}
        return self.xp.bincount(index, minlength=rows + 1, **length)[:rows]

    def end(self, step: Any) -> Any:
        """Where each entry gets to by following `step`, which maps ends to themselves."""
        for _ in range(int(step.shape[0]).bit_length()):
            step = step[step]
        return step


def _sibling_laws(n: _Links) -> dict[str, Any]:
    nodes = n.state.nodes
    first, after, before = (nodes[row] for row in (Column.FIRST_CHILD, Column.NEXT_SIBLING, Column.PREVIOUS_SIBLING))

    def child_of(node: Any, parent: Any) -> Any:
        return n.live[n.at(node)] & (n.parent[n.at(node)] == parent)

    wrong = n.live & (after != NONE) & ~(child_of(after, n.parent) & (before[n.at(after)] == n.ids))
    wrong |= n.live & (before != NONE) & ~(child_of(before, n.parent) & (after[n.at(before)] == n.ids))
    wrong |= n.live & (before == NONE) & (first[n.above] != n.ids)
    headless = (n.live | n.is_root) & (first != NONE) & ~(child_of(first, n.ids) & (before[n.at(first)] == NONE))
    rows = n.layout.rows
    onward = n.xp.where(n.live & (after >= 0) & (after < rows), after, rows)
    ends = n.end(n.xp.concatenate([onward, n.xp.full(1, rows, onward.dtype)]))[:rows]
    return {
        "siblings are linked both ways, from their parent": n.total(wrong) + n.total(headless),
        "sibling lists end": n.total(n.live & (ends != rows)),
    }


def _hash_of(n: _Links) -> Any:
    """[rows] uint32: the multilinear hash of every node's place, as `transitions.walk.bucket_of` computes it."""
    layout, xp = n.layout, n.xp
    keys = n.state.books[layout.hash_keys :].view(xp.uint32)
    pages = n.state.tokens.reshape(layout.rows, layout.page_size).view(xp.uint32)
    words = xp.where(n.above >= layout.nodes, n.state.nodes[Column.NAMESPACE : Column.NAMESPACE + 4], 0).view(xp.uint32)
    total = xp.sum(pages * keys[: layout.page_size], axis=1, dtype=xp.uint32)
    total += n.above.astype(xp.uint32) * keys[layout.page_size]
    return total + xp.sum(words * keys[layout.page_size + 1 :, None], axis=0, dtype=xp.uint32)


def _chain_laws(n: _Links) -> dict[str, Any]:
    layout, links, rows = n.layout, n.state.links, n.layout.rows
    heads, onward = links[: layout.buckets], links[layout.buckets :]
    needed = n.live & (n.ids != n.parent + 1)
    chained = n.times(heads, heads != NONE) + n.times(onward, needed & (onward != NONE))
    total = _hash_of(n)
    mixed = (total ^ (total >> 16)) * n.xp.uint32(0x9E3779B1)
    bucket = (mixed >> (33 - layout.buckets.bit_length())).astype(n.xp.int32)
    misplaced = n.total((heads != NONE) & (bucket[n.at(heads)] != n.xp.arange(layout.buckets)))
    misplaced += n.total(needed & (onward != NONE) & (bucket[n.at(onward)] != bucket))
    step = n.xp.where(needed & (onward >= 0) & (onward < rows), onward, rows)
    ends = n.end(n.xp.concatenate([step, n.xp.full(1, rows, step.dtype)]))[:rows]
    return {
        "hash chains hold exactly the nodes that don't follow their parent": n.total(chained != needed),
        "hash chains end": n.total(needed & (ends != rows)),
        "a node is in the chain of its hash": misplaced,
    }


def _twin_laws(n: _Links) -> dict[str, Any]:
    """No two nodes are the same page of the same parent. Twins have equal hashes, so sorting puts them side by side."""
    xp, layout = n.xp, n.layout
    order = xp.lexsort((_hash_of(n), xp.where(n.live, n.parent, NONE)))
    here, there = order[:-1], order[1:]
    pages = n.state.tokens.reshape(layout.rows, layout.page_size)
    spaces = n.state.nodes[Column.NAMESPACE : Column.NAMESPACE + 4]
    same = n.live[here] & n.live[there] & (n.parent[here] == n.parent[there])
    same &= xp.all(pages[here] == pages[there], axis=1)
    same &= (n.above[here] < layout.nodes) | xp.all(spaces[:, here] == spaces[:, there], axis=0)
    return {"no two nodes are the same page of the same parent": n.total(same)}


def _free_node_laws(n: _Links) -> dict[str, Any]:
    on_stack = n.ids < n.state.books[Scalar.FREE_NODES]
    counted = n.times(n.state.nodes[Column.FREE_NODES], on_stack)
    free = (n.ids < n.layout.nodes) & ~n.live
    return {"the stack of free nodes holds each of them, once": n.total(counted != free)}


def _walked_order(n: _Links, order: int) -> tuple[Any, Any, Any]:
    """Of one order: [rows] which nodes are listed, [rows] the rank of the list that each is in, broken links."""
    xp, rows = n.xp, n.layout.rows
    older, newer = n.state.orders[order]
    size = int(newer.shape[0])
    index = xp.arange(size)
    entry = (older != NONE) | (index >= rows)
    broken = 0
    for there, back in ((older, newer), (newer, older)):
        inside = (there >= 0) & (there < size)
        broken += n.total(entry & ~(inside & entry[n.at(there, size)] & (back[n.at(there, size)] == index)))
    step = xp.where(entry & (index < rows) & (newer >= 0) & (newer < size), newer, index)
    ends = n.end(step)
    broken += n.total((index < rows) & entry & (ends < rows))
    return entry[:rows], (ends[:rows] - rows) // n.layout.levels, broken


def _order_laws(n: _Links, tier: Tier) -> dict[str, Any]:
    nodes = n.state.nodes
    listed, rank, broken = _walked_order(n, n.layout.order(tier))
    device, host, incoming = (nodes[row] for row in PAGES)
    locked = nodes[LOCKS[0]] > 0
    if tier == Tier.DEVICE:
        victim = (device >= 0) & (nodes[Column.DEVICE_CHILDREN] == 0)
    else:
        victim = (host >= 0) & (device < 0) & (incoming < 0) & (nodes[Column.FIRST_CHILD] == NONE)
        locked |= nodes[LOCKS[1]] > 0
    of = f"({tier.name.lower()})"
    return {
        f"the eviction order is linked both ways {of}": broken,
        f"only live nodes are in the eviction order {of}": n.total(listed & ~n.live),
        f"what can be evicted is in the order of its rank {of}": n.total(
            n.live & victim & ~locked & ~(listed & (rank == nodes[Column.RANK]))
        ),
    }


def _value_order_laws(n: _Links, tier: Tier, pool: int) -> dict[str, Any]:
    listed, rank, broken = _walked_order(n, n.layout.order(tier, pool))
    evictable = n.live & Values(n.state, pool).held(tier)[0]
    of = f"({tier.name.lower()}, pool {pool})"
    return {
        f"the eviction order is linked both ways {of}": broken,
        f"the order lists exactly what can be evicted {of}": n.total(listed != evictable),
        f"a value is in the order of its rank {of}": n.total(listed & (rank != n.state.nodes[Column.RANK])),
    }
