"""Events that give pages to the tree, and end requests: insert, checkpoint, finish, abort."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purecache.transitions as t
from purecache.check.events import ALL_LEFT, FOREIGN, SOUND, STALE, TWICE, Kind, table
from purecache.check.handles import is_held, prompt_of, receipt_of
from purecache.check.views import View, lent_number, lent_pages
from purecache.check.worlds import World
from purecache.state.layout import LENT, NONE, PAGES, Column, Ledger, Tier
from purecache.state.value_laws import Values
from purecache.transitions import Status

OWN, LENT_ONLY = 0, 1
"""Which pages an insert offers: the tree's own where it has them, or lent ones throughout (duplicates)."""
NO_VALUES, LAST_VALUE, ALL_VALUES = range(3)
"""On which pages an insert offers values of tail pools."""


def insert_kinds(world: World) -> list[Kind]:
    """The kinds of a world."""
    return [_insert(world), _checkpoint(world), _finish(world), _abort(world)]


def _trees(view: View, pool: int) -> jax.Array:
    """[prompts, size] the tree's own device page, of a pool, at every page of every prompt, NONE where it has none."""
    column = Values(view.state, pool).device if pool else view.column(PAGES[Tier.DEVICE])
    return jnp.where(view.nodes >= 0, column[jnp.maximum(view.nodes, 0)], NONE)


def _offered(world: World, view: View, p: Any, pool: int) -> tuple[jax.Array, jax.Array]:
    """[size] pages that a request offers of a pool for its prompt, NONE elsewhere; how many lent ones that takes."""
    index, length, trees = jnp.arange(world.size), jnp.asarray(world.prompts.pages)[p.prompt], _trees(view, pool)
    wanted, trees = index < length, trees[p.prompt]
    if pool:
        wanted &= (p.values == ALL_VALUES) | ((p.values == LAST_VALUE) & (index == length - 1))
        fresh = wanted & (trees < 0)
    else:
        fresh = wanted & ((trees < 0) | (p.offer == LENT_ONLY))
    lent = lent_pages(view, jnp.asarray(world.prompts.ranks)[p.prompt], pool, world.size + 1)
    place = jnp.sum(fresh[None] & (index[None] < index[:, None]), axis=1)
    pages = jnp.where(fresh, lent[place], jnp.where(wanted, trees, NONE))
    return pages.astype(jnp.int32), jnp.sum(fresh, dtype=jnp.int32)


def _offer(world: World, view: View, p: Any, behind: int = 0) -> t.Offer:
    """The offer of an insert; `behind`: entries after the pages of the prompt, one of which may be a lent page."""
    pages, used = _offered(world, view, p, 0)
    length, index = jnp.asarray(world.prompts.pages)[p.prompt], jnp.arange(world.size)
    last = index == length - 1
    pages = jnp.where((p.flaw == FOREIGN) & last, _not_own(world, view)[p.prompt], pages)
    pages = jnp.where((p.flaw == TWICE) & last, pages[0], pages)
    values = [_offered(world, view, p, pool)[0] for pool in range(1, view.layout.pools)]
    if behind:
        extra = lent_pages(view, jnp.asarray(world.prompts.ranks)[p.prompt], 0, world.size + 1)[used]
        pages = jnp.pad(pages, (0, behind), constant_values=NONE)
        pages = jnp.where((jnp.arange(len(pages)) == length) & (p.behind > 0), extra, pages)
        values = [jnp.pad(each, (0, behind), constant_values=NONE) for each in values]
    return t.Offer(pages, jnp.int32(0), p.priority, tuple(values))


def _not_own(world: World, view: View) -> jax.Array:
    """[prompts] a page that is neither lent nor the tree's own at the last page of the prompt, or NONE."""
    last = (jnp.arange(world.size) == jnp.asarray(world.prompts.pages)[:, None] - 1)[..., None]
    owners = view.shelf(Tier.DEVICE, 0)[jnp.asarray(world.prompts.ranks)]
    index = jnp.arange(owners.shape[-1])
    own = jnp.any(last & (_trees(view, 0)[..., None] == index), axis=1)
    return jnp.max(jnp.where((owners != LENT) & ~own, index, NONE), axis=-1).astype(jnp.int32)


def _may_offer(world: World, view: View, p: Any) -> jax.Array:
    """[events] bool: whether the caller has the pages, and whether this differs from a simpler event."""
    length, ranks = jnp.asarray(world.prompts.pages), jnp.asarray(world.prompts.ranks)[p.prompt]
    inside = jnp.arange(world.size) < length[:, None]
    missing = jnp.sum(inside & (_trees(view, 0) < 0), axis=1)[p.prompt]
    behind = getattr(p, "behind", 0)
    length = length[p.prompt]
    used = jnp.where(p.offer == OWN, missing, length)
    good = used + behind <= lent_number(view, ranks, 0)
    good &= (p.offer == OWN) | (missing < length) | (p.flaw != SOUND)
    for pool in range(1, view.layout.pools):
        bare = inside & (_trees(view, pool) < 0)
        at_end = jnp.any(bare & (jnp.arange(world.size) == inside.sum(1)[:, None] - 1), axis=1)
        all_values, last_value = jnp.sum(bare, axis=1)[p.prompt], at_end[p.prompt].astype(jnp.int32)
        taken = jnp.where(p.values == ALL_VALUES, all_values, jnp.where(p.values == LAST_VALUE, last_value, 0))
        good &= taken <= lent_number(view, ranks, pool)
    foreign = (_not_own(world, view) >= 0)[p.prompt]
    return good & jnp.where(p.flaw == FOREIGN, foreign, jnp.where(p.flaw == TWICE, length > 1, True))


