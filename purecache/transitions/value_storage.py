"""Values of tail pools on their way to storage and from there.

The effect of a store names nodes. Its bytes are copied out when it is dispatched, so nothing is locked: a node that has
gone meanwhile, or is another one by now, no longer bears the number of the operation.
"""

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.layout import BEING_STORED, NONE, PAGES, Account, Stored, TailColumn, Tier, TransferKind
from purecache.transitions.columns import book, count, look, masked, put, set_entry
from purecache.transitions.match import valid_prompt
from purecache.transitions.operations import (
    Handle,
    close_operation,
    ended,
    open_operation,
    storage_may_open,
    transfers_of,
)
from purecache.transitions.pages import give_pages, own_pages
from purecache.transitions.prefetch import child_of, follow, reserved
from purecache.transitions.scans import end_of, repeat
from purecache.transitions.value_transfers import find_values
from purecache.transitions.values import Value, set_value, value_at
from purecache.transitions.vocabulary import Finished, Step, Transfers
from purecache.transitions.walk import Prompt


def begin_value_store(
    state: CacheState, pool: int, node: jax.Array, rank: jax.Array, most: jax.Array, size: int
) -> tuple[CacheState, Transfers, jax.Array]:
    """Start writing to storage the values that the path to `node` has on host and storage lacks: at most `most` and
    `size`, the deepest first. Returns the state, the effect (`source` host pages, `target` node ids) and its number."""
    row = state.layout.tail_row(TailColumn.STORED, pool)

    def unstored(state: CacheState, node: jax.Array, value: Value) -> jax.Array:
        return (value.host >= 0) & (state.nodes[row, node] == Stored.NO)

    every = jnp.int32(state.layout.rows)
    state, (nodes, found) = look(state, lambda state: find_values(state, pool, node, every, size, unstored))
    number = jnp.where(storage_may_open(state), jnp.minimum(found, jnp.clip(most, 0, size)), 0)
    state, operation = open_operation(state, TransferKind.STORE, masked(number > 0, node), number, pool)
    nodes = masked(jnp.arange(size) < number, nodes)

    def one(index: jax.Array, carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
        state, source = carry
        state, page = look(state, lambda state: value_at(state, nodes[index], pool).host)
        state = put(state, "nodes", (row, nodes[index]), BEING_STORED + operation.operation)
        return state, set_entry(source, index, page)

    state, source = repeat(state.token, number, one, (state, jnp.full(size, NONE, jnp.int32)))
    state = count(state, STORES_REFUSED=(found > 0) & (number == 0))
    used = nodes != NONE
    return state, transfers_of(TransferKind.STORE, rank, operation, used, source, nodes, pool), number


def finish_value_store(state: CacheState, handle: Handle, nodes: jax.Array, ok: jax.Array, pool: int) -> Step[Finished]:
    """End a store of a tail pool. `nodes` [size] are those of its effect, `ok` [size] says which values storage has.

    `pool` is static.
    """
    state, members = close_operation(state, TransferKind.STORE, handle, state.layout.rows, pool)
    nodes = masked(members.good & (nodes < state.layout.nodes), nodes)
    row = state.layout.tail_row(TailColumn.STORED, pool)
    state, mine = look(state, lambda state: state.nodes[row, nodes] == BEING_STORED + handle.operation)
    nodes = masked(mine, nodes)
    state = count(state, CLOCK=members.good)
    state = put(state, "nodes", (row, nodes), jnp.where(ok, Stored.YES, Stored.NO))
    number = jnp.where(members.good, members.number, 0)

    def tally(index: jax.Array, total: jax.Array) -> jax.Array:
        return total + ((nodes[index] >= 0) & ok[index])

    stored = repeat(state.token, nodes.shape[0], tally, state.token)
    state = count(state, STORED_PAGES=stored, STORE_FAILED_PAGES=number - stored)
    return Step(state, (), ended(state, members, stored))


def finish_value_prefetch(
    state: CacheState, handle: Handle, prompt: Prompt, first: jax.Array, pages: jax.Array, ok: jax.Array, pool: int
) -> Step[Finished]:
    """End a prefetch of a tail pool. `pages` [size] are the reserved ones, for the pages `first` and following of
    `prompt`; `ok` [size] says which arrived.

    Each is given to the node of its page, if that is in the tree, has a kv page and lacks the value on host; the others
    are freed. End the prefetch of kv first. `pool` is static.
    """
    state, (complete, rank, held) = look(state, lambda state: reserved(state, handle, pages, pool))
    named = handle._replace(operation=masked(complete, handle.operation))
    state, members = close_operation(state, TransferKind.PREFETCH, named, pages.shape[0], pool)
    held = masked(members.good, held)
    prompt = valid_prompt(state, prompt)
    fits = (prompt.rank == rank) & (first >= 0)
    prompt = prompt._replace(rank=rank)
    state = count(state, CLOCK=members.good)
    state, (above, _) = look(state, follow, prompt, first)

    def one(
        index: jax.Array, carry: tuple[CacheState, jax.Array, jax.Array]
    ) -> tuple[CacheState, jax.Array, jax.Array]:
        state, above, taken = carry
        page = held[index]

        def plan(state: CacheState) -> tuple[jax.Array, ...]:
            found = child_of(state, prompt, first + index, jnp.maximum(above, 0))
            found = masked((above >= 0) & (first + index < prompt.pages), found)
            node = jnp.maximum(found, 0)
            value = value_at(state, node, pool)
            kv = [state.nodes[row, node] >= 0 for row in PAGES]
            bare = (found >= 0) & (kv[0] | kv[1] | kv[2]) & (value.host < 0) & (value.incoming < 0)
            return found, node, bare

        state, (found, node, bare) = look(state, plan)
        takes = fits & bare & ok[index] & (page >= 0)
        state = book(state, Account.IN_FLIGHT, Tier.HOST, rank, -(page >= 0).astype(jnp.int32), pool)
        state = set_value(state, rank, pool, masked(takes, node), host=page)
        state = own_pages(state, Tier.HOST, rank, masked(takes, page), node, pool)
        row = state.layout.tail_row(TailColumn.STORED, pool)
        state = put(state, "nodes", (row, masked(takes, node)), Stored.YES)
        return give_pages(state, Tier.HOST, rank, masked(~takes, page), pool), found, taken + takes

    state, _, taken = repeat(state.token, end_of(state.token, held >= 0), one, (state, above, state.token))
    number = jnp.where(members.good, members.number, 0)
    state = count(state, PREFETCHED_PAGES=taken, PREFETCH_FAILED_PAGES=number - taken)
    return Step(state, (), ended(state, members, taken))
