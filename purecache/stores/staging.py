"""The memory that pages pass through on their way to and from a store."""

import mmap
from collections.abc import Sequence

import numpy as np

from purecache.stores.envelope import TRAILER

ALIGNMENT = 4096
"""Bytes that each slot begins at a multiple of, as direct I/O wants it."""


class StagingRing:
    """`slots` buffers for one page of `page_bytes` and its trailer each, in one region that never moves.

    One thread owns it. Views stay usable as long as anyone holds them, but only who has acquired a slot may use it.
    """

    def __init__(self, slots: int, page_bytes: int) -> None:
        if slots < 1 or page_bytes < 1:
            raise ValueError(f"a staging ring needs slots >= 1 and page_bytes >= 1, not {slots} and {page_bytes}")
        self.page_bytes = page_bytes
        self.stride = -(-(page_bytes + TRAILER) // ALIGNMENT) * ALIGNMENT
        # Touched now, so that a lack of memory and the time of the page faults show here and not during a request.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        self.region = memoryview(mmap.mmap(-1, slots * self.stride, flags=flags))
        """All slots and what lies between them, for `Store.register`."""
        self._held = [False] * slots
        self._free = list(range(slots))[::-1]

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def acquire(self, number: int) -> list[int] | None:
        """`number` slots, or None where there are not as many: never some of them."""
        if number < 0:
            raise ValueError(f"can't acquire {number} slots")
        if number > len(self._free):
            return None
        first = len(self._free) - number
        # The slots that were released last are the ones still in the processor's caches.
        taken = self._free[first:][::-1]
        del self._free[first:]
        for slot in taken:
            self._held[slot] = True
        return taken

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back. Raises ValueError, and releases none, where one is not held or is named twice."""
        for slot in slots:
            self._check(slot)
        if len(set(slots)) != len(slots):
            raise ValueError(f"slots released twice in one call: {list(slots)}")
        for slot in slots:
            self._held[slot] = False
        self._free.extend(reversed(slots))

    def page(self, slot: int) -> np.ndarray:
        """uint8 [page_bytes], writable: the page in a slot, without its trailer."""
        return np.frombuffer(self.region, np.uint8, self.page_bytes, self._check(slot) * self.stride)

    def sealed(self, slot: int) -> memoryview:
        """The page and its trailer: the buffer that a store reads or fills."""
        start = self._check(slot) * self.stride
        return self.region[start : start + self.page_bytes + TRAILER]

    def _check(self, slot: int) -> int:
        if not 0 <= slot < len(self._held) or not self._held[slot]:
            raise ValueError(f"slot {slot} is not held: it was released before, or it is not of this ring")
        return slot
