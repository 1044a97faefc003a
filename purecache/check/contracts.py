"""What must hold of every single step from one state to the next, whatever the laws say of the states themselves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purecache.check.packing import CLOCK
from purecache.check.views import View, members
from purecache.state.layout import (
    LENT,
    LOCKS,
    NONE,
    PAGES,
    RESERVED,
    TIERS,
    WITHHELD,
    Column,
    Ledger,
    Scalar,
    Tier,
    TransferKind,
)
from purecache.state.value_laws import Values
from purecache.transitions import Status, Transfers

CONTRACTS = (
    "a flaw is answered as documented",
    "what is refused changes nothing",
    "the answer is right",
    "pages of an unfinished operation stay with it",
    "what is locked stays",
    "lent pages stay lent unless the caller hands them over",
    "a page becomes visible on device only by an insert or when its load back has ended well",
    "a page becomes visible on host only when its backup or prefetch has ended well",
    "a page leaves the device only by an eviction or a reset",
    "a node id that is used again is a later node",
    "an operation or receipt that ends is recognised as ended",
    "an effect reads the pages of its nodes and writes pages that are on their way",
    "an operation that begins has all its transfers",
    "everything can be given back",
    "the laws hold",
    "every number fits into a byte",
    "no prefix is deeper than the prompts",
    "what a request leaves behind is lent no more",
    "what is out of use stays so until it is taken into use again",
)
"""Names of the bits of a verdict, lowest first."""

_UNCHANGED = (Status.NO_ROOM, Status.TABLE_FULL, Status.BELOW_THRESHOLD, Status.STALE)
"""Statuses besides the negative ones that promise an unchanged state."""
EVERY_POOL = -2
"""See `Traits`."""


class Traits(NamedTuple):
    """What a kind of events may do. Data, so that all kinds share one program."""

    fills_device: Any
    """[] pool whose pages may become visible on device, EVERY_POOL, or NONE."""
    fills_host: Any
    """[] the same for the host."""
    counted: Any
    """[] bool: whether the reply counts the pages that became visible."""
    empties_device: Any
    """[] bool: whether pages may leave the device."""
    forgets: Any
    """[] bool: whether it is a reset, after which nothing goes on."""
    grows: Any
    """[] bool: whether pages that are out of use may come back."""


def traits_of(name: str) -> Traits:
    """The traits of a kind of events, by its name."""
    base, _, index = name.partition("@")
    pool = int(index or 0)
    inserts = base in ("insert", "checkpoint", "finish")
    device = EVERY_POOL if inserts else pool if base == "finish_load_back" else NONE
    host = pool if base in ("finish_backup", "finish_prefetch") else NONE
    leaving = ("allocate", "evict_device", "shrink_device", "begin_load_back", "fork", "forget", "forget_namespace")
    flags = (base.startswith("finish_"), base in (*leaving, "reset"), base == "reset", base.startswith("grow_"))
    return Traits(*(np.int32(each) for each in (device, host, *flags)))


class Deed(NamedTuple):
    """What one event did, in one shape for all kinds."""

    flawed: jax.Array
    """[] bool: it was a mistake, or came too late."""
    wanted: jax.Array
    """[] the status that this must be answered with."""
    status: jax.Array
    """[] the status of the reply."""
    number: jax.Array
    """[] pages that the reply counts."""
    most: jax.Array
    """[] pages that may become visible, as they fared."""
    right: jax.Array
    """[] bool: whether the answer is what the tree says."""
    ends: jax.Array
    """[] the operation that it may end, or NONE."""
    rank: jax.Array
    """[] the rank of the pages that the caller handed over."""
    given: jax.Array
    """[pools, pages] these pages, NONE elsewhere."""
    left: jax.Array
    """[] how many of the first of them are not the caller's any more if it went well."""
    effects: Transfers
    """All transfers: every field [entries]."""


