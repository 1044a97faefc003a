"""What the facade answers: plain data with NumPy arrays, and the errors it raises."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from purecache.transitions import Status


class CacheError(ValueError):
    """A call that the cache can't carry out as it stands; `status` says what was wrong. Nothing was changed."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class Node(NamedTuple):
    """A prefix in the tree, as it was seen at some time. Once that prefix has been evicted, using it is refused."""

    number: int
    """Node id, which is used again for other prefixes."""
    clock: int
    """Clock of the cache when it named this node."""


class Receipt(NamedTuple):
    """Stands for one lock. Give it back once: to `unlock`, `finish`, `abort` or `retract`."""

    number: int
    generation: int


@dataclass(frozen=True, eq=False)
class Match:
    """How much of a prompt is cached. Lengths are in tokens (bigrams, in a tree of bigrams).

    The pages are good until the next eviction, unless they are locked; the nodes may be kept.
    """

    device_pages: np.ndarray
    """int32[n]: the device pages of the part that is on device, shallowest first."""
    device_length: int
    """Tokens on device."""
    length: int
    """Tokens on device or, after `load_back`, from host."""
    device_node: Node
    """Deepest node of the part on device; what to lock."""
    node: Node
    """Deepest node of all that is usable; what to load back."""
    full_length: int = -1
    """Tokens whose kv is on device or host, whatever the other pools lack. Where that is more than `length`, the prompt
    branches off a known one there: what a recurrent layer has then is worth keeping."""
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """Per tail pool int32[device_length / page_size]: device page of each value that the device part needs, or NONE."""

    @property
    def host_length(self) -> int:
        """Tokens that only host memory has."""
        return self.length - self.device_length


@dataclass(frozen=True, eq=False)
class Inserted:
    """What became of the pages given to `insert`, `checkpoint` or `finish`."""

    length: int
    """Tokens of the prompt that are in the tree now."""
    node: Node
    """Their deepest node."""
    pages: np.ndarray
    """int32[length / page_size]: the tree's device pages, which replace the caller's."""
    duplicates: np.ndarray
    """int32[k]: pages of the caller that the tree has already. After `insert` they are still lent to the caller."""
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """Per tail pool int32[length / page_size]: the tree's device page of each value, or NONE."""
    spare: dict[str, np.ndarray] = field(default_factory=dict)
    """Per tail pool int32[k]: values of the caller that the tree did not take, as `duplicates`."""


@dataclass(frozen=True, eq=False)
class Load:
    """A load back that was carried out: the prefix is on device now."""

    pages: np.ndarray
    """int32[n]: device pages of the part that was on host, shallowest first."""
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """Per tail pool int32[length of the match / page_size]: device page of each value that it needs, or NONE."""


@dataclass(frozen=True, eq=False)
class Loading:
    """A load back that was begun; see `PrefixCache.loaded`."""

    match: Match
    """What is loaded."""
    pages: np.ndarray
    """int32[n]: the device pages that are written, shallowest first. Not to be read before the load back has ended."""


@dataclass(frozen=True)
class Refusal:
    """A load back that was not carried out; compute those tokens instead."""

    status: Status
    """Why: NO_ROOM, BELOW_THRESHOLD, TABLE_FULL, NOTHING, or STALE if the copy failed or has not ended, or if the match
    is out of date."""


MESSAGES = {
    Status.BAD_NODE: "that prefix is no longer in the tree: match again",
    Status.BAD_PAGE: "a page is out of range, given twice, or not lent to this request: nothing was changed",
    Status.BAD_RECEIPT: "the receipt was given back already, is from before a reset, or from another cache",
    Status.BAD_RANK: "the rank is not one of this cache's ranks",
    Status.BAD_LENGTH: "a length is negative or larger than the cache",
    Status.TABLE_FULL: "too many locks are out at once: raise max_receipts, or unlock what has ended",
}


def check(status: int) -> None:
    """Raise CacheError for a status that is a mistake of the caller, or a full table."""
    if status < 0 or status == Status.TABLE_FULL:
        raise CacheError(Status(status), MESSAGES[Status(status)])
