"""Takes note of a run: totals, times and the time series of an `Outcome`."""

from collections.abc import Callable

import numpy as np

from purecache.traces.engine import Engine, Running
from purecache.traces.hot import hot_stretches
from purecache.traces.outcome import (
    LINKS,
    SOURCES,
    Latency,
    Moment,
    Moved,
    Outcome,
    Refusals,
    Share,
    TraceFacts,
)

ROWS = 200
"""Rows of the time series, about."""
_COUNTED = {"backup": "backup_pages", "load_back": "loaded_pages", "store": "stored_pages"}
"""Link: the counter of the cache."""


class Meter:
    """Counts for one run."""

    def __init__(self, engine: Engine, progress: Callable[[int], None] | None = None) -> None:
        """`progress(requests)` is called after each of about `ROWS` stretches."""
        self._engine, self._trace, self._hardware = engine, engine.trace, engine.setting.hardware
        self._progress = progress or (lambda requests: None)
        number = len(self._trace)
        self._every = max(1, number // ROWS)
        self._found = np.zeros((number, 3), np.int64)
        """Pages on device, on host and on disk, by request."""
        self._waits = np.zeros(number)
        """Seconds from arrival to its prefill."""
        self._first = np.zeros(number)
        """Seconds from arrival to the first token."""
        self._series: list[Moment] = []
        self._begun = self._marked = 0
        self._before: dict[str, int] = {}
        self.too_large = self.waited = self.late = 0
        self.reads: list[int] = []
        """Pages of each prefetch."""

    def began(self, running: Running, wait: float) -> float:
        """A request has begun, `wait` seconds after its arrival; seconds that its load back and prefill take."""
        found = running.device, running.host, running.disk
        self._found[running.request] = found
        return self._note(running.request, wait, sum(found), running.host + running.disk)

    def refused(self, request: int, wait: float) -> float:
        """A request does not fit at all; seconds that computing it takes."""
        self.too_large += 1
        return self._note(request, wait, 0, 0)

    def _note(self, request: int, wait: float, pages: int, loaded: int) -> float:
        size, hardware = self._trace.page_tokens, self._hardware
        seconds = hardware.load(loaded * size) + hardware.prefill(pages * size, int(self._trace.tokens[request]))
        self._waits[request], self._first[request] = wait, wait + seconds
        self._begun += 1
        return seconds

    def mark(self, now: float, running: int, last: bool = False) -> None:
        """Write a row of the series if it is time, or if this is the end."""
        if not last and self._begun < self._marked + self._every:
            return
        totals = self._totals()
        change = {name: total - self._before.get(name, 0) for name, total in totals.items()}
        self._series.append(
            Moment(
                requests=self._begun,
                time=now,
                hits={name: change[name] for name in SOURCES},
                moved={name: change[name] for name in LINKS},
                evicted={tier: change[f"evicted_{tier}"] for tier in ("device", "host", "disk")},
                pages=self._engine.pages(),
                running=running,
                refused=change["refused"],
            )
        )
        self._before, self._marked = totals, self._begun
        self._progress(self._begun)

    def _totals(self) -> dict[str, int]:
        counters, disk, size = self._engine.cache.counters(), self._engine.disk, self._trace.page_tokens
        device, host, on_disk = (int(pages) * size for pages in self._found.sum(axis=0))
        served = (self._first > 0) | (self._found.sum(axis=1) > 0)
        tokens = int(self._trace.tokens[served].sum())
        totals = {"device": device, "host": host, "disk": on_disk, "computed": tokens - device - host - on_disk}
        totals |= {link: counters[name] for link, name in _COUNTED.items()}
        totals["prefetch"] = sum(self.reads)
        totals |= {f"evicted_{tier}": counters[f"evicted_{tier}_pages"] for tier in ("device", "host")}
        totals["evicted_disk"] = disk.evicted if disk else 0
        refused = ("loads_refused", "backup_refused_pages", "prefetches_refused")
        totals["refused"] = self.too_large + self.waited + sum(counters[name] for name in refused)
        return totals

    # ---- the end -------------------------------------------------------------------------------------------------

    def outcome(self, name: str) -> Outcome:
        """All of it. `name`: of the trace's file."""
        trace, totals, counters = self._trace, self._totals(), self._engine.cache.counters()
        return Outcome(
            trace=TraceFacts(
                name=name,
                form=trace.form,
                requests=len(trace),
                tokens=int(trace.tokens.sum()),
                output_tokens=int(trace.output.sum()),
                page_tokens=trace.page_tokens,
                pages=int(trace.prompt_pages.sum()),
                distinct_pages=trace.distinct,
                seconds=float(trace.times[-1]),
            ),
            setting=self._engine.setting.facts(trace),
            hits=self._shares(),
            moved=self._moved(totals),
            evicted={tier: totals[f"evicted_{tier}"] for tier in ("device", "host", "disk")},
            dropped=counters["dropped_pages"],
            refusals=Refusals(
                too_large=self.too_large,
                waited=self.waited,
                loads=counters["loads_refused"],
                backup_pages=counters["backup_refused_pages"],
                prefetches=counters["prefetches_refused"],
                prefetches_late=self.late,
            ),
            latency=self._latency(),
            series=tuple(self._series),
            hot=hot_stretches(trace),
        )

    def _shares(self) -> dict[str, Share]:
        trace, found = self._trace, self._found.sum(axis=0)
        whole = int(trace.tokens.sum())
        begun = int((-(-trace.tokens // trace.page_tokens)).sum())
        pages = [*(int(each) for each in found), begun - int(found.sum())]
        tokens = [each * trace.page_tokens for each in pages[:3]]
        tokens.append(whole - sum(tokens))
        return {
            name: Share(here, number, here / max(whole, 1))
            for name, here, number in zip(SOURCES, tokens, pages, strict=True)
        }

    def _moved(self, totals: dict[str, int]) -> dict[str, Moved]:
        size, hardware = self._trace.page_tokens, self._hardware
        seconds = {
            "backup": hardware.load(totals["backup"] * size),
            "load_back": hardware.load(totals["load_back"] * size),
            "store": hardware.write(totals["store"] * size),
            "prefetch": sum(hardware.read(pages * size) for pages in self.reads),
        }
        each = round(hardware.token_bytes * size)
        return {link: Moved(totals[link], totals[link] * each, seconds[link]) for link in LINKS}

    def _latency(self) -> Latency:
        tokens, found = self._trace.tokens, self._found * self._trace.page_tokens
        known = found.sum(axis=1)
        p50, p90, p99 = np.percentile(self._first, (50, 90, 99)).tolist()
        return Latency(
            ttft_mean=float(self._first.mean()),
            ttft_p50=p50,
            ttft_p90=p90,
            ttft_p99=p99,
            queue_mean=float(self._waits.mean()),
            prefill=float(self._hardware.prefill(known, tokens).sum()),
            saved=self._hardware.saved(found),
            prefill_without=float(self._hardware.prefill(0, tokens).sum()),
        )
