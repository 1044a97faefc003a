"""A data plane in memory: what an interpreter may do, and the worst of it, by seed.

Device pages are read when a backup is dispatched. The target of a copy holds garbage until the copy has ended. A load
back reads host pages at once or at the last moment. Completions of one kind keep their order.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.effects import Completion, Planes, Transfer, completion_of
from purecache.effects.checks import checked_transfer
from purecache.simulate.content import BLANK, DROPPED, FAILED, IN_FLIGHT, LOST
from purecache.simulate.fate import Fate, Fault
from purecache.simulate.rows import HostRows
from purecache.transitions import TransferKind

FOREVER = (20, 60)
"""Ticks after which a transfer that hangs is given up by the plane."""
REMEMBERED = 8
"""Completions that may be delivered once more."""


@dataclass(eq=False, slots=True)
class _Flight:
    number: int
    transfer: Transfer
    due: int
    source: np.ndarray
    target: np.ndarray
    """As indices into the arrays of all ranks."""
    ok: np.ndarray
    words: np.ndarray | None
    """What was read, or None for what is read when it lands."""
    hangs: bool = False
    landed: bool = False


class SimulatedPool:
    """Stands in for the interpreter of one pool: `device` and `host` are uint64 arrays of one word per page."""

    page_bytes = 8
    commit_alone = True

    def __init__(self, fate: Fate, ranks: int, device_pages: int, host_pages: int) -> None:
        """Sizes per rank."""
        self.fate, self.ranks, self.device_pages, self.host_pages = fate, ranks, device_pages, host_pages
        self.device = np.full(ranks * device_pages, BLANK)
        self.host = np.full(ranks * host_pages, BLANK)
        self.valid = np.zeros(ranks * host_pages, bool)
        """Which host pages the plane believes in: a lost one is known to be lost."""
        self._flights: dict[TransferKind, deque[_Flight]] = {kind: deque() for kind in TransferKind}
        self._started = 0

    @property
    def in_flight(self) -> int:
        """Transfers started and not reported."""
        return sum(len(flights) for flights in self._flights.values())

    def check(self, transfer: Transfer) -> Transfer:
        """See `Interpreter.check`."""
        return checked_transfer(transfer, self.ranks, self.device_pages, self.host_pages)

    def launch(self, transfer: Transfer) -> None:
        """Begin a transfer that was checked."""
        fate, backup = self.fate, transfer.kind is TransferKind.BACKUP
        sizes = (self.device_pages, self.host_pages) if backup else (self.host_pages, self.device_pages)
        source, target = transfer.source + transfer.rank * sizes[0], transfer.target + transfer.rank * sizes[1]
        ok = fate.spared(len(target))
        flight = _Flight(self._started, transfer, self._due(transfer.kind), source, target, ok, None)
        self._started += 1
        self._flights[transfer.kind].append(flight)
        if fate.strikes(Fault.NEVER, 0.004):
            flight.due, flight.hangs = fate.now + FOREVER[0] + fate.below(FOREVER[1] - FOREVER[0]), True
        at_once, early = fate.coin(0.3), fate.coin()
        if backup:
            flight.words = self.device[source]
            self.host[target] = IN_FLIGHT
            self.valid[target] = True
            return
        self.device[target] = IN_FLIGHT
        ok &= self.valid[source]
        if at_once and not flight.hangs:
            self._land(flight)
        elif early:
            flight.words = self.host[source]

    def _due(self, kind: TransferKind) -> int:
        """When a new transfer ends. It does not overtake the one before it unless transfers may be reordered."""
        due = self.fate.now + self.fate.delay()
        flights, overtakes = self._flights[kind], self.fate.strikes(Fault.REORDER, 0.3)
        return max(due, flights[-1].due) if flights and not overtakes and not flights[-1].hangs else due

    def _land(self, flight: _Flight) -> None:
        if flight.landed:
            return
        flight.landed = True
        backup = flight.transfer.kind is TransferKind.BACKUP
        if flight.hangs:
            flight.ok[:] = False
        words = self.host[flight.source] if flight.words is None else flight.words
        (self.host if backup else self.device)[flight.target] = np.where(flight.ok, words, FAILED)

    def poll(self) -> list[Completion]:
        """What has ended: of one kind never a younger transfer before an older one."""
        if self.fate.strikes(Fault.CORRUPT, 0.0005):
            self._lose()
        ended: list[_Flight] = []
        for flights in self._flights.values():
            for flight in flights:
                if flight.due <= self.fate.now:
                    self._land(flight)
            while flights and flights[0].landed and flights[0].due <= self.fate.now:
                ended.append(flights.popleft())
        return self._completions(ended)

    def _completions(self, ended: list[_Flight]) -> list[Completion]:
        ended.sort(key=lambda flight: flight.number)
        return [completion_of(flight.transfer, flight.ok) for flight in ended]

    def _lose(self) -> None:
        """A program failed while it owned the host pages: all of them are gone, and the plane knows."""
        self.host[:], self.valid[:] = LOST, False
        for flights in self._flights.values():
            for flight in flights:
                if flight.transfer.kind is TransferKind.BACKUP or flight.words is None:
                    flight.ok &= flight.landed and flight.transfer.kind is not TransferKind.BACKUP

    def hurry(self) -> None:
        """Carry out every load back now, but for those that hang."""
        for flight in self._flights[TransferKind.LOAD_BACK]:
            if not flight.hangs:
                self._land(flight)
                flight.due = self.fate.now

    def settle(self) -> None:
        """Nothing is waited for: `drain` lands all."""

    def drain(self) -> list[Completion]:
        """End everything; what hangs has failed."""
        ended = [flight for flights in self._flights.values() for flight in flights]
        for flights in self._flights.values():
            flights.clear()
        for flight in sorted(ended, key=lambda flight: flight.number):
            self._land(flight)
        return self._completions(ended)

    def copy(self, source: int, target: int, rank: int) -> bool:
        """Copy a device page now; whether that went well."""
        first = rank * self.device_pages
        ok = bool(self.fate.spared(1)[0])
        self.device[first + target] = self.device[first + source] if ok else FAILED
        return ok

    def drop_host(self, pages: np.ndarray, rank: int) -> None:
        """Give up host pages."""
        self.host[pages + rank * self.host_pages] = DROPPED
        self.valid[pages + rank * self.host_pages] = False

    def reset(self) -> None:
        """Forget the transfers in flight and every host page."""
        for flights in self._flights.values():
            flights.clear()
        self.host[:], self.valid[:] = DROPPED, False

    def staged(self, batch: int, parts: int = 1, head_axis: int = 0) -> HostRows:
        """See `Interpreter.staged`. Raises ValueError for pages in parts."""
        if parts != 1:
            raise ValueError(f"a page is one word, it can't be cut into {parts} parts")
        return HostRows(self, batch)

    def warm(self) -> None:
        """Nothing to compile."""

    def programs(self) -> list[dict[str, Any]]:
        """None."""
        return []

    def counters(self) -> dict[str, int]:
        """None."""
        return {}


class SimulatedPlanes(Planes):
    """The planes of a cache, over simulated pools. Some completions come twice, some after a reset."""

    def __init__(self, planes: dict[str, SimulatedPool], fate: Fate) -> None:
        super().__init__(planes)  # type: ignore[arg-type] # all that is used of an interpreter is there
        self._fate = fate
        self._reported: deque[Completion] = deque(maxlen=REMEMBERED)
        self.repeated = 0
        """Completions that the cache must have recognised as out of date."""

    def poll(self) -> list[Completion]:
        """See `Planes.poll`."""
        return self._noted(super().poll())

    def drain(self) -> list[Completion]:
        """See `Planes.drain`."""
        return self._noted(super().drain())

    def _noted(self, done: list[Completion]) -> list[Completion]:
        self._reported.extend(done)
        if self._reported and self._fate.strikes(Fault.DUPLICATE, 0.02):
            done = [*done, self._reported[self._fate.below(len(self._reported))]]
            self.repeated += 1
        self._fate.events += len(done)
        return done

    def reset(self) -> None:
        """See `Planes.reset`. What was under way may still be reported, against the rules."""
        for each in self._open.values():
            self._reported.append(completion_of(each.transfer, np.ones(len(each.transfer.target), bool)))
        super().reset()
