"""A line in the structured log when something of a cache goes wrong: refusals, failures, a store that is left alone."""

import time
from collections.abc import Callable

from purecache.cache import PrefixCache
from purecache.logs import log
from purecache.metrics.samples import Sampler
from purecache.state.layout import Scalar

_NAMES = {
    Scalar.DROPPED_PAGES: "dropped_pages",
    Scalar.BACKUP_FAILED_PAGES: "backup_failed_pages",
    Scalar.BACKUP_REFUSED_PAGES: "backup_refused_pages",
    Scalar.LOAD_FAILED_PAGES: "load_failed_pages",
    Scalar.LOADS_REFUSED: "loads_refused",
    Scalar.STALE_COMPLETIONS: "stale_completions",
    Scalar.STORE_FAILED_PAGES: "store_failed_pages",
    Scalar.STORES_REFUSED: "stores_refused",
    Scalar.PREFETCH_FAILED_PAGES: "prefetch_failed_pages",
    Scalar.PREFETCHES_REFUSED: "prefetches_refused",
}
"""Counters that should stand still."""


class TroubleLog:
    """An observer: `cache.observe(TroubleLog())`. At most one line per period, with what has happened in it.

    What happened before its first tick is not told.
    """

    def __init__(self, period: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """period: seconds. clock: steady seconds."""
        self._period, self._clock, self._next = period, clock, float("-inf")
        self._sampler = Sampler(clock)
        self._before: dict[str, int] = {}
        self._breaker = False

    def ticked(self, cache: PrefixCache) -> None:
        """Compare, once per period."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + self._period
        self._sampler.ticked(cache)
        sample = self._sampler.sample
        assert sample is not None
        now_known = sample.totals()
        totals = {name: now_known[counter] for counter, name in _NAMES.items()}
        grown = {name: total - self._before.get(name, total) for name, total in totals.items()}
        if any(grown.values()):
            log("trouble", None, **{name: number for name, number in grown.items() if number})
        self._before = totals
        open_now = sample.storage is not None and sample.storage.guard.breaker.is_open
        if open_now != self._breaker:
            log("storage_left_alone" if open_now else "storage_tried_again")
        self._breaker = open_now
