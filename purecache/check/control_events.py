"""Events of an operator: tiers made smaller and larger, prefixes and namespaces forgotten."""

import functools
from typing import Any

import jax.numpy as jnp

import purecache.transitions as t
from purecache.check.events import SOUND, Kind, table
from purecache.check.handles import prompt_of
from purecache.check.worlds import World
from purecache.entries import of_pool
from purecache.state.layout import Tier
from purecache.transitions.forget import ALONE


def control_kinds(world: World) -> list[Kind]:
    """The kinds of a world with `control`."""
    if not world.control:
        return []
    kinds = [kind for pool in range(world.config.layout.pools) for kind in _sizes(world, pool)]
    return [*kinds, _forget(world), _forget_namespace(world)]


def _sizes(world: World, pool: int) -> list[Kind]:
    kinds, layout = [], world.config.layout
    for name, function, tier in (
        ("shrink_device", t.shrink_device, Tier.DEVICE),
        ("shrink_host", t.shrink_host, Tier.HOST),
        ("grow_device", t.grow_device, Tier.DEVICE),
        ("grow_host", t.grow_host, Tier.HOST),
    ):
        if capacity := layout.capacity(tier, pool):
            numbers = range(1, min(2, capacity) + 1) if name.startswith("shrink") else (1,)
            kinds.append(
                Kind(
                    of_pool(name, pool),
                    ("rank", "number", "flaw"),
                    table(range(layout.ranks), numbers, [SOUND]),
                    lambda view, p: jnp.bool_(True),
                    lambda view, p: (p.rank, p.number),
                    functools.partial(function, size=capacity, pool=pool),
                )
            )
    return kinds


def _forget(world: World) -> Kind:
    return Kind(
        "forget",
        ("prompt", "keep", "flaw"),
        table(range(world.prompts.number), range(ALONE, world.depth), [SOUND]),
        lambda view, p: jnp.bool_(True),
        lambda view, p: (prompt_of(world, p.prompt), p.keep),
        t.forget,
    )


def _forget_namespace(world: World) -> Kind:
    def arguments(view: Any, p: Any) -> tuple[Any, ...]:
        return t.Space(jnp.array([1, 0, 0, 0], jnp.int32) * p.space), p.rank

    return Kind(
        "forget_namespace",
        ("space", "rank", "flaw"),
        table(range(world.namespaces), range(world.config.ranks), [SOUND]),
        lambda view, p: jnp.bool_(True),
        arguments,
        t.forget_namespace,
    )
