"""Stack distances: the hit rate of LRU at every capacity from one pass.

A prefix cache that evicts exactly by least recent use, from the end of a prefix, holds at any time the pages used last,
as many as fit. So a page is found iff fewer different pages than the capacity were used since its last use (Mattson,
Gecsei, Slutz, Traiger: "Evaluation techniques for storage hierarchies", 1970). The pages of one prompt are used at the
same time, its end first: no page was used later than what is above it. That holds for capacities from the largest
request on. With host memory that is written through, device and host together are one such cache of the larger size.
"""

from collections.abc import Callable

import numpy as np

from purecache.workloads import PagedTrace

NEVER = np.iinfo(np.int32).max
"""Distance of a page that was not used before."""


class _Fenwick:
    """Flags in a row, and how many are set up to a place (Fenwick: "A new data structure for cumulative frequency
    tables", 1994). Places count from 1; arrays of them are handled at once."""

    def __init__(self, places: int) -> None:
        self._sums = np.zeros(places + 1, np.int32)

    def add(self, places: np.ndarray, amount: int) -> None:
        sums, at = self._sums, places
        while len(at):
            np.add.at(sums, at, amount)
            at = at + (at & -at)
            at = at[at < len(sums)]

    def up_to(self, places: np.ndarray) -> np.ndarray:
        total, at = np.zeros(len(places), np.int32), places.copy()
        while at.any():
            total += self._sums[at]  # entry 0 stays 0
            at &= at - 1
        return total


def stack_distances(trace: PagedTrace, progress: Callable[[int], None] | None = None) -> np.ndarray:
    """int32[pages of all prompts and answers]: different pages used since the last use of each, itself included.

    In the order of `trace.ids`; NEVER for a first use. `progress(requests)` is called now and then.
    """
    found = np.full(len(trace.ids), NEVER, np.int32)
    last = np.zeros(trace.distinct, np.int64)
    flags, used, distinct = _Fenwick(len(trace.ids)), 0, 0
    for request in range(len(trace)):
        first, end = int(trace.starts[request]), int(trace.starts[request + 1])
        ids = trace.ids[first:end]
        before = last[ids]
        known = before > 0  # the front of a prompt, as a page is never known without what is above it
        again = before[known]
        found[first : first + len(again)] = distinct + 1 - flags.up_to(again)
        flags.add(again, -1)
        now = used + (end - first) - np.arange(end - first)
        flags.add(now, 1)
        last[ids], used = now, used + (end - first)
        distinct += len(ids) - len(again)
        if progress is not None and request % 256 == 0:
            progress(request)
    return found


class LruCurve:
    """What exact LRU finds of each prompt, at any capacity."""

    def __init__(self, trace: PagedTrace, progress: Callable[[int], None] | None = None) -> None:
        """One pass over the trace."""
        self._trace, distances = trace, stack_distances(trace, progress)
        place = np.arange(len(trace.ids)) - np.repeat(trace.starts[:-1], trace.sizes)
        countable = place < np.repeat(trace.match_pages, trace.sizes)
        self._distances = np.where(countable, distances, NEVER)
        self._sorted = np.sort(self._distances)

    def pages(self, capacities: np.ndarray) -> np.ndarray:
        """int64[n]: pages that are found in all, at these capacities in pages."""
        return np.searchsorted(self._sorted, np.minimum(capacities, NEVER - 1), side="right")

    def by_request(self, capacity: int) -> np.ndarray:
        """int64[requests]: pages that each finds at a capacity."""
        sums = np.concatenate([[0], np.cumsum(self._distances <= min(capacity, NEVER - 1))])
        return sums[self._trace.starts[1:]] - sums[self._trace.starts[:-1]]

    def capacities(self, number: int = 200) -> np.ndarray:
        """int64[n]: capacities to draw the curve at, from the largest request to all pages, on a log scale."""
        most = max(self._trace.distinct, self._trace.largest)
        return np.unique(np.geomspace(self._trace.largest, most, number).round().astype(np.int64))
