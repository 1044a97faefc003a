"""The staging buffers of pages: a slot of the ring holds one page as one or more sealed objects."""

from collections.abc import Sequence

import numpy as np

from purecache.stores.envelope import TRAILER
from purecache.stores.staging import StagingRing


class PageBuffers:
    """`slots` pages of `parts` objects with `row_bytes` each; every object has a trailer of its own."""

    def __init__(self, slots: int, row_bytes: int, parts: int) -> None:
        self.parts = parts
        self._stride = row_bytes + TRAILER
        # The ring adds the trailer of the last object itself.
        self.ring = StagingRing(slots, parts * self._stride - TRAILER)

    @property
    def free(self) -> int:
        """Pages for which there is a buffer."""
        return self.ring.free

    def acquire(self, number: int) -> list[int] | None:
        """Slots for so many pages, or None where there are not as many."""
        return self.ring.acquire(number)

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back."""
        self.ring.release(slots)

    def objects(self, slots: Sequence[int]) -> list[memoryview]:
        """What a store reads or fills: the objects of all pages, page by page, with their trailers."""
        return [
            self.ring.sealed(slot)[part * self._stride : (part + 1) * self._stride]
            for slot in slots
            for part in range(self.parts)
        ]

    def rows(self, slot: int) -> list[np.ndarray]:
        """uint8[row_bytes], writable: the objects of one page, without their trailers."""
        return [np.frombuffer(sealed, np.uint8)[:-TRAILER] for sealed in self.objects([slot])]
