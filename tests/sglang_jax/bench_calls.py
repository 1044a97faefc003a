"""The calls of a scheduler, timed on sglang-jax's caches and ours. No keys and values: only what the caches decide."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from purecache.adapters.sglang_jax import SglangJaxCache

CACHES = {"radix": RadixCache, "unified": UnifiedRadixCache, "ours": SglangJaxCache}
REPEATS = {512: 100, 4096: 60, 32768: 20}
ANSWER = 16
"""Tokens that a request generates."""
LEAF = 128
"""Tokens of each of the prompts that fill the pool."""
LEAVES = 2048


@dataclass
class Request:
    """The fields of a scheduler's request that prefix caches read and write."""

    origin_input_ids: list[int]
    req_pool_idx: int = 0
    rid: str = "request"
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    prefix_indices: Any = None
    last_node: Any = None
    extra_key: str | None = None
    dp_rank: int = 0
    last_matched_prefix_len: int = 0
    cache_protected_len: int = 0
    kv_committed_len: int = 0
    swa_uuid_for_lock: Any = None
    recurrent_pool_idx: Any = None

    def pop_committed_kv_cache(self) -> int:
        """Tokens that the request has computed, once."""
        length, self.kv_committed_len = self.kv_committed_len, 0
        return length


@dataclass
class Setup:
    """One cache with its pools."""

    cache: Any
    allocator: Any
    rows: Any

    def allocate(self, number: int) -> np.ndarray:
        """Slots of `number` tokens (whole pages), after an eviction if need be."""
        whole = -(-number // self.cache.page_size) * self.cache.page_size
        if self.allocator.available_size(0) < whole:
            self.cache.evict(EvictParams(num_tokens=whole, dp_rank=0))
        return self.allocator.alloc(whole, dp_rank=0)


def new_setup(kind: type, page_size: int, pool: int, longest: int) -> Setup:
    """An empty cache of `pool` tokens."""
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(size=pool, kvcache=None)
    else:
        allocator = PagedTokenToKVPoolAllocator(size=pool, page_size=page_size, kvcache=None)
    rows = ReqToTokenPool(size=2, max_context_len=longest)
    sizes = {"kv_head_num": 1, "head_dim": 1, "layer_num": 1, "max_seq_len": longest}
    cache = kind(
        req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=page_size, disable=False, **sizes
    )
    return Setup(cache, allocator, rows)


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """One row per call, page size and prompt length."""
    for page_size in (1, 16):
        for tokens in (512, 4096) if quick else (512, 4096, 32768):
            yield from compared(page_size, tokens, {name: lives(k, page_size, tokens) for name, k in CACHES.items()})
        yield from compared(page_size, LEAF, {name: evictions(k, page_size, quick) for name, k in CACHES.items()})


def compared(page_size: int, tokens: int, times: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """Rows with the three caches side by side."""
    for operation in next(iter(times.values())):
        label = {"operation": operation, "page": page_size, "tokens": tokens}
        yield label | {name: found[operation] for name, found in times.items()}


def lives(kind: type, page_size: int, tokens: int) -> dict[str, float]:
    """Median microseconds of the calls in the life of a request, half of whose prompt is cached.

    The first requests, for which programs are compiled, do not count.
    """
    setup = new_setup(kind, page_size, pool=6 * tokens, longest=2 * tokens)
    random = np.random.default_rng(0)
    shared = random.integers(0, 1 << 17, tokens // 2).tolist()
    times: dict[str, list[float]] = {}
    for _ in range(REPEATS[tokens] + 3):
        prompt = shared + random.integers(0, 1 << 17, tokens - len(shared)).tolist()
        for name, seconds in life(setup, prompt).items():
            times.setdefault(name, []).append(seconds)
    return {name: median(taken[3:]) * 1e6 for name, taken in times.items()}


def life(setup: Setup, prompt: list[int]) -> dict[str, float]:
    """Seconds of each call for one request, from its admission to its end, as the scheduler makes them."""
    cache, req = setup.cache, Request(list(prompt))
    req.fill_ids = req.origin_input_ids
    key = req.fill_ids[:-1]
    seconds: dict[str, float] = {}
    found = timed(seconds, "match_prefix", lambda: match(cache, key, req))
    req.prefix_indices, req.last_node = found.device_indices, found.last_device_node
    req.last_matched_prefix_len = req.cache_protected_len = held = len(found.device_indices)
    timed(seconds, "inc + dec_lock_ref", lambda: lock_and_unlock(cache, req.last_node))
    req.swa_uuid_for_lock = cache.inc_lock_ref(req.last_node).swa_uuid_for_lock
    slots = setup.allocate(len(prompt) - held + ANSWER)
    setup.rows.write((0, slice(0, held)), req.prefix_indices)
    setup.rows.write((0, slice(held, held + len(slots))), slots)
    timed(seconds, "cache_unfinished_req", lambda: cache.cache_unfinished_req(req))
    timed(seconds, "evictable_size", lambda: cache.evictable_size(dp_rank=0))
    req.output_ids = [7] * ANSWER
    req.kv_committed_len = len(prompt) + ANSWER
    timed(seconds, "cache_finished_req", lambda: cache.cache_finished_req(req))
    return seconds


def match(cache: Any, tokens: list[int], req: Any = None) -> Any:
    """What `Req.init_next_round_input` asks."""
    return cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None, 0), req=req))


def lock_and_unlock(cache: Any, node: Any) -> None:
    """What a scheduler does around an attempt to admit a request."""
    cache.dec_lock_ref(node, cache.inc_lock_ref(node).to_dec_params())


def evictions(kind: type, page_size: int, quick: bool) -> dict[str, float]:
    """Median microseconds of evictions from a full pool with many leaves."""
    leaves = LEAVES // 8 if quick else LEAVES
    setup = new_setup(kind, page_size, pool=leaves * LEAF, longest=LEAF)
    random = np.random.default_rng(1)
    for _ in range(leaves):
        tokens = random.integers(0, 1 << 17, LEAF).tolist()
        setup.cache.insert(InsertParams(key=RadixKey(tokens, None, 0), value=setup.allocate(LEAF)))
    name = f"evict, {leaves} leaves"
    asked = {f"{name}, one page": page_size, f"{name}, {LEAF} tokens": LEAF}
    return {name: median_eviction(setup, number) for name, number in asked.items()}


def median_eviction(setup: Setup, number: int) -> float:
    """Median microseconds of 40 evictions of `number` tokens."""
    params, seconds = EvictParams(num_tokens=number, dp_rank=0), []
    for _ in range(42):
        found: dict[str, float] = {}
        timed(found, "evict", lambda: setup.cache.evict(params))
        seconds.append(found["evict"])
    return median(seconds[2:]) * 1e6


def timed(seconds: dict[str, float], name: str, action: Callable[[], Any]) -> Any:
    """Run `action`, note how long it took, and return what it returns. The garbage collector waits."""
    gc.disable()
    start = time.perf_counter()
    answer = action()
    seconds[name] = time.perf_counter() - start
    gc.enable()
    return answer
