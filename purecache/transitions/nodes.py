"""Adding nodes to the tree and taking them out."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, PAGES, TIERS, Column, Scalar, Stored, TailColumn, Tier
from purecache.transitions.columns import count, look, masked, put, when
from purecache.transitions.orders import drop_entry, listed, place, rule
from purecache.transitions.pages import give_pages
from purecache.transitions.scans import repeat
from purecache.transitions.standing import set_pages
from purecache.transitions.values import drop_values
from purecache.transitions.walk import bucket_of, namespace_of, page_at


def add_to_hash(state: CacheState, node: jax.Array, bucket: jax.Array) -> CacheState:
    """Make `node` findable in `bucket`. NONE adds nothing."""
    state, first = look(state, lambda state: state.links[bucket])
    state = put(state, "links", masked(node >= 0, state.layout.buckets + node), first)
    return put(state, "links", masked(node >= 0, bucket), node)


def create_node(
    state: CacheState,
    parent: jax.Array,
    tokens: jax.Array,
    namespace: jax.Array,
    rank: jax.Array,
    hits: jax.Array | int,
    priority: jax.Array | int,
) -> tuple[CacheState, jax.Array]:
    """Add a child without pages, for the page `tokens` [page_size]. There must be a free node id and no such child.

    Nodes created one after the other have consecutive ids as far as the stack of free ids allows.
    """
    layout = state.layout

    def plan(state: CacheState) -> tuple[jax.Array, ...]:
        node = state.nodes[Column.FREE_NODES, state.books[Scalar.FREE_NODES] - 1]
        return node, state.nodes[Column.FIRST_CHILD, parent], state.nodes[Column.DEPTH, parent]

    def hash_it(state: CacheState) -> CacheState:
        return add_to_hash(state, node, bucket_of(state, parent, tokens, namespace))

    state, (node, sibling, depth) = look(state, plan)
    values: dict[int, Any] = {
        Column.PARENT: parent,
        Column.FIRST_CHILD: NONE,
        Column.NEXT_SIBLING: sibling,
        Column.PREVIOUS_SIBLING: NONE,
        Column.RANK: rank,
        Column.HITS: hits,
        Column.PRIORITY: priority,
        Column.BORN: state.books[Scalar.CLOCK],
        Column.STORED: Stored.NO,
        Column.DEPTH: depth + 1,
    }
    values |= {layout.tail_row(TailColumn.STORED, pool): Stored.NO for pool in range(1, layout.pools)}
    for column, value in values.items():
        state = put(state, "nodes", (column, node), value)
    state = put(state, "nodes", (Column.PREVIOUS_SIBLING, sibling), node)
    state = put(state, "nodes", (Column.FIRST_CHILD, parent), node)
    for word in range(4):
        state = put(state, "nodes", (Column.NAMESPACE + word, masked(parent >= layout.nodes, node)), namespace[word])
    state = count(write_tokens(state, node, tokens), FREE_NODES=-1)
    return when(node != parent + 1, hash_it, state), node


def write_tokens(state: CacheState, node: jax.Array, tokens: jax.Array) -> CacheState:
    """Write the tokens [page_size] of a node."""
    start = jnp.where(state.token >= 0, node, NONE) * state.layout.page_size
    return state.replace(tokens=lax.dynamic_update_slice(state.tokens, tokens, (start,)))


def drop_from_hash(state: CacheState, node: jax.Array) -> CacheState:
    """Undo `add_to_hash`: find the link that leads to `node` along its own chain, and lead it past."""
    layout = state.layout

    def plan(state: CacheState) -> tuple[jax.Array, jax.Array]:
        parent, tokens = state.nodes[Column.PARENT, node], page_at(state, state.tokens, node)
        link = bucket_of(state, parent, tokens, namespace_of(state, node))
        link = lax.while_loop(
            lambda link: state.links[link] != node, lambda link: layout.buckets + state.links[link], link
        )
        return link, state.links[layout.buckets + node]

    state, (link, after) = look(state, plan)
    return put(state, "links", link, after)


def remove(state: CacheState, node: jax.Array) -> CacheState:
    """Take a childless node that owns no page out of the tree."""

    def plan(state: CacheState) -> tuple[jax.Array, ...]:
        rows = (Column.PARENT, Column.NEXT_SIBLING, Column.PREVIOUS_SIBLING)
        return tuple(state.nodes[row, node] for row in rows)

    state, (parent, after, before) = look(state, plan)
    state = when(node != parent + 1, lambda state: drop_from_hash(state, node), state)
    state = repeat(state.token, len(TIERS), lambda tier, state: drop_entry(state, tier, node), state)
    state = put(state, "nodes", (Column.FIRST_CHILD, masked(before == NONE, parent)), after)
    state = put(state, "nodes", (Column.NEXT_SIBLING, before), after)
    state = put(state, "nodes", (Column.PREVIOUS_SIBLING, after), before)
    state = put(state, "nodes", (Column.PARENT, node), NONE)
    return count(put(state, "nodes", (Column.FREE_NODES, state.books[Scalar.FREE_NODES]), node), FREE_NODES=1)


def has_page(state: CacheState, node: jax.Array) -> jax.Array:
    """[] bool: whether a node has a page in any tier, or waits for one. Read it through `look`."""
    device, host, incoming = (state.nodes[row, node] for row in PAGES)
    return (device >= 0) | (host >= 0) | (incoming >= 0)


def is_free(state: CacheState, node: jax.Array) -> jax.Array:
    """[] bool: whether nothing holds a lock on a node. Read it through `look`."""
    return (state.nodes[Column.DEVICE_LOCKS, node] == 0) & (state.nodes[Column.HOST_LOCKS, node] == 0)


def is_empty(state: CacheState, node: jax.Array) -> jax.Array:
    """[] bool: a node without page, child, lock or operation, which may go. Read it through `look`."""
    layout = state.layout
    bare = ~has_page(state, node) & (state.nodes[Column.FIRST_CHILD, node] == NONE)
    in_tree = (node >= 0) & (node < layout.nodes) & (state.nodes[Column.PARENT, node] != NONE)
    return bare & is_free(state, node) & in_tree


def prune(state: CacheState, node: jax.Array) -> CacheState:
    """`remove_empty`; a page that only host has, and that is a leaf now, is the next victim unless it is listed."""
    return list_bared(*remove_empty(state, node))


def remove_empty(state: CacheState, node: jax.Array) -> tuple[CacheState, jax.Array]:
    """Remove `node` if it is empty, then its parent if that has become empty, and so on upwards.

    Returns the state and the first that stays.
    """

    def up(carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
        state, node = carry
        state, parent = look(state, lambda state: state.nodes[Column.PARENT, node])
        return remove(state, node), parent

    return lax.while_loop(lambda carry: is_empty(*carry), up, (state, node))


def list_bared(state: CacheState, node: jax.Array) -> CacheState:
    """Make `node`, which lost what was below it, the next victim of the host tier, if it is one and is not listed."""

    def plan(state: CacheState, node: jax.Array) -> tuple[jax.Array, ...]:
        device, host, incoming = (state.nodes[row, node] for row in PAGES)
        leaf = (node >= 0) & (node < state.layout.nodes) & (state.nodes[Column.FIRST_CHILD, node] == NONE)
        wanted = ~listed(state, Tier.HOST, node) | rule(state, Scalar.ALWAYS_NEXT)
        next_victim = leaf & (host >= 0) & (device < 0) & (incoming < 0) & wanted
        return masked(next_victim, node), state.nodes[Column.RANK, node]

    state, (survivor, rank) = look(state, plan, node)
    return place(state, Tier.HOST, survivor, rank, rule(state, Scalar.NEWEST_FIRST))


def drop_host_page(state: CacheState, node: jax.Array, rank: jax.Array) -> CacheState:
    """Free the host page of `node` and its values there, and drop its entry: a node without it may go at any time."""
    state = drop_values(state, rank, node, Tier.HOST)[0]
    state, page = look(state, lambda state: state.nodes[Column.HOST_PAGE, node])
    state = drop_entry(set_pages(state, rank, node, host=NONE), Tier.HOST, node)
    return give_pages(state, Tier.HOST, rank, page)


def leftmost(state: CacheState, node: jax.Array, wanted: jax.Array | bool = True) -> jax.Array:
    """[] the first of the nodes at and below `node` when children come before their parents; `node` itself unless
    `wanted`. Read it through `look`."""

    def child(node: jax.Array) -> jax.Array:
        return state.nodes[Column.FIRST_CHILD, node]

    return lax.while_loop(lambda node: wanted & (child(node) != NONE), child, node)


def following(state: CacheState, node: jax.Array, top: jax.Array) -> jax.Array:
    """[] the node after `node` in that order, among those at and below `top`; NONE after `top`. Read it through `look`.

    What is beside `top` is not looked at: that may be much.
    """
    sibling = masked(node != top, state.nodes[Column.NEXT_SIBLING, node])
    beside = sibling != NONE
    after = leftmost(state, jnp.where(beside, sibling, state.nodes[Column.PARENT, node]), beside)
    return masked(node != top, after)


def drop_host_subtree(state: CacheState, top: jax.Array, rank: jax.Array, whole: bool = False) -> CacheState:
    """Free the host pages of everything below `top`, which lost its own page, and its values there: nothing can be
    reached through it. `whole` (static): take `top` itself out of the tree too, if nothing holds it.

    A node that an operation or a receipt holds stays as an empty node and goes when it is let go; only a page that is
    being loaded stays with it. (A store has its bytes once it is dispatched, a prefetch needs the node alone.) Nodes
    below `top` have no device page: a child on device keeps its parent there.
    """

    def visit(carry: tuple[CacheState, jax.Array]) -> tuple[CacheState, jax.Array]:
        state, node = carry
        state, (after, held) = look(state, lambda state: (following(state, node, top), held_on_host(state, node)))
        state = when(held, lambda state: drop_host_page(state, node, rank), state)
        state, empty = look(state, is_empty, node)
        return when(empty, lambda state: remove(state, node), state), after

    def held_on_host(state: CacheState, node: jax.Array) -> jax.Array:
        return (state.nodes[Column.HOST_PAGE, node] >= 0) & (state.nodes[Column.INCOMING_PAGE, node] < 0)

    state = drop_values(state, rank, top, Tier.HOST)[0]
    state, start = look(state, leftmost, top)
    end = NONE if whole else top
    return lax.while_loop(lambda carry: carry[1] != end, visit, (state, start))[0]
