"""What transitions answer: statuses, effects and replies. Data only; every array has a fixed shape."""

import enum
from typing import Generic, NamedTuple, TypeVar

import jax

from purecache.state.cache_state import CacheState


class Status(enum.IntEnum):
    """How a transition went. Below zero is a mistake of the caller: the state is unchanged."""

    OK = 0
    NOTHING = 1
    """There was nothing to do."""
    NO_ROOM = 2
    """Not enough free and evictable pages; nothing was changed."""
    TABLE_FULL = 3
    """Too many operations or receipts are out; nothing was changed."""
    BELOW_THRESHOLD = 4
    """Too few tokens to be worth a load back."""
    JOINED = 5
    """All of it is being loaded already by another operation, or can't be before such a load has ended."""
    STALE = 6
    """The operation ended or was reset before this completion came; it was dropped."""
    BAD_NODE = -1
    """The id is not that of a live node."""
    BAD_PAGE = -2
    """A page is out of range, given twice, or not lent to the caller."""
    BAD_RECEIPT = -3
    """The receipt was returned already, or is not from this cache."""
    BAD_RANK = -4
    """The rank is out of range."""
    BAD_LENGTH = -5
    """A length is negative or exceeds the array it describes."""


class Transfers(NamedTuple):
    """Effect: copy pages `source[k]` to `target[k]` for every k with `operation[k] >= 0`, before any later effect.

    Pages of one operation are consecutive: of pool 0 deepest node first, of a tail pool in an order of its own. Page
    ids are local to `rank`; `kind` names the tiers.
    """

    kind: jax.Array
    """[] a TransferKind."""
    pool: jax.Array
    """[] number of the pool whose pages these are."""
    rank: jax.Array
    """[]."""
    operation: jax.Array
    """[size] number of the operation that each page belongs to, NONE for unused entries."""
    generation: jax.Array
    """[size] its generation."""
    source: jax.Array
    """[size] page ids."""
    target: jax.Array
    """[size] page ids."""


class NodeHandle(NamedTuple):
    """A node as it was seen at some time: ids are used again, and later nodes are not meant."""

    node: jax.Array
    """[] node id."""
    clock: jax.Array
    """[] the clock of the state when a reply named it."""


class Matched(NamedTuple):
    """Reply of match and peek. Lengths are in pages."""

    device_length: jax.Array
    """[] pages of the prefix that are on device."""
    length: jax.Array
    """[] pages of the prefix usable on device or, after a load back, from host."""
    device_node: jax.Array
    """[] deepest node of the device part, or the root."""
    node: jax.Array
    """[] deepest node of the usable prefix, or the root."""
    clock: jax.Array
    """[] the clock, for handles of these nodes."""
    full_length: jax.Array
    """[] pages of the prefix that pool 0 has on device or host, whatever the laws of the others say."""
    device_pages: jax.Array
    """[size] device page of each of the first `device_length` nodes, NONE beyond."""
    values: tuple[jax.Array, ...] = ()
    """Per tail pool [size]: device page of each value that the device part needs, NONE elsewhere."""


class Locked(NamedTuple):
    """Reply of lock: the receipt that `unlock` takes."""

    status: jax.Array
    receipt: jax.Array
    generation: jax.Array


class Admitted(NamedTuple):
    """Reply of admit: a match whose device part is locked."""

    matched: Matched
    locked: Locked


class Unlocked(NamedTuple):
    """Reply of unlock."""

    status: jax.Array


class Lent(NamedTuple):
    """Reply of allocate."""

    status: jax.Array
    pages: jax.Array
    """[size] device pages, NONE beyond the number asked for."""


class Withheld(NamedTuple):
    """Reply of the two shrinkings."""

    status: jax.Array
    number: jax.Array
    """[] pages that are out of use now; less than asked if no more could be freed."""
    pages: jax.Array
    """[size] these pages, NONE beyond."""


