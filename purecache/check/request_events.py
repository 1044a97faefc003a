"""Events of requests: match, admit, allocate, insert, finish, locks, evictions, reset."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import purecache.transitions as t
from purecache.check.events import ALL_LEFT, FOREIGN, SOUND, STALE, TWICE, Kind, table
from purecache.check.handles import is_held, live_node, node_handle, node_numbers, prompt_of, receipt_of
from purecache.check.insert_events import insert_kinds
from purecache.check.views import View, lent_number, lent_pages
from purecache.check.worlds import World
from purecache.entries import of_pool
from purecache.state.layout import LENT, NONE, PAGES, Tier
from purecache.transitions import Status


def request_kinds(world: World) -> list[Kind]:
    """The kinds of a world, cheap ones first."""
    kinds = [_match(world, "match", t.match), _match(world, "admit", t.admit), _lock(world), _unlock(world)]
    for pool in range(world.config.layout.pools):
        kinds += [*_lending(world, pool), *_evictions(world, pool)]
        kinds += _copies(world, pool) if pool else []
    kinds += insert_kinds(world)
    return [*kinds, Kind("reset", ("flaw",), table([SOUND]), lambda v, p: jnp.bool_(True), lambda v, p: (), t.reset)]


def _near(world: World, view: View, prompt: jax.Array) -> jax.Array:
    """[] bool: at most the last page of the prompt is not in the tree: what is further off ends the same way."""
    known = jnp.sum(view.nodes >= 0, axis=1)
    return (known + 1 >= jnp.asarray(world.prompts.pages))[prompt]


def _match(world: World, name: str, function: Any) -> Kind:
    def expected(view: View, p: Any, reply: Any) -> jax.Array:
        matched = reply.matched if name == "admit" else reply
        refused = reply.locked.status == Status.TABLE_FULL if name == "admit" else jnp.bool_(False)
        nodes = view.nodes[p.prompt]
        device, host = (view.column(row)[jnp.maximum(nodes, 0)] >= 0 for row in PAGES[:2])
        index = jnp.arange(world.size)

        def run(good: jax.Array) -> jax.Array:
            return jnp.min(jnp.where(good & (nodes >= 0), world.size, index))

        right = matched.full_length == run(device | host)
        if view.layout.pools == 1:
            right &= (matched.device_length == run(device)) & (matched.length == run(device | host))
        last = nodes[jnp.maximum(matched.length - 1, 0)]
        right &= (matched.length == 0) | (matched.node == last)
        return refused | right

    return Kind(
        name,
        ("prompt", "flaw"),
        table(range(world.prompts.number), [SOUND]),
        lambda view, p: _near(world, view, p.prompt),
        lambda view, p: (prompt_of(world, p.prompt),),
        function,
        expected=expected,
    )


def _lock(world: World) -> Kind:
    return Kind(
        "lock",
        ("node", "flaw"),
        table(node_numbers(world), [SOUND, STALE]),
        live_node,
        lambda view, p: (node_handle(p.node, p.flaw),),
        t.lock,
        ((STALE, Status.BAD_NODE),),
    )


def _unlock(world: World) -> Kind:
    return Kind(
        "unlock",
        ("receipt", "flaw"),
        table(range(world.config.max_receipts), [SOUND, STALE]),
        lambda view, p: is_held(view, p.receipt) | (p.flaw == STALE),
        lambda view, p: (receipt_of(p),),
        t.unlock,
        ((STALE, Status.BAD_RECEIPT),),
    )


def _not_lent(view: View, rank: jax.Array, pool: int) -> jax.Array:
    """[] the last page of a rank that is not lent, NONE if all are."""
    owners = view.shelf(Tier.DEVICE, pool)[rank]
    return jnp.max(jnp.where(owners != LENT, jnp.arange(owners.shape[-1]), NONE), axis=-1).astype(jnp.int32)


def _lending(world: World, pool: int) -> list[Kind]:
    capacity, layout = world.config.layout.capacity(Tier.DEVICE, pool), world.config.layout

    def pages(view: View, p: Any) -> jax.Array:
        chosen = jnp.where(jnp.arange(capacity) < p.number, lent_pages(view, p.rank, pool, capacity), NONE)
        foreign = (p.flaw == FOREIGN) & (jnp.arange(capacity) == 0)
        return jnp.where(foreign, _not_lent(view, p.rank, pool), chosen)

    def may_release(view: View, p: Any) -> jax.Array:
        foreign = (p.number == 1) & (_not_lent(view, p.rank, pool) >= 0)
        return jnp.where(p.flaw == FOREIGN, foreign, lent_number(view, p.rank, pool) >= p.number)

    def given(arguments: tuple[Any, ...]) -> Any:
        return arguments[0], tuple(arguments[1] if p == pool else None for p in range(layout.pools))

    sizes = range(1, min(2, capacity) + 1)
    return [
        Kind(
            of_pool("allocate", pool),
            ("rank", "number", "flaw"),
            table(range(layout.ranks), sizes, [SOUND]),
            lambda view, p: jnp.bool_(True),
            lambda view, p: (p.rank, p.number),
            functools.partial(_sized, t.allocate, capacity, pool),
        ),
        Kind(
            of_pool("release", pool),
            ("rank", "number", "flaw"),
            table(range(layout.ranks), sizes, [SOUND, FOREIGN]),
            may_release,
            lambda view, p: (p.rank, pages(view, p)),
            functools.partial(t.release, pool=pool) if pool else t.release,
            ((FOREIGN, Status.BAD_PAGE),),
            given=given,
            left=lambda reply: ALL_LEFT,
        ),
    ]


def _sized(function: Any, size: int, pool: int, state: Any, *arguments: Any) -> Any:
    return function(state, *arguments, size, pool) if pool else function(state, *arguments, size)


def _evictions(world: World, pool: int) -> list[Kind]:
    kinds, layout = [], world.config.layout
    for name, function, tier in (
        ("evict_device", t.evict_device, Tier.DEVICE),
        ("evict_host", t.evict_host, Tier.HOST),
    ):
        if capacity := layout.capacity(tier, pool):
            kinds.append(
                Kind(
                    of_pool(name, pool),
                    ("rank", "number", "flaw"),
                    table(range(layout.ranks), range(1, min(2, capacity) + 1), [SOUND]),
                    lambda view, p: jnp.bool_(True),
                    lambda view, p: (p.rank, p.number),
                    functools.partial(_sized, function, capacity, pool),
                )
            )
    return kinds


def _copies(world: World, pool: int) -> list[Kind]:
    capacity = world.config.layout.capacity(Tier.DEVICE, pool)

    def two(view: View, p: Any) -> tuple[Any, ...]:
        pages = lent_pages(view, p.rank, pool, max(2, capacity))
        return p.rank, pages[0], jnp.where(p.flaw == TWICE, pages[0], pages[1])

    return [
        Kind(
            of_pool("fork", pool),
            ("node", "flaw"),
            table(node_numbers(world), [SOUND, STALE]),
            live_node,
            lambda view, p: (node_handle(p.node, p.flaw),),
            functools.partial(t.fork, pool=pool),
            ((STALE, Status.BAD_NODE),),
        ),
        Kind(
            of_pool("copy_page", pool),
            ("rank", "flaw"),
            table(range(world.config.ranks), [SOUND, TWICE]),
            lambda view, p: lent_number(view, p.rank, pool) >= 2,
            two,
            functools.partial(t.copy_page, pool=pool),
            ((TWICE, Status.BAD_PAGE),),
        ),
    ]
