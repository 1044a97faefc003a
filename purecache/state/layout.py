"""Names of the rows and sentinels of the state, and the static sizes that its arrays follow from."""

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from purecache.state.pools import TailPool

NONE = -1
"""No node, no page, no entry. As an index of a masked write it means "write nothing"."""
FREE = -1
"""Owner of a page that lies on a free-list."""
LENT = -2
"""Owner of a device page that a request holds outside the tree."""
WITHHELD = -3
"""Owner of a page that is out of use, since its tier was made smaller."""
RESERVED = -4
"""Owner of a host page that prefetch 0 waits for; those of operation n have the owner RESERVED - n."""

SKETCH_ROWS = 4
"""Rows of counters of a frequency sketch."""

BLOCK_TOKENS = 512
"""Tokens that a walk compares per step along a run of consecutive nodes."""


class Tier(enum.IntEnum):
    """Where the bytes of a node are, or are on their way to."""

    DEVICE = 0
    HOST = 1
    INCOMING = 2
    """Reserved by an unfinished operation: a device page if the node is on host, else a host page."""


TIERS = (Tier.DEVICE, Tier.HOST)
"""The tiers that own pages."""


class Column(enum.IntEnum):
    """Rows of `CacheState.nodes`: all that is known of a node, besides its tokens, links and place in the orders."""

    PARENT = 0
    """Its parent; NONE for roots and for ids that are not in use."""
    FIRST_CHILD = 1
    NEXT_SIBLING = 2
    PREVIOUS_SIBLING = 3
    DEVICE_CHILDREN = 4
    """How many children hold a device page."""
    RANK = 5
    """Data-parallel rank of the namespace that it is in."""
    DEVICE_LOCKS = 6
    """Lock references in the device tier: its own receipts and operations, and its locked children."""
    HOST_LOCKS = 7
    """The same in the host tier."""
    HITS = 8
    PRIORITY = 9
    BORN = 10
    """Clock at which it was created: who has seen the id before that means another node."""
    NAMESPACE = 11
    """First of four rows: 128-bit namespace of nodes directly below a root; elsewhere unused."""
    FREE_NODES = 15
    """Not about the node: a stack of free node ids."""
    STORED = 16
    """A `Stored`: whether storage has its page, as far as is known."""
    DEPTH = 17
    """Pages of the prefix that ends here; 0 at a root."""
    DEVICE_PAGE = 18
    """Page ids of pool 0 by tier; those of pool p are 3 * p rows further on. Behind them: see `TailColumn`."""
    HOST_PAGE = 19
    INCOMING_PAGE = 20


LOCKS = (Column.DEVICE_LOCKS, Column.HOST_LOCKS)
"""Row of the lock references, by tier."""
PAGES = (Column.DEVICE_PAGE, Column.HOST_PAGE, Column.INCOMING_PAGE)
"""Row of the page ids of pool 0, by tier."""


class TailColumn(enum.IntEnum):
    """What else is known of a tail pool's value at a node: rows of `CacheState.nodes`, see `Layout.tail_row`."""

    LOCKS = 0
    """Lock references on the value in the device tier: of receipts and loads whose prefixes need it."""
    OPERATION = 1
    """The unfinished operation that its incoming page belongs to."""
    STORED = 2
    """As Column.STORED; while it is being written, BEING_STORED plus the number of that operation."""


BEING_STORED = 16
"""See `TailColumn.STORED`."""


class Shelf(enum.IntEnum):
    """Rows of `CacheState.shelves`."""

    FREE_PAGES = 0
    """A stack of free page ids per tier, pool and rank."""
    OWNERS = 1
    """Per page: the node that owns it, or FREE, LENT, WITHHELD or what RESERVED says."""


class Account(enum.IntEnum):
    """Whose hands pages are in. Per tier, pool and rank, the accounts add up to the capacity."""

    FREE = 0
    EVICTABLE = 1
    PROTECTED = 2
    IN_FLIGHT = 3
    LENT = 4
    WITHHELD = 5
    """Out of use: the tier was made smaller."""


