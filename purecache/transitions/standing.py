"""In whose hands the pages of a node are: the rule behind every account."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, TIERS, Account, Tier
from purecache.transitions.columns import look, put

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
    pages = (state.pages[tier, pool, nodes] for tier in (Tier.DEVICE, Tier.HOST, Tier.INCOMING))
    return Standing(*pages, state.locks[Tier.DEVICE, nodes], state.locks[Tier.HOST, nodes])


def tally(standing: Standing, valid: Any) -> jax.Array:
    """[accounts, tiers] how many of the valid nodes are in each account."""
    both = (
        device_account(standing.device, standing.host, standing.incoming, standing.device_locks),
        host_account(*standing),
    )
    rows = [[jnp.sum((both[tier] == account) & valid, dtype=jnp.int32) for tier in TIERS] for account in HELD]
    zero = [jnp.int32(0)] * len(TIERS)
    return jnp.array([zero, *rows, zero])


def transfer_accounts(state: CacheState, rank: jax.Array, change: jax.Array, pool: int = 0) -> CacheState:
    """Add `change` [accounts, tiers] to the accounts of a rank."""
    return state.replace(accounts=state.accounts.at[:, :, pool, rank].add(change))


def set_pages(state: CacheState, rank: jax.Array, nodes: jax.Array, **pages: Any) -> CacheState:
    """Write the `device`, `host` or `incoming` pages of `nodes` (NONE: skipped), and keep the accounts true."""
    state, before = look(state, standing_of, nodes)
    after = before._replace(**{name: jnp.broadcast_to(page, jnp.shape(nodes)) for name, page in pages.items()})
    for name in pages:
        state = put(state, "pages", (Tier[name.upper()], 0, nodes), getattr(after, name))
    valid = nodes != NONE
    return transfer_accounts(state, rank, tally(after, valid) - tally(before, valid))
