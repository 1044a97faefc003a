"""Where the time of our requests goes: the parts of each call, timed from outside by wrapping what it consists of."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.ours import CALLS, Purecache
from benchmarks.peers.replay import replay
from benchmarks.peers.workload import Workload


class Stopwatch:
    """Nanoseconds and calls by name. What a timed function spends in another one is counted with the inner one."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner: list[int] = []

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed under `name`."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0)
            start = time.perf_counter_ns()
            try:
                return function(*arguments, **named)
            finally:
                taken = time.perf_counter_ns() - start
                self.spent[name] += taken - self._inner.pop()
                self.calls[name] += 1
                if self._inner:
                    self._inner[-1] += taken

        return timed


def profiled(peer: Any, workload: Workload) -> dict[str, float]:
    """Microseconds per request by call and part, all requests counted. The watch itself costs about 1 us per part."""
    assert isinstance(peer, Purecache)
    watch, cache = Stopwatch(), peer.cache
    driver: Any = cache._driver
    _watch_programs(watch, driver.programs)
    for name in ("prompt", "offer"):
        setattr(cache._inputs, name, watch.around("inputs: checks, conversion", getattr(cache._inputs, name)))
    for name in ("matched", "inserted", "receipt"):
        setattr(cache._replies, name, watch.around("replies: answers made", getattr(cache._replies, name)))
    cache._run = watch.around("driver: Python around a program", driver.run)
    for name in CALLS:
        setattr(cache, name, watch.around("facade: Python", getattr(cache, name)))
    summary = replay(peer, workload)
    found = {name: spent / 1000 / len(workload) for name, spent in sorted(watch.spent.items())}
    return {"request, watched": summary["us"]} | found | idle_call(driver, len(workload))


def _watch_programs(watch: Stopwatch, programs: Any) -> None:
    get = programs.get

    def watched(name: str, size: int = 0) -> Any:
        program = get(name, size)
        if not hasattr(program, "watched"):
            program.watched = True
            program.command = watch.around(f"{name}: command built", program.command)
            program.run = watch.around(f"{name}: compiled call", program.run)
            program.answer = watch.around(f"{name}: reply read", program.answer)
        return program

    programs.get = watched


def idle_call(driver: Any, requests: int, repeats: int = 300) -> dict[str, float]:
    """Least microseconds of programs of some sizes that find nothing to do: what a call costs by itself."""
    found = {}
    digest = np.zeros(4, np.int32)
    for size in (16, 256, 4096):
        program = driver.programs.get("admit", size)
        command = program.command(np.zeros(0, np.int32), 0, digest, 0)
        taken = []
        for _ in range(repeats):
            start = time.perf_counter_ns()
            driver._step(program, command)
            np.asarray(driver._current[0][1])
            taken.append((time.perf_counter_ns() - start) / 1000)
        found[f"an empty admit of {size} pages (one)"] = min(taken)
    return found
