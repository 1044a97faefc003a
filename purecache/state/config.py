"""What a user decides about a cache, checked when it is built."""

import enum
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from purecache.state.layout import Layout
from purecache.state.pools import ANCHOR, PoolSpec, checked_pools

LAYOUT_LIMIT = 2**30


class ConfigError(ValueError):
    """A configuration that cannot work; the message says which value to change."""


class Policy(enum.IntEnum):
    """Which unlocked leaf is evicted first. Victims are always leaves, whatever the policy."""

    LRU = 0
    """Longest without a touch."""
    MRU = 1
    """Touched last."""
    FIFO = 2
    """Inserted first; a touch changes nothing."""
    FILO = 3
    """Inserted last."""
    LFU = 4
    """Fewest hits, among equals longest without a touch."""
    SLRU = 5
    """Pages with fewer than two hits before the others, LRU within both."""
    PRIORITY = 6
    """Lowest priority, among equals LRU. A page has the highest priority of all requests that used it."""
    RETENTION = 7
    """Earliest deadline: the time of the last use, plus what `CacheConfig.retention` gives pages of its priority. So a
    priority counts for less the longer a page lies idle, and pages that a request did not `keep` go early."""


RULES = {
    #                  MOVES  NEWEST_FIRST  KEEPS_LOCKED  ALWAYS_NEXT
    Policy.LRU: (True, False, False, False),
    Policy.MRU: (True, True, False, True),
    Policy.FIFO: (False, False, True, False),
    Policy.FILO: (False, True, True, False),
    Policy.LFU: (True, False, False, False),
    Policy.SLRU: (True, False, False, False),
    Policy.PRIORITY: (True, False, False, False),
    Policy.RETENTION: (True, False, False, False),
}
"""The table that makes policies of the eviction orders: see the four scalars of that name."""


RETENTION = (0, 600)
"""What `CacheConfig.retention` is unless given: everything that was kept has 600 units more than what was not."""
TIME_LIMIT = 2**30
"""Times and retentions are below it, so that their sum fits into 32 bits."""


class WritePolicy(enum.StrEnum):
    """When a device page is copied to host memory."""

    WRITE_THROUGH = "write_through"
    """At its first insert."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it is used a second time."""
    WRITE_BACK = "write_back"
    """When it is evicted from the device."""


BACKUP_HITS = {WritePolicy.WRITE_THROUGH: 1, WritePolicy.WRITE_THROUGH_SELECTIVE: 2, WritePolicy.WRITE_BACK: 0}


