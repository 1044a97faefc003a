"""Insert: hand the pages of a computed prompt to the tree."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Account, Column, Scalar, Tier
from purecache.transitions.columns import add, book, count, look, masked, put, when
from purecache.transitions.lend import all_lent_once
from purecache.transitions.nodes import create_node
from purecache.transitions.orders import arrive, level, retains, touch
from purecache.transitions.pages import own_pages
from purecache.transitions.scans import end_of, first_of, number_of, repeat, some
from purecache.transitions.sketch import remembered
from purecache.transitions.standing import set_pages
from purecache.transitions.values import adopt_value, deepest_valid, touch_values, value_at
from purecache.transitions.vocabulary import Inserted, Status, Step
from purecache.transitions.walk import Prompt, page_at, root_of, size_of, walk

ALL = np.int32(2**30)
"""More pages than there are."""


class Offer(NamedTuple):
    """What a request brings to an insert, besides the prompt."""

    pages: jax.Array
    """[size] device page of each page of the prompt: the tree's own where it matched, else lent to the request."""
    counted: jax.Array
    """[] pages at the front that an earlier insert of the same request has counted as hits."""
    priority: jax.Array
    """[] priority of the request."""
    kept: jax.Array | np.int32 = ALL
    """[] pages at the front that have this priority; those behind are worth less, and get -1 if that is lower."""
    values: tuple[jax.Array, ...] = ()
    """Per tail pool [size]: device page of the value at each page of the prompt, NONE where the request has none."""


class _Plan(NamedTuple):
    """All that an insert will change, decided before anything is."""

    status: jax.Array
    nodes: jax.Array
    """[size] node of every page, shallowest first: known ones, then new ids."""
    parents: jax.Array
    """[size]."""
    known: jax.Array
    """[size] bool: in the tree already."""
    adopt: jax.Array
    """[size] bool: the tree takes the offered page."""
    length: jax.Array
    """[] pages of the prompt that will be in the tree."""
    created: jax.Array
    """[] how many nodes are new."""
    values: tuple[jax.Array, ...]
    """Per tail pool [size]: the tree's own device page of each value, or NONE."""
    adopt_values: tuple[jax.Array, ...]
    """Per tail pool [size] bool: the tree takes the offered value."""


def _plan(state: CacheState, prompt: Prompt, offer: Offer) -> _Plan:
    size = size_of(state, prompt)
    index = jnp.arange(size, dtype=jnp.int32)
    layout = state.layout
    path = walk(state, prompt, *(layout.page_row(tier, pool) for pool in range(layout.pools) for tier in Tier))
    known = index < path.length
    found = jnp.where(known, path.nodes[:size], 0)
    device, host, incoming, *values = (masked(known, pages[:size]) for pages in path.columns)
    # A page that is being loaded belongs to that operation until it ends, and so does everything below it.
    loading = known & (device < 0) & (host >= 0) & (incoming >= 0)
    length = jnp.minimum(first_of(state.token, loading), prompt.pages)
    free_nodes = state.books[Scalar.FREE_NODES]
    length = jnp.minimum(length, path.length + free_nodes)
    trees, here = values[::3], []
    for own, on_host, coming, given in zip(trees, values[1::3], values[2::3], offer.values, strict=True):
        here.append((own >= 0) | ((on_host >= 0) & (coming >= 0)) | (given[:size] >= 0))
    # Behind the last valid prefix a page would be of no use. What the tree has on device it keeps.
    there = jnp.minimum(first_of(state.token, device < 0), length)
    length = jnp.maximum(deepest_valid(state, length, here), there) if here else length
    inside = index < length
    fresh = state.nodes[Column.FREE_NODES, jnp.maximum(free_nodes - 1 - (index - path.length), 0)]
    nodes = masked(inside, jnp.where(known, found, fresh))
    parents = jnp.concatenate([root_of(state, prompt.rank)[None], nodes[:-1]])
    adopt = inside & (device < 0)
    created = jnp.maximum(length - path.length, 0)
    taken = tuple(inside & (own < 0) & (given[:size] >= 0) for own, given in zip(trees, offer.values, strict=True))
    status = jnp.int32(Status.OK)
    return _Plan(status, nodes, parents, known & inside, adopt, length, created, tuple(trees), taken)


def _create(state: CacheState, prompt: Prompt, offer: Offer, plan: _Plan, before: jax.Array) -> CacheState:
    """Add the new nodes, which will have the ids of the plan. before: uses of each page that are remembered."""
    first, priorities = plan.length - plan.created, _priorities(offer, plan)

    def one(number: jax.Array, state: CacheState) -> CacheState:
        index = first + number
        page = page_at(state, prompt.tokens, index)
        hits, priority = 1 + before[index], priorities[index]
        return create_node(state, plan.parents[index], page, prompt.namespace, prompt.rank, hits, priority)[0]

    return repeat(state.token, plan.created, one, state)


def _priorities(offer: Offer, plan: _Plan) -> jax.Array:
    """[size] the priority that a request gives each page."""
    kept = jnp.arange(plan.nodes.shape[0], dtype=jnp.int32) < offer.kept
    return jnp.where(kept, offer.priority, jnp.minimum(offer.priority, -1))


