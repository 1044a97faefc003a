"""Writing pages to storage: host page -> bytes -> store, each stage bounded, none waited for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.effects.staged import StagedPages
from purecache.effects.transfers import Transfer
from purecache.storage.buffers import PageBuffers
from purecache.stores.guard import Done, Guard, Kind, Request

Report = Callable[[int, int, np.ndarray], None]
"""Takes operation, generation and ok [n]: ends a store."""


@dataclass(eq=False)
class _Write:
    """One store operation under way."""

    operation: int
    generation: int
    good: np.ndarray
    """bool[n]: pages of the operation that host has; what follows is of those."""
    names: list[str]
    slots: list[int]
    parts: list[tuple[np.ndarray, Any, int]]
    """Of the copy from host: positions, the arrays that will hold those pages, and the place of the first in them."""


class Writer:
    """Carries out store operations. `start` takes a slot of the ring per page, so it never has more than there are."""

    def __init__(self, staged: StagedPages, ring: PageBuffers, guard: Guard, report: Report, number: Callable[[], int]):
        self._staged, self._ring, self._guard, self._report, self._number = staged, ring, guard, report, number
        self._failed: list[tuple[int, int, int]] = []
        """Operation, generation and pages of those that could not begin."""
        self._reading: list[_Write] = []
        self._writing: dict[int, _Write] = {}

    @property
    def in_flight(self) -> int:
        """Operations under way."""
        return len(self._failed) + len(self._reading) + len(self._writing)

    def start(self, transfer: Transfer, pages: np.ndarray, names: list[tuple[str, ...]] | None) -> None:
        """Begin with one operation: host `pages` as global ids, the objects of each; None for names nobody can make."""
        good = self._staged.has(pages)
        # What fails here is reported by `poll`: this is called from within a transition's effects.
        slots = self._ring.acquire(int(good.sum())) if names is not None and good.any() else None
        if names is None or slots is None:
            self._failed.append((transfer.operation, transfer.generation, len(pages)))
            return
        try:
            parts = self._staged.read(pages[good])
        except Exception:
            self._ring.release(slots)
            self._failed.append((transfer.operation, transfer.generation, len(pages)))
            return
        flat = [name for place in np.flatnonzero(good) for name in names[place]]
        self._reading.append(_Write(transfer.operation, transfer.generation, good, flat, slots, parts))

    def poll(self) -> None:
        """Hand pages whose bytes have come to the store. Copies them, but waits for nothing."""
        failed, self._failed = self._failed, []
        for operation in failed:
            self._end(*operation)
        waiting = []
        for write in self._reading:
            if all(_ready(arrays) for _, arrays, _ in write.parts):
                self._put(write)
            else:
                waiting.append(write)
        self._reading = waiting

    def done(self, done: Done) -> bool:
        """Take an answer of the guard; False if it is not one of this writer's."""
        write = self._writing.get(done.number)
        if write is None:
            return False
        if write.operation >= 0:
            ok = np.zeros(len(write.good), bool)
            ok[write.good] = self._ring.whole([answer is True for answer in done.answers])
            self._report(write.operation, write.generation, ok)
            write.operation = -1  # a late call is answered twice
        if done.finished:
            del self._writing[done.number]
            self._ring.release(write.slots)
        return True

    def give_up(self) -> None:
        """Report everything under way as failed."""
        writes = [*self._reading, *self._writing.values()]
        ended = self._failed + [(w.operation, w.generation, len(w.good)) for w in writes if w.operation >= 0]
        self.forget()
        for operation in ended:
            self._end(*operation)

    def forget(self) -> None:
        """The operations were reset: report none of them any more."""
        self._failed = []
        for write in self._reading:
            self._ring.release(write.slots)
        self._reading = []
        for write in self._writing.values():
            write.operation = -1

    def _put(self, write: _Write) -> None:
        try:
            for where, arrays, first in write.parts:
                for place, position in enumerate(where.tolist(), first):
                    self._staged.bytes_of(arrays, place, self._ring.rows(write.slots[position]))
        except Exception:  # the copy failed while it ran
            self._give_up(write)
            return
        number = self._number()
        if self._guard.start(Request(Kind.PUT, number, write.names, self._ring.objects(write.slots))):
            self._writing[number] = write
        else:
            self._give_up(write)

    def _give_up(self, write: _Write) -> None:
        self._ring.release(write.slots)
        self._end(write.operation, write.generation, len(write.good))

    def _end(self, operation: int, generation: int, pages: int) -> None:
        self._report(operation, generation, np.zeros(pages, bool))


def _ready(arrays: Any) -> bool:
    try:
        return all(array.is_ready() for array in arrays)
    except Exception:
        return True