class Restored(NamedTuple):
    """Reply of the two growings."""

    status: jax.Array
    number: jax.Array
    """[] pages that are in use again; less than asked if no more were out of use."""


class Released(NamedTuple):
    """Reply of release, abort and retract."""

    status: jax.Array


class Inserted(NamedTuple):
    """Reply of insert and finish."""

    status: jax.Array
    length: jax.Array
    """[] pages of the prefix that are now in the tree."""
    node: jax.Array
    """[] deepest of them, or the root."""
    clock: jax.Array
    """[] the clock, for a handle of that node."""
    pages: jax.Array
    """[size] the tree's device page of each, NONE beyond."""
    duplicates: jax.Array
    """[size] pages of the caller that the tree did not take, since it had that page already; NONE elsewhere."""
    wanted: jax.Array
    """[] how many pages of the path the write policy wants backed up: those of the pool with most."""
    values: tuple[jax.Array, ...] = ()
    """Per tail pool [size]: the tree's device page of each value, NONE where it has none."""
    spare: tuple[jax.Array, ...] = ()
    """Per tail pool [size]: values of the caller that the tree did not take."""


class Evicted(NamedTuple):
    """Reply of the two evictions."""

    status: jax.Array
    number: jax.Array
    """[] pages freed; less than asked if no more could be."""
    pages: jax.Array
    """[size] the freed pages, NONE beyond."""
    values: tuple[jax.Array, ...] = ()
    """Per tail pool [size]: pages of the values that left with them, NONE elsewhere."""


class BackupBegun(NamedTuple):
    """Reply of begin_backup."""

    status: jax.Array
    number: jax.Array
    """[] pages on their way; the rest of the path was refused for want of host room."""
    values: tuple[jax.Array, ...] = ()
    """Per tail pool []: values on their way."""


class StoreBegun(NamedTuple):
    """Reply of begin_store."""

    status: jax.Array
    number: jax.Array
    """[] pages on their way."""
    left: jax.Array
    """[] pages of the same stretch that are still missing."""
    values: tuple[jax.Array, ...] = ()
    """Per tail pool []: values on their way."""


class PrefetchBegun(NamedTuple):
    """Reply of begin_prefetch."""

    status: jax.Array
    operation: jax.Array
    generation: jax.Array
    number: jax.Array
    """[] pages reserved; fewer than wanted if there was no room."""
    pages: jax.Array
    """[size] the reserved host pages, NONE beyond."""


class LoadBegun(NamedTuple):
    """Reply of begin_load_back."""

    status: jax.Array
    operation: jax.Array
    generation: jax.Array
    number: jax.Array
    """[] pages that this operation loads."""
    pages: jax.Array
    """[size] device pages of all nodes below the device prefix, shallowest first; NONE beyond."""


class Forked(NamedTuple):
    """Reply of fork."""

    status: jax.Array
    page: jax.Array
    """[] the page lent to the caller, or NONE."""


class Advanced(NamedTuple):
    """Reply of advance."""

    time: jax.Array
    """[] what time it is now."""


class ResetDone(NamedTuple):
    """Reply of reset."""

    lent: jax.Array
    """[] device pages that requests still hold."""


class Forgotten(NamedTuple):
    """Reply of forget and forget_namespace."""

    status: jax.Array
    device: jax.Array
    """[] device pages of kv freed."""
    host: jax.Array
    """[] host pages of kv freed."""
    left: jax.Array
    """[] nodes that were meant and stay, as something holds them or is copying them."""


class Finished(NamedTuple):
    """Reply of the transitions that end an operation."""

    status: jax.Array
    number: jax.Array
    """[] pages published, stored or inserted."""
    node: jax.Array
    """[] deepest node of the operation, NONE if it was stale."""
    clock: jax.Array
    """[] the clock, for a handle of that node."""


Reply = TypeVar("Reply")


class Step(NamedTuple, Generic[Reply]):
    """What every transition returns: the next state, the transfers to run, and an answer."""

    state: CacheState
    effects: tuple[Transfers, ...]
    reply: Reply
