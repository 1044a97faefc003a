"""Laws of what is linked: sibling lists, hash chains, eviction orders, free node ids.

Written without walks, so that they hold for NumPy and JAX alike and for many states at once: links must fit pairwise,
and following them by doubling (n steps in log n rounds) must lead to the end of a list.
"""

from types import ModuleType
from typing import Any

from purecache.state.cache_state import CacheState
from purecache.state.config import Policy
from purecache.state.layout import LOCKS, NONE, PAGES, TIERS, Column, Scalar, Tier
from purecache.state.node_columns import Columns
from purecache.state.value_laws import Values


def link_laws(state: CacheState, xp: ModuleType) -> dict[str, Any]:
    """For each law of the lists, how often it is broken: int scalars of `xp` (numpy or jax.numpy)."""
    links = Columns(state, xp)
    laws = _sibling_laws(links) | _chain_laws(links) | _twin_laws(links) | _free_node_laws(links)
    for tier in TIERS:
        laws |= _order_laws(links, tier)
    for pool in range(1, state.layout.pools):
        for tier in TIERS:
            laws |= _value_order_laws(links, tier, pool)
    return laws


def _at(n: Columns, index: Any, size: int | None = None) -> Any:
    """`index`, kept inside of an array even where it is damaged."""
    return n.xp.clip(index, 0, (size or n.layout.rows) - 1)


def _end(step: Any) -> Any:
    """Where each entry gets to by following `step`, which maps ends to themselves."""
    for _ in range(int(step.shape[0]).bit_length()):
        step = step[step]
    return step


def _sibling_laws(n: Columns) -> dict[str, Any]:
    nodes = n.state.nodes
    first, after, before = (nodes[row] for row in (Column.FIRST_CHILD, Column.NEXT_SIBLING, Column.PREVIOUS_SIBLING))

    def child_of(node: Any, parent: Any) -> Any:
        return n.live[_at(n, node)] & (n.parent[_at(n, node)] == parent)

    wrong = n.live & (after != NONE) & ~(child_of(after, n.parent) & (before[_at(n, after)] == n.ids))
    wrong |= n.live & (before != NONE) & ~(child_of(before, n.parent) & (after[_at(n, before)] == n.ids))
    wrong |= n.live & (before == NONE) & (first[n.above] != n.ids)
    headless = (n.live | n.is_root) & (first != NONE) & ~(child_of(first, n.ids) & (before[_at(n, first)] == NONE))
    rows = n.layout.rows
    onward = n.xp.where(n.live & (after >= 0) & (after < rows), after, rows)
    ends = _end(n.xp.concatenate([onward, n.xp.full(1, rows, onward.dtype)]))[:rows]
    return {
        "siblings are linked both ways, from their parent": n.total(wrong) + n.total(headless),
        "sibling lists end": n.total(n.live & (ends != rows)),
    }


def _hash_of(n: Columns) -> Any:
    """[rows] uint32: the multilinear hash of every node's place, as `transitions.walk.bucket_of` computes it."""
    layout, xp = n.layout, n.xp
    keys = n.state.books[layout.hash_keys : layout.retention].view(xp.uint32).reshape(2, layout.hashed_words, 1)
    pages = n.state.tokens.reshape(layout.rows, layout.page_size).view(xp.uint32)
    spaces = xp.where(n.above >= layout.nodes, n.state.nodes[Column.NAMESPACE : Column.NAMESPACE + 4], 0).view(
        xp.uint32
    )
    words = xp.concatenate([pages.T, n.above.astype(xp.uint32)[None], spaces])
    return xp.sum((words & 0xFFFF) * keys[0] + (words >> 16) * keys[1], axis=0, dtype=xp.uint32)


