"""Events of transfers: backups, load backs, stores and prefetches begin, and end in every way they can."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purecache.transitions as t
from purecache.check.events import SOUND, STALE, Kind, table
from purecache.check.handles import handle_generation, live_node, node_handle, node_numbers
from purecache.check.views import View, ancestors, pages_in_flight, pages_where, stored_by
from purecache.check.worlds import World
from purecache.entries import of_pool
from purecache.state.layout import Column, Ledger, Tier, TransferKind
from purecache.transitions import Status

MOST_PREFETCHED = 2
"""Pages that one prefetch asks for, at most."""


def transfer_kinds(world: World) -> list[Kind]:
    """The kinds of a world that move pages between tiers."""
    layout, kinds = world.config.layout, []
    if not layout.host_pages:
        return []
    kinds += [
        _begin(world, "begin_backup", lambda state, handle: t.begin_backup(state, handle, jnp.int32(0), world.size)),
        _begin(world, "begin_load_back", lambda state, handle: t.begin_load_back(state, handle, world.size)),
        _finish(world, "finish_backup", t.finish_backup, TransferKind.BACKUP),
        _finish(world, "finish_load_back", t.finish_load_back, TransferKind.LOAD_BACK),
    ]
    for pool in range(1, layout.pools):
        kinds += [
            _finish_values(world, "finish_backup", t.finish_value_backup, TransferKind.BACKUP, Tier.HOST, pool),
            _finish_values(world, "finish_load_back", t.finish_value_load, TransferKind.LOAD_BACK, Tier.DEVICE, pool),
        ]
    if world.storage:
        most = tuple(jnp.int32(world.size) for _ in range(layout.pools))
        kinds += [
            _begin(world, "begin_store", lambda state, handle: t.begin_store(state, handle, most, world.size)),
            _finish(world, "finish_store", t.finish_store, TransferKind.STORE),
            _begin_prefetch(world, 0),
            _finish_prefetch(world, 0),
        ]
        for pool in range(1, layout.pools):
            kinds += [_finish_value_store(world, pool), _begin_prefetch(world, pool), _finish_prefetch(world, pool)]
    return kinds


def _begin(world: World, name: str, function: Any) -> Kind:
    return Kind(
        name,
        ("node", "flaw"),
        table(node_numbers(world), [SOUND, STALE]),
        live_node,
        lambda view, p: (node_handle(p.node, p.flaw),),
        function,
        ((STALE, Status.BAD_NODE),),
    )


def _is_open(view: View, operation: jax.Array, kind: TransferKind, pool: int) -> jax.Array:
    good = view.operation(Ledger.OPERATION_KIND)[operation] == kind
    return good & (view.operation(Ledger.OPERATION_POOL)[operation] == pool)


def _handle(p: Any) -> t.Handle:
    return t.Handle(p.operation, handle_generation(p.flaw))


def outcome(p: Any, size: int) -> jax.Array:
    """[size] bool: how each page of an operation fared."""
    return ((p.outcome >> jnp.arange(size)) & 1) > 0


def _may_end(view: View, p: Any, kind: TransferKind, pool: int, size: int) -> jax.Array:
    """Whether an operation is open, or, for a stale completion, anything: and the outcome is one for its pages."""
    count = view.operation(Ledger.OPERATION_COUNT)[p.operation]
    good = _is_open(view, p.operation, kind, pool) & (p.outcome < (1 << jnp.minimum(count, size)))
    return jnp.where(p.flaw == STALE, p.outcome == 0, good)


def _endings(world: World, size: int) -> np.ndarray:
    return table(range(world.config.max_operations), range(1 << size), [SOUND, STALE])


def _leading(view: View, p: Any, size: int) -> jax.Array:
    """[] pages that arrived with all above them; the outcome is deepest first."""
    count, index = view.operation(Ledger.OPERATION_COUNT)[p.operation], jnp.arange(size)
    return count - 1 - jnp.max(jnp.where((index < count) & ~outcome(p, size), index, -1))


def _each(view: View, p: Any, size: int) -> jax.Array:
    """[] pages that arrived."""
    count = view.operation(Ledger.OPERATION_COUNT)[p.operation]
    return jnp.sum(outcome(p, size) & (jnp.arange(size) < count), dtype=jnp.int32)


def _first(view: View, p: Any, size: int) -> jax.Array:
    """[] pages that arrived with all before them; the outcome is in the order of the prompt."""
    count, index = view.operation(Ledger.OPERATION_COUNT)[p.operation], jnp.arange(size)
    return jnp.minimum(count, jnp.min(jnp.where(outcome(p, size), size, index)))


_STALE = ((STALE, Status.STALE),)


def _finish(world: World, name: str, function: Any, kind: TransferKind) -> Kind:
    size = world.depth
    return Kind(
        name,
        ("operation", "outcome", "flaw"),
        _endings(world, size),
        lambda view, p: _may_end(view, p, kind, 0, size),
        lambda view, p: (_handle(p), outcome(p, world.size)),
        function,
        _STALE,
        publishable=lambda view, p: _leading(view, p, size),
    )


def _pages_of(view: View, operation: jax.Array, tier: Tier, pool: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Rank of an operation, and [size] the pages that it fills."""
    rank = jnp.clip(view.operation(Ledger.OPERATION_RANK)[operation], 0, view.layout.ranks - 1)
    return rank, pages_where(pages_in_flight(view, operation, tier, pool, rank), size)