_BAD_PAGES = ((FOREIGN, Status.BAD_PAGE), (TWICE, Status.BAD_PAGE))
_BAD_RECEIPT = ((STALE, Status.BAD_RECEIPT),)


def _given(arguments: tuple[Any, ...]) -> Any:
    prompt, offer = arguments[:2]
    return prompt.rank, (offer.pages, *offer.values)


def _value_choices(world: World) -> tuple[int, ...]:
    return (NO_VALUES, LAST_VALUE, ALL_VALUES) if world.config.layout.tails else (NO_VALUES,)


def _insert(world: World) -> Kind:
    fields = ("prompt", "offer", "values", "priority", "flaw")
    columns = (range(world.prompts.number), (OWN, LENT_ONLY), _value_choices(world), world.priorities)
    return Kind(
        "insert",
        fields,
        _flawed_simply(table(*columns, [SOUND, FOREIGN, TWICE]), fields),
        lambda view, p: _may_offer(world, view, p),
        lambda view, p: (prompt_of(world, p.prompt), _offer(world, view, p)),
        t.insert,
        _BAD_PAGES,
        given=_given,
    )


def _flawed_simply(rows: np.ndarray, fields: tuple[str, ...]) -> np.ndarray:
    """Flawed events with a plain offer only: the others would be refused for the same reason."""
    by = {name: rows[:, place] for place, name in enumerate(fields)}
    plain = (by["flaw"] == SOUND) | ((by["offer"] == LENT_ONLY) & (by["values"] == NO_VALUES))
    plain &= (by["flaw"] == SOUND) | (by.get("behind", 0 * by["flaw"]) == 0)
    plain &= (by["flaw"] == SOUND) | (by["priority"] == by["priority"].min())
    return rows[plain]


def _checkpoint(world: World) -> Kind:
    fields = ("prompt", "offer", "values", "priority", "receipt", "flaw")
    columns = (range(world.prompts.number), (OWN, LENT_ONLY), _value_choices(world), world.priorities)
    return Kind(
        "checkpoint",
        fields,
        _flawed_simply(table(*columns, range(world.config.max_receipts), [SOUND, STALE, FOREIGN]), fields),
        lambda view, p: _may_offer(world, view, p) & is_held(view, p.receipt) & _of_rank(world, view, p),
        lambda view, p: (prompt_of(world, p.prompt), _offer(world, view, p), receipt_of(p)),
        t.checkpoint,
        _BAD_PAGES + _BAD_RECEIPT,
        given=_given,
        left=lambda reply: reply.length,
    )


def _of_rank(world: World, view: View, p: Any) -> jax.Array:
    """Whether a receipt is of the rank of the prompt: a request lives in one."""
    node = view.state.ledger[Ledger.RECEIPT_NODE, p.receipt]
    return view.column(Column.RANK)[jnp.maximum(node, 0)] == jnp.asarray(world.prompts.ranks)[p.prompt]


def _finish(world: World) -> Kind:
    fields = ("prompt", "offer", "values", "priority", "receipt", "behind", "flaw")
    columns = (range(world.prompts.number), (OWN, LENT_ONLY), _value_choices(world), world.priorities)
    return Kind(
        "finish",
        fields,
        _flawed_simply(table(*columns, range(world.config.max_receipts), (0, 1), [SOUND, STALE, FOREIGN]), fields),
        lambda view, p: _may_offer(world, view, p) & is_held(view, p.receipt) & _of_rank(world, view, p),
        lambda view, p: (prompt_of(world, p.prompt), _offer(world, view, p, behind=1), receipt_of(p)),
        t.finish,
        _BAD_PAGES + _BAD_RECEIPT,
        given=_given,
        left=lambda reply: ALL_LEFT,
    )


def _abort(world: World) -> Kind:
    layout = world.config.layout
    capacity = layout.device_pages

    def arguments(view: View, p: Any) -> tuple[Any, ...]:
        def lent(pool: int) -> jax.Array:
            size = layout.capacity(Tier.DEVICE, pool)
            return jnp.where(jnp.arange(size) < p.number, lent_pages(view, p.rank, pool, size), NONE)

        return p.rank, lent(0), receipt_of(p), tuple(lent(pool) for pool in range(1, layout.pools))

    def enabled(view: View, p: Any) -> jax.Array:
        return is_held(view, p.receipt) & (p.number <= lent_number(view, p.rank, 0))

    return Kind(
        "abort",
        ("rank", "number", "receipt", "flaw"),
        table(range(layout.ranks), range(min(2, capacity) + 1), range(world.config.max_receipts), [SOUND, STALE]),
        enabled,
        arguments,
        t.abort,
        _BAD_RECEIPT,
        given=lambda arguments: (arguments[0], (arguments[1], *arguments[3])),
        left=lambda reply: ALL_LEFT,
    )