def _chain_laws(n: Columns) -> dict[str, Any]:
    layout, links, rows = n.layout, n.state.links, n.layout.rows
    heads, onward = links[: layout.buckets], links[layout.buckets : layout.sketch_at]
    needed = n.live & (n.ids != n.parent + 1)
    chained = n.per_node(heads, heads != NONE) + n.per_node(onward, needed & (onward != NONE))
    total = _hash_of(n)
    mixed = (total ^ (total >> 16)) * n.xp.uint32(0x9E3779B1)
    bucket = (mixed >> (33 - layout.buckets.bit_length())).astype(n.xp.int32)
    misplaced = n.total((heads != NONE) & (bucket[_at(n, heads)] != n.xp.arange(layout.buckets)))
    misplaced += n.total(needed & (onward != NONE) & (bucket[_at(n, onward)] != bucket))
    step = n.xp.where(needed & (onward >= 0) & (onward < rows), onward, rows)
    ends = _end(n.xp.concatenate([step, n.xp.full(1, rows, step.dtype)]))[:rows]
    return {
        "hash chains hold exactly the nodes that don't follow their parent": n.total(chained != needed),
        "hash chains end": n.total(needed & (ends != rows)),
        "a node is in the chain of its hash": misplaced,
    }


def _twin_laws(n: Columns) -> dict[str, Any]:
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


def _free_node_laws(n: Columns) -> dict[str, Any]:
    on_stack = n.ids < n.state.books[Scalar.FREE_NODES]
    counted = n.per_node(n.state.nodes[Column.FREE_NODES], on_stack)
    free = (n.ids < n.layout.nodes) & ~n.live
    return {"the stack of free nodes holds each of them, once": n.total(counted != free)}


def _walked_order(n: Columns, order: int) -> tuple[Any, Any, Any]:
    """Of one order: [rows] which nodes are listed, [rows] the rank of the list that each is in, broken links."""
    xp, rows = n.xp, n.layout.rows
    older, newer, _ = n.state.orders[order]
    size = int(newer.shape[0])
    index = xp.arange(size)
    entry = (older != NONE) | (index >= rows)
    broken = 0
    for there, back in ((older, newer), (newer, older)):
        inside = (there >= 0) & (there < size)
        broken += n.total(entry & ~(inside & entry[_at(n, there, size)] & (back[_at(n, there, size)] == index)))
    step = xp.where(entry & (index < rows) & (newer >= 0) & (newer < size), newer, index)
    ends = _end(step)
    broken += n.total((index < rows) & entry & (ends < rows))
    return entry[:rows], (ends[:rows] - rows) // n.layout.levels, broken


def _order_laws(n: Columns, tier: Tier) -> dict[str, Any]:
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
    _, newer, due = n.state.orders[n.layout.order(tier)]
    retains = n.state.books[Scalar.POLICY] == Policy.RETENTION
    # A damaged link is another law's matter.
    behind = _at(n, newer[: n.layout.rows])
    followed = listed & (newer[: n.layout.rows] < n.layout.rows) & listed[behind]
    latest = n.state.books[Scalar.TIME] + n.state.books[n.layout.retention + n.layout.levels - 1]
    return {
        f"deadlines rise along the lists of an eviction order {of}": retains
        * n.total(followed & (due[behind] < due[: n.layout.rows])),
        f"deadlines are neither unset nor later than any page is kept {of}": retains
        * n.total(listed & ((due[: n.layout.rows] < 0) | (due[: n.layout.rows] > latest))),
        f"the eviction order is linked both ways {of}": broken,
        f"only live nodes are in the eviction order {of}": n.total(listed & ~n.live),
        f"what can be evicted is in the order of its rank {of}": n.total(
            n.live & victim & ~locked & ~(listed & (rank == nodes[Column.RANK]))
        ),
    }


def _value_order_laws(n: Columns, tier: Tier, pool: int) -> dict[str, Any]:
    listed, rank, broken = _walked_order(n, n.layout.order(tier, pool))
    evictable = n.live & Values(n.state, pool).held(tier)[0]
    of = f"({tier.name.lower()}, pool {pool})"
    return {
        f"the eviction order is linked both ways {of}": broken,
        f"the order lists exactly what can be evicted {of}": n.total(listed != evictable),
        f"a value is in the order of its rank {of}": n.total(listed & (rank != n.state.nodes[Column.RANK])),
    }