def insert(state: CacheState, prompt: Prompt, offer: Offer) -> Step[Inserted]:
    """Give the whole pages of a computed prompt to the tree.

    A page that the tree lacks on device becomes the tree's; for one that it has, the caller's page comes back as a
    duplicate and stays lent. Passing over a page of another request is a hit; a new page counts as one. If an offered
    page is not lent to the caller, nothing is changed. The insert is short (see `length`) where a page is just being
    loaded, and at the node limit.
    """
    state, reply = insert_if(state, prompt, offer, True)
    return Step(state, (), reply)


def insert_if(
    state: CacheState, prompt: Prompt, offer: Offer, known: jax.Array | bool, ends: bool = False
) -> tuple[CacheState, Inserted]:
    """`insert`, refused unless the receipt of the request is `known`.

    If the request `ends`, the pages offered behind those of the prompt must be lent too; they stay lent.
    """
    size = size_of(state, prompt)
    good_rank = (prompt.rank >= 0) & (prompt.rank < state.layout.ranks)
    good = good_rank & (prompt.pages >= 0) & (prompt.pages <= size)
    prompt = prompt._replace(pages=jnp.where(good, prompt.pages, 0), rank=jnp.where(good_rank, prompt.rank, 0))
    state, plan = look(state, _plan, prompt, offer)
    state, trees = look(state, lambda state: state.nodes[Column.DEVICE_PAGE, jnp.maximum(plan.nodes, 0)])
    every, index = jnp.arange(offer.pages.shape[0], dtype=jnp.int32), jnp.arange(size, dtype=jnp.int32)
    offered = masked(every < prompt.pages, offer.pages)
    left = offer.pages if ends else offered
    offer = offer._replace(pages=offered[:size])
    own = plan.known & ~plan.adopt & (trees == offer.pages)
    foreign = masked(~jnp.pad(own, (0, len(every) - size)), left)
    missing = some(state.token, (index < prompt.pages) & (offer.pages < 0))
    state, lent = all_lent_once(state, prompt.rank, foreign)
    state, offer, spare, good_values = _examine_values(state, prompt, offer, plan, ends)
    lent &= good_values
    status = jnp.where(good, jnp.where(lent & ~missing, Status.OK, Status.BAD_PAGE), Status.BAD_LENGTH)
    status = jnp.where(known, jnp.where(good_rank, status, Status.BAD_RANK), Status.BAD_RECEIPT)
    ok = status == Status.OK
    state = count(state, CLOCK=ok)
    # Most inserts find most of the prompt in the tree: the writes for new pages are left out where there are none.
    state, before = remembered(state, prompt, ok & (index >= offer.counted) & (index < plan.length))
    state = when(ok & (plan.created > 0), lambda state: _create(state, prompt, offer, plan, before), state)
    state = when(ok & some(state.token, plan.adopt), lambda state: _adopt(state, prompt, offer, plan), state)
    state = _adopt_values(state, prompt, offer, plan, ok)
    state = _use(state, prompt, offer, plan, ok)
    state, pages = look(state, lambda state: state.nodes[Column.DEVICE_PAGE, jnp.maximum(plan.nodes, 0)])
    adopted = number_of(state.token, plan.adopt & ok)
    inside = (index < plan.length) & ok
    last = plan.nodes[jnp.maximum(plan.length - 1, 0)]
    node = jnp.where(ok & (plan.length > 0), last, root_of(state, prompt.rank))
    duplicates = masked(inside & ~plan.adopt & ~own, offer.pages)
    state, wanted = look(state, _wanted, plan)
    state = count(state, DUPLICATE_PAGES=number_of(state.token, duplicates >= 0), INSERTED_PAGES=adopted)
    length, clock = jnp.where(ok, plan.length, 0), state.books[Scalar.CLOCK]
    wanted = jnp.where(ok, wanted, 0)
    state = touch_values(state, Tier.DEVICE, masked(length > 0, node), prompt.rank)
    held = tuple(
        masked(inside, jnp.where(taken, given[:size], own))
        for own, taken, given in zip(plan.values, plan.adopt_values, offer.values, strict=True)
    )
    spare = tuple(masked(ok, pages) for pages in spare)
    pages = masked(inside, pages)
    return state, Inserted(status, length, node, clock, pages, duplicates, wanted, held, spare)


def _examine_values(
    state: CacheState, prompt: Prompt, offer: Offer, plan: _Plan, ends: bool
) -> tuple[CacheState, Offer, list[jax.Array], jax.Array]:
    """Check the values offered: each must be the tree's own at that node, or lent and given once.

    Returns the state, the offer without those behind the prompt, what the tree won't take of it ([size], and all that
    is offered if the request `ends`), and whether it is good.
    """
    offered, spare, good = [], [], jnp.bool_(True)
    for pool, (given, trees, taken) in enumerate(zip(offer.values, plan.values, plan.adopt_values, strict=True), 1):
        every, size = jnp.arange(given.shape[0], dtype=jnp.int32), trees.shape[0]
        inside = masked(every < prompt.pages, given)
        own = (inside[:size] >= 0) & (inside[:size] == trees) & (jnp.arange(size) < plan.length)
        left = given if ends else inside
        state, lent = all_lent_once(state, prompt.rank, masked(~jnp.pad(own, (0, len(every) - size)), left), pool)
        good &= lent
        offered.append(inside)
        refused = ~jnp.pad(own | taken, (0, len(every) - size))
        spare.append(masked(refused & (ends | (every < plan.length)), left))
    return state, offer._replace(values=tuple(offered)), spare, good


