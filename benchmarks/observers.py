"""What metrics, KV events and logs cost the thread of a scheduler, per step and per look at a cache.

A step is a request of 4,096 tokens (`admit`, `allocate`, `finish`), a tick, and a pause until `STEP` has passed, in
which the model would run and the publisher's thread works. Measured is the processor time that `ticked` takes on the
scheduler's thread, so that other work on the machine does not count.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from purecache import CacheConfig, PrefixCache
from purecache.events import KvEvents
from purecache.events.changes import DEVICE, Watch
from purecache.events.table import BlockTable
from purecache.events.wire import Batch, encode
from purecache.logs import NAME, log
from purecache.metrics import Sampler, TroubleLog

PAGE, TOKENS = 16, 4096
STEP = 0.010
"""Seconds of a step."""
AIM = 0.02
"""Share of the scheduler's time."""


class Timed:
    """An observer, and the seconds that it took."""

    def __init__(self, observer: Any) -> None:
        self.observer, self.seconds = observer, []

    def ticked(self, cache: PrefixCache) -> None:
        start = time.thread_time()
        self.observer.ticked(cache)
        self.seconds.append(time.thread_time() - start)


class Requests:
    """A cache, and requests of which half is a prompt that it holds and half is new."""

    def __init__(self, nodes: int) -> None:
        self.cache = PrefixCache(CacheConfig(page_size=PAGE, device_pages=nodes))
        self.prompt, self.turn = np.arange(TOKENS, dtype=np.int32), 0

    def serve(self) -> float:
        """Processor seconds of one request."""
        self.turn += 1
        self.prompt[TOKENS // 2 :] = np.arange(TOKENS // 2) + self.turn * TOKENS
        start = time.thread_time()
        found, receipt = self.cache.admit(self.prompt)
        new = self.cache.allocate(TOKENS // PAGE - len(found.device_pages))
        self.cache.finish(self.prompt, np.concatenate([found.device_pages, new]), receipt)
        return time.thread_time() - start


def report(quick: bool) -> list[dict[str, Any]]:
    """Print and return the rows."""
    rows = []
    print(f"\nobservers: share of steps of {STEP * 1e3:.0f} ms with a request of {TOKENS} tokens each (aim: {AIM})")
    for nodes in (10_000,) if quick else (10_000, 100_000, 1_000_000):
        requests = Requests(nodes)
        for _ in range(4):
            requests.serve()
            requests.cache.tick()
        rows += steps(requests, nodes, 100 if quick else 300)
        rows.append(looks(requests, nodes))
    rows.append(naming())
    rows.append(logs())
    return rows


def steps(requests: Requests, nodes: int, number: int) -> list[dict[str, Any]]:
    """Shares of each observer, all at work in the same steps."""
    cache = requests.cache
    events = KvEvents(cache.config, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    events.flush(cache)
    working: list[float] = []
    take = events._take

    def timed(changes: Any) -> None:
        start = time.thread_time()
        take(changes)
        working.append(time.thread_time() - start)

    events._take = timed  # type: ignore[method-assign]
    observers = {"metrics": Timed(Sampler()), "events": Timed(events), "trouble": Timed(TroubleLog())}
    for observer in observers.values():
        cache.observe(observer)
    serving, begin = [], time.perf_counter()
    for step in range(number):
        serving.append(requests.serve())
        cache.tick()
        time.sleep(max(0.0, begin + (step + 1) * STEP - time.perf_counter()))
    rows = []
    for name, observer in observers.items():
        cache.unobserve(observer)
        row = {
            "observer": name,
            "nodes": nodes,
            "us_median": float(np.median(observer.seconds)) * 1e6,
            "us_mean": float(np.mean(observer.seconds)) * 1e6,
            "share": float(np.mean(observer.seconds)) / STEP,
            "of_requests": sum(observer.seconds) / sum(serving),
        }
        rows.append(row)
        print(
            f"{name:10} {nodes:8} nodes: {row['us_median']:8.1f} us median, {row['us_mean']:8.1f} mean per tick,"
            f" {row['share']:.4f} of a step, {row['of_requests']:.3f} of what the requests took",
            flush=True,
        )
    assert events.flush(cache)
    counts = events.counters()
    rows.append({"observer": "publisher", "nodes": nodes, "share": sum(working) / number / STEP, **counts})
    print(f"{'publisher':10} {nodes:8} nodes: its thread worked {rows[-1]['share']:.4f} of a step, {counts}")
    events.close()
    return rows


def looks(requests: Requests, nodes: int) -> dict[str, Any]:
    """Seconds of one look: with nothing changed, and after a request."""
    watch = Watch(requests.cache.config, storage=False)
    first = seconds_of(lambda: watch.take(requests.cache), 1)
    idle = seconds_of(lambda: watch.take(requests.cache), 20)
    changed = []
    for _ in range(20):
        requests.serve()
        changed.append(seconds_of(lambda: watch.take(requests.cache), 1))
    row = {"observer": "look", "nodes": nodes, "us_first": first * 1e6, "us_idle": idle * 1e6}
    row["us_request"] = float(np.median(changed)) * 1e6
    print(
        f"{'one look':10} {nodes:8} nodes: {row['us_idle']:8.1f} us with nothing changed, {row['us_request']:8.1f}"
        f" after a request, {row['us_first']:8.1f} the first one"
    )
    return row


def naming() -> dict[str, Any]:
    """Microseconds of the publisher's thread per block that comes and goes."""
    requests = Requests(100_000)
    watch, table = Watch(requests.cache.config, storage=False), BlockTable(requests.cache.config, {DEVICE: "GPU"})
    named = encoded = 0.0
    size = blocks = 0
    for turn in range(40):
        requests.serve()
        changes = watch.take(requests.cache)
        assert changes is not None
        start, before = time.thread_time(), table.blocks
        told = table.apply(changes)
        middle = time.thread_time()
        payload = sum(len(encode(Batch(0.0, events, group))) for group, events in told)
        if turn >= 20:  # before that, memory is touched for the first time
            named, encoded = named + (middle - start), encoded + (time.thread_time() - middle)
            size, blocks = size + payload, blocks + table.blocks - before
    requests.cache.evict(table.blocks // 2)
    there, changes = table.blocks, watch.take(requests.cache)
    assert changes is not None
    before = time.thread_time()
    table.apply(changes)
    removed = time.thread_time() - before
    row = {
        "observer": "naming",
        "us_stored": named / blocks * 1e6,
        "us_encoded": encoded / blocks * 1e6,
        "us_removed": removed / (there - table.blocks) * 1e6,
        "bytes": size / blocks,
    }
    print(
        f"publisher's thread per block of {PAGE} tokens: {row['us_stored']:.2f} us to name, {row['us_encoded']:.2f} to"
        f" encode ({row['bytes']:.0f} bytes), {row['us_removed']:.2f} to remove"
    )
    return row


def logs() -> dict[str, Any]:
    """Microseconds of a line in the log, wanted by a handler that keeps nothing, and not wanted."""
    logger = logging.getLogger(NAME)

    def line() -> None:
        log("matched", "request-17", prompt_tokens=4096, device=2048, host=1024)

    off = seconds_of(line, 10_000)
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    logger.setLevel(logging.INFO)
    on = seconds_of(line, 10_000)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    row = {"observer": "log", "us_off": off * 1e6, "us_on": on * 1e6}
    print(f"a line in the log: {row['us_off']:.2f} us where nobody wants it, {row['us_on']:.2f} us where somebody does")
    return row


def seconds_of(call: Callable[[], Any], number: int) -> float:
    """Processor seconds of this thread per call."""
    start = time.thread_time()
    for _ in range(number):
        call()
    return (time.thread_time() - start) / number