def verdict_of(traits: Traits, deed: Deed, before: View, after: View, same: Any, depth: int) -> jax.Array:
    """[] int32 with a bit for each contract of CONTRACTS that one step breaks; those of whole states are left out.

    same: whether both states have one fingerprint, with the eviction orders and without.
    """
    status = deed.status
    refused = sum((status == each for each in _UNCHANGED), jnp.bool_(False))
    goes_on = traits.forgets == 0
    wrong, missing = _misdirected(before, after, deed.effects)
    broken = {
        0: (status != deed.wanted) & deed.flawed,
        1: (refused & ~same[1]) | ((status < 0) & ~same[0]),
        2: ~deed.right,
        3: goes_on & _moved(before, after, jnp.arange(before.layout.max_operations) == deed.ends, depth),
        4: goes_on & _unlocked(before, after),
        5: goes_on & _taken(deed, before, after),
        6: _appeared(traits.fills_device, traits.counted, deed, before, after, Tier.DEVICE),
        7: _appeared(traits.fills_host, traits.counted, deed, before, after, Tier.HOST),
        8: (traits.empties_device == 0) & _left(before, after),
        9: goes_on & _confused(before, after),
        10: goes_on & _not_recognised(before, after),
        11: wrong,
        12: missing,
        17: _kept_lent(deed, after),
        18: (traits.grows == 0) & _came_back(before, after),
    }
    return jnp.stack([flag.astype(jnp.int32) << bit for bit, flag in broken.items()]).sum(dtype=jnp.int32)


def _any(*masks: jax.Array) -> jax.Array:
    return jnp.any(jnp.stack([jnp.any(mask) for mask in masks]))


def _identity(before: View, after: View) -> jax.Array:
    """[rows] bool: nodes that were in the tree and still are, as the same prefix."""
    return before.live & after.live & jnp.all(before.paths == after.paths, axis=1)


def _moved(before: View, after: View, closes: jax.Array, depth: int) -> jax.Array:
    """Whether a page in flight of an operation that goes on is in other hands now, or its source is."""
    kept = _identity(before, after)
    nodes, kinds = members(before, depth), before.operation(Ledger.OPERATION_KIND)
    moves = (kinds == TransferKind.BACKUP) | (kinds == TransferKind.LOAD_BACK)
    goes_on = before.open() & ~closes
    place = jnp.maximum(nodes, 0)
    used = (nodes >= 0) & (goes_on & moves)[:, None]
    incoming = before.column(PAGES[2])[place] != after.column(PAGES[2])[place]
    host = before.column(PAGES[1])[place] != after.column(PAGES[1])[place]
    host &= (kinds == TransferKind.LOAD_BACK)[:, None]
    wrong = [used & (~kept[place] | incoming | host), goes_on & ~after.open()]
    for pool in range(before.layout.pools):
        for tier in TIERS:
            owners, now = before.shelf(tier, pool), after.shelf(tier, pool)
            ours, theirs = _operation_of(before, owners, tier, pool), _operation_of(after, now, tier, pool)
            wrong.append((ours >= 0) & ~closes[jnp.maximum(ours, 0)] & (ours != theirs))
    return _any(*wrong)


def _operation_of(view: View, owners: jax.Array, tier: Tier, pool: int) -> jax.Array:
    """[ranks, capacity] the operation that each page of a shelf is in flight for, NONE for others. For pool 0 only
    reserved pages: the others are checked by node."""
    operation = jnp.where(owners <= RESERVED, RESERVED - owners, NONE)
    if pool:
        values, node = Values(view.state, pool), jnp.maximum(owners, 0)
        waits = (owners >= 0) & (values.incoming[node] == jnp.arange(owners.shape[1]))
        waits &= (values.host[node] < 0) if tier == Tier.HOST else (values.device[node] < 0) & (values.host[node] >= 0)
        operation = jnp.where(waits, values.operation[node], operation)
    return operation


def _unlocked(before: View, after: View) -> jax.Array:
    """Whether a locked node lost its device page, or a locked value its own."""
    kept = _identity(before, after)
    device = before.column(PAGES[Tier.DEVICE])
    locked = before.live & (before.column(LOCKS[0]) > 0) & (device >= 0)
    held = before.live & ((before.column(LOCKS[0]) > 0) | (before.column(LOCKS[1]) > 0))
    wrong = [locked & (~kept | (device != after.column(PAGES[Tier.DEVICE]))), held & ~kept & _still_held(before, after)]
    for pool in range(1, before.layout.pools):
        ours, theirs = Values(before.state, pool), Values(after.state, pool)
        wrong.append(before.live & (ours.locks > 0) & (ours.device >= 0) & (ours.device != theirs.device))
    return _any(*wrong)


