"""Sizes and speeds of the batches that a store has read or written."""

from typing import NamedTuple

from purecache.histograms import BANDWIDTH, PAGES, SECONDS, Counts, Histogram


class BatchSizes(NamedTuple):
    """Histograms over batches: objects in each, GB/s and seconds of the call."""

    objects: Histogram
    bandwidth: Histogram
    """Of those that moved bytes."""
    seconds: Histogram


class Batches:
    """Those of one kind of request. Under the lock of its owner."""

    def __init__(self) -> None:
        self._objects, self._bandwidth, self._seconds = Counts(PAGES), Counts(BANDWIDTH), Counts(SECONDS)

    def add(self, objects: int, moved: int, seconds: float) -> None:
        """A call has ended that moved so many bytes."""
        self._objects.add(objects)
        self._seconds.add(seconds)
        if moved and seconds > 0:
            self._bandwidth.add(moved / seconds / 1e9)

    def now(self) -> BatchSizes:
        """A copy."""
        return BatchSizes(self._objects.now(), self._bandwidth.now(), self._seconds.now())
