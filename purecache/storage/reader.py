"""Prefetch: is it in storage, has it landed in host memory, and when to stop waiting."""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from purecache.answers import Node
from purecache.effects.staged import Part, StagedPages
from purecache.storage.buffers import PageBuffers
from purecache.stores.guard import Done, Guard, Kind, Request
from purecache.stores.interface import Fetch, Presence


class EndPolicy(enum.StrEnum):
    """How long a prefetch may hold up its request."""

    BEST_EFFORT = "best_effort"
    """What has arrived when the scheduler asks for the first time."""
    WAIT_COMPLETE = "wait_complete"
    """Until all of it has arrived or failed."""
    TIMEOUT = "timeout"
    """Until then, or until a time that grows with its length is over."""


class Progress(enum.Enum):
    """Answer to "is this request's prefetch done?"."""

    YES = "yes"
    """It ended; `Prefetch.loaded` tokens more are on host."""
    NOT_YET = "not yet"
    GIVEN_UP = "given up"
    """It ended and brought nothing: not in storage, no room, failed, or the pages came otherwise. Match as always."""


class Stage(enum.Enum):
    """Where a prefetch stands."""

    QUERY = 0
    READ = 1
    ENDED = 2


@dataclass(eq=False)
class Prefetch:
    """One prefetch. Ask `StorageTier.progress` about it, and match once it has ended."""

    prompt: tuple[Any, ...]
    """Pieces of the prompt, as programs take it."""
    anchor: Node
    first: int
    """Pages of the prompt that the cache had."""
    names: list[tuple[str, ...]]
    """Objects of each page behind them."""
    stage: Stage = Stage.QUERY
    loaded: int = 0
    """Tokens that came from storage; known when it has ended."""
    asked: float | None = None
    """When the scheduler asked for the first time, in its own clock."""
    operation: tuple[int, int] | None = None
    pages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Reserved host pages, local to the rank."""
    ok: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    resolved: int = 0
    """Pages that arrived or failed."""
    issued: int = 0
    """Pages asked for so far."""
    starved: float | None = None
    """Since when there has been no buffer for it."""

    @property
    def rank(self) -> int:
        """Data-parallel rank."""
        return int(self.prompt[3])


@dataclass(eq=False)
class _Read:
    """One request to the guard, or one copy into host pages."""

    prefetch: Prefetch | None
    """None if it ended meanwhile: only the slots are waited for."""
    first: int
    slots: list[int]
    parts: list[Part] = field(default_factory=list)
    hits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Positions in the prefetch of the pages that a copy writes."""


