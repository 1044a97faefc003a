"""The whole cache as one immutable pytree of int32 arrays."""

from dataclasses import replace
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from purecache.meshes import no_mesh
from purecache.state.config import RULES, CacheConfig, Policy, WritePolicy
from purecache.state.layout import (
    FREE,
    LENT,
    LOCKS,
    NONE,
    TIERS,
    Account,
    Column,
    Layout,
    Ledger,
    Scalar,
    Shelf,
    Stored,
    TailColumn,
    Tier,
)


class CacheState(eqx.Module):
    """State of a cache: the prefix tree, free-lists, locks, unfinished operations and counters. All arrays are int32.

    A node is one page of tokens under its parent. What has the same length stands in rows of one array, since every
    donated array costs a microsecond or two per call; the enums of `state.layout` name the rows. `rows`, `buckets` and
    so on are sizes of `layout`.
    """

    tokens: jax.Array
    """[rows * page_size]: tokens of each node, flat so that a run of nodes is one slice."""
    nodes: jax.Array
    """[columns, rows]: see `Column`."""
    links: jax.Array
    """[links]: hash chains, heads [buckets] then nexts [rows]; a node that follows its parent's id is found without
    them. Then the frequency sketch, if there is one: see `transitions.sketch`."""
    orders: jax.Array
    """[pools * tiers, 3, rows + ranks * levels]: eviction orders, circular lists (older, newer) closed by sentinels;
    and the deadlines of the entries, under Policy.RETENTION.
    Those of tail pools list exactly the values that may be evicted, each rank in its first list."""
    shelves: jax.Array
    """[len(Shelf), shelf_length]: free-list and owners of the pages, per tier, pool and rank."""
    ledger: jax.Array
    """[len(Ledger), ledger]: unfinished operations and lock receipts."""
    books: jax.Array
    """[books]: scalars (`Scalar`), accounts [len(Account), tiers, pools, ranks], the keys of the hash, then how long
    pages of each level are kept."""
    token: jax.Array
    """[] always 0: what orders reads before writes, see `transitions.columns`."""
    layout: Layout = eqx.field(static=True)

    def replace(self, **arrays: Any) -> Self:
        """The same state with some arrays exchanged."""
        return replace(self, **arrays)

    def scalar(self, name: Scalar) -> jax.Array:
        """[] one of the scalars."""
        return self.books[name]

    def account(self, name: Account, tier: Tier, rank: Any, pool: Any = 0) -> jax.Array:
        """[] pages of a tier, rank and pool that are in this account."""
        return self.books[self.layout.account(name, tier, rank, pool)]


def empty_arrays(layout: Layout) -> dict[str, np.ndarray]:
    """The arrays of a cache that holds nothing; in `books`, settings and hash keys are still missing."""
    return {
        "tokens": np.zeros(layout.rows * layout.page_size, np.int32),
        "nodes": _empty_nodes(layout),
        "links": np.append(
            np.full(layout.sketch_at, NONE, np.int32), np.zeros(layout.links - layout.sketch_at, np.int32)
        ),
        "orders": _empty_orders(layout),
        "shelves": _empty_shelves(layout),
        "ledger": _empty_ledger(layout),
        "books": _empty_books(layout),
        "token": np.zeros((), np.int32),
    }


def empty_state(config: CacheConfig) -> CacheState:
    """A cache that holds nothing, as NumPy arrays (no device is touched)."""
    layout = config.layout
    arrays = empty_arrays(layout)
    books = arrays["books"]
    books[Scalar.POLICY] = int(config.policy)
    books[Scalar.MOVES : Scalar.ALWAYS_NEXT + 1] = RULES[Policy(config.policy)]
    if config.write == WritePolicy.WRITE_BACK and config.host_pages:
        books[Scalar.WRITE_BACK] = config.backup_threshold or 1
    books[Scalar.EXCLUSIVE] = config.exclusive
    books[Scalar.BACKUP_HITS] = config.backup_hits
    books[Scalar.LOAD_BACK_TOKENS] = config.load_back_threshold
    if config.external_pages:
        books[Scalar.EXTERNAL] = 1
        _lend_all(layout, arrays["shelves"], books)
    keys = np.random.default_rng(config.seed).integers(0, 2**32, 2 * layout.hashed_words, np.uint32)
    books[layout.hash_keys : layout.retention] = keys.view(np.int32)
    books[layout.retention :] = config.retention_of_levels
    return CacheState(**arrays, layout=layout)  # type: ignore[arg-type]


