"""Single calls: one prompt that is cached whole, at several lengths, shapes and sizes of the tree."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.peers.replay import Peer

Make = Callable[[str, int, int, int], Peer]
PAGE, REPEATS, TURNS = 16, 200, 32
LENGTHS = (512, 4096, 32768, 131072)
SIZES = (8192, 131072, 1 << 20)
"""Pages of the tree that the same call is timed in."""
FILLING = 256
"""Pages of each prompt that fills a tree."""


def rows(make: Make, name: str, quick: bool) -> list[dict[str, Any]]:
    """Microseconds, minimum and median, per call."""
    found = []
    for tokens in LENGTHS[:2] if quick else LENGTHS:
        for turns in (1, TURNS):
            peer = make(name, PAGE, 4 * tokens + 8192 * PAGE, tokens)
            found += _calls(peer, tokens, turns, {"tokens": tokens, "turns": turns, "nodes": 0})
    for size in SIZES[:2] if quick else SIZES:
        peer = make(name, PAGE, size * PAGE, 4096)
        for number in range(size // FILLING - 2):
            _request(peer, _prompt(FILLING * PAGE, 1 + number))
        found += _calls(peer, 4096, 1, {"tokens": 4096, "turns": 1, "nodes": size})
    return found


def _calls(peer: Peer, tokens: int, turns: int, label: dict[str, Any]) -> Iterator[dict[str, Any]]:
    prompt = _prompt(tokens + PAGE, 0)
    for turn in range(1, turns + 1):
        _request(peer, prompt[: max(tokens * turn // turns, 1)])
    taken = [_timed(peer, prompt[: tokens + 1]) for _ in range(REPEATS + 2)][2:]
    for place, operation in enumerate(("match", "whole request")):
        yield label | _row(operation, [each[place] for each in taken])
    if label["nodes"]:
        yield label | _row("evict one page", [_evicted(peer) for _ in range(REPEATS // 2)])


def _timed(peer: Peer, tokens: np.ndarray) -> tuple[float, float]:
    """Microseconds of the match (with slots and lock), and of all of a request that is cached."""
    request = peer.prepare(tokens, len(tokens))
    clock = time.perf_counter_ns
    start = clock()
    peer.match(request)
    peer.slots(request)
    matched = clock()
    peer.lock(request)
    peer.room(request)
    peer.insert(request)
    peer.unlock(request)
    return (matched - start) / 1000, (clock() - start) / 1000


def _evicted(peer: Peer) -> float:
    start = time.perf_counter_ns()
    peer.evict(PAGE)
    return (time.perf_counter_ns() - start) / 1000


def _request(peer: Peer, tokens: np.ndarray) -> None:
    request = peer.prepare(tokens, len(tokens))
    for step in (peer.match, peer.slots, peer.lock, peer.room, peer.insert, peer.unlock):
        step(request)


def _prompt(tokens: int, number: int) -> np.ndarray:
    return ((np.arange(tokens) + number * 1_000_003) % 2**30).astype(np.int32)


def _row(operation: str, taken: list[float]) -> dict[str, Any]:
    return {"operation": operation, "us_min": min(taken), "us_median": float(np.median(taken))}


def memory(make: Make, name: str, page: int) -> list[dict[str, Any]]:
    """Bytes that a cached token takes: by the growth of the process, and by the arrays of our state.

    To be called once per process: memory that was freed before would be used again.
    """
    prompts, tokens = 500, 4096
    peer = make(name, page, prompts * tokens, 0)
    _request(peer, _prompt(tokens, prompts))
    gc.collect()
    before = _resident()
    for number in range(prompts - 1):
        _request(peer, _prompt(tokens, number))
    gc.collect()
    row: dict[str, Any] = {"page": page, "rss": (_resident() - before) / ((prompts - 1) * tokens)}
    if (state_bytes := getattr(peer, "state_bytes", None)) is not None:
        row["state"] = state_bytes() / (prompts * tokens)
    return [row]


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
