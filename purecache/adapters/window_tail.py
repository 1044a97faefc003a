"""The pages of sliding windows as sglang-jax's allocator keeps them: by a map from slots of full attention."""

from typing import Any

import numpy as np

from purecache.adapters.slots import PageMath
from purecache.state import NONE, CacheConfig, PoolSpec, Window
from purecache.state.config import ConfigError

WINDOW = "window"
"""Name of the pool."""


class WindowTail:
    """The window's side of an allocator of both pools (`SWATokenToKVPoolAllocator`): see `Tail`.

    The allocator maps each slot of full attention to a slot of the window's pool, or to 0; kernels read through that
    map. In the tree a prefix may be given another page of the one pool and keep that of the other, so this keeps the
    map true of the tree: an entry is never left behind for a window page that went elsewhere.
    """

    def __init__(self, allocator: Any, page_size: int) -> None:
        self._allocator, self._math = allocator, PageMath(page_size)
        pages = allocator.swa_attn_allocator.size_per_rank // page_size + 1
        self._page_of = np.zeros((allocator.dp_size, pages), np.int32)
        """Page of full attention that each window page of the tree goes with; not kept up for others."""

    def offered(self, pages: np.ndarray, rank: int) -> np.ndarray:
        """int32[n]: the window page of each page, NONE where it has none."""
        slots = self._map(rank)[pages * self._math.page_size]
        return np.where(slots > 0, slots // self._math.page_size, NONE).astype(np.int32)

    def settle(self, mine: np.ndarray, trees: np.ndarray, values: np.ndarray, rank: int) -> None:
        """See `Tail`. The map of the tree's pages says what the tree has."""
        offered = self.offered(mine, rank)
        spare, other = (offered >= 0) & (offered != values), mine != trees
        if (lost := spare & ~other).any():
            self._allocator.free_swa(self._math.slots_of(mine[lost]), dp_rank=rank)
        self._unmap(mine[other & ~spare], rank)
        self._pair(trees, values, rank)

    def loaded(self, pages: np.ndarray, values: np.ndarray, rank: int) -> None:
        """See `Tail`."""
        self._pair(pages, values, rank)

    def lend(self, number: int, rank: int) -> np.ndarray:
        """See `Tail`."""
        window, width = self._allocator.swa_attn_allocator, self._math.page_size
        number = min(number, window.available_size(dp_rank=rank) // width)
        slots = window.alloc(number * width, dp_rank=rank) if number else None
        return np.zeros(0, np.int32) if slots is None else self._math.pages_of(slots)

    def take(self, values: np.ndarray, rank: int) -> None:
        """See `Tail`."""
        self._part(values, rank)
        self._allocator.swa_attn_allocator.free(self._math.slots_of(values), dp_rank=rank)

    def reset(self) -> None:
        """See `Tail`."""
        self._page_of[:] = 0

    def _map(self, rank: int) -> np.ndarray:
        """The allocator's map of a rank."""
        mapping = self._allocator.full_to_swa_index_mapping
        return mapping[rank] if isinstance(mapping, list) else mapping

    def _unmap(self, pages: np.ndarray, rank: int) -> None:
        if len(pages):
            self._map(rank)[self._math.slots_of(pages)] = 0

    def _part(self, values: np.ndarray, rank: int) -> None:
        """Forget where window pages were, unless something else is there by now."""
        pages = self._page_of[rank, values]
        there = (pages > 0) & (self.offered(pages, rank) == values)
        self._unmap(pages[there], rank)
        self._page_of[rank, values] = 0

    def _pair(self, pages: np.ndarray, values: np.ndarray, rank: int) -> None:
        """Window pages `values` go with `pages` from now on, where there are any."""
        new = (values >= 0) & (self.offered(pages, rank) != values)
        self._part(values[new], rank)
        self._map(rank)[self._math.slots_of(pages[new])] = self._math.slots_of(values[new])
        held = values >= 0
        self._page_of[rank, values[held]] = pages[held]


def window_config(config: CacheConfig, device_pages: int, sliding_window_size: int, host_pages: int = 0) -> CacheConfig:
    """A configuration with a pool for windows of so many tokens. Raises ConfigError for one that is not positive."""
    if sliding_window_size <= 0:
        raise ConfigError(f"a sliding window has at least one token, not {sliding_window_size}")
    return config.register_pool(PoolSpec(WINDOW, Window(sliding_window_size), device_pages, host_pages))
