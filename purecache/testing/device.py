"""A stand-in for the device and its thread: forwards take the arrays of the pool and put new ones in place.

Nothing runs at the same time here, so every run can be repeated. When the cache is called, or asks for the arrays of
the pool, forwards may go on by a stage: their arrays are taken (they are deleted then), or new ones are in place.
"""

import random
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from purecache.testing.pools import KVPool
from purecache.testing.stand_ins import Request


@dataclass
class Work:
    """What a forward does for a request: read what `marks` say in `slots` up to `begin`, and write the rest."""

    request: Request
    slots: np.ndarray
    marks: np.ndarray
    begin: int


@dataclass
class Forward:
    """A batch on its way. `launch_done` is set when the new arrays are in the pool."""

    works: list[Work]
    launch_done: threading.Event = field(default_factory=threading.Event)


class Device:
    """Runs forwards in their order."""

    def __init__(self, pool: KVPool, random: random.Random) -> None:
        self.pool, self.random = pool, random
        self._queue: deque[Forward] = deque()
        self._new: list | None = None  # the arrays of a forward that has deleted those in the pool
        self._now = list(pool.arrays)  # the arrays that must be in the pool while forwards are under way
        self._haste = random.choice((0.02, 0.1, 0.5))
        pool.moment = self.moment

    def launch(self, forward: Forward) -> None:
        """Begin a forward."""
        if not self._queue:
            self._now = list(self.pool.arrays)
        self._queue.append(forward)
        if len(self._queue) == 1 and self.random.random() < 0.5:
            self._advance()

    def moment(self) -> None:
        """Some time passes."""
        while self._queue and self.random.random() < self._haste:
            self._advance()

    def wait(self, forward: Forward | None = None) -> None:
        """Until a forward has put its arrays in place, or all have."""
        while self._queue and not (forward and forward.launch_done.is_set()):
            self._advance()

    def _advance(self) -> None:
        forward = self._queue[0]
        same = all(one is other for one, other in zip(self.pool.arrays, self._now, strict=True))
        assert same, "the pool was written while a forward was under way: that is lost, or the forward reads too early"
        if self._new is None:
            self._check(forward)
            values = [(work.request.rank, work.slots[work.begin :], work.marks[work.begin :]) for work in forward.works]
            writes = [(rank, slots, self.pool.expand(marks)) for rank, slots, marks in values]
            self._new = self.pool.compute(writes)
            return
        self.pool.replace_buffer(self._new)
        self._now, self._new = list(self._new), None
        self._queue.popleft()
        forward.launch_done.set()

    def _check(self, forward: Forward) -> None:
        there = {rank: self.pool.read(rank) for rank in {work.request.rank for work in forward.works}}
        for work in forward.works:
            what = f"{work.request} is about to run"
            check_bytes(self.pool, there[work.request.rank], work.slots[: work.begin], work.marks[: work.begin], what)


def check_bytes(pool: KVPool, there: np.ndarray, slots: np.ndarray, marks: np.ndarray, what: str) -> None:
    """Check that slots have what tokens with these marks have. `there` is what a rank has, of `KVPool.read`."""
    wrong = np.flatnonzero((there[slots] != pool.expand(marks)).any(axis=(1, 2, 3, 4)))
    if len(wrong):
        first = wrong[0]
        holds = "nothing computed" if (there[slots[first]] == -1).all() else "something else"
        message = f"wrong bytes: {what}, but slot {slots[first]} for its token {first} has {holds}"
        raise AssertionError(f"{message} ({len(wrong)} of {len(slots)} tokens are wrong)")
