"""Copies of pages on device: a request that goes on from a value that it must not write takes one of its own."""

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.layout import LENT, NONE, Account, Tier, TransferKind
from purecache.transitions.columns import book, count, look, masked
from purecache.transitions.evict import make_room
from purecache.transitions.lend import owners_of
from purecache.transitions.locks import is_live, rank_of
from purecache.transitions.pages import free_count, own_pages, take_pages
from purecache.transitions.values import list_before, set_value, value_at
from purecache.transitions.vocabulary import Forked, NodeHandle, Released, Status, Step, Transfers


def _copy(rank: jax.Array, pool: int, source: jax.Array, target: jax.Array, condition: jax.Array) -> Transfers:
    """The effect that copies one page; none unless `condition`."""
    zero, none = jnp.zeros(1, jnp.int32), jnp.full(1, NONE, jnp.int32)
    used = masked(condition, zero)
    return Transfers(jnp.int32(TransferKind.COPY), jnp.int32(pool), rank, used, none, source[None], target[None])


def fork(state: CacheState, handle: NodeHandle, pool: int) -> Step[Forked]:
    """Lend the caller a page with a copy of a tail pool's value at a node. `pool` is static.

    The page is a free one, or the oldest other value is evicted for it. If there is no other, the value itself is
    handed over: the tree loses it, but no request fails for want of a page.
    """
    state, live = look(state, is_live, handle)
    node = masked(live, handle.node)
    state, rank = look(state, rank_of, node)
    state, value = look(state, lambda state: value_at(state, jnp.maximum(node, 0), pool))
    there = live & (node < state.layout.nodes) & (value.device >= 0)
    state, node = count(state, CLOCK=there), masked(there, node)
    free = value.locks == 0
    # As the newest, it is the last to be evicted.
    state = list_before(state, state.layout.order(Tier.DEVICE, pool), masked(free, node), rank, NONE)
    empty = there & (free_count(state, Tier.DEVICE, rank, pool) == 0)
    others = state.account(Account.EVICTABLE, Tier.DEVICE, rank, pool) - free
    evicts, steals = empty & (others > 0), empty & (others <= 0) & free
    state, write_back = make_room(state, rank, evicts.astype(jnp.int32), 1, pool)
    copies = there & (~empty | evicts)
    state, taken = take_pages(state, Tier.DEVICE, rank, copies.astype(jnp.int32), 1, Account.LENT, pool)
    state = set_value(state, rank, pool, masked(steals, node), device=NONE)
    state = book(state, Account.LENT, Tier.DEVICE, rank, steals.astype(jnp.int32), pool)
    page = jnp.where(steals, value.device, taken[0])
    state = own_pages(state, Tier.DEVICE, rank, page, LENT, pool)
    effect = _copy(rank, pool, value.device, page, copies)
    status = jnp.where(there, jnp.where(copies | steals, Status.OK, Status.NO_ROOM), Status.NOTHING)
    return Step(state, (*write_back, effect), Forked(jnp.where(live, status, Status.BAD_NODE), page))


def copy_page(state: CacheState, rank: jax.Array, source: jax.Array, target: jax.Array, pool: int) -> Step[Released]:
    """Copy one page that is lent to the caller into another one. `pool` is static."""
    good_rank = (rank >= 0) & (rank < state.layout.ranks)
    rank = jnp.where(good_rank, rank, 0)
    pages = jnp.stack([source, target])
    state, owners = look(state, lambda state: owners_of(state, rank, pages, pool))
    good = good_rank & (owners[0] == LENT) & (owners[1] == LENT) & (source != target)
    status = jnp.where(good_rank, jnp.where(good, Status.OK, Status.BAD_PAGE), Status.BAD_RANK)
    return Step(state, (_copy(rank, pool, source, target, good),), Released(status))
