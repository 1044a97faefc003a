"""Room on device for schedulers: what leaves the tree for their allocators, and what it gets for loads from host."""

from collections.abc import Iterator, Mapping

import numpy as np

from purecache.adapters.slots import PageMath, SlotAllocator
from purecache.adapters.tails import Tail
from purecache.answers import Load, Match
from purecache.cache import PrefixCache
from purecache.state.layout import Column, Tier
from purecache.state.pools import ANCHOR
from purecache.transitions import Status

_NO_PAGES = np.zeros(0, np.int32)


class Room:
    """Moves device pages between a cache with `external_pages` and the allocators of a scheduler.

    Whatever leaves the tree is free in them when a call returns.
    """

    def __init__(self, cache: PrefixCache, allocator: SlotAllocator, tails: Mapping[str, Tail]) -> None:
        """tails: the scheduler's side of every tail pool of the cache."""
        self.cache, self.math, self.tails = cache, PageMath(cache.config.page_size), tails
        self._allocator = allocator

    def evict(self, tokens: int, rank: int | None) -> int:
        """Free at least `tokens` slots of a rank (None: any), as far as there are evictable ones; returns how many."""
        freed = 0
        for each in range(self.cache.config.ranks) if rank is None else (rank,):
            missing = -(-(tokens - freed) // self.math.page_size)
            number = min(missing, self.cache.evictable_pages(each))
            if number > 0:
                freed += self._withdraw(number, each)
        return freed

    def take_free(self) -> int:
        """Free the slots of pages that have left the tree by other ways than these; returns how many."""
        return sum(self._withdraw(self.cache.free_pages(rank), rank) for rank in range(self.cache.config.ranks))

    def evict_values(self, number: int, rank: int | None, pool: str) -> int:
        """Free up to `number` values of a tail pool, of a rank or any; returns how many. The KV stays."""
        freed = 0
        for each in range(self.cache.config.ranks) if rank is None else (rank,):
            missing = min(number - freed, self.cache.evictable_pages(each, pool))
            freed += self._withdraw_values(missing, each, pool)
        return freed

    def load_back(self, match: Match, rank: int) -> np.ndarray:
        """Bring the part of a match that is on host: int32[host_length] slots, or none of them.

        Room comes from the allocator first, then from eviction. The copy has been dispatched when this returns.
        """
        width = self.math.page_size
        free = min(self._allocator.available_size(dp_rank=rank) // width, match.host_length // width)
        if free:
            slots = self._allocator.alloc(free * width, dp_rank=rank)
            if slots is not None:
                self.cache.release(self.math.pages_of(slots), rank=rank)
        self._lend_values(match.length // width, rank)
        loaded = self.cache.load_back(match)
        pages = loaded.pages if isinstance(loaded, Load) else _NO_PAGES
        for name, tail in self.tails.items():
            if isinstance(loaded, Load):
                tail.loaded(pages, loaded.values[name][match.device_length // width :], rank)
            elif loaded.status == Status.STALE:
                tail.loaded(*self._held(name, rank), rank)  # some of it may have come
        self._withdraw(self.cache.free_pages(rank), rank)
        return self.math.slots_of(pages)

    def _held(self, pool: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """All values of a pool that the tree has on device, after the pages that they go with. Slow: for failures."""
        layout = self.cache.config.layout
        row = layout.page_row(Tier.DEVICE, self.cache.config.pool_of(pool))
        pages, values, ranks = (
            column[: layout.nodes] for column in self.cache.columns(Column.DEVICE_PAGE, row, Column.RANK)
        )
        held = (pages >= 0) & (values >= 0) & (ranks == rank)
        return pages[held], values[held]

    def _lend_values(self, depth: int, rank: int) -> None:
        """Give the tree free values for a load of a prefix of `depth` pages."""
        for name, tail in self.tails.items():
            law = self.cache.config.layout.tails[self.cache.config.pool_of(name) - 1].law
            values = tail.lend(depth - int(law.first_needed(depth, self.math.page_size)), rank)
            self.cache.release(values, rank=rank, pool=name)

    def _withdraw(self, number: int, rank: int) -> int:
        """Hand `number` pages, free ones first, then evicted ones, to the allocator; returns how many slots.

        The values that go with them go too.
        """
        taken = 0
        for pages in self._leaving(number, rank, ANCHOR):
            for name in self.tails:
                self._withdraw_values(self.cache.free_pages(rank, name), rank, name)
            self.free(self.math.slots_of(pages), rank)
            taken += len(pages)
        if not taken:
            for name in self.tails:
                self._withdraw_values(self.cache.free_pages(rank, name), rank, name)
        return taken * self.math.page_size

    def _withdraw_values(self, number: int, rank: int, pool: str) -> int:
        """Hand `number` values, free ones first, then evicted ones, to the scheduler; returns how many."""
        taken = 0
        for values in self._leaving(number, rank, pool):
            self.tails[pool].take(values, rank)
            taken += len(values)
        return taken

    def _leaving(self, number: int, rank: int, pool: str) -> Iterator[np.ndarray]:
        """Take up to `number` pages out of a pool of the tree."""
        while number > 0:
            pages = self.cache.allocate(min(number, self.cache.largest), rank=rank, pool=pool)
            if pages is None:
                return
            number -= len(pages)
            yield pages

    def free(self, slots: np.ndarray, rank: int) -> None:
        """Give slots to the allocator."""
        if len(slots):
            self._allocator.free(slots, dp_rank=rank)
