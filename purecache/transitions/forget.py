"""Forget: deleting a prefix with all that goes on from it, or a whole namespace.

What a receipt or a load protects on device stays, with its copy on host. A page that is being copied to host leaves the
device, and goes when the copy has ended if what is above it has gone; a page that is being stored goes, and its node
when that has ended.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, PAGES, Column, Scalar, Tier
from purecache.transitions.columns import add, count, look, masked, when
from purecache.transitions.locks import freed_by
from purecache.transitions.match import valid_prompt
from purecache.transitions.nodes import drop_host_page, following, has_page, is_empty, leftmost, prune, remove
from purecache.transitions.orders import NEWER, OLDER, drop_entry, head_of, listed, place, place_between, rule, touch
from purecache.transitions.pages import give_pages
from purecache.transitions.scans import some
from purecache.transitions.standing import set_pages
from purecache.transitions.values import drop_values
from purecache.transitions.vocabulary import Forgotten, Status, Step
from purecache.transitions.walk import Prompt, Space, namespace_of, root_of, walk

ALONE = -1
"""Instead of a number of pages to keep: see `forget`."""


class _Tally(NamedTuple):
    """What has gone, and what stays; see `Forgotten`."""

    device: jax.Array
    host: jax.Array
    left: jax.Array


def _leave_order(state: CacheState, node: jax.Array, parent: jax.Array, rank: jax.Array) -> CacheState:
    """Take `node`, which has left the device, out of the order there. NONE: nothing.

    Where use does not move entries, the page above it, if it is a leaf now without an entry, is listed: before all
    others if the first go first, since it had left the order as the oldest; else in the place of its child.
    """

    def plan(state: CacheState) -> jax.Array:
        above = jnp.clip(parent, 0, state.layout.nodes - 1)
        leaf = (state.nodes[Column.DEVICE_PAGE, above] >= 0) & (state.nodes[Column.DEVICE_CHILDREN, above] == 0)
        unlisted = ~listed(state, Tier.DEVICE, above) & ~rule(state, Scalar.MOVES)
        return masked((node >= 0) & (parent < state.layout.nodes) & leaf & unlisted, above)

    def ends(state: CacheState) -> tuple[jax.Array, jax.Array]:
        head, last_first = head_of(state, node, rank), rule(state, Scalar.NEWEST_FIRST)
        older = jnp.where(last_first, state.orders[Tier.DEVICE, OLDER, node], head)
        return older, jnp.where(last_first, node, state.orders[Tier.DEVICE, NEWER, head])

    state, heir = look(state, plan)
    return drop_entry(place_between(state, Tier.DEVICE, heir, ends), Tier.DEVICE, node)


def _list_on_host(state: CacheState, node: jax.Array, rank: jax.Array) -> CacheState:
    """List a locked page that only host has, and that is a leaf now, where use does not move entries. NONE: nothing."""

    def plan(state: CacheState) -> jax.Array:
        device, host, incoming = (state.nodes[row, node] for row in PAGES)
        leaf = (host >= 0) & (device < 0) & (incoming < 0) & (state.nodes[Column.FIRST_CHILD, node] == NONE)
        unlisted = ~listed(state, Tier.HOST, node) & ~rule(state, Scalar.MOVES)
        return masked((node >= 0) & leaf & unlisted, node)

    state, heir = look(state, plan)
    return place(state, Tier.HOST, heir, rank, rule(state, Scalar.NEWEST_FIRST))


def _drop(state: CacheState, node: jax.Array, rank: jax.Array, tally: _Tally) -> tuple[CacheState, _Tally]:
    """Free what a node has, whose children have been dealt with, unless it is locked; remove it if it is empty then."""

    def plan(state: CacheState) -> tuple[jax.Array, ...]:
        device, host, incoming = (state.nodes[row, node] for row in PAGES)
        free = state.nodes[Column.DEVICE_LOCKS, node] == 0
        return state.nodes[Column.PARENT, node], device, host, free & (device >= 0), free & (incoming < 0)

    state, (parent, page, host, leaves, drops) = look(state, plan)
    leaver = masked(leaves, node)
    state = drop_values(state, rank, leaver, Tier.DEVICE)[0]
    state = set_pages(state, rank, leaver, device=NONE)
    state = give_pages(state, Tier.DEVICE, rank, masked(leaves, page))
    state = add(state, "nodes", (Column.DEVICE_CHILDREN, masked(leaves, parent)), -1)
    state = _leave_order(state, leaver, parent, rank)
    state = drop_host_page(state, masked(drops, node), rank)
    state, (empty, stays) = look(state, lambda state: (is_empty(state, node), has_page(state, node)))
    state = when(empty, lambda state: remove(state, node), state)
    state = _list_on_host(state, masked(stays, node), rank)
    return state, _Tally(tally.device + leaves, tally.host + (drops & (host >= 0)), tally.left + stays)


def _sweep(state: CacheState, top: jax.Array, rank: jax.Array, tally: _Tally) -> tuple[CacheState, _Tally]:
    """`_drop` everything at and below `top`, children before their parents. NONE: nothing."""

    def visit(carry: tuple[CacheState, jax.Array, _Tally]) -> tuple[CacheState, jax.Array, _Tally]:
        state, node, tally = carry
        state, after = look(state, following, node, top)
        state, tally = _drop(state, node, rank, tally)
        return state, after, tally

    state, start = look(state, lambda state: masked(top >= 0, leftmost(state, jnp.maximum(top, 0))))
    state, _, tally = lax.while_loop(lambda carry: carry[1] >= 0, visit, (state, start, tally))
    return state, tally


def _chosen(state: CacheState, prompt: Prompt, keep: jax.Array) -> tuple[jax.Array, ...]:
    """The topmost node to forget, or NONE, and its parent. Read it through `look`."""
    path = walk(state, prompt)
    last = path.nodes[jnp.maximum(path.length - 1, 0)]
    childless = state.nodes[Column.FIRST_CHILD, last] == NONE
    whole = (path.length > 0) & ((path.length == prompt.pages) | childless)
    alone = masked(whole, last)
    below = masked(keep < path.length, path.nodes[jnp.clip(keep, 0, jnp.maximum(path.length - 1, 0))])
    top = jnp.where(keep < 0, alone, below)
    return top, masked(top >= 0, state.nodes[Column.PARENT, jnp.maximum(top, 0)])


def _drop_alone(
    state: CacheState, node: jax.Array, rank: jax.Array, tally: _Tally
) -> tuple[CacheState, jax.Array, _Tally]:
    """`_drop` a node and those above it while nothing else goes on from them. Returns also the first that stays."""

    def goes(carry: tuple[CacheState, jax.Array, _Tally]) -> jax.Array:
        state, node, _ = carry
        inside = (node >= 0) & (node < state.layout.nodes)
        childless = (state.nodes[Column.FIRST_CHILD, node] == NONE) & (state.nodes[Column.INCOMING_PAGE, node] < 0)
        locks = state.nodes[Column.DEVICE_LOCKS, node] + state.nodes[Column.HOST_LOCKS, node]
        return inside & childless & (locks == 0)

    def up(carry: tuple[CacheState, jax.Array, _Tally]) -> tuple[CacheState, jax.Array, _Tally]:
        state, node, tally = carry
        state, above = look(state, lambda state: state.nodes[Column.PARENT, node])
        state, tally = _drop(state, node, rank, tally)
        return state, above, tally

    return lax.while_loop(goes, up, (state, node, tally))


def forget(state: CacheState, prompt: Prompt, keep: jax.Array) -> Step[Forgotten]:
    """Delete the path of a prompt behind its first `keep` pages, with everything that goes on from there.

    ALONE: what goes on from the end of the prompt, and of its own path what no other prefix shares. If the tree does
    not have the whole prompt, that begins with the deepest page of it, unless something else goes on from there. What
    stays above counts as used.
    """
    named = valid_prompt(state, prompt)
    state, (top, above) = look(state, _chosen, named, keep)
    rank, nothing = named.rank, state.token
    state = count(state, CLOCK=top >= 0)
    state, tally = _sweep(state, top, rank, _Tally(nothing, nothing, nothing))
    state, stays = look(state, lambda state: (above >= 0) & (state.nodes[Column.FIRST_CHILD, above] != NONE))
    alone = masked((keep < 0) & ~stays, above)
    state, onward, tally = _drop_alone(state, alone, rank, tally)
    state = _renew(state, jnp.where(alone >= 0, onward, above), rank)
    good = (prompt.rank >= 0) & (prompt.rank < state.layout.ranks) & (prompt.pages >= 0)
    status = jnp.where(good, jnp.where(top >= 0, Status.OK, Status.NOTHING), Status.BAD_RANK)
    return Step(state, (), Forgotten(status, *tally))


def _renew(state: CacheState, node: jax.Array, rank: jax.Array) -> CacheState:
    """What is above a prefix that has gone is in its orders as touched, and goes if it is empty. NONE: nothing."""
    state, (device, host, _) = look(state, freed_by, node)
    state = touch(touch(state, Tier.DEVICE, device, rank), Tier.HOST, host, rank)
    return when(node >= 0, lambda state: prune(state, node), state)


def forget_namespace(state: CacheState, space: Space, rank: jax.Array) -> Step[Forgotten]:
    """Delete all prefixes of a namespace in a rank."""
    good = (rank >= 0) & (rank < state.layout.ranks)
    rank = jnp.where(good, rank, 0)
    root, nothing = root_of(state, rank), state.token

    def differs(state: CacheState, node: jax.Array) -> tuple[jax.Array, jax.Array]:
        return some(state.token, namespace_of(state, node) != space.digest), state.nodes[Column.NEXT_SIBLING, node]

    def visit(carry: tuple[CacheState, jax.Array, _Tally]) -> tuple[CacheState, jax.Array, _Tally]:
        state, node, tally = carry
        state, (other, after) = look(state, differs, node)
        state, tally = _sweep(state, masked(~other, node), rank, tally)
        return state, after, tally

    state, first = look(state, lambda state: masked(good, state.nodes[Column.FIRST_CHILD, root]))
    state = count(state, CLOCK=good)
    start = (state, first, _Tally(nothing, nothing, nothing))
    state, _, tally = lax.while_loop(lambda carry: carry[1] >= 0, visit, start)
    return Step(state, (), Forgotten(jnp.where(good, Status.OK, Status.BAD_RANK), *tally))
