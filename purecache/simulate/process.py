"""One simulated process: a cache with its planes and its storage tier, and what its requests hold."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from purecache.answers import Load, Loading, Match, Receipt
from purecache.cache import PrefixCache
from purecache.simulate.content import BLANK, PARTIAL, Prints, described, salt_of
from purecache.simulate.fate import Fate, Finding
from purecache.simulate.plan import Plan
from purecache.simulate.plane import SimulatedPlanes, SimulatedPool
from purecache.simulate.profiles import PROFILES
from purecache.simulate.request import Request
from purecache.simulate.store import SimulatedGuard, SimulatedStore
from purecache.state import NONE, Tier
from purecache.state.layout import Account, Scalar
from purecache.state.pools import ANCHOR
from purecache.storage import Prefetch, StorageOptions, StorageTier
from purecache.stores.names import ObjectRecord

PATIENCE = 8.0
"""Ticks until a call of the store is late."""
LONGEST_END = 200
"""Ticks within which all must have ended, once nothing fails any more."""


@dataclass(eq=False)
class Books:
    """What a process holds of its cache besides requests."""

    loadings: list[tuple[Request, Match, Loading]] = field(default_factory=list)
    locks: list[Receipt] = field(default_factory=list)
    prefetches: list[tuple[Prefetch, list[int], dict[str, Any]]] = field(default_factory=list)
    void: list[Receipt] = field(default_factory=list)
    """Receipts that were given back."""


class Process:
    """A cache under simulation. Every call goes through `call`, every byte through `check` and `write`."""

    def __init__(self, plan: Plan, fate: Fate, store: SimulatedStore, number: int) -> None:
        self.plan, self.fate, self.store, self.number = plan, fate, store, number
        self.config, self.profile = plan.config, PROFILES[plan.profile]
        self.page_size, self.extra = self.config.page_size, int(self.config.bigrams)
        self.groups = {name: [name] for name in self.config.pool_names}
        """The pools whose pages go together, by the one that has page ids."""
        for spec in self.config.pools:
            if spec.anchor is not None:
                self.groups[self.config.pool_names[self.config.pool_of(spec.name)]].append(spec.name)
        self.laws = {spec.name: spec.law for spec in self.config.pools if spec.law is not None}
        names = [name for group in self.groups.values() for name in group]
        self._salts = {name: salt_of(name) for name in names}
        self.queue: list[tuple[list[int], dict[str, Any]]] = []
        """Prompts of requests that were taken off the device."""
        self.history: list[list[int]] = []
        """Tokens of finished requests, of all processes, for conversations that go on."""
        self.start()

    def start(self) -> None:
        """Begin with empty memory, on the store as it is."""
        config, ranks, fate = self.config, self.config.ranks, self.fate
        self.requests: list[Request] = []
        self.books = Books()
        pools = {}
        for anchor, group in self.groups.items():
            pool = config.pool_of(anchor)
            sizes = config.layout.capacity(Tier.DEVICE, pool), max(1, config.layout.capacity(Tier.HOST, pool))
            pools |= {name: SimulatedPool(fate, ranks, *sizes) for name in group}
        self.pools = pools
        self.planes = SimulatedPlanes(pools, fate)
        self.cache = PrefixCache(config, self.planes, smallest=self.profile.smallest)
        options = StorageOptions(workers=2, queue=8, call_timeout=PATIENCE, **self.plan.storage)
        self.guard = SimulatedGuard(self.store, fate, options.workers, options.queue, options.call_timeout)
        record = ObjectRecord("model", "1", "uint64", "word", self.page_size, (0, 1))
        naming = dict.fromkeys(pools, record) if len(pools) > 1 else record
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a page is .* tokens")
            self.tier = StorageTier(self.cache, self.guard, naming, options, clock=fate.seconds)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call the cache: an event."""
        self.fate.events += 1
        self.fate.trace.append((self.fate.events, self.number, name, arguments, options))
        return getattr(self.cache, name)(*arguments, **options)

    @property
    def receipts_left(self) -> int:
        """Locks that can still be taken."""
        books = self.books
        return self.config.max_receipts - len(self.requests) - len(books.loadings) - len(books.locks)

    def pages_of(self, tokens: int) -> int:
        """Whole pages of so many tokens."""
        return max(0, tokens - self.extra) // self.page_size

    def prints(self, namespace: str | None) -> Prints:
        """The words of a prompt's pages."""
        return Prints(namespace, self.page_size, self.config.bigrams)

    # ---- bytes ---------------------------------------------------------------------------------------------------

    def write(self, pool: str, rank: int, pages: Sequence[int] | np.ndarray, words: np.ndarray) -> None:
        """Compute pages of a pool and of its side pools."""
        for name in self.groups[pool]:
            there = self.pools[name]
            undefined = (words == PARTIAL) | (words == BLANK)
            there.device[np.asarray(pages, np.int64) + rank * there.device_pages] = np.where(
                undefined, words, words ^ self._salts[name]
            )

    def check(self, what: str, pool: str, rank: int, pages: Sequence[int] | np.ndarray, words: np.ndarray) -> None:
        """Compare device pages with what a fault-free model computes. Raises Finding."""
        index = np.asarray(pages, np.int64)
        if len(index) != len(words) or (len(index) and index.min() < 0):
            raise Finding("pages", f"{what}: {len(words)} pages of {pool} expected, got {index.tolist()}")
        for name in self.groups[pool]:
            there = self.pools[name]
            found, wanted = there.device[index + rank * there.device_pages], words ^ self._salts[name]
            wrong = np.flatnonzero(found != wanted)
            if len(wrong):
                first = int(wrong[0])
                raise Finding(
                    "bytes",
                    f"{what}: page {first} of the prompt in pool {name}, device page {index[first]} of rank {rank},"
                    f" must hold {described(int(wanted[first]))} and holds {described(int(found[first]))}",
                )

    def check_values(self, what: str, rank: int, rows: dict[str, np.ndarray], words: np.ndarray, depth: int) -> None:
        """Check what a match or a load says about the tail pools of a prefix of `depth` pages."""
        for pool, law in self.laws.items():
            first = int(law.first_needed(depth, self.page_size))
            row = rows[pool]
            if len(row) != depth or (row[:first] != NONE).any():
                raise Finding("pages", f"{what}: values of {pool} for {depth} pages from {first} on: {row.tolist()}")
            self.check(what, pool, rank, row[first:], words[first:depth])

    def check_match(self, what: str, rank: int, match: Match, words: np.ndarray, load: Load | None = None) -> None:
        """Check every byte that a match, or its load back, serves."""
        depth, length = len(match.device_pages), match.length // self.page_size
        if match.device_length != depth * self.page_size or length < depth or length > len(words):
            raise Finding("pages", f"{what}: {depth} pages, lengths {match.device_length} and {match.length}")
        if load is None:
            self.check(what, ANCHOR, rank, match.device_pages, words[:depth])
            self.check_values(what, rank, match.values, words, depth)
            return
        self.check(what, ANCHOR, rank, load.pages, words[depth:length])
        self.check_values(what, rank, load.values, words, length)

    # ---- laws ----------------------------------------------------------------------------------------------------

    def check_laws(self) -> None:
        """Raise Finding for a law that the state breaks, and for pages that are lent to nobody."""
        broken = self.cache.violations()
        if broken:
            raise Finding("laws", "; ".join(broken))
        held = {(pool, rank): 0 for pool in self.groups for rank in range(self.config.ranks)}
        for request in [*self.requests, *(each[0] for each in self.books.loadings)]:
            for pool, number in request.lent().items():
                held[pool, request.rank] += number
        for (pool, rank), number in held.items():
            lent = self.cache.lent_pages(rank, pool)
            if lent != number:
                raise Finding("lent", f"{lent} pages of {pool} are lent in rank {rank}, requests hold {number}")

    def settle(self) -> None:
        """Wait until nothing is under way: neither transfers, nor calls of the store, some of which hung till now."""
        for _ in range(LONGEST_END):
            self.fate.now += 1
            self.guard.release()
            self.call("drain")
            self.call("tick")
            if not (self.tier.in_flight or self.planes.in_flight or self.guard.busy):
                return

    def check_empty(self) -> None:
        """After everything has ended: evict all, and check that every page, receipt and operation is free."""
        self.settle()
        for _ in range(2):
            for pool in reversed(self.config.pool_names):
                self.cache.evict(1 << 20, pool=pool)
            self.settle()
            for pool in reversed(self.config.pool_names):
                self.cache.evict_host(1 << 20, pool=pool)
        self.check_laws()
        for number, pool in enumerate(self.config.pool_names):
            for tier in (Tier.DEVICE, Tier.HOST):
                for rank in range(self.config.ranks):
                    free = self.cache.pages(Account.FREE, tier, rank, pool)
                    all_pages = self.config.layout.capacity(tier, number)
                    if free != all_pages:
                        raise Finding("leak", f"{free} of {all_pages} {tier.name} pages of {pool} are free in {rank}")
        books = np.asarray(self.cache.state.books)
        left = int(books[Scalar.VACANT_OPERATIONS]), int(books[Scalar.VACANT_RECEIPTS])
        if left != (self.config.max_operations, self.config.max_receipts):
            raise Finding("leak", f"operations and receipts left: {left}")
        stale = self.cache.counters()["stale_completions"]
        if stale != self.planes.repeated:
            raise Finding("stale", f"{self.planes.repeated} completions came twice, {stale} were recognised")
        if self.tier.in_flight or self.tier.ring.free != self.plan.storage.get("staging_pages", 64):
            raise Finding("leak", f"storage: {self.tier.in_flight} under way, {self.tier.ring.free} buffers free")
