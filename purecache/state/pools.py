"""Pools beside the anchor pool: what a user says of them, and their laws."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

ANCHOR = "kv"
"""Name of pool 0, which makes the tree."""
PLACES = ("device", "host", "storage")
"""Names of the tiers in a `PoolSpec`."""


@runtime_checkable
class Law(Protocol):
    """Which pages of a prefix must hold a value of a pool, for the prefix to be valid.

    A law is part of the shape of a state: make it a frozen dataclass, so that equal laws share programs.
    """

    @property
    def in_place(self) -> bool:
        """Whether requests read the values where they are, so that a lock on a prefix protects them. If not, a request
        takes a copy (`fork`) before it computes."""
        ...

    def first_needed(self, depth: Any, page_size: int) -> Any:
        """A prefix of `depth` pages needs values on its pages from this one on, 0 <= result <= depth.

        `depth` is an int or an int32 array, traced or not, and so is the result. It must not decrease with the depth.
        """
        ...


@dataclass(frozen=True)
class WholePrefix:
    """A value on every page: full attention."""

    in_place: bool = True

    def first_needed(self, depth: Any, page_size: int) -> Any:
        """Page 0."""
        return depth * 0


@dataclass(frozen=True)
class Window:
    """Values on the pages of the last `tokens` tokens: sliding-window attention."""

    tokens: int
    in_place: bool = True

    def first_needed(self, depth: Any, page_size: int) -> Any:
        """The page that many pages before the end, or 0."""
        pages = -(-self.tokens // page_size)
        return (depth - pages) * (depth > pages)


@dataclass(frozen=True)
class Chunk:
    """Values on the pages since the last multiple of `tokens`: chunked local attention."""

    tokens: int
    in_place: bool = True

    def first_needed(self, depth: Any, page_size: int) -> Any:
        """The page that holds the first token of the chunk that the next token is in."""
        return depth * page_size // self.tokens * self.tokens // page_size


@dataclass(frozen=True)
class Checkpoint:
    """A value on the last page: a recurrent state, which is right after exactly that page."""

    in_place: bool = False

    def first_needed(self, depth: Any, page_size: int) -> Any:
        """The last page."""
        return depth - (depth > 0)


@dataclass(frozen=True)
class TailPool:
    """What the control plane knows of a tail pool. Two pools that are equal here share every program."""

    law: Law
    device_pages: int
    """Per rank."""
    host_pages: int
    """Per rank."""


@dataclass(frozen=True)
class PoolSpec:
    """A pool beside the anchor pool. Raises ValueError for what cannot work.

    A *tail pool* has a law and page ids of its own: device_pages and host_pages, per rank. A *side pool* names another
    pool as its anchor, and is wherever that one is, under the same page ids.
    tiers: where its values go, besides the device. A side pool must go wherever its anchor goes.
    """

    name: str
    law: Law | None = None
    device_pages: int = 0
    host_pages: int = 0
    anchor: str | None = None
    tiers: tuple[str, ...] = PLACES

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name == ANCHOR:
            raise ValueError(f"the name of a pool must be an identifier other than {ANCHOR!r}, got {self.name!r}")
        if (self.law is None) == (self.anchor is None):
            raise ValueError(f"pool {self.name}: give a law (a tail pool) or an anchor (a side pool), one of them")
        if unknown := set(self.tiers) - set(PLACES):
            raise ValueError(f"pool {self.name}: tiers are {PLACES}, got {sorted(unknown)}")
        if "device" not in self.tiers:
            raise ValueError(f"pool {self.name}: every pool is on the device, add it to tiers")
        if self.anchor is not None:
            if self.device_pages or self.host_pages:
                raise ValueError(f"pool {self.name}: a side pool has the pages of its anchor, leave its sizes out")
            return
        if not isinstance(self.law, Law):
            raise ValueError(f"pool {self.name}: a law has in_place and first_needed(depth, page_size)")
        self._check_sizes()

    def _check_sizes(self) -> None:
        for field, least in (("device_pages", 1), ("host_pages", 0)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"pool {self.name}: {field} must be an int of at least {least}, got {value!r}")
        if self.host_pages and "host" not in self.tiers:
            raise ValueError(f"pool {self.name}: host_pages without host among its tiers")

    @property
    def tail(self) -> TailPool:
        """The control plane's view of a tail pool."""
        assert self.law is not None
        return TailPool(self.law, self.device_pages, self.host_pages)


def checked_law(name: str, law: Law, page_size: int) -> None:
    """Raise ValueError for a law that is out of range or decreases, on the depths up to a few thousand pages."""
    before = 0
    for depth in [*range(300), *range(300, 5000, 7)]:
        first = int(law.first_needed(depth, page_size))
        if not before <= first <= depth:
            raise ValueError(
                f"pool {name}: first_needed({depth}) is {first}; it must be at most the depth and must not decrease"
            )
        before = first


def checked_pools(pools: tuple[PoolSpec, ...], page_size: int, host_pages: int) -> None:
    """Raise ValueError for names given twice, unknown anchors, laws that don't hold water and tiers that don't fit."""
    known: dict[str, tuple[str, ...]] = {ANCHOR: PLACES}
    for spec in pools:
        if spec.name in known:
            raise ValueError(f"there are two pools named {spec.name}")
        if spec.anchor is not None:
            if spec.anchor not in known:
                raise ValueError(f"pool {spec.name}: its anchor {spec.anchor!r} must come before it")
            if missing := set(known[spec.anchor]) - set(spec.tiers):
                raise ValueError(
                    f"pool {spec.name} must go wherever {spec.anchor} goes, or its pages would come back without it: "
                    f"add {sorted(missing)} to its tiers"
                )
        elif spec.law is not None:
            checked_law(spec.name, spec.law, page_size)
            if spec.host_pages and not host_pages:
                raise ValueError(f"pool {spec.name}: values are on host with their kv pages only: set host_pages too")
        known[spec.name] = spec.tiers
