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
class Part:
    """What a forward does in one pool for a request: read what `marks` say in `slots` up to `begin`, write the rest."""

    slots: np.ndarray
    marks: np.ndarray
    begin: int
    first: int = 0
    """Number of the token that the first slot belongs to."""


@dataclass
class Work:
    """What a forward does for a request, in each pool of the device."""

    request: Request
    parts: list[Part]


@dataclass
class Forward:
    """A batch on its way. `launch_done` is set when the new arrays are in the pool."""

    works: list[Work]
    launch_done: threading.Event = field(default_factory=threading.Event)


class Device:
    """Runs forwards in their order."""

    def __init__(self, pools: list[KVPool], random: random.Random) -> None:
        self.pools, self.random = pools, random
        self._queue: deque[Forward] = deque()
        self._new: list | None = None  # per pool, the arrays of a forward that has deleted those in the pool
        self._now = self._there()  # those that must be in the pools while forwards are under way
        self._haste = random.choice((0.02, 0.1, 0.5))
        for pool in pools:
            pool.moment = self.moment

    def launch(self, forward: Forward) -> None:
        """Begin a forward."""
        if not self._queue:
            self._now = self._there()
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

    def _there(self) -> list:
        return [array for pool in self.pools for array in pool.arrays]

    def _advance(self) -> None:
        forward = self._queue[0]
        same = all(one is other for one, other in zip(self._there(), self._now, strict=True))
        assert same, "the pool was written while a forward was under way: that is lost, or the forward reads too early"
        if self._new is None:
            for number, pool in enumerate(self.pools):
                self._check(forward, number, pool)
            self._new = [self._computed(forward, number, pool) for number, pool in enumerate(self.pools)]
            return
        for pool, arrays in zip(self.pools, self._new, strict=True):
            pool.replace_buffer(arrays)
        self._now, self._new = self._there(), None
        self._queue.popleft()
        forward.launch_done.set()

    @staticmethod
    def _computed(forward: Forward, number: int, pool: KVPool) -> list:
        writes = []
        for work in forward.works:
            part = work.parts[number]
            values = pool.expand(part.marks[part.begin :])
            writes.append((work.request.rank, part.slots[part.begin :], values))
        return pool.compute(writes)

    def _check(self, forward: Forward, number: int, pool: KVPool) -> None:
        there = {rank: pool.read(rank) for rank in {work.request.rank for work in forward.works}}
        for work in forward.works:
            part, what = work.parts[number], f"{work.request} is about to run"
            slots, marks = part.slots[: part.begin], part.marks[: part.begin]
            check_bytes(pool, there[work.request.rank], slots, marks, what, part.first)


def check_bytes(
    pool: KVPool, there: np.ndarray, slots: np.ndarray, marks: np.ndarray, what: str, begin: int = 0
) -> None:
    """Check that slots have what tokens with these marks have. `there` is what a rank has, of `KVPool.read`.

    `begin`: number of the first of these tokens.
    """
    wrong = np.flatnonzero((there[slots] != pool.expand(marks)).any(axis=(1, 2, 3, 4)))
    if len(wrong):
        first = wrong[0]
        holds = "nothing computed" if (there[slots[first]] == -1).all() else "something else"
        message = f"wrong bytes: {what}, but slot {slots[first]} for its token {begin + first} has {holds}"
        raise AssertionError(f"{message} ({len(wrong)} of {len(slots)} tokens are wrong)")
