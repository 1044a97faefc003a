"""Looks on at a running cache, in bounded memory: the series of a report with real seconds."""

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from purecache.report.model import Report, Transfer, to_json
from purecache.report.prefixes import label_of_nodes, label_of_tokens, prefixes_of
from purecache.report.readings import counters_of, found_of, settings_of, stocks_of
from purecache.report.watch import Watch

if TYPE_CHECKING:
    from purecache.cache import PrefixCache


class Sampler:
    """An observer of one cache: `cache.observe(sampler)`; at the end `sampler.save(path, cache)`.

    It takes a sample of the accounts and counters at a tick, not more often than once per `period` seconds. When there
    are too many it drops every second one and takes half as many from then on, so that they always span the whole run.
    """

    def __init__(
        self,
        *,
        samples: int = 1000,
        period: float = 0.0,
        transfers: int = 20_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Time begins now.

        samples: most that are kept, at least 2. transfers: most that are kept; older ones are dropped and counted.
        clock: steady seconds. Raises ValueError for sizes that make no sense.
        """
        if samples < 2 or transfers < 0 or not period >= 0:
            raise ValueError("a sampler keeps at least 2 samples, and nothing can be negative")
        self._clock, self._start, self._most = clock, clock(), samples
        self.period = period
        """Seconds between two samples at least, now."""
        self._at: list[float] = []
        self._books: list[np.ndarray] = []
        self._transfers: deque[Transfer] = deque(maxlen=transfers)
        self._seen = 0
        self._watch: Watch | None = None

    def __len__(self) -> int:
        """Samples that are kept."""
        return len(self._at)

    def ticked(self, cache: "PrefixCache") -> None:
        """Look at the cache: called by it."""
        now, books = self._look(cache)
        if not self._at or now - self._at[-1] >= max(self.period, 1e-9):
            self._keep(now, books)

    def _look(self, cache: "PrefixCache") -> tuple[float, np.ndarray]:
        """Take note of transfers; the time, and the books."""
        now, books = self._clock() - self._start, cache._driver.books()
        if self._watch is None:
            self._watch = Watch(cache.config)
        ended = self._watch.look(now, books, cache._driver.operations)
        self._seen += len(ended)
        self._transfers.extend(ended)
        return now, books

    def _keep(self, now: float, books: np.ndarray) -> None:
        if len(self._at) >= self._most:
            span = self._at[-1] - self._at[0]
            self._at, self._books = self._at[::2], self._books[::2]
            self.period = max(2 * self.period, 2 * span / self._most)
        self._at.append(now)
        self._books.append(books)

    def report(
        self, cache: "PrefixCache", *, title: str = "a run", tokens: bool = False, made: dict[str, str] | None = None
    ) -> Report:
        """What was seen until now, and the tree as it is now. For the thread of the cache; reads the whole state.

        tokens: whether the first tokens of prefixes may be shown. made: what to say of how it was made.
        """
        now, last = self._look(cache)
        assert self._watch is not None
        kept = sum(each < now for each in self._at)
        at, books = [*self._at[:kept], now], [*self._books[:kept], last]
        state, config = cache.state, cache.config
        label = label_of_tokens(state, config, hashed=False) if tokens else label_of_nodes
        return Report(
            source="run",
            title=title,
            axis="seconds",
            at=tuple(at),
            page_size=config.page_size,
            stocks=stocks_of(config, books),
            found=found_of(config, books),
            counters=counters_of(books),
            transfers=(*self._transfers, *self._watch.open()),
            transfers_left_out=self._seen - len(self._transfers),
            prefixes=prefixes_of(state, config, label),
            settings=settings_of(config),
            made=dict(made or {}),
            notes=("Transfers that began and ended between two ticks are counted, and not in the timeline.",),
        )

    def save(self, path: str | os.PathLike[str], cache: "PrefixCache", **options: bool | str | dict[str, str]) -> None:
        """Write `report(cache, **options)` as JSON, for `purecache report`; readable by its owner only."""
        content = to_json(self.report(cache, **options))  # type: ignore[arg-type]
        Path(path).unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(content)
