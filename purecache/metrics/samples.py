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


class StorageSample(NamedTuple):
    """What is known of a storage tier. Its guard may be asked from any thread."""

    guard: Guard
    counts: Mapping[str, int]
    """Of the tier: prefetches and what became of them."""
    under_way: Mapping[str, int]
    """Stores and prefetches that have not ended, and stores that wait for a staging buffer."""


class Sample(NamedTuple):
    """The numbers of a cache at one tick; nothing of it changes."""

    books: np.ndarray
    """int32[books]: see `CacheState.books`."""
    totals: np.ndarray
    """int64[counters]: those of `COUNTERS`, which in the books begin again from 2^31 on."""
    plane: Mapping[str, int]
    """Counters of the data plane."""
    in_flight: int
    """Transfers between device and host."""
    moved: Mapping[tuple[TransferKind, int], Moved]
    storage: StorageSample | None
    hit_rate: float
    """Tokens found on device or host per token looked up in the last `WINDOW` seconds; 0 where none was."""

    def total(self, counter: Scalar) -> int:
        """One of the totals."""
        return int(self.totals[counter - _FIRST])


class Sampler:
    """An observer that keeps the last sample. Other threads read `sample`; None before the first tick."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: steady seconds, for the window of the hit rate."""
        self.sample: Sample | None = None
        self._clock = clock
        self._books: np.ndarray | None = None
        self._totals = np.zeros(len(COUNTERS), np.int64)
        self._marks: deque[tuple[float, int, int]] = deque([(clock(), 0, 0)], maxlen=_STEPS + 1)
        """Time, pages found and pages looked up at the beginnings of the parts of the window."""

    def ticked(self, cache: PrefixCache) -> None:
        """Take a sample."""
        driver = cache._driver
        books, storage = driver.books(), driver.storage
        if books is not self._books:
            self._add(books)
        self.sample = Sample(
            books=books,
            totals=self._totals,
            plane=driver.plane.counters(),
            in_flight=driver.plane.in_flight,
            moved=driver.tally.now(),
            storage=storage and StorageSample(storage.guard, dict(storage._counts), storage.under_way),
            hit_rate=self._rate(),
        )

    def _add(self, books: np.ndarray) -> None:
        """Add what the counters grew by. They are int32 and wrap; between two ticks they grow by less than 2^32."""
        new = books[_FIRST:_LAST].view(np.uint32)
        old = np.zeros_like(new) if self._books is None else self._books[_FIRST:_LAST].view(np.uint32)
        self._totals = self._totals + (new - old)
        self._books = books

    def _rate(self) -> float:
        now = self._clock()
        found = int(self._totals[0] + self._totals[1])
        asked = found + int(self._totals[2])
        marks = self._marks
        if now - marks[-1][0] >= WINDOW / _STEPS:
            marks.append((now, found, asked))
            while len(marks) > 2 and now - marks[1][0] >= WINDOW:
                marks.popleft()
        _, found_before, asked_before = marks[0]
        return (found - found_before) / (asked - asked_before) if asked > asked_before else 0.0


assert COUNTERS[:3] == (Scalar.MATCHED_DEVICE_PAGES, Scalar.MATCHED_HOST_PAGES, Scalar.MATCHED_MISS_PAGES)
