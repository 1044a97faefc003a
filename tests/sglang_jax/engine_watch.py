"""Watching a scheduler of sglang-jax from inside its process: what it does, and when nothing is under way."""

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

SETTLE_SECONDS = 60.0


@dataclass
class Events:
    """What happened inside: `asked` and `loaded` are tokens of load backs, the rest are numbers of events."""

    load_backs: int = 0
    asked: int = 0
    loaded: int = 0
    evictions: int = 0
    retracted: int = 0
    chunks: int = 0


class Gate:
    """Stands where the scheduler receives requests, and is called by it at every step.

    It lets the requests of a round in together and in order, so that batches do not depend on timing, and it runs
    what others want to know on the scheduler's thread.
    """

    def __init__(self, scheduler: Any):
        self.expected, self._held, self._receive = 0, [], scheduler.recv_requests
        self._questions: queue.SimpleQueue = queue.SimpleQueue()
        scheduler.recv_requests = self

    def __call__(self) -> list[Any]:
        while not self._questions.empty():
            question, answer = self._questions.get()
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)
        self._held += self._receive()
        if sum(hasattr(request, "input_ids") for request in self._held) < self.expected:
            return []
        ready, self._held, self.expected = self._held, [], 0
        return ready

    def ask(self, question: Callable[[], Any]) -> Any:
        """What `question` returns (or raises), between two steps of the scheduler."""
        answer: Future = Future()
        self._questions.put((question, answer))
        return answer.result(SETTLE_SECONDS)


def watch(scheduler: Any, events: Events, heed_quota: bool) -> None:
    """Count what the scheduler asks of the cache and does with requests."""
    from sgl_jax.srt.managers import schedule_policy
    from sgl_jax.srt.managers.schedule_batch import ScheduleBatch

    cache, adder = scheduler.tree_cache, schedule_policy.PrefillAdder
    load_back, evict = getattr(cache, "init_load_back", None), cache.evict
    retract, add_chunk = ScheduleBatch.retract_decode, adder.add_chunked_req

    def counted_load_back(node: Any, length: int, mem_quota: int | None = None) -> Any:
        found = load_back(node, length, mem_quota=mem_quota if heed_quota else None)
        events.load_backs += 1
        events.asked += length
        events.loaded += len(found[0])
        return found

    def counted_evict(*args: Any, **options: Any) -> Any:
        events.evictions += 1
        return evict(*args, **options)

    def counted_retract(self: Any, *rest: Any) -> Any:
        found = retract(self, *rest)
        events.retracted += len(found[0])
        return found

    def counted_chunk(self: Any, request: Any) -> Any:
        events.chunks += 1
        return add_chunk(self, request)

    if load_back is not None:
        cache.init_load_back = counted_load_back
    cache.evict, ScheduleBatch.retract_decode, adder.add_chunked_req = counted_evict, counted_retract, counted_chunk


def settle(scheduler: Any, gate: Gate) -> None:
    """Wait until the scheduler has nothing to do and the cache has no transfer under way."""
    limit = time.monotonic() + SETTLE_SECONDS
    while not gate.ask(lambda: scheduler.is_fully_idle() and not in_flight(scheduler.tree_cache)):
        if time.monotonic() > limit:
            raise TimeoutError("the scheduler or the cache is not idle after a minute")
        time.sleep(0.005)


def in_flight(cache: Any) -> bool:
    """Whether transfers to or from host or storage are under way."""
    if not hasattr(cache, "prefetches"):
        return bool(getattr(cache, "ongoing_write", None))
    from purecache.state.layout import TIERS, Account

    ranks, tier = range(cache.cache.config.ranks), cache.prefetches.tier
    pages = sum(cache.cache.pages(Account.IN_FLIGHT, where, rank) for where in TIERS for rank in ranks)
    return pages > 0 or (tier is not None and tier.in_flight > 0)


def sizes(scheduler: Any) -> list[dict[str, int]]:
    """Per rank, in tokens: what the leak check of the scheduler adds up."""
    cache, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    return [
        {
            "available": int(allocator.available_size(rank)),
            "evictable": int(cache.evictable_size(dp_rank=rank)),
            "protected": int(cache.protected_size(dp_rank=rank)),
            "size": int(allocator.size_per_rank),
        }
        for rank in range(scheduler.dp_size)
    ]


def counters(cache: Any) -> dict[str, int] | None:
    """The counters of purecache, after a check of all its laws; None for other caches."""
    if not hasattr(cache, "prefetches"):
        return None
    cache.sanity_check()
    tier = cache.prefetches.tier
    return cache.cache.counters() | (tier.counters() if tier is not None else {})
