"""Deleting the objects of forgotten prompts from a store: bounded batches, retried while the store takes none."""

from collections import deque
from collections.abc import Callable, Collection, Iterable

import numpy as np

from purecache.state import NONE
from purecache.state.layout import Column, Layout
from purecache.stores.guard import Done, Guard, Kind, Request

BATCH = 256
"""Objects of one request."""
WAITING = 1 << 20
"""Objects that may wait to be deleted; what is beyond stays in storage, and is counted."""


def gone(layout: Layout, before: np.ndarray, after: np.ndarray) -> list[int]:
    """The nodes that left the tree between two states, or lost their last page. before, after: the columns."""
    live = (before[Column.PARENT, : layout.nodes] != NONE) & _has_page(layout, before)
    same = before[Column.BORN, : layout.nodes] == after[Column.BORN, : layout.nodes]
    kept = (after[Column.PARENT, : layout.nodes] != NONE) & same & _has_page(layout, after)
    return np.flatnonzero(live & ~kept).tolist()


def _has_page(layout: Layout, nodes: np.ndarray) -> np.ndarray:
    rows = (Column.DEVICE_PAGE, Column.HOST_PAGE, Column.INCOMING_PAGE)
    return np.any(nodes[list(rows), : layout.nodes] >= 0, axis=0)


class Eraser:
    """Deletes objects by name, a batch at a time, and not before a write of the same object has ended."""

    def __init__(self, guard: Guard, number: Callable[[], int]) -> None:
        self._guard, self._number = guard, number
        self._waiting: deque[str] = deque()
        self._asked: dict[int, int] = {}
        self.counts = {"erased": 0, "erase_failed": 0}

    @property
    def in_flight(self) -> int:
        """Objects that wait, and requests under way."""
        return len(self._waiting) + len(self._asked)

    def erase(self, names: Iterable[str]) -> None:
        """Delete these objects soon."""
        for name in names:
            if len(self._waiting) < WAITING:
                self._waiting.append(name)
            else:
                self.counts["erase_failed"] += 1

    def poll(self, writing: Collection[str]) -> None:
        """Ask the store to delete what waits, but what is being written: one batch at a time."""
        if self._asked or not self._waiting:
            return
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        ready = [name for name in batch if name not in writing]
        self._waiting.extend(name for name in batch if name in writing)
        number = self._number()
        if ready and self._guard.start(Request(Kind.DELETE, number, ready)):
            self._asked[number] = len(ready)
        else:
            self._waiting.extendleft(reversed(ready))

    def done(self, done: Done) -> bool:
        """Take an answer of the guard; False if it is not one of this eraser's."""
        if done.number not in self._asked:
            return False
        if done.finished:
            del self._asked[done.number]
            erased = sum(answer is True for answer in done.answers)
            self.counts["erased"] += erased
            self.counts["erase_failed"] += len(done.answers) - erased
        return True
