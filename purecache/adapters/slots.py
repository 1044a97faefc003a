"""Token slots, which schedulers count in, and the pages that they lie in; allocators that hand them out."""

from typing import Protocol

import numpy as np


class SlotAllocator(Protocol):
    """A scheduler's own allocator. Slots are token indices local to a rank, whole pages aligned to the page size."""

    def alloc(self, need_size: int, dp_rank: int = 0) -> np.ndarray | None:
        """`need_size` slots (whole pages), or None."""
        ...

    def free(self, free_index: np.ndarray, dp_rank: int = 0) -> None:
        """Take slots back; any slot of a page stands for all of it."""
        ...

    def available_size(self, dp_rank: int = 0) -> int:
        """Free slots of a rank."""
        ...


class PageMath:
    """Between slots and pages of one size: page p holds the slots [p * page_size, (p + 1) * page_size)."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._offsets = np.arange(page_size, dtype=np.int32)

    def slots_of(self, pages: np.ndarray) -> np.ndarray:
        """int32[n * page_size]: a new array with all slots of `pages` [n]."""
        if self.page_size == 1:
            return np.array(pages, np.int32)
        return (pages.astype(np.int32)[:, None] * self.page_size + self._offsets).reshape(-1)

    def pages_of(self, slots: np.ndarray) -> np.ndarray:
        """int32[n]: the pages of a row of slots, whose pages are whole up to the last."""
        return (slots[:: self.page_size] // self.page_size).astype(np.int32)

    def whole(self, tokens: int) -> int:
        """`tokens`, rounded down to whole pages."""
        return tokens // self.page_size * self.page_size
