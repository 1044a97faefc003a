"""Host pages of a simulated pool as rows of bytes, for storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from purecache.simulate.content import FAILED, IN_FLIGHT
from purecache.simulate.fate import Fate, Fault


class HostPool(Protocol):
    """The host side of a simulated pool."""

    fate: Fate
    host: np.ndarray
    """[pages] words."""
    valid: np.ndarray
    """[pages] bool: whether the page was not dropped."""


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy between host pages and rows: an array that is not there yet, and a part of it."""

    pool: HostPool
    where: np.ndarray
    """Positions among the pages of the call."""
    pages: np.ndarray
    words: np.ndarray | None
    """What was read, or None for what is read when it ends."""
    due: int
    ok: bool
    written: bool = False

    @property
    def ready(self) -> bool:
        """Whether it has ended."""
        return self.due <= self.pool.fate.now

    def is_ready(self) -> bool:
        """Whether it has ended."""
        return self.ready


class HostRows:
    """Stands in for `StagedPages`: a page is one row of 8 bytes."""

    row_bytes = 8

    def __init__(self, pool: HostPool, batch: int) -> None:
        self._pool, self._batch = pool, batch

    def has(self, pages: np.ndarray) -> np.ndarray:
        """bool[n]: which pages are not known to be lost."""
        return self._pool.valid[pages]

    def warm(self) -> None:
        """Nothing to compile."""

    def _begin(self, pages: np.ndarray) -> list[_Copy]:
        """One copy per batch of pages. Raises OSError where even that fails."""
        fate, copies = self._pool.fate, []
        if fate.strikes(Fault.FAIL, 0.02):
            raise OSError("no copy can be begun")
        for first in range(0, len(pages), self._batch):
            where = np.arange(first, min(first + self._batch, len(pages)))
            ok = not fate.strikes(Fault.FAIL, 0.02)
            copies.append(_Copy(self._pool, where, pages[where], None, fate.now + fate.delay(), ok))
        return copies

    def read(self, pages: np.ndarray) -> list[tuple[np.ndarray, list[_Copy], int]]:
        """Begin to read host pages: positions, the arrays and the place of the first page in them."""
        parts = []
        for copy in self._begin(pages):
            if self._pool.fate.coin():
                copy.words = self._pool.host[copy.pages]
            parts.append((copy.where, [copy], 0))
        return parts

    def bytes_of(self, arrays: Sequence[_Copy], place: int, rows: Sequence[np.ndarray]) -> None:
        """Write a page that was read into its row. Raises OSError if the copy failed."""
        copy = arrays[0]
        lost = copy.words is None and not self._pool.valid[copy.pages[place]]
        if not copy.ok or lost:
            raise OSError("the copy failed")
        words = self._pool.host[copy.pages] if copy.words is None else copy.words
        rows[0].view(np.uint64)[0] = words[place]

    def write(self, pages: np.ndarray, rows: Sequence[Sequence[np.ndarray]]) -> list[_Copy]:
        """Begin to write rows into host pages. The rows are read at once."""
        copies = self._begin(pages)
        for copy in copies:
            copy.words = np.array([rows[row][0].view(np.uint64)[0] for row in copy.where.tolist()], np.uint64)
            self._pool.host[copy.pages] = IN_FLIGHT
            self._pool.valid[copy.pages] = True
        return copies

    def landed(self, part: _Copy) -> bool:
        """Whether the pages of a part hold its bytes now."""
        if part.words is None or not self._pool.valid[part.pages].all():
            return False
        self._pool.host[part.pages] = part.words if part.ok else FAILED
        return part.ok