def _still_held(before: View, after: View) -> jax.Array:
    """[rows] bool: a receipt that was out, and is, names this node."""
    rows = []
    for view in (before, after):
        node = view.state.ledger[Ledger.RECEIPT_NODE, : view.layout.max_receipts]
        rows.append(jnp.any((node[:, None] == jnp.arange(view.layout.rows)) & (node != NONE)[:, None], axis=0))
    return rows[0] & rows[1]


def _taken(deed: Deed, before: View, after: View) -> jax.Array:
    """Whether a lent page that the caller keeps is lent no more."""
    wrong = []
    for pool in range(before.layout.pools):
        lent = (before.shelf(Tier.DEVICE, pool) == LENT) & (after.shelf(Tier.DEVICE, pool) != LENT)
        named = jnp.any(jnp.arange(lent.shape[1])[:, None] == deed.given[pool][None], axis=1)
        here = jnp.arange(before.layout.ranks) == deed.rank
        wrong.append(lent & ~(named[None] & here[:, None]))
    return _any(*wrong)


def _kept_lent(deed: Deed, after: View) -> jax.Array:
    """Whether a page that the caller gave away for good is still lent. An allocator outside frees such pages itself."""
    wrong = []
    for pool in range(after.layout.pools):
        owner = _owner(after, Tier.DEVICE, pool, deed.rank, deed.given[pool])
        given = (deed.given[pool] >= 0) & (jnp.arange(owner.shape[0]) < deed.left)
        wrong.append(given & (owner == LENT))
    done = (deed.status == Status.OK) & ~deed.flawed & (after.state.books[Scalar.EXTERNAL] == 0)
    return done & _any(*wrong)


def _came_back(before: View, after: View) -> jax.Array:
    pools = range(before.layout.pools)
    shelves = [(before.shelf(tier, pool), after.shelf(tier, pool)) for tier in TIERS for pool in pools]
    return _any(*((was == WITHHELD) & (now != WITHHELD) for was, now in shelves))


def _columns(view: View, tier: Tier) -> list[jax.Array]:
    columns = [view.column(PAGES[tier])]
    for pool in range(1, view.layout.pools):
        values = Values(view.state, pool)
        columns.append(values.device if tier == Tier.DEVICE else values.host)
    return columns


def _appeared(fills: Any, counted: Any, deed: Deed, before: View, after: View, tier: Tier) -> jax.Array:
    """Whether a page became visible in a tier that may not, not as many as the reply says, or more than arrived."""
    kept, wrong, new = _identity(before, after), [], jnp.int32(0)
    for pool, (was, now) in enumerate(zip(_columns(before, tier), _columns(after, tier), strict=True)):
        appeared = after.live & (now >= 0) & (~kept | (was < 0))
        allowed = (fills == pool) | (fills == EVERY_POOL)
        wrong.append(appeared & ~allowed)
        new += jnp.sum(appeared & allowed, dtype=jnp.int32)
    miscounted = (counted != 0) & (fills >= 0) & ((new != deed.number) | (new > deed.most))
    return _any(*wrong) | miscounted


def _left(before: View, after: View) -> jax.Array:
    kept = _identity(before, after)
    pairs = zip(_columns(before, Tier.DEVICE), _columns(after, Tier.DEVICE), strict=True)
    return _any(*(before.live & (was >= 0) & (~kept | (now != was)) for was, now in pairs))


def _confused(before: View, after: View) -> jax.Array:
    """Whether a node that is new, or another one under its id, could be taken for one that was seen before."""
    new = after.live & ~_identity(before, after)
    born = after.column(Column.BORN)
    return _any(new & ((born <= CLOCK) | (born > after.state.books[Scalar.CLOCK])))


def _not_recognised(before: View, after: View) -> jax.Array:
    operations = before.open() & ~after.open()
    ends = [operations & (after.operation(Ledger.OPERATION_GENERATION) == 0)]
    held, now = (view.state.ledger[Ledger.RECEIPT_NODE, : view.layout.max_receipts] for view in (before, after))
    generation = after.state.ledger[Ledger.RECEIPT_GENERATION, : before.layout.max_receipts]
    return _any(*ends, (held != NONE) & (now == NONE) & (generation == 0))


