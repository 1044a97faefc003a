"""What requests of a hybrid model hold in its pools, and the memory without a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from purecache.demo.engine import Geometry
from purecache.demo.hybrid_config import KV, STATE, WINDOW, HybridConfig
from purecache.demo.hybrid_pools import PAGE_AXIS
from purecache.demo.memory import Lease, pages_for
from purecache.demo.weights import DemoError
from purecache.state.pools import Window


@dataclass(eq=False)
class HybridLease(Lease):
    """The pages of one admitted request in every pool. Its kv pages are `pages`."""

    windows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32[n] window page of each page of the context, -1 where it has none (any more)."""
    lent: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """bool[n] which of these are lent to the request; others belong to the cache and are only read."""
    slot: int = -1
    """The slot of its own state."""
    filled: int = 0
    """Tokens that are computed."""
    last: int = 0
    """Last position in its prompt from which a request with the same prompt could go on."""
    branch: int = 0
    """Position at which the prompt leaves a known one without a state; 0: nowhere."""

    def lent_windows(self) -> np.ndarray:
        """int32[k] window pages that are lent to the request."""
        return self.windows[self.lent]


def window_law(config: HybridConfig, geometry: Geometry) -> Window:
    """Which window pages a prefix needs, so that a request can go on from it with the same bits.

    Models that compute chunk by chunk begin again at the start of a chunk, up to a chunk before the end of the prefix.
    """
    return Window(config.window if config.exact else config.window + geometry.chunk)


class HybridMemory:
    """Holds pages for requests; versions with and without a cache say where pages come from.

    A request keeps window pages as long as a prefix that ends where it is would need them.
    """

    def __init__(self, config: HybridConfig, geometry: Geometry, sizes: Mapping[str, int]):
        """`sizes`: device pages (slots) per pool. Raises DemoError if not even one request would fit."""
        self.config, self.geometry, self.sizes = config, geometry, dict(sizes)
        self.law = window_law(config, geometry)
        if WINDOW in sizes and (least := self.most_windows(geometry.context)) > sizes[WINDOW]:
            tokens = least * geometry.page_size
            raise DemoError(f"One request may need {tokens} tokens of window layers: raise --window-tokens to that.")
        if STATE in sizes and sizes[STATE] < geometry.batch + 1:
            raise DemoError(f"Each of {geometry.batch + 1} requests has a state: raise --states at least to that.")

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.geometry.page_size

    @property
    def pages(self) -> int:
        """Device pages of kv in total."""
        return self.sizes[KV]

    def first_window(self, tokens: int) -> int:
        """First page whose window values are needed after that many tokens."""
        return int(self.law.first_needed(tokens // self.page_size, self.page_size))

    def most_windows(self, length: int) -> int:
        """Most window pages that a request of `length` tokens holds at a time."""
        sizes = self.law.tokens, self.geometry.chunk
        return min(pages_for(length, self.page_size), sum(pages_for(size, self.page_size) for size in sizes) + 1)

    def take(self, pool: str, number: int) -> np.ndarray | None:
        """Pages of a pool for a request, int32[number]; None, and nothing taken, if there are not so many."""
        raise NotImplementedError

    def give(self, pool: str, pages: np.ndarray) -> None:
        """Take back pages that were lent."""
        raise NotImplementedError

    def reserve(self, lease: HybridLease, end: int) -> bool:
        """Add the kv and window pages that are needed to compute up to position `end`; see Memory.reserve."""
        needed = pages_for(end, self.page_size)
        if (missing := needed - len(lease.pages)) > 0:
            lent = self.take(KV, missing)
            if lent is None:
                return False
            lease.pages = np.concatenate([lease.pages, lent])
        if WINDOW not in self.sizes:
            return True
        if (missing := needed - len(lease.windows)) > 0:
            lease.windows = np.concatenate([lease.windows, np.full(missing, -1, np.int32)])
            lease.lent = np.concatenate([lease.lent, np.zeros(missing, bool)])
        first = lease.filled // self.page_size
        places = first + np.flatnonzero(lease.windows[first:needed] < 0)
        lent = self.take(WINDOW, len(places)) if len(places) else places
        if lent is None:
            return False
        lease.windows[places], lease.lent[places] = lent, True
        return True

    def slide(self, lease: HybridLease) -> None:
        """Give up the window pages that are too far back by now."""
        if WINDOW not in self.sizes:
            return
        past = slice(0, self.first_window(lease.filled))
        gone = lease.windows[past][lease.lent[past]]
        if len(gone):
            self.give(WINDOW, gone)
        lease.windows[past], lease.lent[past] = -1, False


class HybridPlainMemory(HybridMemory):
    """Pools without a cache: every request computes its whole prompt. The baseline of the demo."""

    def __init__(self, config: HybridConfig, geometry: Geometry, pools: dict[str, Any]):
        """Lend the pages of some pools, all of them free."""
        sizes = {name: next(iter(pool)).shape[PAGE_AXIS] for name, pool in pools.items()}
        super().__init__(config, geometry, sizes)
        self.pools: Any = pools
        self._free = {name: list(range(size))[::-1] for name, size in sizes.items()}

    def free(self, pool: str) -> int:
        """Pages of a pool that nobody holds."""
        return len(self._free[pool])

    def take(self, pool: str, number: int) -> np.ndarray | None:
        """Free pages; see HybridMemory.take."""
        if number > self.free(pool):
            return None
        return np.array([self._free[pool].pop() for _ in range(number)], np.int32)

    def give(self, pool: str, pages: np.ndarray) -> None:
        """Make pages free."""
        self._free[pool].extend(int(page) for page in pages[::-1])

    def announce(self, tokens: np.ndarray) -> None:
        """Do nothing: there is nothing to fetch."""

    def open(self, tokens: np.ndarray, spare: int) -> HybridLease | None:
        """Lend kv pages for all tokens, and a slot; window pages follow as they are needed. See Memory.open."""
        needed = {KV: pages_for(len(tokens), self.page_size) + spare, WINDOW: self.most_windows(len(tokens)), STATE: 1}
        if any(needed[name] > self.free(name) for name in self.sizes):
            return None
        pages = self.take(KV, needed[KV] - spare)
        slot = self.take(STATE, 1) if STATE in self.sizes else [-1]
        assert pages is not None
        assert slot is not None
        return HybridLease(pages, slot=int(slot[0]))

    def stop(self, lease: HybridLease, position: int) -> int | None:
        """None."""

    def advance(self, lease: HybridLease, tokens: np.ndarray) -> None:
        """Give up window pages; see Memory.advance."""
        lease.filled = len(tokens)
        self.slide(lease)

    def share(self, lease: HybridLease, tokens: np.ndarray) -> None:
        """Do nothing: nobody can find these pages."""

    def close(self, lease: HybridLease, tokens: np.ndarray) -> None:
        """Free everything."""
        self.cancel(lease)

    def cancel(self, lease: HybridLease) -> None:
        """Free everything."""
        self.give(KV, lease.pages)
        if WINDOW in self.sizes:
            self.give(WINDOW, lease.lent_windows())
        if STATE in self.sizes:
            self.give(STATE, np.array([lease.slot]))

    def tick(self) -> None:
        """Do nothing: there are no copies."""
