"""What metrics are made of: copies of the numbers of a cache, taken at a tick on its thread."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from purecache.cache import PrefixCache
from purecache.effects.tally import Moved
from purecache.state.layout import COUNTERS, Scalar
from purecache.stores.guard import Guard
from purecache.transitions import TransferKind

_FIRST = COUNTERS[0]
_LAST = COUNTERS[-1] + 1
WINDOW = 10.0
"""Seconds over which the hit rate is taken."""
_STEPS = 10
"""Parts of that window."""
_LOOKED_UP = Scalar.MATCHED_DEVICE_PAGES, Scalar.MATCHED_HOST_PAGES, Scalar.MATCHED_MISS_PAGES


class StorageSample(NamedTuple):
    """What is known of a storage tier. Its guard may be asked from any thread."""

    guard: Guard
    counts: Mapping[str, int]
    """Of the tier: prefetches and what became of them."""
    under_way: Mapping[str, int]
    """Stores and prefetches that have not ended, and stores that wait for a staging buffer."""


class Mark(NamedTuple):
    """The counters at one moment."""

    time: float
    books: np.ndarray
    totals: np.ndarray
    """int64[counters]: those of `COUNTERS`, which in the books are int32 and wrap."""

    def totals_at(self, books: np.ndarray) -> np.ndarray:
        """int64[counters]: the totals at later books. Until then, no counter may have grown by 2^32."""
        new, old = (each[_FIRST:_LAST].view(np.uint32) for each in (books, self.books))
        return self.totals + (new - old)


class Sample(NamedTuple):
    """The numbers of a cache at one tick; nothing of it changes."""

    books: np.ndarray
    """int32[books]: see `CacheState.books`."""
    last: Mark
    """Of the last second."""
    first: Mark
    """`WINDOW` ago, or the beginning."""
    plane: Mapping[str, int]
    """Counters of the data plane."""
    in_flight: int
    """Transfers between device and host."""
    moved: Mapping[tuple[TransferKind, int], Moved]
    storage: StorageSample | None

    def totals(self) -> dict[Scalar, int]:
        """All counters since the cache was made."""
        return dict(zip(COUNTERS, self.last.totals_at(self.books).tolist(), strict=True))

    def hit_rate(self) -> float:
        """Pages found on device or host per page looked up in the last `WINDOW` seconds; 0 where none was."""
        grown = self.last.totals_at(self.books) - self.first.totals
        device, host, missed = (int(grown[counter - _FIRST]) for counter in _LOOKED_UP)
        asked = device + host + missed
        return (device + host) / asked if asked else 0.0


class Sampler:
    """An observer that keeps the last sample. Other threads read `sample`; None before the first tick."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: steady seconds, for the window of the hit rate."""
        self.sample: Sample | None = None
        self._clock = clock
        self._marks: deque[Mark] = deque()
        """One per second of the window."""

    def ticked(self, cache: PrefixCache) -> None:
        """Take a sample: copies and references, no sums."""
        driver, now, marks = cache._driver, self._clock(), self._marks
        books, storage = driver.books(), driver.storage
        if not marks:
            marks.append(Mark(now, np.zeros_like(books), np.zeros(len(COUNTERS), np.int64)))
        if now - marks[-1].time >= WINDOW / _STEPS:
            marks.append(Mark(now, books, marks[-1].totals_at(books)))
            while len(marks) > 2 and now - marks[1].time >= WINDOW:
                marks.popleft()
        self.sample = Sample(
            books,
            marks[-1],
            marks[0],
            driver.plane.counters(),
            driver.plane.in_flight,
            driver.tally.now(),
            storage and StorageSample(storage.guard, dict(storage._counts), storage.under_way),
        )