def _lend_all(layout: Layout, shelves: np.ndarray, books: np.ndarray) -> None:
    """Mark every device page as lent; what stands in an empty free-list is never read."""
    shelves[Shelf.OWNERS, : layout.shelf(Tier.HOST)] = LENT
    for pool in range(layout.pools):
        for rank in range(layout.ranks):
            books[layout.account(Account.FREE, Tier.DEVICE, rank, pool)] = 0
            books[layout.account(Account.LENT, Tier.DEVICE, rank, pool)] = layout.capacity(Tier.DEVICE, pool)


def as_jax(state: CacheState, device: Any = None) -> CacheState:
    """The state as JAX arrays on `device`, copied: a transition may donate them without touching the original."""
    with jax.default_device(device), no_mesh():
        copied = jax.tree.map(lambda array: jnp.array(array, copy=True), state)
    # Committed, so that calls find the programs that were compiled for arrays on this device.
    return copied if device is None else jax.device_put(copied, device)


def _empty_nodes(layout: Layout) -> np.ndarray:
    nodes = np.full((layout.columns, layout.rows), NONE, np.int32)
    nodes[Column.DEVICE_CHILDREN : Column.FREE_NODES] = 0
    nodes[Column.STORED] = Stored.NO
    nodes[Column.FREE_NODES, : layout.nodes] = np.arange(layout.nodes)[::-1]
    roots = slice(layout.nodes, layout.nodes + layout.ranks)
    nodes[Column.RANK, roots] = np.arange(layout.ranks)
    nodes[LOCKS, roots] = 1
    nodes[Column.DEPTH, roots] = 0
    for pool in range(1, layout.pools):
        nodes[layout.tail_row(TailColumn.LOCKS, pool)] = 0
        nodes[layout.tail_row(TailColumn.STORED, pool)] = Stored.NO
    return nodes


def _empty_orders(layout: Layout) -> np.ndarray:
    heads = layout.ranks * layout.levels
    orders = np.full((layout.pools * len(TIERS), 3, layout.rows + heads), NONE, np.int32)
    orders[:, :2, layout.rows :] = np.arange(layout.rows, layout.rows + heads)
    return orders


def _empty_shelves(layout: Layout) -> np.ndarray:
    shelves = np.full((len(Shelf), layout.shelf_length), FREE, np.int32)
    sizes = [layout.capacity(tier, pool) for tier in TIERS for pool in range(layout.pools)]
    stacks = [np.arange(size)[::-1] for size in sizes for _ in range(layout.ranks)]
    shelves[Shelf.FREE_PAGES] = np.concatenate(stacks)
    return shelves


def _empty_ledger(layout: Layout) -> np.ndarray:
    ledger = np.full((len(Ledger), layout.ledger), NONE, np.int32)
    ledger[[Ledger.OPERATION_GENERATION, Ledger.RECEIPT_GENERATION]] = 0
    ledger[Ledger.OPERATION_VACANT, : layout.max_operations] = np.arange(layout.max_operations)[::-1]
    ledger[Ledger.RECEIPT_VACANT, : layout.max_receipts] = np.arange(layout.max_receipts)[::-1]
    return ledger


def _empty_books(layout: Layout) -> np.ndarray:
    books = np.zeros(layout.books, np.int32)
    books[Scalar.FREE_NODES] = layout.nodes
    books[Scalar.VACANT_RECEIPTS] = layout.max_receipts
    books[Scalar.VACANT_OPERATIONS] = layout.max_operations
    for tier in TIERS:
        for pool in range(layout.pools):
            for rank in range(layout.ranks):
                books[layout.account(Account.FREE, tier, rank, pool)] = layout.capacity(tier, pool)
    return books
