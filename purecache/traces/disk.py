"""A storage tier without bytes: which pages a disk would have. The cache's own transitions store and prefetch them.

It stands where `purecache.storage.StorageTier` stands beside a real interpreter. Keys are the numbers of pages (see
`purecache.workloads.paging`), writes end at once, and the disk keeps what was written or read last.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from purecache import PrefixCache
from purecache.answers import Node
from purecache.effects import Transfer
from purecache.state import NONE
from purecache.transitions import Status


@dataclass(eq=False)
class Reading:
    """A prefetch that was begun: host pages are reserved for it."""

    operation: tuple[int, int]
    first: int
    """Page of the prompt that the first one read is."""
    pages: np.ndarray
    """int32[n]: the reserved host pages."""
    prompt: np.ndarray
    """int32[m]: the prompt's pages, as far as this prefetch makes them usable."""


def _all_well(transfer: Transfer) -> np.ndarray:
    return np.ones(len(transfer.target), bool)


class Disk:
    """A disk of `capacity` pages below a cache of one rank, whose pages are of one token, without an interpreter."""

    def __init__(self, cache: PrefixCache, capacity: int) -> None:
        """Attach it."""
        self._cache, self._driver, self._capacity = cache, cache._driver, capacity
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._written: list[Transfer] = []
        self.evicted = 0
        """Pages that had to go."""
        self._driver.storage = self

    def __len__(self) -> int:
        return len(self._kept)

    # ---- what the driver calls ----

    def store(self, node: Node) -> int:
        """Write what the path to `node` has on host and the disk lacks. Every backup that ends does this."""
        started, size = 0, self._driver.programs.bucket(1)
        while True:
            reply = self._driver.run("begin_store", size, *node, size)
            for transfer in self._written:
                self._driver.end("finish_store", transfer.operation, transfer.generation, _all_well(transfer))
            self._written.clear()
            started += reply.number
            if reply.status != Status.OK:
                return started

    def write(self, transfer: Transfer) -> None:
        """Carry out the effect of a `begin_store`."""
        _, tokens = self._driver.views()
        for number in tokens[transfer.target].tolist():
            self._use(number)
        self._written.append(transfer)

    def tick(self) -> None:
        """Nothing waits."""

    def reset(self) -> None:
        """Keeps what it has."""

    def _use(self, number: int) -> None:
        self._kept[number] = None
        self._kept.move_to_end(number)
        if len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
            self.evicted += 1

    # ---- what a scheduler calls ----

    def begin(self, prompt: np.ndarray) -> Reading | None:
        """Reserve host pages for what the disk has of a prompt behind what the cache has; None for nothing."""
        found = self._cache.peek(prompt)
        end = found.length
        while end < len(prompt) and int(prompt[end]) in self._kept:
            end += 1
        wanted = end - found.length
        if not wanted:
            return None
        size = self._driver.programs.bucket(wanted)
        reply = self._driver.run("begin_prefetch", size, *found.node, min(wanted, size))
        if reply.status != Status.OK:
            return None
        pages = reply.pages[: reply.number].copy()
        return Reading((reply.operation, reply.generation), found.length, pages, prompt[: found.length + len(pages)])

    def end(self, reading: Reading, landed: int) -> int:
        """The first `landed` pages of a prefetch have arrived, and it is over; how many the tree took."""
        size = self._driver.programs.bucket(len(reading.prompt))
        pieces = self._cache._inputs.prompt(reading.prompt, None, 0)[1]
        ok = np.zeros(size, np.int32)
        ok[:landed] = 1
        for number in reading.prompt[reading.first : reading.first + landed].tolist():
            self._use(number)
        pages = np.full(size, NONE, np.int32)
        pages[: len(reading.pages)] = reading.pages
        reply = self._driver.run("finish_prefetch", size, *reading.operation, *pieces, reading.first, pages, ok)
        return reply.number
