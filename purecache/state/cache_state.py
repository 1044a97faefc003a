"""The whole cache as one immutable pytree of int32 arrays."""

from dataclasses import replace
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from purecache.state.config import CacheConfig, WritePolicy
from purecache.state.layout import (
    FREE,
    NONE,
    TIERS,
    Account,
    Layout,
    Operation,
    Receipt,
    Scalar,
    Score,
    Tier,
    Tree,
)


class CacheState(eqx.Module):
    """State of a cache. `rows`, `buckets`, `shelves` and `head` are those of `layout`; every array is int32.

    A node is one page of tokens under its parent. `NONE` marks an empty entry. Columns of one concern are rows of
    one array, since each donated array costs a microsecond per call.
    """

    tokens: jax.Array
    """[rows * page_size]: tokens of each node, flat so that a run of nodes is one slice."""
    namespaces: jax.Array
    """[4, rows]: 128-bit namespace of nodes directly below a root; elsewhere unused."""
    links: jax.Array
    """[buckets + rows]: hash chains, heads then nexts. A node that follows its parent's id is found without them."""
    hash_keys: jax.Array
    """[page_size + 5]: secret multipliers of the hash: tokens, parent, namespace."""
    tree: jax.Array
    """[len(Tree), rows]."""
    pages: jax.Array
    """[len(Tier), pools, rows]: page id per tier and pool, local to the rank."""
    locks: jax.Array
    """[tiers, rows]: lock references of a node: its own receipts and operations, and its locked children."""
    scores: jax.Array
    """[len(Score), rows]."""
    orders: jax.Array
    """[tiers, 2, rows + ranks * levels]: eviction orders, circular lists (older, newer) closed by sentinels."""
    free_nodes: jax.Array
    """[nodes]: stack of free node ids."""
    free_pages: jax.Array
    """[shelves]: a stack of free page ids per tier, pool and rank."""
    owners: jax.Array
    """[shelves]: the node that owns a page, or FREE, or LENT."""
    receipts: jax.Array
    """[len(Receipt), max_receipts]."""
    operations: jax.Array
    """[len(Operation), max_operations]."""
    accounts: jax.Array
    """[len(Account), tiers, pools, ranks]."""
    scalars: jax.Array
    """[len(Scalar)]."""
    token: jax.Array
    """[] always 0: what orders reads before writes, see `transitions.columns`."""
    layout: Layout = eqx.field(static=True)

    def replace(self, **arrays: Any) -> Self:
        """The same state with some arrays exchanged."""
        return replace(self, **arrays)

    @property
    def parent(self) -> jax.Array:
        """[rows] parent of each live node, NONE for roots and dead nodes."""
        return self.tree[Tree.PARENT]

    def column(self, tier: Tier, pool: int = 0) -> jax.Array:
        """[rows] page id of each node in a tier and pool."""
        return self.pages[tier, pool]

    def scalar(self, name: Scalar) -> jax.Array:
        """[] one entry of `scalars`."""
        return self.scalars[name]


def empty_arrays(layout: Layout) -> dict[str, np.ndarray]:
    """The arrays of a cache that holds nothing, apart from those that follow from settings and chance."""
    return {
        "tokens": np.zeros(layout.rows * layout.page_size, np.int32),
        "namespaces": np.zeros((4, layout.rows), np.int32),
        "links": np.full(layout.buckets + layout.rows, NONE, np.int32),
        "tree": _empty_tree(layout),
        "pages": np.full((len(Tier), layout.pools, layout.rows), NONE, np.int32),
        "locks": _root_locks(layout),
        "scores": np.zeros((len(Score), layout.rows), np.int32),
        "orders": _empty_orders(layout),
        "free_nodes": np.arange(layout.nodes, dtype=np.int32)[::-1].copy(),
        "receipts": _vacant(len(Receipt), Receipt.GENERATION, Receipt.VACANT, layout.max_receipts),
        "operations": _vacant(len(Operation), Operation.GENERATION, Operation.VACANT, layout.max_operations),
    }


def empty_state(config: CacheConfig) -> CacheState:
    """A cache that holds nothing, as NumPy arrays (no device is touched)."""
    layout = config.layout
    arrays = empty_arrays(layout) | {
        "hash_keys": _hash_keys(layout, config.seed),
        "free_pages": np.concatenate([_shelf(layout, t) for t in TIERS for _ in range(layout.pools * layout.ranks)]),
        "owners": np.full(layout.shelves, FREE, np.int32),
        "accounts": _empty_accounts(layout),
        "scalars": _scalars(config),
        "token": np.zeros((), np.int32),
    }
    return CacheState(**arrays, layout=layout)  # type: ignore[arg-type]


def as_jax(state: CacheState, device: jax.Device | None = None) -> CacheState:
    """The state as JAX arrays on `device`, copied: a transition may donate them without touching the original."""
    with jax.default_device(device):
        return jax.tree.map(lambda array: jnp.array(array, copy=True), state)


def _hash_keys(layout: Layout, seed: int) -> np.ndarray:
    words = np.random.default_rng(seed).integers(0, 2**32, layout.page_size + 5, np.uint32)
    return (words | 1).view(np.int32)


def _empty_tree(layout: Layout) -> np.ndarray:
    tree = np.full((len(Tree), layout.rows), NONE, np.int32)
    tree[Tree.DEVICE_CHILDREN] = 0
    tree[Tree.RANK, layout.nodes : layout.nodes + layout.ranks] = np.arange(layout.ranks)
    return tree


def _root_locks(layout: Layout) -> np.ndarray:
    locks = np.zeros((len(TIERS), layout.rows), np.int32)
    locks[:, layout.nodes : layout.nodes + layout.ranks] = 1
    return locks


def _empty_orders(layout: Layout) -> np.ndarray:
    heads = layout.ranks * layout.levels
    orders = np.full((len(TIERS), 2, layout.rows + heads), NONE, np.int32)
    orders[:, :, layout.rows :] = np.arange(layout.rows, layout.rows + heads)
    return orders


def _shelf(layout: Layout, tier: Tier) -> np.ndarray:
    return np.arange(layout.capacity(tier), dtype=np.int32)[::-1]


def _vacant(rows: int, generation: int, stack: int, size: int) -> np.ndarray:
    table = np.full((rows, size), NONE, np.int32)
    table[generation] = 0
    table[stack] = np.arange(size)[::-1]
    return table


def _empty_accounts(layout: Layout) -> np.ndarray:
    accounts = np.zeros((len(Account), len(TIERS), layout.pools, layout.ranks), np.int32)
    for tier in TIERS:
        accounts[Account.FREE, tier] = layout.capacity(tier)
    return accounts


def _scalars(config: CacheConfig) -> np.ndarray:
    scalars = np.zeros(len(Scalar), np.int32)
    scalars[Scalar.FREE_NODES] = config.layout.nodes
    scalars[Scalar.VACANT_RECEIPTS] = config.max_receipts
    scalars[Scalar.VACANT_OPERATIONS] = config.max_operations
    scalars[Scalar.POLICY] = int(config.policy)
    scalars[Scalar.WRITE_BACK] = config.write == WritePolicy.WRITE_BACK and config.host_pages > 0
    scalars[Scalar.BACKUP_HITS] = config.backup_hits
    scalars[Scalar.LOAD_BACK_TOKENS] = config.load_back_threshold
    return scalars
