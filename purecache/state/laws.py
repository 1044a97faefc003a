"""The laws of the state, recomputed from its arrays (never from its counters).

`broken_laws` is written once for NumPy and JAX: with NumPy it serves `violations`, inside a compiled program it serves
the chex assertions and the model checker.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from purecache.state.cache_state import CacheState, empty_arrays
from purecache.state.layout import (
    FREE,
    LENT,
    NONE,
    RESERVED,
    TIERS,
    WITHHELD,
    Account,
    Column,
    Ledger,
    Scalar,
    Shelf,
    Stored,
    Tier,
    TransferKind,
)
from purecache.state.linked import link_laws
from purecache.state.node_columns import Columns, counted
from purecache.state.value_laws import Values, broken_value_laws


def broken_laws(state: CacheState, xp: ModuleType = np) -> dict[str, Any]:
    """For each law, how often it is broken: int scalars of `xp` (numpy or jax.numpy)."""
    nodes = Columns(state, xp)
    kv = _tree_laws(nodes) | _page_laws(nodes) | _lock_laws(nodes) | _table_laws(nodes)
    return kv | link_laws(state, xp) | broken_value_laws(state, xp)


def violations(state: CacheState) -> list[str]:
    """Every broken law in words; none if the state is sound. Copies the state to NumPy: for tests and tools."""
    host = jax.tree.map(np.asarray, state)
    return [f"{law}: broken {int(times)} times" for law, times in broken_laws(host, np).items() if times]


def assert_shapes(state: CacheState) -> None:
    """Assert shape and dtype of every array (chex). Works on tracers too."""
    for name, array in empty_arrays(state.layout).items():
        chex.assert_shape(getattr(state, name), array.shape)
    chex.assert_type(jax.tree.leaves(state), jnp.int32)


def assert_laws(state: CacheState) -> None:
    """Assert every law (chex). Inside jit, call the function through `chex.chexify`."""
    assert_shapes(state)
    for law, times in broken_laws(state, jnp).items():
        chex.assert_trees_all_equal(times, jnp.zeros_like(times), custom_message=law)


@functools.cache
def law_checker() -> Callable[[CacheState], None]:
    """A function that raises AssertionError for a state that breaks a law: one compiled program per layout."""

    @functools.partial(chex.chexify, async_check=False)
    @jax.jit
    def assertions(state: CacheState) -> jax.Array:
        assert_laws(state)
        return state.token

    def check(state: CacheState) -> None:
        assertions(state)

    return check


def _tree_laws(n: Columns) -> dict[str, Any]:
    xp, nodes = n.xp, n.state.nodes
    parent_live = n.live[n.above] | n.is_root[n.above]
    on_device = n.live & (n.device >= 0)
    children = n.per_node(n.above, n.live)
    listed = n.live | n.is_root
    born = nodes[Column.BORN]
    first, inner = nodes[Column.FIRST_CHILD], n.live & ~n.is_root[n.above]
    return {
        "the parent of a node is live": n.total(n.live & ~parent_live),
        "a node is of its parent's rank": n.total(n.live & (nodes[Column.RANK] != nodes[Column.RANK][n.above])),
        "device children are counted": n.total(
            listed & (nodes[Column.DEVICE_CHILDREN] != n.per_node(n.above, on_device))
        ),
        "a node has a first child iff it has children": n.total(listed & ((first != NONE) != (children > 0))),
        "free nodes and live nodes are all nodes": xp.abs(
            n.state.books[Scalar.FREE_NODES] + n.total(n.live) - n.layout.nodes
        ),
        "the parent of a page on device is on device": n.total(
            on_device & ~n.is_root[n.above] & (n.device[n.above] < 0)
        ),
        "the parent of a page on host has a page or waits for one": n.total(
            inner & (n.host >= 0) & ~_has_page(n)[n.above]
        ),
        "no node is born after the clock, or before its parent": n.total(
            n.live & ((born > n.state.books[Scalar.CLOCK]) | (~n.is_root[n.above] & (born < born[n.above])))
        ),
        "a node has a page, a child or a lock": n.total(
            n.live & ~_has_page(n) & (children == 0) & (n.device_locks == 0) & (n.host_locks == 0)
        ),
    }


def _has_page(n: Columns) -> Any:
    return (n.device >= 0) | (n.host >= 0) | (n.incoming >= 0)


def _page_laws(n: Columns) -> dict[str, Any]:
    loading = n.live & (n.device < 0) & (n.host >= 0) & (n.incoming >= 0)
    writing = n.live & (n.host < 0) & (n.incoming >= 0)
    loose = (n.device < 0) & (n.incoming < 0) & (n.device_locks == 0) & (n.host_locks == 0)
    held = {
        Tier.DEVICE: (
            n.live & (n.device >= 0) & (n.device_locks == 0),
            n.live & (n.device >= 0) & (n.device_locks > 0),
            loading,
        ),
        Tier.HOST: (n.live & (n.host >= 0) & loose, n.live & (n.host >= 0) & ~loose, writing),
    }
    laws: dict[str, Any] = {
        "no dead node has a page": n.total(~n.live & _has_page(n)),
        "an operation brings a page to one tier only": n.total((n.device >= 0) & (n.host >= 0) & (n.incoming >= 0)),
    }
    for tier in TIERS:
        column = n.device if tier == Tier.DEVICE else n.host
        for rank in range(n.layout.ranks):
            laws |= _shelf_laws(n, tier, rank, 0, (column, n.incoming), held[tier])
    for pool in range(1, n.layout.pools):
        values = Values(n.state, pool)
        for tier in TIERS:
            column = values.device if tier == Tier.DEVICE else values.host
            alive = tuple(n.live & mask for mask in values.held(tier))
            for rank in range(n.layout.ranks):
                laws |= _shelf_laws(n, tier, rank, pool, (column, values.incoming), alive)
    return laws


def _shelf_laws(
    n: Columns, tier: Tier, rank: int, pool: int, pages_of: tuple[Any, Any], held: tuple[Any, ...]
) -> dict[str, Any]:
    """The accounts, owners and free-list of one tier, rank and pool.

    pages_of: the pages of the nodes, and those on their way. held: nodes with evictable, protected and incoming pages.
    """
    xp, layout, moving = n.xp, n.layout, held[2]
    column, incoming = pages_of
    where, size = f"({tier.name.lower()}, rank {rank}{f', pool {pool}' if pool else ''})", layout.capacity(tier, pool)
    start = layout.shelf(tier, pool) + rank * size
    stack, owners = n.state.shelves[:, start : start + size]
    accounts = {account: n.state.account(account, tier, rank, pool) for account in Account}
    here = n.state.nodes[Column.RANK] == rank
    names = (Account.EVICTABLE, Account.PROTECTED, Account.IN_FLIGHT)
    reserved = {Account.IN_FLIGHT: n.total(owners <= RESERVED)}
    wrong = sum(
        xp.abs(accounts[a] - n.total(mask & here) - reserved.get(a, 0)) for a, mask in zip(names, held, strict=True)
    )
    marks = {Account.FREE: FREE, Account.LENT: LENT, Account.WITHHELD: WITHHELD}
    for account, mark in marks.items():
        wrong += xp.abs(accounts[account] - n.total(owners == mark))
    if size == 0:
        return {f"accounts are true {where}": wrong}
    pages = xp.arange(size)
    owner = xp.where(owners >= 0, owners, 0)
    holds = (column[owner] == pages) | (moving[owner] & (incoming[owner] == pages))
    on_stack = xp.where(pages < accounts[Account.FREE], stack, size)
    listed = counted(xp, on_stack, size + 1)[:size]
    return {
        f"accounts are true {where}": wrong,
        f"pages add up to the capacity {where}": xp.abs(sum(accounts.values()) - size),
        f"the owner of a page holds it {where}": n.total((owners >= 0) & ~(holds & n.live[owner] & here[owner])),
        f"a page on the free-list is free, once {where}": n.total(listed != (owners == FREE)),
        f"every page of a node is owned by it {where}": xp.abs(
            n.total(owners >= 0) - n.total(n.live & here & (column >= 0)) - n.total(moving & here)
        ),
    }


def _lock_laws(n: Columns) -> dict[str, Any]:
    ledger = n.state.ledger
    held = n.per_node(ledger[Ledger.RECEIPT_NODE], ledger[Ledger.RECEIPT_NODE] != NONE)
    kinds = n.xp.where(ledger[Ledger.OPERATION_POOL] == 0, ledger[Ledger.OPERATION_KIND], NONE)
    pinned = n.per_node(ledger[Ledger.OPERATION_NODE], kinds == TransferKind.LOAD_BACK)
    storing = (kinds == TransferKind.STORE) | (kinds == TransferKind.PREFETCH)
    on_host = pinned + n.per_node(ledger[Ledger.OPERATION_NODE], storing)
    laws = {}
    for name, locks, own in (("device", n.device_locks, held + pinned), ("host", n.host_locks, on_host)):
        children = n.per_node(n.above, n.live & (locks > 0))
        wrong = n.total((n.live | n.is_root) & (locks != own + children + n.is_root))
        laws[f"{name} locks are receipts, operations and locked children"] = wrong
        laws[f"no dead node is locked ({name})"] = n.total(~n.live & ~n.is_root & (locks != 0))
    return laws


def _table_laws(n: Columns) -> dict[str, Any]:
    xp, scalars, ledger = n.xp, n.state.books, n.state.ledger
    out = ledger[Ledger.OPERATION_KIND] != NONE
    kinds = xp.where(ledger[Ledger.OPERATION_POOL] == 0, ledger[Ledger.OPERATION_KIND], NONE)
    start, size = n.layout.shelf(Tier.HOST), n.layout.ranks * n.layout.host_pages
    reserved = n.state.shelves[Shelf.OWNERS, start : start + size] <= RESERVED

    def members(*wanted: TransferKind) -> Any:
        of_kind = sum(kinds == kind for kind in wanted) > 0
        return xp.sum(xp.where(of_kind, ledger[Ledger.OPERATION_COUNT], 0))

    in_tree = members(TransferKind.BACKUP, TransferKind.LOAD_BACK)
    writing = n.live & (n.state.nodes[Column.STORED] == Stored.WRITING)
    return {
        "vacant and open operations are all": xp.abs(
            scalars[Scalar.VACANT_OPERATIONS] + n.total(out) - n.layout.max_operations
        ),
        "vacant and held receipts are all": xp.abs(
            scalars[Scalar.VACANT_RECEIPTS] + n.total(ledger[Ledger.RECEIPT_NODE] != NONE) - n.layout.max_receipts
        ),
        "every page on its way belongs to an operation": xp.abs(in_tree - n.total(n.live & (n.incoming >= 0))),
        "every page being stored belongs to an operation": xp.abs(members(TransferKind.STORE) - n.total(writing)),
        "every reserved page belongs to a prefetch": xp.abs(members(TransferKind.PREFETCH) - n.total(reserved)),
    }
