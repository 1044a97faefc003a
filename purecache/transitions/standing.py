"""In whose hands the pages of a node are: the rule behind every account."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, PAGES, TIERS, Account, Column, Tier
from purecache.transitions.columns import book, look, masked, put
from purecache.transitions.scans import end_of, repeat


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


def accounts_of(standing: Standing) -> tuple[Any, Any]:
    """The accounts of the device pages and of the host pages of nodes, elementwise."""
    device = device_account(standing.device, standing.host, standing.incoming, standing.device_locks)
    return device, host_account(*standing)


def evictable(standing: Standing) -> list[jax.Array]:
    """[...] bool by tier: whether the pages of nodes may be evicted from it, elementwise."""
    return [account == Account.EVICTABLE for account in accounts_of(standing)]


def move_between(
    state: CacheState, rank: jax.Array, pages: list[jax.Array], source: Account, target: Account
) -> CacheState:
    """Book `pages`, by tier, of a rank from one account to another."""
    for tier in TIERS:
        state = book(state, source, tier, rank, -pages[tier])
        state = book(state, target, tier, rank, pages[tier])
    return state


def set_pages(state: CacheState, rank: jax.Array, nodes: jax.Array, **pages: Any) -> CacheState:
    """Write the `device`, `host` or `incoming` pages of `nodes` [] or [size], and keep the accounts true.

    NONE among the nodes is skipped.
    """
    if nodes.ndim:
        each = {name: jnp.broadcast_to(page, nodes.shape) for name, page in pages.items()}

        def one(index: jax.Array, state: CacheState) -> CacheState:
            return set_pages(state, rank, nodes[index], **{name: page[index] for name, page in each.items()})

        return repeat(state.token, end_of(state.token, nodes >= 0), one, state)
    state, before = look(state, standing_of, nodes)
    after = before._replace(**{name: jnp.asarray(page, jnp.int32) for name, page in pages.items()})
    for name in pages:
        state = put(state, "nodes", (PAGES[Tier[name.upper()]], nodes), getattr(after, name))
    for tier, old, new in zip(TIERS, accounts_of(before), accounts_of(after), strict=True):
        state = book(state, masked(nodes >= 0, old), tier, rank, -1)
        state = book(state, masked(nodes >= 0, new), tier, rank, 1)
    return state
