"""In whose hands the pages of a node are: the rule behind every account."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, PAGES, TIERS, Account, Column, Tier
from purecache.transitions.columns import book, look, put

HELD = (Account.EVICTABLE, Account.PROTECTED, Account.IN_FLIGHT)
"""The accounts of pages that nodes hold; FREE and LENT are kept by the free-lists."""


def device_account(device: Any, host: Any, incoming: Any, device_locks: Any) -> Any:
    """The account of a node's device page: EVICTABLE, PROTECTED, IN_FLIGHT (being loaded) or NONE. Elementwise."""
    loading = (device < 0) & (host >= 0) & (incoming >= 0)
    held = jnp.where(device_locks > 0, Account.PROTECTED, Account.EVICTABLE)
    return jnp.where(device >= 0, held, jnp.where(loading, Account.IN_FLIGHT, NONE))


def host_account(device: Any, host: Any, incoming: Any, device_locks: Any, host_locks: Any) -> Any:
    """The account of a node's host page: EVICTABLE, PROTECTED, IN_FLIGHT (being written) or NONE. Elementwise.

    A host page is evictable when it is the only copy and nothing holds it: the copy of a page that is on device goes
    with that page, not before.
    """
    loose = (device < 0) & (incoming < 0) & (device_locks == 0) & (host_locks == 0)
    held = jnp.where(loose, Account.EVICTABLE, Account.PROTECTED)
    return jnp.where(host >= 0, held, jnp.where(incoming >= 0, Account.IN_FLIGHT, NONE))


class Standing(NamedTuple):
    """What decides the accounts of some nodes, elementwise: their pages and locks."""

    device: Any
    host: Any
    incoming: Any
    device_locks: Any
    host_locks: Any


def standing_of(state: CacheState, nodes: Any, pool: int = 0) -> Standing:
    """The pages and locks of `nodes`. Read it through `look`."""
    device, host, incoming = (state.nodes[row + len(PAGES) * pool, nodes] for row in PAGES)
    return Standing(
        device, host, incoming, state.nodes[Column.DEVICE_LOCKS, nodes], state.nodes[Column.HOST_LOCKS, nodes]
    )


def tally(standing: Standing, valid: Any) -> list[list[jax.Array]]:
    """How many of the valid nodes are in each of the accounts of `HELD`, by tier."""
    both = (
        device_account(standing.device, standing.host, standing.incoming, standing.device_locks),
        host_account(*standing),
    )
    return [[jnp.sum((both[tier] == account) & valid, dtype=jnp.int32) for tier in TIERS] for account in HELD]


def evictable(standing: Standing) -> jax.Array:
    """[tiers, ...] bool: whether the pages of nodes may be evicted from each tier, elementwise."""
    device = device_account(standing.device, standing.host, standing.incoming, standing.device_locks)
    return jnp.stack([device == Account.EVICTABLE, host_account(*standing) == Account.EVICTABLE])


def move_between(state: CacheState, rank: jax.Array, pages: jax.Array, source: Account, target: Account) -> CacheState:
    """Book `pages` [tiers] of a rank from one account to another."""
    for tier in TIERS:
        state = book(state, source, tier, rank, -pages[tier])
        state = book(state, target, tier, rank, pages[tier])
    return state


def set_pages(state: CacheState, rank: jax.Array, nodes: jax.Array, **pages: Any) -> CacheState:
    """Write the `device`, `host` or `incoming` pages of `nodes` (NONE: skipped), and keep the accounts true."""
    state, before = look(state, standing_of, nodes)
    after = before._replace(**{name: jnp.broadcast_to(page, jnp.shape(nodes)) for name, page in pages.items()})
    for name in pages:
        state = put(state, "nodes", (PAGES[Tier[name.upper()]], nodes), getattr(after, name))
    valid = nodes != NONE
    for account, old, new in zip(HELD, tally(before, valid), tally(after, valid), strict=True):
        for tier in TIERS:
            state = book(state, account, tier, rank, new[tier] - old[tier])
    return state
