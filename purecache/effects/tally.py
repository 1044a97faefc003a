"""How many pages were moved between device and host, and how long that took."""

import time
from collections.abc import Callable
from typing import NamedTuple

from purecache.effects.transfers import Completion, Transfer
from purecache.histograms import SECONDS, Counts, Histogram
from purecache.transitions import TransferKind


class Moved(NamedTuple):
    """Totals of the transfers of one kind and pool that have ended."""

    pages: int
    failed: int
    """Pages that did not arrive."""
    seconds: Histogram
    """Per transfer, from its start until the cache took note of its end: that is the end of a step."""


class Tally:
    """Counts transfers by kind and pool. What is reset is never counted."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds, steady."""
        self._clock = clock
        self._began: dict[tuple[int, int], float] = {}
        self._pages: dict[tuple[TransferKind, int], list[int]] = {}
        self._seconds: dict[tuple[TransferKind, int], Counts] = {}

    def began(self, transfer: Transfer) -> None:
        """A backup or load back begins."""
        self._began[transfer.operation, transfer.generation] = self._clock()

    def ended(self, done: Completion) -> None:
        """It has ended, well or not."""
        key = done.kind, done.pool
        if key not in self._pages:
            self._pages[key], self._seconds[key] = [0, 0], Counts(SECONDS)
        began, moved = self._began.pop((done.operation, done.generation), None), int(done.ok.sum())
        self._pages[key][0] += moved
        self._pages[key][1] += len(done.ok) - moved
        if began is not None:
            self._seconds[key].add(self._clock() - began)

    def forget(self) -> None:
        """What is under way will never be reported."""
        self._began.clear()

    def now(self) -> dict[tuple[TransferKind, int], Moved]:
        """A copy of the totals, by kind and pool."""
        return {key: Moved(good, bad, self._seconds[key].now()) for key, (good, bad) in self._pages.items()}
