"""Names of the rows and sentinels of the state, and the static sizes that its arrays follow from."""

import enum
from dataclasses import dataclass
from functools import cached_property

NONE = -1
"""No node, no page, no entry. As an index of a masked write it means "write nothing"."""
FREE = -1
"""Owner of a page that lies on a free-list."""
LENT = -2
"""Owner of a device page that a request holds outside the tree."""

BLOCK_TOKENS = 512
"""Tokens that a walk compares per step along a run of consecutive nodes."""


class Tier(enum.IntEnum):
    """Rows of `CacheState.pages`: where a node's bytes are, or are on their way to."""

    DEVICE = 0
    HOST = 1
    INCOMING = 2
    """Reserved by an unfinished operation: a device page if the node is on host, else a host page."""


TIERS = (Tier.DEVICE, Tier.HOST)
"""The tiers that own pages, in the order of `CacheState.locks` and `CacheState.orders`."""


class Tree(enum.IntEnum):
    """Rows of `CacheState.tree`."""

    PARENT = 0
    FIRST_CHILD = 1
    NEXT_SIBLING = 2
    PREVIOUS_SIBLING = 3
    DEVICE_CHILDREN = 4
    """How many children hold a device page."""
    RANK = 5
    """Data-parallel rank of the namespace that a node is in."""


class Score(enum.IntEnum):
    """Rows of `CacheState.scores`: what the eviction and write policies look at, besides the orders."""

    HITS = 0
    PRIORITY = 1
    TOUCHED = 2
    """Clock of the last touch that ended at this node."""


class Account(enum.IntEnum):
    """Rows of `CacheState.accounts`: in whose hands pages are. Per tier, pool and rank they add up to the capacity."""

    FREE = 0
    EVICTABLE = 1
    PROTECTED = 2
    IN_FLIGHT = 3
    LENT = 4


class Operation(enum.IntEnum):
    """Rows of `CacheState.operations`."""

    KIND = 0
    NODE = 1
    COUNT = 2
    GENERATION = 3
    VACANT = 4
    """Stack of vacant operation numbers."""


class Receipt(enum.IntEnum):
    """Rows of `CacheState.receipts`."""

    NODE = 0
    GENERATION = 1
    VACANT = 2
    """Stack of vacant receipt numbers."""


class Scalar(enum.IntEnum):
    """Entries of `CacheState.scalars`: the clock, stack heights, settings that are data, and counters."""

    CLOCK = 0
    FREE_NODES = 1
    VACANT_RECEIPTS = 2
    VACANT_OPERATIONS = 3
    POLICY = 4
    WRITE_BACK = 5
    BACKUP_HITS = 6
    """Hits from which an insert wants a page backed up; 0 means never at insert."""
    LOAD_BACK_TOKENS = 7
    MATCHED_DEVICE_PAGES = 8
    MATCHED_HOST_PAGES = 9
    MATCHED_MISS_PAGES = 10
    INSERTED_PAGES = 11
    DUPLICATE_PAGES = 12
    EVICTED_DEVICE_PAGES = 13
    EVICTED_HOST_PAGES = 14
    DROPPED_PAGES = 15
    """Device pages evicted without a copy on host."""
    BACKUP_PAGES = 16
    BACKUP_FAILED_PAGES = 17
    BACKUP_REFUSED_PAGES = 18
    LOADED_PAGES = 19
    LOAD_FAILED_PAGES = 20
    LOADS_REFUSED = 21
    STALE_COMPLETIONS = 22


COUNTERS = tuple(name for name in Scalar if name >= Scalar.MATCHED_DEVICE_PAGES)
"""The scalars that only ever grow."""


@dataclass(frozen=True)
class Layout:
    """The static sizes of a state. Two states of one layout share every compiled program."""

    page_size: int
    ranks: int
    pools: int
    device_pages: int
    """Device pages per rank and pool."""
    host_pages: int
    """Host pages per rank and pool."""
    levels: int
    """Lists per eviction order: buckets of hits or priority."""
    max_operations: int
    max_receipts: int

    @cached_property
    def nodes(self) -> int:
        """Most nodes besides the roots: each owns a page, or waits for an operation that does."""
        return self.ranks * (self.device_pages + 2 * self.host_pages)

    @cached_property
    def rows(self) -> int:
        """Length of a node column: nodes, one root per rank, and padding so that a block never runs over the end."""
        return self.nodes + self.ranks + self.block

    @cached_property
    def block(self) -> int:
        """Pages that a walk compares per step."""
        return max(1, BLOCK_TOKENS // self.page_size)

    @cached_property
    def buckets(self) -> int:
        """Heads of the hash table, a power of two."""
        return 1 << max(4, self.nodes.bit_length())

    def root(self, rank: int) -> int:
        """Node id of the root of a rank. Roots come after all nodes, so that no root is followed by a node in a run."""
        return self.nodes + rank

    def capacity(self, tier: int) -> int:
        """Pages per rank and pool of a tier."""
        return self.device_pages if tier == Tier.DEVICE else self.host_pages

    def shelf(self, tier: int, pool: int = 0) -> int:
        """Offset in `free_pages` and `owners` at which the ranks of a tier and pool begin."""
        before = self.pools * self.device_pages if tier == Tier.HOST else 0
        return self.ranks * (before + pool * self.capacity(tier))

    @cached_property
    def shelves(self) -> int:
        """Length of `free_pages` and `owners`."""
        return self.ranks * self.pools * (self.device_pages + self.host_pages)

    def head(self, rank: int, level: int) -> int:
        """Index of the sentinel of one list in an order."""
        return self.rows + rank * self.levels + level