class Stored(enum.IntEnum):
    """What is known of a page in storage."""

    NO = 0
    WRITING = 1
    YES = 2
    """It was written, or read: it may have been evicted there since."""


class TransferKind(enum.IntEnum):
    """Direction of a transfer between two tiers; kind of an operation."""

    BACKUP = 1
    """Device to host."""
    LOAD_BACK = 2
    """Host to device."""
    STORE = 3
    """Host to storage."""
    PREFETCH = 4
    """Storage to host."""
    COPY = 5
    """Device to device. It ends when it is dispatched: no operation, its entries are named 0."""


class Ledger(enum.IntEnum):
    """Rows of `CacheState.ledger`: the table of unfinished operations and that of lock receipts."""

    OPERATION_KIND = 0
    OPERATION_NODE = 1
    """Deepest node of the operation."""
    OPERATION_COUNT = 2
    """Its members: that node and its next ancestors."""
    OPERATION_GENERATION = 3
    OPERATION_VACANT = 4
    """Stack of vacant operation numbers."""
    RECEIPT_NODE = 5
    RECEIPT_GENERATION = 6
    RECEIPT_VACANT = 7
    """Stack of vacant receipt numbers."""
    OPERATION_POOL = 8
    OPERATION_RANK = 9


class Scalar(enum.IntEnum):
    """First entries of `CacheState.books`: clocks, stack heights, settings that are data, and counters."""

    CLOCK = 0
    FREE_NODES = 1
    VACANT_RECEIPTS = 2
    VACANT_OPERATIONS = 3
    TIME = 4
    """Time as the caller tells it (`advance`), from which pages are kept: see Policy.RETENTION."""
    POLICY = 5
    WRITE_BACK = 6
    """Hits from which a page that is evicted from the device is copied to host; 0 means never."""
    BACKUP_HITS = 7
    """Hits from which an insert wants a page backed up; 0 means never at insert."""
    LOAD_BACK_TOKENS = 8
    MOVES = 9
    """First of the four rules that make the policy, each 0 or 1. A touch moves the entry of a page in its order."""
    NEWEST_FIRST = 10
    """Victims are taken from the newest end."""
    KEEPS_LOCKED = 11
    """The entries of locked pages stay; else they are dropped, and listed again at unlock."""
    ALWAYS_NEXT = 12
    """A page that becomes a leaf takes its child's place even if it is listed."""
    EXCLUSIVE = 13
    """A page that was loaded back leaves host."""
    EXTERNAL = 14
    """The device pages outside the tree belong to an allocator outside the cache: none is freed, all are lent."""
    MATCHED_DEVICE_PAGES = 15
    MATCHED_HOST_PAGES = 16
    MATCHED_MISS_PAGES = 17
    INSERTED_PAGES = 18
    DUPLICATE_PAGES = 19
    EVICTED_DEVICE_PAGES = 20
    EVICTED_HOST_PAGES = 21
    DROPPED_PAGES = 22
    """Device pages evicted without a copy on host."""
    BACKUP_PAGES = 23
    BACKUP_FAILED_PAGES = 24
    BACKUP_REFUSED_PAGES = 25
    LOADED_PAGES = 26
    LOAD_FAILED_PAGES = 27
    LOADS_REFUSED = 28
    STALE_COMPLETIONS = 29
    STORED_PAGES = 30
    STORE_FAILED_PAGES = 31
    STORES_REFUSED = 32
    PREFETCHED_PAGES = 33
    PREFETCH_FAILED_PAGES = 34
    PREFETCHES_REFUSED = 35


COUNTERS = tuple(name for name in Scalar if name >= Scalar.MATCHED_DEVICE_PAGES)
"""The scalars that only ever grow."""


