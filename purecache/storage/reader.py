"""Prefetch: is it in storage, has it landed in host memory, and when to stop waiting."""

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from purecache.effects.staged import Part
from purecache.storage.options import EndPolicy, StorageOptions
from purecache.storage.pool_pages import PoolPages, Slot
from purecache.storage.prefetch import Prefetch, Present, Share, Stage
from purecache.stores.guard import Done, Guard, Kind, Request
from purecache.stores.interface import Fetch, Presence


class Progress(enum.Enum):
    """Answer to "is this request's prefetch done?"."""

    YES = "yes"
    """It ended; `Prefetch.loaded` tokens more can be used from host."""
    NOT_YET = "not yet"
    GIVEN_UP = "given up"
    """It ended and brought nothing: not in storage, no room, failed, or the pages came otherwise. Match as always."""


def is_over(options: StorageOptions, tokens: int, waited: float) -> bool:
    """Whether a prefetch of so many tokens, about which the scheduler asked `waited` seconds ago, must end now."""
    if options.policy is EndPolicy.TIMEOUT:
        return waited > options.timeout_base + tokens / 1024 * options.timeout_per_1024
    return options.policy is EndPolicy.BEST_EFFORT


@dataclass(eq=False)
class _Read:
    """One request to the guard, or one copy into host pages."""

    share: Share | None
    """None if its prefetch ended meanwhile: only the slots are waited for."""
    pages: PoolPages
    rank: int
    places: np.ndarray
    """Positions in the pages of the share."""
    slots: list[Slot]
    parts: list[tuple[int, Part]] = field(default_factory=list)


class Reader:
    """Moves prefetches on. What concerns the tree is the caller's: `reserve(prefetch, present)` and `end(prefetch)`.

    `reserve` gives the prefetch its shares, False if it is not worth it; `end` ends their operations.
    """

    def __init__(
        self,
        pools: Mapping[int, PoolPages],
        guard: Guard,
        patience: float,
        reserve: Callable[[Prefetch, Present], bool],
        end: Callable[[Prefetch], None],
        number: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools, self._guard, self._patience, self._clock = pools, guard, patience, clock
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
        names = [name for _, pages in prefetch.asked_for.values() for page in pages for name in page]
        number = self._number()
        if not self._guard.start(Request(Kind.EXISTS, number, names)):
            return False
        self._queries[number] = prefetch
        self.open.append(prefetch)
        return True

    def done(self, done: Done) -> bool:
        """Take an answer of the guard; False if it is not one of this reader's."""
        if done.number in self._queries:
            prefetch = self._queries.pop(done.number) if done.finished else self._queries[done.number]
            if prefetch.stage is Stage.QUERY:
                self._found(prefetch, [answer is Presence.YES for answer in done.answers])
            return True
        read = self._reads.get(done.number)
        if read is None:
            return False
        if read.share is not None:
            self._arrived(read, read.share, read.pages.whole([answer is Fetch.HIT for answer in done.answers]))
        if done.finished:
            del self._reads[done.number]
            read.pages.release(read.slots)
        return True

    def poll(self) -> None:
        """Ask for more pages where there is room, and end what is complete."""
        waiting = []
        for copy in self._copies:
            if all(part.ready for _, part in copy.parts):
                self._landed(copy)
            else:
                waiting.append(copy)
        self._copies = waiting
        for prefetch in list(self.open):
            if prefetch.stage is Stage.READ:
                for share in prefetch.shares:
                    self._ask(share, prefetch.rank)
                if all(share.complete for share in prefetch.shares):
                    self.finish(prefetch)

    def finish(self, prefetch: Prefetch) -> None:
        """End a prefetch with what has landed in host memory so far. What arrives later is dropped."""
        if prefetch.stage is Stage.ENDED:
            return
        prefetch.stage = Stage.ENDED
        self.open.remove(prefetch)
        self._let_go(prefetch)
        self._end(prefetch)

    def forget(self) -> None:
        """The operations were reset: end all prefetches without telling anyone."""
        for prefetch in list(self.open):
            self._let_go(prefetch)
            prefetch.shares = []
            self.finish(prefetch)

    def _let_go(self, prefetch: Prefetch) -> None:
        """Whatever arrives from now on is not for this prefetch."""
        for read in [*self._reads.values(), *self._copies]:
            if any(read.share is share for share in prefetch.shares):
                read.share = None

    def _found(self, prefetch: Prefetch, answers: list[bool]) -> None:
        present, first = {}, 0
        for pool, (_, names) in prefetch.asked_for.items():
            last = first + len(names) * self._pools[pool].parts
            present[pool] = self._pools[pool].whole(answers[first:last])
            first = last
        if self._reserve(prefetch, present):
            prefetch.stage = Stage.READ
        else:
            self.finish(prefetch)

    def _ask(self, share: Share, rank: int) -> None:
        pages = self._pools[share.pool]
        while share.issued < len(share.wanted):
            count = min(pages.batch, len(share.wanted) - share.issued, pages.free)
            if not count:
                # All buffers may be held by calls that never return: then the rest is given up.
                now = self._clock()
                share.starved = share.starved or now
                if now - share.starved > self._patience:
                    share.stop()
                return
            share.starved = None
            slots = pages.acquire(count) or []
            first, number = share.issued, self._number()
            names = [name for page in share.names[first : first + count] for name in page]
            if not self._guard.start(Request(Kind.GET, number, names, pages.buffers(slots))):
                pages.release(slots)
                share.stop()
                return
            self._reads[number] = _Read(share, pages, rank, share.wanted[first : first + count], slots)
            share.issued += count

    def _arrived(self, read: _Read, share: Share, hit: np.ndarray) -> None:
        read.share = None
        share.resolved += int((~hit).sum())
        if not share.pool and not hit.all():
            share.stop()  # behind a gap no page of kv is of use
        if not hit.any():
            return
        places = read.places[hit]
        slots = [slot for slot, good in zip(read.slots, hit.tolist(), strict=True) if good]
        try:
            parts = read.pages.write(read.pages.on_host(share.pages[places], read.rank), slots)
        except Exception:
            share.resolved += len(places)
            return
        self._copies.append(_Read(share, read.pages, read.rank, places, [], parts))

    def _landed(self, copy: _Read) -> None:
        if copy.share is not None:
            copy.share.ok[copy.places] = copy.pages.landed(copy.parts, len(copy.places))
            copy.share.resolved += len(copy.places)