def _misdirected(before: View, after: View, transfers: Transfers) -> tuple[jax.Array, jax.Array]:
    """Whether an effect reads or writes what it may not, and whether an operation began without all its transfers."""
    wrong, layout = jnp.bool_(False), before.layout
    used = transfers.operation != NONE
    for pool in range(layout.pools):
        of_pool = used & (transfers.pool == pool)
        for check in (_backup, _load, _store, _copy):
            wrong |= _any(of_pool & check(before, after, transfers, pool))
    moves = used & (transfers.kind != TransferKind.COPY)
    numbers = jnp.arange(layout.max_operations)
    listed = jnp.sum(moves[:, None] & (transfers.operation[:, None] == numbers), axis=0, dtype=jnp.int32)
    wrong |= _any(moves & ~after.open()[jnp.clip(transfers.operation, 0, layout.max_operations - 1)])
    began = after.open() & ~before.open() & (after.operation(Ledger.OPERATION_KIND) != TransferKind.PREFETCH)
    return wrong, _any(jnp.where(began, listed != after.operation(Ledger.OPERATION_COUNT), listed != 0))


def _owner(view: View, tier: Tier, pool: int, rank: jax.Array, page: jax.Array) -> jax.Array:
    """[size] owners of pages of a rank."""
    shelf = view.shelf(tier, pool)
    if not shelf.shape[1]:
        return jnp.full(page.shape, NONE)
    inside = (page >= 0) & (page < shelf.shape[1])
    return jnp.where(inside, shelf[rank, jnp.where(inside, page, 0)], NONE)


def _incoming(view: View, pool: int, node: jax.Array) -> jax.Array:
    column = Values(view.state, pool).incoming if pool else view.column(PAGES[2])
    return column[jnp.maximum(node, 0)]


def _same_path(before: View, after: View, source: jax.Array, target: jax.Array) -> jax.Array:
    """[size] bool: both owners are nodes, and stand for one prefix."""
    paths = before.paths[jnp.maximum(source, 0)], after.paths[jnp.maximum(target, 0)]
    return (source >= 0) & (target >= 0) & jnp.all(paths[0] == paths[1], axis=-1)


def _backup(before: View, after: View, transfers: Any, pool: int) -> jax.Array:
    source = _owner(before, Tier.DEVICE, pool, transfers.rank, transfers.source)
    target = _owner(after, Tier.HOST, pool, transfers.rank, transfers.target)
    fits = _same_path(before, after, source, target) & (_incoming(after, pool, target) == transfers.target)
    return (transfers.kind == TransferKind.BACKUP) & ~fits


def _load(before: View, after: View, transfers: Any, pool: int) -> jax.Array:
    source = _owner(after, Tier.HOST, pool, transfers.rank, transfers.source)
    target = _owner(after, Tier.DEVICE, pool, transfers.rank, transfers.target)
    fits = _same_path(before, after, source, target) & (_incoming(after, pool, target) == transfers.target)
    fits &= _owner(before, Tier.HOST, pool, transfers.rank, transfers.source) == source
    return (transfers.kind == TransferKind.LOAD_BACK) & ~fits


def _store(before: View, after: View, transfers: Any, pool: int) -> jax.Array:
    source = _owner(before, Tier.HOST, pool, transfers.rank, transfers.source)
    fits = (source == transfers.target) & before.live[jnp.maximum(transfers.target, 0)]
    return (transfers.kind == TransferKind.STORE) & ~fits


def _copy(before: View, after: View, transfers: Any, pool: int) -> jax.Array:
    target = _owner(after, Tier.DEVICE, pool, transfers.rank, transfers.target)
    source = _owner(before, Tier.DEVICE, pool, transfers.rank, transfers.source)
    fits = (target == LENT) & ((source >= 0) | (source == LENT)) & (transfers.source != transfers.target)
    return (transfers.kind == TransferKind.COPY) & ~fits


def bit_of(contract: str) -> int:
    """The bit of a contract."""
    return 1 << CONTRACTS.index(contract)


def broken_contracts(verdict: int) -> list[str]:
    """Names of the contracts that a verdict says are broken."""
    return [name for bit, name in enumerate(CONTRACTS) if verdict >> bit & 1]