def _adopt_values(state: CacheState, prompt: Prompt, offer: Offer, plan: _Plan, ok: jax.Array) -> CacheState:
    """Give the tree the offered values that it lacks, the shallowest first."""
    for pool, (given, taken) in enumerate(zip(offer.values, plan.adopt_values, strict=True), 1):
        takers = masked(taken & ok, plan.nodes)

        def one(index: jax.Array, state: CacheState, pool: int = pool, given: Any = given, takers: Any = takers) -> Any:
            return adopt_value(state, prompt.rank, pool, takers[index], given[index])

        state = repeat(state.token, end_of(state.token, takers >= 0), one, state)
    return state


def _adopt(state: CacheState, prompt: Prompt, offer: Offer, plan: _Plan) -> CacheState:
    """Book the offered pages as the tree's, and list the deepest of them."""
    takers, parents = masked(plan.adopt, plan.nodes), masked(plan.adopt, plan.parents)
    state = set_pages(state, prompt.rank, takers, device=offer.pages)
    taken = number_of(state.token, plan.adopt)
    state = book(state, Account.LENT, Tier.DEVICE, prompt.rank, -taken)
    state = add(state, "nodes", (Column.DEVICE_CHILDREN, parents), 1)
    state = own_pages(state, Tier.DEVICE, prompt.rank, masked(plan.adopt, offer.pages), plan.nodes)
    # What is on device is closed upwards, so that the adopted pages are the end of the path.
    return arrive(state, Tier.DEVICE, plan.nodes[jnp.maximum(plan.length - 1, 0)], prompt.rank)


def _use(state: CacheState, prompt: Prompt, offer: Offer, plan: _Plan, ok: jax.Array) -> CacheState:
    """Count the hits of pages that were there, raise priorities and touch the path."""
    index = jnp.arange(plan.nodes.shape[0], dtype=jnp.int32)
    known = masked(plan.known & ok, plan.nodes)
    given = _priorities(offer, plan)
    state, lower = look(state, lambda state: (known != NONE) & (state.nodes[Column.PRIORITY, known] < given))
    state = when(
        some(state.token, lower),
        lambda state: put(state, "nodes", (Column.PRIORITY, masked(lower, known)), given),
        state,
    )
    state = add(state, "nodes", (Column.HITS, masked(index >= offer.counted, known)), 1)
    state = _list_ends(state, prompt, plan, ok)
    last = jnp.maximum(plan.length - 1, 0)
    used = ok & (plan.length > 0) & ~plan.adopt[last]
    return touch(state, Tier.DEVICE, masked(used, plan.nodes[last]), prompt.rank)


def _list_ends(state: CacheState, prompt: Prompt, plan: _Plan, ok: jax.Array) -> CacheState:
    """Where pages of a path are kept for different times, list the last page of each stretch as just used.

    Else a page that becomes a leaf when shorter-lived ones below it have gone would count as long unused.
    """
    index = jnp.arange(plan.nodes.shape[0], dtype=jnp.int32)

    def falls(state: CacheState) -> jax.Array:
        levels = level(state, plan.nodes, state.nodes[Column.PRIORITY, jnp.maximum(plan.nodes, 0)])
        return ok & retains(state) & (index + 1 < plan.length) & (levels > jnp.append(levels[1:], levels[-1]))

    state, ends = look(state, falls)

    def one(place: jax.Array, state: CacheState) -> CacheState:
        return arrive(state, Tier.DEVICE, masked(ends[place], plan.nodes[place]), prompt.rank)

    return repeat(state.token, end_of(state.token, ends), one, state)


def _wanted(state: CacheState, plan: _Plan) -> jax.Array:
    """[] how many pages of the path have the hits for a backup and no copy on host, nor one on its way.

    The pool with most of them counts.
    """
    nodes = jnp.maximum(plan.nodes, 0)
    threshold = state.books[Scalar.BACKUP_HITS]
    enough = (threshold > 0) & (state.nodes[Column.HITS, nodes] >= threshold) & (plan.nodes != NONE)
    bare = (state.nodes[Column.HOST_PAGE, nodes] < 0) & (state.nodes[Column.INCOMING_PAGE, nodes] < 0)
    most = number_of(state.token, bare & enough)
    for pool in range(1, state.layout.pools):
        value = value_at(state, nodes, pool)
        bare = (value.device >= 0) & (value.host < 0) & (value.incoming < 0)
        has_host = state.layout.capacity(Tier.HOST, pool) > 0
        most = jnp.maximum(most, number_of(state.token, bare & enough)) if has_host else most
    return most
