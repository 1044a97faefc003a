"""Events of requests: match, admit, allocate, insert, finish, locks, evictions, reset."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purecache.transitions as t
from purecache.check.events import FOREIGN, SOUND, STALE, TWICE, Kind, table
from purecache.check.packing import CLOCK
from purecache.check.views import View, lent_number, lent_pages
from purecache.check.worlds import World
from purecache.state.layout import LENT, NONE, PAGES, Column, Ledger, Tier
from purecache.state.value_laws import Values
from purecache.transitions import Status

OWN, LENT_ONLY = 0, 1
"""Which pages an insert offers: the tree's own where it has them, or lent ones throughout (duplicates)."""
NO_VALUES, LAST_VALUE, ALL_VALUES = range(3)
"""On which pages an insert offers values of tail pools."""
GENERATION = 0
"""Every handle of a packed state has this generation."""


def request_kinds(world: World) -> list[Kind]:
    """The kinds of a world, cheap ones first."""
    kinds = [_match(world, "match", t.match), _match(world, "admit", t.admit), _lock(world), _unlock(world)]
    for pool in range(world.config.layout.pools):
        kinds += [*_lending(world, pool), *_evictions(world, pool)]
        kinds += _copies(world, pool) if pool else []
    kinds += [_insert(world), _checkpoint(world), _finish(world), _abort(world)]
    return [*kinds, Kind("reset", ("flaw",), table([SOUND]), lambda v, p: jnp.bool_(True), lambda v, p: (), t.reset)]


def of_pool(name: str, pool: int) -> str:
    """Name of a transition of a pool, as in `purecache.entries`."""
    return f"{name}@{pool}" if pool else name


def prompt_of(world: World, number: jax.Array) -> t.Prompt:
    """A prompt of the world, as transitions take it."""
    prompts = world.prompts
    columns = (prompts.tokens, prompts.pages, prompts.spaces, prompts.ranks)
    return t.Prompt(*(jnp.asarray(column)[number] for column in columns))


def node_handle(node: jax.Array, flaw: jax.Array) -> t.NodeHandle:
    """A node as it is now, or as it was before it was born."""
    return t.NodeHandle(node, jnp.where(flaw == STALE, CLOCK - 1, CLOCK))


def handle_generation(flaw: jax.Array) -> jax.Array:
    """The generation of what is open now, or of what has ended."""
    return jnp.where(flaw == STALE, GENERATION - 1, GENERATION)


def live_node(view: View, p: Any) -> jax.Array:
    """Whether a parameter `node` names one: roots are never stale."""
    return jnp.where(p.flaw == STALE, view.live[p.node], view.listed[p.node])


def node_numbers(world: World) -> range:
    """Every id that a node or a root can have."""
    return range(world.config.layout.nodes + world.config.ranks)


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


def _held(view: View, receipt: jax.Array) -> jax.Array:
    return view.state.ledger[Ledger.RECEIPT_NODE, receipt] != NONE


def _receipt(p: Any) -> t.ReceiptHandle:
    return t.ReceiptHandle(p.receipt, handle_generation(p.flaw))


def _unlock(world: World) -> Kind:
    return Kind(
        "unlock",
        ("receipt", "flaw"),
        table(range(world.config.max_receipts), [SOUND, STALE]),
        lambda view, p: _held(view, p.receipt) | (p.flaw == STALE),
        lambda view, p: (_receipt(p),),
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


# ---- inserts -------------------------------------------------------------------------------------------------------


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
        lambda view, p: _may_offer(world, view, p) & _held(view, p.receipt) & _of_rank(world, view, p),
        lambda view, p: (prompt_of(world, p.prompt), _offer(world, view, p), _receipt(p)),
        t.checkpoint,
        _BAD_PAGES + _BAD_RECEIPT,
        given=_given,
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
        lambda view, p: _may_offer(world, view, p) & _held(view, p.receipt) & _of_rank(world, view, p),
        lambda view, p: (prompt_of(world, p.prompt), _offer(world, view, p, behind=1), _receipt(p)),
        t.finish,
        _BAD_PAGES + _BAD_RECEIPT,
        given=_given,
    )


def _abort(world: World) -> Kind:
    layout = world.config.layout
    capacity = layout.device_pages

    def arguments(view: View, p: Any) -> tuple[Any, ...]:
        def lent(pool: int) -> jax.Array:
            size = layout.capacity(Tier.DEVICE, pool)
            return jnp.where(jnp.arange(size) < p.number, lent_pages(view, p.rank, pool, size), NONE)

        return p.rank, lent(0), _receipt(p), tuple(lent(pool) for pool in range(1, layout.pools))

    def enabled(view: View, p: Any) -> jax.Array:
        return _held(view, p.receipt) & (p.number <= lent_number(view, p.rank, 0))

    return Kind(
        "abort",
        ("rank", "number", "receipt", "flaw"),
        table(range(layout.ranks), range(min(2, capacity) + 1), range(world.config.max_receipts), [SOUND, STALE]),
        enabled,
        arguments,
        t.abort,
        _BAD_RECEIPT,
        given=lambda arguments: (arguments[0], (arguments[1], *arguments[3])),
    )
