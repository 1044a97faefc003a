"""Operations of a cache, seen from outside: which began, which ended and how, between two looks at its tables."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from purecache.report.model import Transfer
from purecache.state import NONE, CacheConfig
from purecache.state.layout import Ledger, Scalar, TransferKind

FAILED = {
    TransferKind.BACKUP: Scalar.BACKUP_FAILED_PAGES,
    TransferKind.LOAD_BACK: Scalar.LOAD_FAILED_PAGES,
    TransferKind.STORE: Scalar.STORE_FAILED_PAGES,
    TransferKind.PREFETCH: Scalar.PREFETCH_FAILED_PAGES,
}
"""Counter of the pages that failed, by kind."""


@dataclass(frozen=True)
class _Open:
    """An operation that has not ended."""

    kind: TransferKind
    pool: int
    rank: int
    pages: int
    begun: float


class Watch:
    """Looks at books and ledger now and then. What begins and ends between two looks is not seen."""

    def __init__(self, config: CacheConfig) -> None:
        """Of a cache with this configuration, from its beginning or from now on."""
        self._names, self._most = config.pool_names, config.layout.max_operations
        self._open: dict[tuple[int, int], _Open] = {}
        self._generations = np.zeros(self._most, np.int32)
        self._failed: dict[TransferKind, int] = {}

    def look(self, at: float, books: np.ndarray, operations: Callable[[], np.ndarray]) -> list[Transfer]:
        """The transfers that have ended since the last look. books: the state's, as they are at `at`.

        operations: what returns the table of operations, int32[rows of `Ledger`, max_operations or more].
        """
        failed = {kind: int(books[row]) for kind, row in FAILED.items()}
        before, self._failed = self._failed or failed, failed
        if not self._open and int(books[Scalar.VACANT_OPERATIONS]) == self._most:
            return []  # the common case; nothing that begins later can be mistaken for what came before
        table = operations()[:, : self._most]
        generations = table[Ledger.OPERATION_GENERATION].copy()
        used = np.flatnonzero(table[Ledger.OPERATION_KIND] != NONE).tolist()
        now = {(number, int(generations[number])): number for number in used}
        gone = [(key, self._open.pop(key)) for key in list(self._open) if key not in now]
        reset = unseen = False
        if gone:
            # A reset gives every number a new generation at once, also those that were never used.
            steps = generations - self._generations
            reset, unseen = bool((steps > 0).all()), int(steps.sum()) > len(gone)
        self._generations = generations
        for key, number in now.items():
            if key not in self._open:
                rows = (Ledger.OPERATION_KIND, Ledger.OPERATION_POOL, Ledger.OPERATION_RANK, Ledger.OPERATION_COUNT)
                kind, pool, rank, pages = (int(table[row, number]) for row in rows)
                self._open[key] = _Open(TransferKind(kind), max(pool, 0), max(rank, 0), pages, at)
        lost = {kind: failed[kind] - before[kind] for kind in failed}
        return [self._as_transfer(each, at, _outcome(each, gone, lost, reset, unseen)) for _, each in gone]

    def open(self) -> list[Transfer]:
        """The transfers that have not ended."""
        return [self._as_transfer(each, None, "open") for each in self._open.values()]

    def _as_transfer(self, each: _Open, ended: float | None, outcome: str) -> Transfer:
        name = each.kind.name.lower()
        return Transfer(name, self._names[each.pool], each.rank, each.pages, each.begun, ended, outcome)


def _outcome(
    each: _Open, gone: list[tuple[tuple[int, int], _Open]], lost: dict[TransferKind, int], reset: bool, unseen: bool
) -> str:
    """How an operation ended, as far as the pages that failed meanwhile tell."""
    if reset:
        return "forgotten"
    failed, alike = lost[each.kind], [other for _, other in gone if other.kind == each.kind]
    if failed == 0:
        return "ok"
    if unseen or (len(alike) > 1 and failed < sum(other.pages for other in alike)):
        return "unknown"
    return "failed" if failed >= sum(other.pages for other in alike) else "part"
