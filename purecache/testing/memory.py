"""What a scheduler and a prefix cache share: rows, slots, the pool and the device."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.testing.admission import Tally
from purecache.testing.caller import Caller
from purecache.testing.device import Device, Part, Work
from purecache.testing.pools import KVPool, PagedSlots, TokenSlots, marks_of
from purecache.testing.stand_ins import CacheInitParams, Request, RequestRows, Vocabulary


@dataclass(frozen=True)
class HostTier:
    """How to look into the host tier of a cache, and handle it; all optional.

    `pages(cache)`: pages free and pages in all. `settle(cache)`: wait until no transfer is under way.
    `close(cache)`: it is not used any more. For storage below the host: `queued(cache, request)` when a request begins
    to wait, `ready(cache, request)` before it is admitted (False: not yet), `gone(cache, request)` when it was aborted.
    """

    pages: Callable[[Any], tuple[int, int]] | None = None
    settle: Callable[[Any], Any] | None = None
    close: Callable[[Any], Any] | None = None
    queued: Callable[[Any, Request], Any] | None = None
    ready: Callable[[Any, Request], bool] | None = None
    gone: Callable[[Any, Request], Any] | None = None


class Memory:
    """A cache made by `make_cache(params: CacheInitParams)`, and the memory around it.

    `tokens` and `max_running` are per rank; `chunk` is the most that a rank computes in one prefill, None: all at once.
    `policy`: "fcfs", "lpm" or "dfs-weight". `optimism`: how much of its max_new_tokens a running request is expected to
    need; little means many retractions. `twice`: how often cache_finished_req is called a second time.
    """

    def __init__(
        self,
        make_cache: Callable[[CacheInitParams], Any],
        *,
        seed: int = 0,
        tokens: int = 64,
        page_size: int = 1,
        dp_size: int = 1,
        is_eagle: bool = False,
        overlap: bool = False,
        chunk: int | None = None,
        max_running: int = 4,
        policy: str = "fcfs",
        optimism: float = 0.3,
        twice: float = 0.0,
        vocabulary: Any = None,
        host: HostTier | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.page_size, self.dp_size, self.is_eagle, self.overlap = page_size, dp_size, is_eagle, overlap
        self.chunk, self.max_running, self.policy, self.optimism = chunk, max_running, policy, optimism
        self.twice, self.host, self.tally = twice, host or HostTier(), Tally()
        self.rows = self.rows_of(dp_size * (max_running + 2), 2 * tokens)
        self.pool = KVPool(tokens * dp_size, page_size, dp_size)
        size = tokens * dp_size
        if page_size == 1:
            self.allocator = TokenSlots(size, self.pool, dp_size)
        else:
            self.allocator = PagedSlots(size, page_size, self.pool, dp_size)
        self.allocator.on_free = self._check_free
        params = CacheInitParams(self.rows, self.allocator, page_size, is_eagle)
        self.device = Device([self.pool, *self.more_pools(tokens, params)], self.random)
        self.handed = params.token_to_kv_pool_allocator  # what slots come from; `allocator` has those of full attention
        self.cache = make_cache(params)
        vocabulary = Vocabulary() if vocabulary is None else vocabulary
        moment = self.device.moment
        self.caller = self.caller_of(
            self.cache, params.req_to_token_pool, self.allocator, vocabulary, is_eagle, self.random, moment
        )
        if overlap and self.caller.with_host:
            self.cache._donation_barrier = self.device.wait
        self.requests: list[Request] = []
        self._admitted: list[Request] = []  # chosen for the next batch, without a row yet

    caller_of = Caller
    """Makes what calls the cache."""

    def rows_of(self, size: int, max_context_len: int) -> RequestRows:
        """The table of rows."""
        return RequestRows(size, max_context_len)

    def more_pools(self, tokens: int, params: CacheInitParams) -> list[KVPool]:
        """Pools beside that of full attention, for schedulers that have some; they change `params` for the cache."""
        return []

    def _check_free(self, rank: int, slots: np.ndarray) -> None:
        for request in [*self._admitted, *self.rows.owners.values()]:
            if request.rank != rank:
                continue
            held = request.last_matched_prefix_len
            if request.req_pool_idx is None:
                uses = request.prefix_indices[:held]
            else:
                uses = self.rows.slots(request, 0, request.cache_protected_len)
            both = np.intersect1d(slots, uses)
            assert not len(both), f"slot {both[0]} of rank {rank} is freed, but {request} reads it: the cache locks it"

    def allocate(self, requests: list[Request], begins: list[int], ends: list[int], rank: int) -> None:
        """Slots for positions of requests of a rank, after evicting what they need."""
        number = sum(ends) - sum(begins)
        room = number + (len(requests) * self.page_size if self.page_size > 1 else 0)
        self.evict(room, rank)
        if self.page_size > 1:
            last = [
                int(self.rows.slots(request, begin - 1, begin)[0]) if begin else -1
                for request, begin in zip(requests, begins, strict=True)
            ]
            slots = self.handed.alloc_extend(begins, ends, last, number, dp_rank=rank)
        else:
            slots = self.handed.alloc(number, dp_rank=rank)
        promised = "the sizes that the cache answered promised room, but there is none"
        assert slots is not None, f"{promised} for {number} tokens of rank {rank}: {self.caller.sizes()[rank]}"
        for request, begin, end in zip(requests, begins, ends, strict=True):
            self.rows.write((self.rows.row(request), slice(begin, end)), slots[: end - begin])
            slots = slots[end - begin :]

    def evict(self, tokens: int, rank: int) -> None:
        """Let the cache evict if there is no room. All of it is asked for, not what is missing."""
        if self.allocator.available_size(rank) < tokens:
            self.caller.evict(tokens, rank)
            self.tally.evictions += 1

    def free_slots(self, rank: int) -> int:
        """Slots of a rank that can be had without evicting."""
        return self.allocator.available_size(rank)

    def work(self, request: Request, begin: int) -> Work:
        """Compute a request from position `begin` to all that it has slots for."""
        end = request.kv_committed_len
        marks = marks_of(request.future[: end + self.is_eagle], request.extra_key, self.is_eagle)
        return Work(request, [Part(self.rows.slots(request, 0, end), marks, begin)])

    def tell(self, hook: Callable[[Any, Request], Any] | None, request: Request) -> Any:
        """Call a hook for storage, which must not raise; None without one."""
        try:
            return None if hook is None else hook(self.cache, request)
        except Exception as error:
            raise AssertionError(f"a hook for storage must not raise for {request}; it raised {error!r}") from error

    def release(self, request: Request, is_insert: bool) -> None:
        """A request leaves memory."""
        self.caller.finished(request, is_insert, twice=self.random.random() < self.twice)
        begin, end = request.pop_overallocated_kv_cache()
        begin = -(-begin // self.page_size) * self.page_size
        if begin < end:
            self.handed.free(self.rows.slots(request, begin, end), dp_rank=request.rank)
        self.rows.free(request)
