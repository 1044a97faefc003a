"""States as bytes: what makes no difference is set to fixed values, what is never read to values that would show.

Sound because transitions only compare clocks with clocks and generations with generations, and the callers of the model
always name nodes, receipts and operations as they are now; stale names are tried as events of their own.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purecache.check.worlds import World
from purecache.state import CacheState
from purecache.state.layout import NONE, Account, Column, Layout, Ledger, Scalar, Shelf, TailColumn, Tier
from purecache.state.value_laws import Values

CLOCK = 1
"""The clock of every packed state; all nodes were born at it."""
UNREAD = 99
"""Stands where no transition may read: a decision that depends on it goes wrong."""


class Packing:
    """Packs the states of one world. The settings of the world are an argument, so that worlds of one layout share
    programs."""

    def __init__(self, world: World) -> None:
        self._layout, self._hit_cap = world.config.layout, world.hit_cap
        start = world.start
        self.settings = np.array(start.books)
        self.settings[Scalar.CLOCK] = CLOCK
        """[books]: settings and hash keys, the clock, and counters of zero."""
        self._shapes = [getattr(start, name).shape for name in _PACKED]
        self.width = sum(math.prod(shape) for shape in self._shapes) + len(_variable(start.books, self._layout))
        """Bytes of a packed state."""
        as_rows = jax.tree.map(lambda leaf: jnp.asarray(leaf), start)
        self.start = np.asarray(self.pack(self.normal(as_rows)))
        """int8[width]: the empty cache."""

    def pack(self, state: CacheState) -> jax.Array:
        """int8[width] of a normal state."""
        parts = [getattr(state, name).reshape(-1) for name in _PACKED]
        return jnp.concatenate([*parts, _variable(state.books, self._layout)]).astype(jnp.int8)

    def unpack(self, packed: jax.Array, settings: jax.Array) -> CacheState:
        """The state that `pack` packed."""
        arrays, at = {}, 0
        for name, shape in zip(_PACKED, self._shapes, strict=True):
            size = math.prod(shape)
            arrays[name] = packed[at : at + size].reshape(shape).astype(jnp.int32)
            at += size
        heights, accounts = packed[at : at + _HEIGHTS], packed[at + _HEIGHTS :]
        first, last = len(Scalar), self._layout.hash_keys
        books = jnp.concatenate(
            [
                settings[:1],
                heights.astype(jnp.int32),
                settings[1 + _HEIGHTS : first],
                accounts.astype(jnp.int32),
                settings[last:],
            ]
        )
        return CacheState(**arrays, books=books, token=jnp.int32(0), layout=self._layout)

    def fits(self, state: CacheState) -> jax.Array:
        """[] bool: whether every number of a normal state fits into a byte."""
        parts = [getattr(state, name).reshape(-1) for name in _PACKED]
        return jnp.all(jnp.abs(jnp.concatenate([*parts, _variable(state.books, self._layout)])) < 128)

    def normal(self, state: CacheState) -> CacheState:
        """The state with everything that makes no difference set to fixed values."""
        nodes, links, orders = self._nodes(state), self._links(state), self._orders(state)
        return state.replace(
            nodes=nodes,
            links=links,
            orders=orders,
            tokens=self._tokens(state),
            shelves=self._shelves(state),
            ledger=self._ledger(state),
        )

    def _live(self, state: CacheState) -> jax.Array:
        ids = jnp.arange(self._layout.rows)
        return (state.nodes[Column.PARENT] != NONE) & (ids < self._layout.nodes)

    def _nodes(self, state: CacheState) -> jax.Array:
        layout, nodes, live = self._layout, state.nodes, self._live(state)
        padding = jnp.arange(layout.rows) >= layout.nodes
        written = (
            Column.FIRST_CHILD,
            Column.NEXT_SIBLING,
            Column.PREVIOUS_SIBLING,
            Column.RANK,
            Column.HITS,
            Column.PRIORITY,
            Column.STORED,
            Column.DEPTH,
        )
        rows: dict[int, Any] = {row: jnp.where(live | padding, nodes[row], UNREAD) for row in written}
        rows[Column.HITS] = jnp.where(live, jnp.minimum(nodes[Column.HITS], self._hit_cap), rows[Column.HITS])
        rows[Column.BORN] = jnp.where(live, CLOCK, jnp.where(padding, nodes[Column.BORN], UNREAD))
        below_root = live & (nodes[Column.PARENT] >= layout.nodes)
        for word in range(4):
            row = Column.NAMESPACE + word
            rows[row] = jnp.where(below_root | padding, nodes[row], UNREAD)
        free = jnp.arange(layout.rows) < state.books[Scalar.FREE_NODES]
        rows[Column.FREE_NODES] = jnp.where(free, nodes[Column.FREE_NODES], UNREAD)
        for pool in range(1, layout.pools):
            operation, stored = (layout.tail_row(column, pool) for column in (TailColumn.OPERATION, TailColumn.STORED))
            waits = Values(state, pool).incoming >= 0
            rows[operation] = jnp.where(waits | padding, nodes[operation], UNREAD)
            rows[stored] = jnp.where(live | padding, nodes[stored], UNREAD)
        return _with_rows(nodes, rows)

    def _tokens(self, state: CacheState) -> jax.Array:
        pages = state.tokens.reshape(self._layout.rows, self._layout.page_size)
        padding = jnp.arange(self._layout.rows) >= self._layout.nodes
        return jnp.where((self._live(state) | padding)[:, None], pages, UNREAD).reshape(-1)

    def _links(self, state: CacheState) -> jax.Array:
        layout = self._layout
        ids = jnp.arange(layout.rows)
        chained = self._live(state) & (ids != state.nodes[Column.PARENT] + 1)
        nexts, sketch = state.links[layout.buckets : layout.sketch_at], state.links[layout.sketch_at :]
        onward = jnp.where(chained | (ids >= layout.nodes), nexts, UNREAD)
        return jnp.concatenate([state.links[: layout.buckets], onward, sketch])

    def _orders(self, state: CacheState) -> jax.Array:
        head = jnp.arange(state.orders.shape[-1]) >= self._layout.rows
        listed = head | (state.orders[:, 0] != NONE)
        return jnp.where(listed[:, None], state.orders, NONE)

    def _shelves(self, state: CacheState) -> jax.Array:
        layout, stack = self._layout, state.shelves[Shelf.FREE_PAGES]
        used = []
        for tier in (Tier.DEVICE, Tier.HOST):
            for pool in range(layout.pools):
                for rank in range(layout.ranks):
                    size = layout.capacity(tier, pool)
                    used.append(jnp.arange(size) < state.account(Account.FREE, tier, rank, pool))
        return _with_rows(state.shelves, {Shelf.FREE_PAGES: jnp.where(jnp.concatenate(used), stack, UNREAD)})

    def _ledger(self, state: CacheState) -> jax.Array:
        ledger, index = state.ledger, jnp.arange(self._layout.ledger)
        out = ledger[Ledger.OPERATION_KIND] != NONE
        unopened = index >= self._layout.max_operations
        described = (Ledger.OPERATION_NODE, Ledger.OPERATION_COUNT, Ledger.OPERATION_POOL, Ledger.OPERATION_RANK)
        rows: dict[int, Any] = {row: jnp.where(out | unopened, ledger[row], UNREAD) for row in described}
        for row, height in (
            (Ledger.OPERATION_VACANT, Scalar.VACANT_OPERATIONS),
            (Ledger.RECEIPT_VACANT, Scalar.VACANT_RECEIPTS),
        ):
            rows[row] = jnp.where(index < state.books[height], ledger[row], UNREAD)
        for row in (Ledger.OPERATION_GENERATION, Ledger.RECEIPT_GENERATION):
            rows[row] = jnp.zeros_like(index)
        return _with_rows(ledger, rows)


def _with_rows(matrix: jax.Array, rows: dict[int, Any]) -> jax.Array:
    """The matrix with some rows exchanged. Not a scatter: see `purecache.check.programs`."""
    exchanged = {int(row): value for row, value in rows.items()}
    return jnp.stack([exchanged.get(row, matrix[row]).astype(jnp.int32) for row in range(matrix.shape[0])])


_PACKED = ("tokens", "nodes", "links", "orders", "shelves", "ledger")
"""Arrays that are packed whole."""


_HEIGHTS = Scalar.TIME - Scalar.CLOCK
"""Scalars right behind the clock that say how high stacks are, and what time it is."""


def _variable(books: Any, layout: Layout) -> Any:
    """What changes in `books` and makes a difference: heights of stacks, the time, and accounts."""
    parts = [books[1 : 1 + _HEIGHTS], books[len(Scalar) : layout.hash_keys]]
    return jnp.concatenate(parts) if isinstance(books, jax.Array) else np.concatenate(parts)