def _finish_values(world: World, name: str, function: Any, kind: TransferKind, tier: Tier, pool: int) -> Kind:
    size = min(world.depth, world.config.layout.capacity(tier, pool))

    def arguments(view: View, p: Any) -> tuple[Any, ...]:
        rank, pages = _pages_of(view, p.operation, tier, pool, size)
        return _handle(p), rank, pages, outcome(p, size)

    return Kind(
        of_pool(name, pool),
        ("operation", "outcome", "flaw"),
        _endings(world, size),
        lambda view, p: _may_end(view, p, kind, pool, size),
        arguments,
        functools.partial(function, pool=pool),
        _STALE,
        publishable=lambda view, p: _each(view, p, size),
    )


def _finish_value_store(world: World, pool: int) -> Kind:
    """The nodes are those that are left of the effect: that others are named, too, is for the simulator."""
    size = min(world.depth, world.config.layout.capacity(Tier.HOST, pool))

    def arguments(view: View, p: Any) -> tuple[Any, ...]:
        return _handle(p), pages_where(stored_by(view, p.operation, pool), size), outcome(p, size)

    return Kind(
        of_pool("finish_store", pool),
        ("operation", "outcome", "flaw"),
        _endings(world, size),
        lambda view, p: _may_end(view, p, TransferKind.STORE, pool, size),
        arguments,
        functools.partial(t.finish_value_store, pool=pool),
        _STALE,
    )


def _begin_prefetch(world: World, pool: int) -> Kind:
    capacity = world.config.layout.capacity(Tier.HOST, pool)

    def enabled(view: View, p: Any) -> jax.Array:
        fits = view.column(Column.DEPTH)[p.node] + p.number <= world.depth
        return live_node(view, p) & fits

    def function(state: Any, handle: Any, number: jax.Array) -> Any:
        return t.begin_prefetch(state, handle, number, max(1, capacity), pool)

    return Kind(
        of_pool("begin_prefetch", pool),
        ("node", "number", "flaw"),
        table(node_numbers(world), range(1, min(MOST_PREFETCHED, world.depth) + 1), [SOUND, STALE]),
        enabled,
        lambda view, p: (node_handle(p.node, p.flaw), p.number),
        function,
        ((STALE, Status.BAD_NODE),),
    )


def _finish_prefetch(world: World, pool: int) -> Kind:
    """Ends with the pages of every prompt that goes on from the anchor, whichever of them arrived."""
    most = min(MOST_PREFETCHED, world.depth)
    pages = np.array(world.contents, np.int32)
    branches = len(pages) ** most

    def prompt(view: View, p: Any, count: jax.Array, rank: jax.Array) -> tuple[t.Prompt, jax.Array]:
        anchor = jnp.maximum(view.operation(Ledger.OPERATION_NODE)[p.operation], 0)
        depth = jnp.clip(view.column(Column.DEPTH)[anchor], 0, world.depth)
        above, width = ancestors(view, anchor, world.depth + 1), world.config.page_size
        tokens = view.state.tokens.reshape(-1, width)
        index = jnp.arange(world.size)
        node = above[jnp.clip(depth - 1 - index, 0, world.depth)]
        step = jnp.clip(index - depth, 0, most - 1)
        content = (p.branch // (len(pages) ** step)) % len(pages)
        own = jnp.where((index < depth)[:, None], tokens[node], jnp.asarray(pages)[content])
        top = above[jnp.clip(depth - 1, 0, world.depth)]
        words = view.state.nodes[Column.NAMESPACE : Column.NAMESPACE + 4, top]
        words = jnp.where(depth > 0, words, jnp.array([1, 0, 0, 0]) * p.space)
        length = jnp.minimum(depth + count, world.depth)
        return t.Prompt(own.reshape(-1), length, words, rank), depth

    def arguments(view: View, p: Any) -> tuple[Any, ...]:
        rank, held = _pages_of(view, p.operation, Tier.HOST, pool, most)
        count = jnp.sum(held >= 0, dtype=jnp.int32)
        named, depth = prompt(view, p, count, rank)
        return _handle(p), named, depth, held, outcome(p, most)

    def enabled(view: View, p: Any) -> jax.Array:
        anchor = jnp.maximum(view.operation(Ledger.OPERATION_NODE)[p.operation], 0)
        count = jnp.minimum(view.operation(Ledger.OPERATION_COUNT)[p.operation], most)
        fits = p.branch < len(pages) ** count
        fits &= (p.space == 0) | (anchor >= view.layout.nodes)
        stale = (p.branch == 0) & (p.space == 0)
        return _may_end(view, p, TransferKind.PREFETCH, pool, most) & jnp.where(p.flaw == STALE, stale, fits)

    rows = table(
        range(world.config.max_operations),
        range(1 << most),
        range(branches),
        range(world.namespaces),
        [SOUND, STALE],
    )
    return Kind(
        of_pool("finish_prefetch", pool),
        ("operation", "outcome", "branch", "space", "flaw"),
        rows,
        enabled,
        arguments,
        functools.partial(t.finish_value_prefetch, pool=pool) if pool else t.finish_prefetch,
        _STALE,
        publishable=lambda view, p: (_each if pool else _first)(view, p, most),
    )
