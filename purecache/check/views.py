"""What events, contracts and fingerprints read of a state, derived once. For one state; use under `jax.vmap`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from purecache.check.signatures import mix, page_signature, root_signature, space_signature
from purecache.check.worlds import World
from purecache.state.cache_state import CacheState
from purecache.state.layout import BEING_STORED, LENT, NONE, RESERVED, Column, Ledger, Shelf, TailColumn, Tier
from purecache.state.value_laws import Values


class View(NamedTuple):
    """A state and what is derived from it."""

    state: CacheState
    live: jax.Array
    """[rows] bool: nodes, without roots."""
    listed: jax.Array
    """[rows] bool: nodes and roots."""
    paths: jax.Array
    """[rows, WORDS]: fingerprint of the prefix that ends at each node or root; zero elsewhere."""
    nodes: Any = None
    """[prompts, size]: the node of every page of every prompt of the world, NONE where the tree has none."""

    @property
    def layout(self) -> Any:
        """The sizes of the state."""
        return self.state.layout

    def column(self, row: int) -> jax.Array:
        """[rows] one column of the nodes."""
        return self.state.nodes[row]

    def shelf(self, tier: Tier, pool: int) -> jax.Array:
        """[ranks, capacity] owners of the pages of a tier and pool."""
        layout = self.layout
        start, size = layout.shelf(tier, pool), layout.capacity(tier, pool)
        return self.state.shelves[Shelf.OWNERS, start : start + layout.ranks * size].reshape(layout.ranks, size)

    def open(self) -> jax.Array:
        """[max_operations] bool: operations that are unfinished."""
        return self.state.ledger[Ledger.OPERATION_KIND, : self.layout.max_operations] != NONE

    def operation(self, row: Ledger) -> jax.Array:
        """[max_operations] one row of the table of operations."""
        return self.state.ledger[row, : self.layout.max_operations]


def view_of(state: CacheState, depth: int) -> View:
    """The view of a state whose prefixes have at most `depth` pages."""
    layout = state.layout
    ids = jnp.arange(layout.rows)
    parent = state.nodes[Column.PARENT]
    live = (parent != NONE) & (ids < layout.nodes)
    root = (ids >= layout.nodes) & (ids < layout.nodes + layout.ranks)
    own = page_signature(state.tokens.reshape(layout.rows, layout.page_size))
    spaces = space_signature(state.nodes[Column.NAMESPACE : Column.NAMESPACE + 4].T)
    own = jnp.where((parent >= layout.nodes)[:, None], mix(own, spaces), own)
    roots = jnp.where(root[:, None], root_signature(ids - layout.nodes), 0).astype(jnp.uint32)
    paths, above = roots, jnp.where(live, parent, 0)
    for _ in range(depth):
        paths = jnp.where(live[:, None], mix(paths[above], own), roots)
    return View(state, live, live | root, paths)


def known_view(state: CacheState, paths: jax.Array, nodes: jax.Array) -> View:
    """The view of a state whose paths and nodes of prompts were derived before."""
    layout = state.layout
    ids = jnp.arange(layout.rows)
    live = (state.nodes[Column.PARENT] != NONE) & (ids < layout.nodes)
    return View(state, live, live | ((ids >= layout.nodes) & (ids < layout.nodes + layout.ranks)), paths, nodes)


def nodes_of_prompts(world: World, view: View) -> jax.Array:
    """[prompts, size] the node of every page of every prompt, NONE where the tree has none."""
    wanted, pages = jnp.asarray(world.prompts.signatures), jnp.asarray(world.prompts.pages)
    same = jnp.all(wanted[:, :, None, :] == view.paths, axis=-1) & view.live
    same &= (jnp.arange(world.size) < pages[:, None])[..., None]
    return jnp.max(jnp.where(same, jnp.arange(view.layout.rows), NONE), axis=-1)


def pages_where(mask: jax.Array, size: int) -> jax.Array:
    """[size] the places of a mask [n], lowest first, NONE beyond."""
    place = jnp.cumsum(mask) - 1
    hit = mask[None] & (place[None] == jnp.arange(size)[:, None])
    return jnp.max(jnp.where(hit, jnp.arange(mask.shape[0]), NONE), axis=1).astype(jnp.int32)


def lent_pages(view: View, rank: Any, pool: int, size: int) -> jax.Array:
    """[size] the lent device pages of a rank, lowest first."""
    return pages_where(view.shelf(Tier.DEVICE, pool)[rank] == LENT, size)


def lent_number(view: View, rank: Any, pool: int) -> jax.Array:
    """[...] how many device pages of the ranks [...] are lent."""
    return jnp.sum(view.shelf(Tier.DEVICE, pool)[rank] == LENT, axis=-1, dtype=jnp.int32)


def pages_in_flight(view: View, operation: Any, tier: Tier, pool: int, rank: Any) -> jax.Array:
    """[capacity] bool: pages of a rank that an operation waits for, with a node or without one."""
    owners = view.shelf(tier, pool)[rank]
    found = owners == RESERVED - operation
    if pool:
        values, node = Values(view.state, pool), jnp.maximum(owners, 0)
        waits = (values.incoming[node] == jnp.arange(len(owners))) & (values.operation[node] == operation)
        found |= (owners >= 0) & waits
    return found


def ancestors(view: View, node: Any, depth: int) -> jax.Array:
    """[depth] `node` and what is above it, deepest first; roots stay roots."""
    found = []
    for _ in range(depth):
        found.append(node)
        above = view.column(Column.PARENT)[jnp.maximum(node, 0)]
        node = jnp.where((node >= 0) & (node < view.layout.nodes), above, node)
    return jnp.stack(found)


def members(view: View, depth: int) -> jax.Array:
    """[max_operations, depth] nodes of every open operation of pool 0 that moves pages of the tree, else NONE."""
    node, count = view.operation(Ledger.OPERATION_NODE), view.operation(Ledger.OPERATION_COUNT)
    kv = view.open() & (view.operation(Ledger.OPERATION_POOL) == 0)
    every = jax.vmap(lambda node: ancestors(view, node, depth))(node)
    return jnp.where(kv[:, None] & (jnp.arange(depth) < count[:, None]), every, NONE)


def stored_by(view: View, operation: Any, pool: int) -> jax.Array:
    """[rows] bool: nodes whose value an operation is storing."""
    row = view.layout.tail_row(TailColumn.STORED, pool)
    return view.live & (view.column(row) == BEING_STORED + operation)
