"""Histograms of a few numbers, made where things happen and read by whoever exports them."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of buckets for durations: those that sglang has for its backups."""
PAGES = (1.0, 5.0, 10.0, 50.0, 100.0)
"""Those of sglang for pages per batch."""
BANDWIDTH = (0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0)
"""Those of sglang for GB/s."""


class Histogram(NamedTuple):
    """What a histogram was at one moment."""

    bounds: tuple[float, ...]
    """Upper end of each bucket but the last, which has none."""
    counts: tuple[int, ...]
    """Values per bucket, one more than bounds."""
    total: float
    """Sum of all values."""


class Counts:
    """A histogram that grows. For one thread, or under a lock of the owner's."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Note a value; it belongs to the first bucket whose end is not below it."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    def now(self) -> Histogram:
        """A copy."""
        return Histogram(self._bounds, tuple(self._counts), self._total)