class Reader:
    """Moves prefetches on. What concerns the tree is the caller's: `reserve(prefetch, pages)` and `end(prefetch)`."""

    def __init__(
        self,
        staged: StagedPages,
        ring: PageBuffers,
        guard: Guard,
        host_pages: int,
        batch: int,
        patience: float,
        reserve: Callable[[Prefetch, int], bool],
        end: Callable[[Prefetch], None],
        number: Callable[[], int],
    ) -> None:
        self._staged, self._ring, self._guard = staged, ring, guard
        self._host_pages, self._batch, self._patience = host_pages, batch, patience
        self._reserve, self._end, self._number = reserve, end, number
        self._queries: dict[int, Prefetch] = {}
        self._reads: dict[int, _Read] = {}
        self._copies: list[_Read] = []
        self.open: list[Prefetch] = []
        """Prefetches that have not ended."""

    @property
    def in_flight(self) -> int:
        """Prefetches that have not ended."""
        return len(self.open)

    def start(self, prefetch: Prefetch) -> bool:
        """Ask storage what it has; False if the store takes no request now."""
        number = self._number()
        if not self._guard.start(Request(Kind.EXISTS, number, [name for page in prefetch.names for name in page])):
            return False
        self._queries[number] = prefetch
        self.open.append(prefetch)
        return True

    def done(self, done: Done) -> bool:
        """Take an answer of the guard; False if it is not one of this reader's."""
        if done.number in self._queries:
            prefetch = self._queries.pop(done.number) if done.finished else self._queries[done.number]
            if prefetch.stage is Stage.QUERY:
                self._found(prefetch, self._ring.whole([answer is Presence.YES for answer in done.answers]).tolist())
            return True
        read = self._reads.get(done.number)
        if read is None:
            return False
        if read.prefetch is not None:
            self._arrived(read, self._ring.whole([answer is Fetch.HIT for answer in done.answers]))
        if done.finished:
            del self._reads[done.number]
            self._ring.release(read.slots)
        return True

    def poll(self) -> None:
        """Ask for more pages where there is room, and end what is complete."""
        waiting = []
        for copy in self._copies:
            if all(part.ready for part in copy.parts):
                self._landed(copy)
            else:
                waiting.append(copy)
        self._copies = waiting
        for prefetch in list(self.open):
            if prefetch.stage is Stage.READ:
                self._ask(prefetch)
                if prefetch.resolved == len(prefetch.pages):
                    self.finish(prefetch)

    def finish(self, prefetch: Prefetch) -> None:
        """End a prefetch with what has landed in host memory so far. What arrives later is dropped."""
        if prefetch.stage is Stage.ENDED:
            return
        prefetch.stage = Stage.ENDED
        self.open.remove(prefetch)
        for read in [*self._reads.values(), *self._copies]:
            if read.prefetch is prefetch:
                read.prefetch = None
        self._end(prefetch)

    def forget(self) -> None:
        """The operations were reset: end all prefetches without telling anyone."""
        for prefetch in list(self.open):
            prefetch.operation = None
            self.finish(prefetch)

    def _found(self, prefetch: Prefetch, present: list[bool]) -> None:
        hits = present.index(False) if False in present else len(present)
        if hits and self._reserve(prefetch, hits):
            prefetch.stage = Stage.READ
            prefetch.ok = np.zeros(len(prefetch.pages), bool)
        else:
            self.finish(prefetch)

    def _ask(self, prefetch: Prefetch) -> None:
        while prefetch.issued < len(prefetch.pages):
            count = min(self._batch, len(prefetch.pages) - prefetch.issued, self._ring.free)
            if not count:
                # All buffers may be held by calls that never return: then the rest is given up.
                now = time.monotonic()
                prefetch.starved = prefetch.starved or now
                if now - prefetch.starved > self._patience:
                    self._stop(prefetch, prefetch.issued)
                return
            prefetch.starved = None
            slots = self._ring.acquire(count) or []
            first, number = prefetch.issued, self._number()
            names = [name for page in prefetch.names[first : first + count] for name in page]
            if not self._guard.start(Request(Kind.GET, number, names, self._ring.objects(slots))):
                self._ring.release(slots)
                self._stop(prefetch, first)
                return
            self._reads[number] = _Read(prefetch, first, slots)
            prefetch.issued += count

    def _stop(self, prefetch: Prefetch, first: int) -> None:
        """Ask for nothing from page `first` on: behind a gap no page is of use."""
        prefetch.resolved += len(prefetch.pages) - max(prefetch.issued, first)
        prefetch.issued = len(prefetch.pages)

    def _arrived(self, read: _Read, hit: np.ndarray) -> None:
        prefetch = read.prefetch
        assert prefetch is not None
        read.prefetch = None
        prefetch.resolved += int((~hit).sum())
        if not hit.all():
            self._stop(prefetch, read.first + len(hit))
        if not hit.any():
            return
        places = np.flatnonzero(hit)
        hits = read.first + places
        try:
            rows = [self._ring.rows(read.slots[place]) for place in places.tolist()]
            parts = self._staged.write(prefetch.pages[hits] + np.int32(prefetch.rank * self._host_pages), rows)
        except Exception:
            prefetch.resolved += len(hits)
            return
        self._copies.append(_Read(prefetch, read.first, [], parts, hits))

    def _landed(self, copy: _Read) -> None:
        prefetch = copy.prefetch
        if prefetch is None:
            return
        for part in copy.parts:
            prefetch.ok[copy.hits[part.where]] = self._staged.landed(part)
        prefetch.resolved += len(copy.hits)