_CHECKED_APART = ("policy", "write", "bigrams", "external_pages", "pools", "retention", "exclusive")
"""Fields of a configuration that are not numbers."""


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and policies of a cache. Raises `ConfigError` when a value cannot work.

    page_size: tokens per page. device_pages, host_pages: per rank; host_pages=0 switches L2 off.
    load_back_threshold: in tokens; shorter prefixes on host are computed again.
    bigrams: key the cache by pairs of neighbouring tokens (EAGLE), so that n tokens have n - 1 entries.
    levels: lists that LFU, PRIORITY and RETENTION sort pages into. seed: of the hash table, which is secret.
    retention: under RETENTION, how much longer than others pages are kept, in the unit of `PrefixCache.advance`: first
    those that a request did not keep, then those of priority 0, of priority 1 and so on; the last number holds for all
    priorities above. spare_tail: tokens at the end of every prompt that are not kept: with as many as a server computes
    within its latency target, less what a next turn is expected to add, this is tail-optimized ("truncated") LRU.
    backup_threshold: uses from which a page is copied to host, instead of those of the write policy: under write back,
    pages with fewer are dropped when they are evicted, so that what was used once does not push out what is used often.
    sketch: counters (a power of two) of a frequency sketch, from which a page that comes back has the hits that it had
    when it was evicted, for `backup_threshold`, LFU and SLRU; 0: none, a page begins anew. Some times the pages of all
    tiers is enough.
    exclusive: a page that was loaded back leaves host at once, so that no page takes room twice; under write back only.
    external_pages: an allocator outside the cache (a scheduler's own) hands out the device pages. What is not in the
    tree is lent then, from the start and after a reset, and so is what a request leaves behind.
    pools: those beside the KV of full attention, see `register_pool`.
    """

    page_size: int
    device_pages: int
    host_pages: int = 0
    ranks: int = 1
    policy: Policy | str = Policy.LRU
    write: WritePolicy | str = WritePolicy.WRITE_THROUGH
    load_back_threshold: int = 10
    bigrams: bool = False
    levels: int = 16
    max_operations: int = 256
    max_receipts: int = 4096
    seed: int = field(default=0, repr=False)
    backup_threshold: int | None = None
    external_pages: bool = False
    pools: tuple[PoolSpec, ...] = ()
    retention: tuple[int, ...] = RETENTION
    spare_tail: int = 0
    exclusive: bool = False
    sketch: int = 0

    def __post_init__(self) -> None:
        """Check every value; turn names of policies into members."""
        object.__setattr__(self, "policy", self._policy())
        object.__setattr__(self, "write", self._write())
        object.__setattr__(self, "retention", self._retention())
        least = {"host_pages": 0, "load_back_threshold": 0, "seed": 0, "spare_tail": 0, "sketch": 0}
        for each in fields(self):
            value = getattr(self, each.name)
            if (
                each.name in ("policy", "write", "bigrams", "external_pages", "pools", "retention", "exclusive")
                or value is None
            ):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{each.name} must be an int, got {value!r}")
            if value < least.get(each.name, 1):
                raise ConfigError(f"{each.name} must be at least {least.get(each.name, 1)}, got {value}")
        if self.levels < 2:
            raise ConfigError("levels must be at least 2: SLRU keeps two lists")
        if self.sketch & (self.sketch - 1):
            raise ConfigError(f"sketch must be a power of two, got {self.sketch}")
        object.__setattr__(self, "pools", tuple(self.pools))
        try:
            checked_pools(self.pools, self.page_size, self.host_pages)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.exclusive and (self.write != WritePolicy.WRITE_BACK or self.pools):
            raise ConfigError("exclusive needs write=write_back, and a cache without further pools")
        layout = self.layout
        if max(layout.rows * self.page_size, layout.links, layout.shelf_length) > LAYOUT_LIMIT:
            raise ConfigError(
                f"{layout.rows} nodes of {self.page_size} tokens exceed int32 indices: "
                "lower device_pages or host_pages, or raise page_size"
            )

    def _policy(self) -> Policy:
        try:
            return Policy[self.policy.upper()] if isinstance(self.policy, str) else Policy(self.policy)
        except (KeyError, ValueError):
            raise ConfigError(
                f"policy must be one of {[p.name.lower() for p in Policy]}, got {self.policy!r}"
            ) from None

    def _retention(self) -> tuple[int, ...]:
        given = tuple(self.retention) if isinstance(self.retention, tuple | list) else ()
        good = given and all(isinstance(each, int) and 0 <= each < TIME_LIMIT for each in given)
        if not good or list(given) != sorted(given) or len(given) > max(self.levels, len(RETENTION)):
            raise ConfigError(
                f"retention must be 1 to {self.levels} ints that do not fall, from 0 to below {TIME_LIMIT}, got {given}"
            )
        return given

    def priority_for(self, retention: int) -> int:
        """The lowest priority whose pages are kept at least `retention` longer than those of priority 0."""
        table = self.retention_of_levels[1:]
        wanted = table[0] + retention
        return next((priority for priority, kept in enumerate(table) if kept >= wanted), len(table) - 1)

    @property
    def retention_of_levels(self) -> tuple[int, ...]:
        """`retention` for each of the levels."""
        given = self.retention[: self.levels]
        return given + given[-1:] * (self.levels - len(given))

    def _write(self) -> WritePolicy:
        try:
            return WritePolicy(self.write)
        except ValueError:
            raise ConfigError(f"write must be one of {[w.value for w in WritePolicy]}, got {self.write!r}") from None

    @cached_property
    def layout(self) -> Layout:
        """The sizes that the state's arrays follow from."""
        return Layout(
            page_size=self.page_size,
            ranks=self.ranks,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            levels=self.levels,
            max_operations=self.max_operations,
            max_receipts=self.max_receipts,
            tails=tuple(spec.tail for spec in self.pools if spec.law is not None),
            sketch=self.sketch,
        )

    def register_pool(self, spec: PoolSpec) -> "CacheConfig":
        """This configuration with one pool more. Raises ConfigError where it does not fit to the others."""
        return replace(self, pools=(*self.pools, spec))

    @cached_property
    def pool_names(self) -> tuple[str, ...]:
        """Names of the pools with page ids of their own, in the order of the control plane."""
        return (ANCHOR, *(spec.name for spec in self.pools if spec.law is not None))

    def pool_of(self, name: str) -> int:
        """Number of the pool whose page ids a pool has: its own, or those of its anchor. Raises ConfigError."""
        anchors = {spec.name: spec.anchor for spec in self.pools if spec.anchor is not None}
        while name in anchors:
            name = anchors[name]
        if name not in self.pool_names:
            raise ConfigError(f"there is no pool named {name!r}, only {[*self.pool_names, *anchors]}")
        return self.pool_names.index(name)

    @property
    def backup_hits(self) -> int:
        """Hits from which an insert backs a page up; 0 means only at eviction, or never without L2."""
        hits = BACKUP_HITS[WritePolicy(self.write)] if self.host_pages else 0
        return self.backup_threshold if hits and self.backup_threshold is not None else hits
