"""Store: copying host pages to storage. Storage has pages by content, so that any of them may arrive or fail alone."""

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Column, Stored, Tier, TransferKind
from purecache.transitions.columns import count, look, masked, put
from purecache.transitions.locks import is_live, lock_path, rank_of, unlock_path
from purecache.transitions.operations import (
    Handle,
    close_operation,
    ended,
    open_operation,
    storage_may_open,
    transfers_of,
)
from purecache.transitions.scans import number_of
from purecache.transitions.value_storage import begin_value_store
from purecache.transitions.vocabulary import Finished, NodeHandle, Status, Step, StoreBegun
from purecache.transitions.walk import ancestor, climb


def _unstored(state: CacheState, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lowest stretch of the path to `node` that host has and storage lacks: deepest node (or NONE) and length."""

    def inside(node: jax.Array) -> jax.Array:
        return (node >= 0) & (node < state.layout.nodes)

    def wanted(node: jax.Array) -> jax.Array:
        safe = jnp.maximum(node, 0)
        on_host = state.nodes[Column.HOST_PAGE, safe] >= 0
        return inside(node) & on_host & (state.nodes[Column.STORED, safe] == Stored.NO)

    def up(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        node, length = carry
        return state.nodes[Column.PARENT, node], length + 1

    low = lax.while_loop(lambda n: inside(n) & ~wanted(n), lambda n: state.nodes[Column.PARENT, n], node)
    length = lax.while_loop(lambda carry: wanted(carry[0]), up, (low, state.token))[1]
    return masked(inside(low), low), length


def begin_store(state: CacheState, handle: NodeHandle, most: tuple[jax.Array, ...], size: int) -> Step[StoreBegun]:
    """Start writing to storage what the path to a node has on host and storage lacks: of each pool at most `most` and
    `size` pages.

    The host pages are locked until `finish_store`. The shallowest pages go first. Begun again, it goes on with what is
    still missing. In the effect, `source` are host pages and `target` are node ids.
    """
    state, live = look(state, is_live, handle)
    node = masked(live, handle.node)
    state, rank = look(state, rank_of, node)
    state, (low, missing) = look(state, _unstored, node)
    vacant = storage_may_open(state)
    number = jnp.where(vacant, jnp.minimum(missing, jnp.clip(most[0], 0, size)), 0)
    state, low = look(state, ancestor, low, jnp.where(number > 0, missing - number, 0))
    state, nodes = look(state, lambda state: climb(state, low, number, size))
    state, source = look(state, lambda state: masked(nodes != NONE, state.nodes[Column.HOST_PAGE, nodes]))
    top = masked(number > 0, low)
    state = count(state, CLOCK=live, STORES_REFUSED=(missing > 0) & (number == 0))
    state, operation = open_operation(state, TransferKind.STORE, top, number)
    state = lock_path(state, Tier.HOST, top)
    state = put(state, "nodes", (Column.STORED, nodes), Stored.WRITING)
    used = nodes != NONE
    effects = [transfers_of(TransferKind.STORE, rank, operation, used, source, nodes)]
    values = []
    for pool, room in enumerate(most[1:] if state.layout.tails else (), 1):
        state, transfers, begun = begin_value_store(state, pool, node, rank, room, size)
        effects.append(transfers)
        values.append(begun)
    refusal = jnp.where(vacant, Status.NO_ROOM, Status.TABLE_FULL)
    status = jnp.where(sum(values, number) > 0, Status.OK, jnp.where(missing > 0, refusal, Status.NOTHING))
    reply = StoreBegun(jnp.where(live, status, Status.BAD_NODE), number, missing - number, tuple(values))
    return Step(state, tuple(effects), reply)


def finish_store(state: CacheState, handle: Handle, ok: jax.Array) -> Step[Finished]:
    """End a store. `ok` [size] says of which pages storage has every object, deepest first; unlocks the host pages."""
    size = ok.shape[0]
    state, members = close_operation(state, TransferKind.STORE, handle, size)
    number = jnp.where(members.good, members.number, 0)
    state, nodes = look(state, lambda state: climb(state, members.node, number, size))
    state = count(state, CLOCK=members.good)
    state = put(state, "nodes", (Column.STORED, nodes), jnp.where(ok, Stored.YES, Stored.NO))
    state = unlock_path(state, Tier.HOST, masked(members.good, members.node))
    stored = number_of(state.token, ok & (nodes != NONE))
    state = count(state, STORED_PAGES=stored, STORE_FAILED_PAGES=number - stored)
    return Step(state, (), ended(state, members, stored))