@dataclass(frozen=True)
class Layout:
    """The static sizes of a state. Two states of one layout share every compiled program."""

    page_size: int
    ranks: int
    device_pages: int
    """Device pages of pool 0 per rank."""
    host_pages: int
    """Host pages of pool 0 per rank."""
    levels: int
    """Lists per eviction order: buckets of hits or priority."""
    max_operations: int
    max_receipts: int
    tails: tuple[TailPool, ...] = ()
    """Pools 1 and following."""
    sketch: int = 0
    """Counters per row of the frequency sketch, a power of two; 0: there is none."""

    @cached_property
    def pools(self) -> int:
        """How many pools have page ids of their own."""
        return 1 + len(self.tails)

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
        """Pages that a walk compares per step. No run is longer than there are nodes."""
        return max(1, min(BLOCK_TOKENS // self.page_size, self.nodes))

    @cached_property
    def buckets(self) -> int:
        """Heads of the hash table, a power of two."""
        return 1 << max(4, self.nodes.bit_length())

    @cached_property
    def sketch_at(self) -> int:
        """Index in `links` at which the frequency sketch begins: its rows, then how many uses it has counted lately."""
        return self.buckets + self.rows

    @cached_property
    def links(self) -> int:
        """Length of `links`."""
        return self.sketch_at + (SKETCH_ROWS * self.sketch + 1 if self.sketch else 0)

    def root(self, rank: int) -> int:
        """Node id of the root of a rank. Roots come after all nodes, so that no root is followed by a node in a run."""
        return self.nodes + rank

    def capacity(self, tier: int, pool: int = 0) -> int:
        """Pages per rank of a tier and pool."""
        sizes = self.tails[pool - 1] if pool else self
        return sizes.device_pages if tier == Tier.DEVICE else sizes.host_pages

    def shelf(self, tier: int, pool: int = 0) -> int:
        """Offset in the rows of `shelves` at which the ranks of a tier and pool begin."""
        whole = [self.capacity(each, p) for each in TIERS for p in range(self.pools)]
        return self.ranks * sum(whole[: tier * self.pools + pool])

    @cached_property
    def shelf_length(self) -> int:
        """Length of the rows of `shelves`."""
        return self.ranks * sum(self.capacity(tier, pool) for tier in TIERS for pool in range(self.pools))

    def order(self, tier: int, pool: Any = 0) -> Any:
        """Index in `orders` of the order of a tier and pool."""
        return pool * len(TIERS) + tier

    def page_row(self, tier: int, pool: Any = 0) -> Any:
        """Row of `nodes` with the page ids of a pool in a `Tier`."""
        return Column.DEVICE_PAGE + 3 * pool + tier

    def tail_row(self, column: TailColumn, pool: Any) -> Any:
        """Row of `nodes` with what else is known of the values of a tail pool."""
        return Column.DEVICE_PAGE + 3 * self.pools + len(TailColumn) * (pool - 1) + column

    def account(self, account: Any, tier: int, rank: Any, pool: Any = 0) -> Any:
        """Index in `books` of an account; all but the tier may be arrays."""
        return len(Scalar) + ((account * len(TIERS) + tier) * self.pools + pool) * self.ranks + rank

    @cached_property
    def columns(self) -> int:
        """Rows of `nodes`."""
        return Column.DEVICE_PAGE + 3 * self.pools + len(TailColumn) * len(self.tails)

    @cached_property
    def hash_keys(self) -> int:
        """Index in `books` at which the secret multipliers of the hash begin: those of the lower halves of tokens,
        parent and namespace, then those of the upper halves."""
        return len(Scalar) + len(Account) * len(TIERS) * self.pools * self.ranks

    @cached_property
    def hashed_words(self) -> int:
        """Words of 32 bits that the hash of a page is made of."""
        return self.page_size + 1 + 4

    @cached_property
    def retention(self) -> int:
        """Index in `books` at which the retention of each level begins."""
        return self.hash_keys + 2 * self.hashed_words

    @cached_property
    def books(self) -> int:
        """Length of `books`."""
        return self.retention + self.levels

    @cached_property
    def ledger(self) -> int:
        """Length of the rows of `ledger`."""
        return max(self.max_operations, self.max_receipts)

    def head(self, rank: int, level: int) -> int:
        """Index of the sentinel of one list in an order."""
        return self.rows + rank * self.levels + level
