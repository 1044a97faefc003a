"""Writing pages to storage: host page -> bytes -> store, each stage bounded, none waited for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from purecache.effects.transfers import Transfer
from purecache.storage.pool_pages import Copied, PoolPages, Slot
from purecache.stores.guard import Done, Guard, Kind, Request

Report = Callable[[Transfer, np.ndarray], None]
"""Takes the effect of a store and ok [n]: ends it."""


@dataclass(eq=False)
class _Write:
    """One store operation under way."""

    transfer: Transfer
    pages: PoolPages
    good: np.ndarray
    """bool[n]: pages of the operation that host has; what follows is of those."""
    names: list[str]
    slots: list[Slot]
    copies: list[Copied]
    reported: bool = False


class Writer:
    """Carries out store operations. `start` takes a slot per page, so it never has more than there are."""

    def __init__(self, pools: Mapping[int, PoolPages], guard: Guard, report: Report, number: Callable[[], int]) -> None:
        self._pools, self._guard, self._report, self._number = pools, guard, report, number
        self._failed: list[Transfer] = []
        """Those that could not begin."""
        self._reading: list[_Write] = []
        self._writing: dict[int, _Write] = {}

    @property
    def in_flight(self) -> int:
        """Operations under way."""
        return len(self._failed) + len(self._reading) + len(self._writing)

    def names(self) -> set[str]:
        """The objects that are being written."""
        return {name for write in [*self._reading, *self._writing.values()] for name in write.names}

    def start(self, transfer: Transfer, names: list[tuple[str, ...]] | None) -> None:
        """Begin with one operation: the objects of each of its pages, or None for names that nobody can make."""
        pool = self._pools[transfer.pool]
        pages = pool.on_host(transfer.source, transfer.rank)
        good = pool.has(pages)
        # What fails here is reported by `poll`: this is called from within a transition's effects.
        slots = pool.acquire(int(good.sum())) if names is not None and good.any() else None
        if names is None or slots is None:
            self._failed.append(transfer)
            return
        try:
            copies = pool.read(pages[good])
        except Exception:
            pool.release(slots)
            self._failed.append(transfer)
            return
        flat = [name for place in np.flatnonzero(good) for name in names[place]]
        self._reading.append(_Write(transfer, pool, good, flat, slots, copies))

    def poll(self) -> None:
        """Hand pages whose bytes have come to the store. Copies them, but waits for nothing."""
        failed, self._failed = self._failed, []
        for transfer in failed:
            self._fail(transfer)
        waiting = []
        for write in self._reading:
            if all(copied.ready for copied in write.copies):
                self._put(write)
            else:
                waiting.append(write)
        self._reading = waiting

    def done(self, done: Done) -> bool:
        """Take an answer of the guard; False if it is not one of this writer's."""
        write = self._writing.get(done.number)
        if write is None:
            return False
        if not write.reported:
            ok = np.zeros(len(write.good), bool)
            ok[write.good] = write.pages.whole([answer is True for answer in done.answers])
            self._report(write.transfer, ok)
            write.reported = True  # a late call is answered twice
        if done.finished:
            del self._writing[done.number]
            write.pages.release(write.slots)
        return True

    def give_up(self) -> None:
        """Report everything under way as failed."""
        writes = [*self._reading, *self._writing.values()]
        ended = self._failed + [write.transfer for write in writes if not write.reported]
        self.forget()
        for transfer in ended:
            self._fail(transfer)

    def forget(self) -> None:
        """The operations were reset: report none of them any more."""
        self._failed = []
        for write in self._reading:
            write.pages.release(write.slots)
        self._reading = []
        for write in self._writing.values():
            write.reported = True

    def _put(self, write: _Write) -> None:
        try:
            write.pages.fill(write.copies, write.slots)
        except Exception:  # the copy failed while it ran
            self._give_up(write)
            return
        number = self._number()
        if self._guard.start(Request(Kind.PUT, number, write.names, write.pages.buffers(write.slots))):
            self._writing[number] = write
        else:
            self._give_up(write)

    def _give_up(self, write: _Write) -> None:
        write.pages.release(write.slots)
        self._fail(write.transfer)

    def _fail(self, transfer: Transfer) -> None:
        self._report(transfer, np.zeros(len(transfer.source), bool))
