"""What recording costs: the same requests on caches that are recorded and one that is not, in turns.

Between two requests there is a pause in which the writer works, as between two steps of a scheduler. Its own time is
measured apart, since it competes with whatever else the process does in Python.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from purecache import CacheConfig, PrefixCache
from purecache.replay import Recorder
from purecache.replay.recorder import _Writer

PAGE, TOKENS, PAGES = 16, 4096, 8192
TURNS = 300
AIM = 1.05
"""Times what `admit` and `finish` cost without recording."""


class Case:
    """One cache with a prompt that it holds."""

    def __init__(self, record: Recorder | None) -> None:
        self.cache = PrefixCache(CacheConfig(page_size=PAGE, device_pages=PAGES), record=record)
        self.recorder = record
        self.prompt = np.arange(TOKENS, dtype=np.int32)
        self.cache.insert(self.prompt, self.cache.allocate(TOKENS // PAGE))
        self.turn = 0

    def request(self) -> float:
        """Seconds of an `admit` and the `finish`; the last page differs every time, as the end of a prompt does."""
        self.turn += 1
        self.prompt[-PAGE:] = self.turn
        start = time.perf_counter()
        found, receipt = self.cache.admit(self.prompt)
        new = self.cache.allocate(TOKENS // PAGE - len(found.device_pages))
        self.cache.finish(self.prompt, np.concatenate([found.device_pages, new]), receipt)
        return time.perf_counter() - start


def report(quick: bool) -> list[dict[str, Any]]:
    """Print and return minimum and median microseconds of a request, the ratio to no recording, and the writer's."""
    rows: list[dict[str, Any]] = []
    writing: dict[str, list[float]] = {"hashed": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        recorders = {mode: Recorder(Path(folder) / mode, tokens=mode) for mode in ("hashed", "plain")}
        cases = {"not recorded": Case(None)} | {mode: Case(each) for mode, each in recorders.items()}
        taken: dict[str, list[float]] = {name: [] for name in cases}
        _time_writers(recorders, writing)
        for turn in range(60 if quick else TURNS):
            for name, case in cases.items():
                seconds = case.request()
                if turn > 2:
                    taken[name].append(seconds * 1e6)
            if turn % 10 == 9:
                time.sleep(0.25)  # longer than the writer's period
        for name, recorder in recorders.items():
            recorder.close()
            assert recorder.stopped is None, (name, recorder.stopped)
        sizes = {name: recorder.bytes / recorder.events for name, recorder in recorders.items()}
    print(f"\nrecording, admit + allocate + finish of {TOKENS} tokens, page {PAGE}: us minimum / median (aim: {AIM})")
    for name, values in taken.items():
        ratio = float(np.median(values) / np.median(taken["not recorded"]))
        row = {"tokens": name, "us_min": min(values), "us_median": float(np.median(values)), "ratio": ratio}
        text = f"{name:14} {row['us_min']:9.1f} {row['us_median']:9.1f}   {ratio:5.2f}"
        if name in sizes:
            row |= {"writer_us": float(np.mean(writing[name]) * 1e6), "bytes": sizes[name]}
            text += f"   the writer {row['writer_us']:.0f} us and {row['bytes']:.0f} bytes per event"
        rows.append(row)
        print(text, flush=True)
    return rows


def _time_writers(recorders: dict[str, Recorder], writing: dict[str, list[float]]) -> None:
    """Note the seconds that each writer takes per event."""
    event = _Writer._event

    def timed(self: _Writer, *arguments: Any) -> None:
        start = time.perf_counter()
        event(self, *arguments)
        seconds = time.perf_counter() - start
        for name, recorder in recorders.items():
            if self._recorder is recorder:
                writing[name].append(seconds)

    _Writer._event = timed  # type: ignore[method-assign]
