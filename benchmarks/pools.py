"""What tail pools add to the calls of the facade: the same prompts with kv alone and with more pools, in turns."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from purecache import CacheConfig, PrefixCache
from purecache.state import NONE, Checkpoint, PoolSpec, Window

PAGE, TOKENS, PAGES = 16, 4096, 2048
WINDOW = PoolSpec("window", Window(512), PAGES)
STATE = PoolSpec("state", Checkpoint(), 256)
POOLS = {"kv": (), "kv + window": (WINDOW,), "kv + state": (STATE,), "kv + window + state": (WINDOW, STATE)}
TURNS = 200
AIM = 1.3
"""Times what the call costs with one pool less."""


class Case:
    """One cache with a prompt that it holds, and the calls that are timed."""

    def __init__(self, pools: tuple[PoolSpec, ...]) -> None:
        self.cache = PrefixCache(CacheConfig(page_size=PAGE, device_pages=PAGES, pools=pools), smallest=TOKENS // PAGE)
        self.prompt = np.arange(TOKENS, dtype=np.int32)
        self.turn = 0
        self.cache.insert(self.prompt, self.cache.allocate(TOKENS // PAGE), values=self.values())
        self.found = self.cache.match(self.prompt)

    def values(self) -> dict[str, np.ndarray]:
        """Lent values as a request has them at its end: a window of pages, one state."""
        held = {}
        for spec in self.cache.config.pools:
            first = int(spec.law.first_needed(TOKENS // PAGE, PAGE))  # type: ignore[union-attr]
            pages = np.full(TOKENS // PAGE, NONE, np.int32)
            lent = self.cache.allocate(TOKENS // PAGE - first, pool=spec.name)
            assert lent is not None
            pages[first:] = lent
            held[spec.name] = pages
        return held

    def calls(self) -> dict[str, Callable[[], float]]:
        """Seconds of one call each."""
        return {
            "match": self.match,
            "insert (cached)": self.insert,
            "admit + finish": self.request,
            "insert (new)": self.insert_new,  # last, as it evicts the prompt
        }

    def match(self) -> float:
        """A match of the whole prompt."""
        return timed(lambda: self.cache.match(self.prompt))

    def insert(self) -> float:
        """An insert that finds everything in the tree."""
        return timed(lambda: self.cache.insert(self.prompt, self.found.device_pages, values=self.found.values))

    def insert_new(self) -> float:
        """An insert of a prompt never seen before, with its values."""
        self.turn += 1
        prompt = np.arange(TOKENS, dtype=np.int32) + self.turn * 1_000_003 % 2**30
        pages, held = self.cache.allocate(TOKENS // PAGE), self.values()
        return timed(lambda: self.cache.insert(prompt, pages, values=held))

    def request(self) -> float:
        """Admit and finish a request whose prompt is cached."""

        def serve() -> None:
            found, receipt = self.cache.admit(self.prompt)
            self.cache.finish(self.prompt, found.device_pages, receipt, values=found.values)

        self.cache.match(self.prompt)
        return timed(serve)


def timed(action: Callable[[], Any]) -> float:
    """Seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def report(quick: bool) -> list[dict[str, Any]]:
    """Print and return minimum and median microseconds, and the ratio of the minima to kv alone."""
    cases = {name: Case(pools) for name, pools in POOLS.items()}
    rows: list[dict[str, Any]] = []
    print(f"\ntail pools, {TOKENS} tokens, page {PAGE}: us minimum / median, times kv alone (aim: {AIM} per pool)")
    for call in next(iter(cases.values())).calls():
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(20 if quick else TURNS):
            for name, case in cases.items():
                seconds = case.calls()[call]()
                if turn > 1:
                    taken[name].append(seconds * 1e6)
        for name, values in taken.items():
            ratio = min(values) / min(taken["kv"])
            rows.append({"operation": call, "pools": name, "us_min": min(values), "ratio": ratio})
            print(f"{call:18} {name:22} {min(values):9.1f} {np.median(values):9.1f}   {ratio:5.2f}", flush=True)
    return rows
