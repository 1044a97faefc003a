"""What the control plane costs: microseconds per call of the facade, reply read, at several sizes and capacities."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from purecache import CacheConfig, PrefixCache

REPEATS = 300
AIMS = {
    ("admit + finish", 16, 4096): 150.0,
    ("match", 16, 32768): 300.0,
    ("match", 1, 32768): 300.0,
    ("evict 1 page", 16, 4096): 60.0,
}
"""Microseconds, minimum: (what, page size, tokens)."""


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """One row per operation, page size and prompt length; then the same at several capacities."""
    for page in (1, 16, 64):
        for tokens in (512, 4096) if quick else (512, 4096, 32768, 131072):
            yield from one_size(page, tokens, capacity=max(8192, 2 * tokens // page))
    capacities = (8192, 131072) if quick else (8192, 131072, 1 << 20)
    for capacity in capacities:
        yield from one_size(16, 4096, capacity, filled=True)
    yield many_prompts(prompts=1024, tokens=4096, page=16)


def one_size(page: int, tokens: int, capacity: int, filled: bool = False) -> Iterator[dict[str, Any]]:
    """Rows for one prompt that is cached whole; `filled`: in a cache that is full of other prompts."""
    cache = PrefixCache(CacheConfig(page_size=page, device_pages=capacity))
    if filled:
        fill(cache, page, capacity)
    prompt = np.arange(tokens, dtype=np.int32)
    whole = tokens // page
    cache.insert(prompt, cache.allocate(whole))
    node = cache.match(prompt).device_node
    label = {"page": page, "tokens": tokens, "nodes": capacity}

    def admit_and_finish() -> None:
        found, receipt = cache.admit(prompt)
        cache.finish(prompt, found.device_pages, receipt)

    def lock_and_unlock() -> None:
        cache.unlock(cache.lock(node))

    pages = cache.match(prompt).device_pages
    yield label | timed("match", lambda: cache.match(prompt))
    yield label | timed("insert (cached)", lambda: cache.insert(prompt, pages))
    yield label | timed("lock + unlock", lock_and_unlock)
    yield label | timed("admit + finish", admit_and_finish)
    yield label | timed("insert (new)", *new_prompts(cache, tokens, page))
    yield label | timed("evict 1 page", lambda: cache.evict(1, rank=0), repeats=min(REPEATS, whole))


def fill(cache: PrefixCache, page: int, capacity: int, length: int = 256) -> None:
    """Insert prompts of `length` pages until the device is nearly full."""
    for start in range(0, capacity - 2 * length, length):
        prompt = np.arange(length * page, dtype=np.int32) + (1 + start) * 100_003 % 2**30
        cache.insert(prompt, cache.allocate(length))


def new_prompts(cache: PrefixCache, tokens: int, page: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """An action that inserts a prompt never seen before, and the preparation of its pages."""
    state: dict[str, Any] = {"number": 0}

    def prepare() -> None:
        state["number"] += 1
        state["prompt"] = np.arange(tokens, dtype=np.int32) + state["number"] * 1_000_003 % 2**30
        state["pages"] = cache.allocate(tokens // page)

    return (lambda: cache.insert(state["prompt"], state["pages"]) and None), prepare


def many_prompts(prompts: int, tokens: int, page: int) -> dict[str, Any]:
    """Time per prompt of matching many waiting prompts in one call: half of each is cached."""
    cache = PrefixCache(CacheConfig(page_size=page, device_pages=prompts * tokens // page))
    waiting = [np.arange(tokens, dtype=np.int32) + number * 100_003 for number in range(prompts)]
    for prompt in waiting:
        half = prompt[: tokens // 2]
        cache.insert(half, cache.allocate(len(half) // page))
    row = timed(f"match of {prompts} prompts in one call, per prompt", lambda: cache.match_many(waiting), repeats=10)
    row |= {"us_min": row["us_min"] / prompts, "us_median": row["us_median"] / prompts}
    return {"page": page, "tokens": tokens, "nodes": cache.config.device_pages} | row


def timed(
    name: str, action: Callable[[], Any], prepare: Callable[[], Any] = lambda: None, repeats: int = REPEATS
) -> dict[str, Any]:
    """Minimum and median microseconds of `action`, after two calls that do not count."""
    taken = []
    for _ in range(repeats + 2):
        prepare()
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    counted = np.array(taken[2:]) * 1e6
    return {"operation": name, "us_min": float(counted.min()), "us_median": float(np.median(counted))}
