"""A small scheduler of a model with sliding windows, in the order of calls of sglang-jax's.

Written from its call sites: budgets of the window's pool in PrefillAdder, evict_from_tree_cache, maybe_evict_swa and
check_memory.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from purecache.testing.admission import Admission
from purecache.testing.audit import audit
from purecache.testing.caller import Caller
from purecache.testing.device import Part, Work, check_bytes
from purecache.testing.pools import KVPool, PagedSlots, TokenSlots, marks_of
from purecache.testing.scheduling import Scheduling
from purecache.testing.stand_ins import CacheInitParams, Request
from purecache.testing.window_pools import WindowSlots, check_map


class WindowCaller(Caller):
    """Asks for the sizes of both pools."""

    names = ("full_evictable_size", "full_protected_size")
    windows: WindowSlots

    def window_sizes(self) -> list[tuple[int, int, int]]:
        """Window tokens that are free, evictable and protected, per rank."""
        free, names = self.windows.swa_available_size, ("swa_evictable_size", "swa_protected_size")
        ranks = range(self.allocator.dp_size)
        return [(free(rank), self.size(names[0], rank), self.size(names[1], rank)) for rank in ranks]

    def evict(self, tokens: int, rank: int | None) -> Any:
        """As many of both pools."""
        return self.evict_both(tokens, tokens, rank)

    def evict_both(self, tokens: int, window: int, rank: int | None) -> Any:
        """Evict; what can be evicted must be free when the call returns."""
        before, windows = self.sizes(), self.window_sizes()
        params = self.vocabulary.EvictParams(num_tokens=tokens, swa_num_tokens=window, dp_rank=rank)
        result = self.call("evict", params, note=f"{tokens} and {window} of the window, dp_rank={rank}")
        told = (result.num_tokens_evicted, result.swa_num_tokens_evicted)
        for name, wanted, old, new, said in (
            ("full", tokens, before, self.sizes(), told[0]),
            ("window", window, windows, self.window_sizes(), told[1]),
        ):
            freed = [after[0] - each[0] for each, after in zip(old, new, strict=True)]
            ranks = range(len(old)) if rank is None else [rank]
            least = min(wanted, sum(old[each][1] for each in ranks))
            got = sum(freed[each] for each in ranks)
            assert got >= least, f"evict({wanted}) freed {got} {name} tokens of rank {rank}, but {least} were evictable"
            assert sum(freed) == got, f"evict of rank {rank} freed {freed} {name} tokens per rank"
            assert said == got, f"evict says that it evicted {said} {name} tokens, but {got} became free"
            for each, after in zip(old, new, strict=True):
                moved = f"evict turned {each} {name} tokens (free, evictable, protected) into {after}"
                assert sum(each) == sum(after), moved
                assert each[2] == after[2], moved
        return result


class WindowAdmission(Admission):
    """Knows of the window's pool. `peak`: window tokens that a request that decodes holds at most."""

    peak: int
    window_reserved: list[float]

    def window_room(self, rank: int) -> float:
        """Window tokens that can still be had on a rank."""
        free, evictable, _ = self.caller.window_sizes()[rank]  # type: ignore[attr-defined]
        return free + evictable - self.window_reserved[rank]

    def fits(self, request: Request) -> bool:
        """Whether the window's pool has room for a request."""
        return self._budget(request.extend_input_len, request.rank) < self.window_room(request.rank)

    def go_on(self, request: Request) -> Request | None:
        """The next chunk of a request that is being computed."""
        rank, left = request.rank, self.left[request.rank]
        room = int(self.window_room(rank)) - self.caller.page_size
        if left is not None:
            self.left[rank] = min(left, room)
        again = super().go_on(request)
        if left is not None:
            assert self.left[rank] is not None
            self.left[rank] = left - (min(left, room) - (self.left[rank] or 0))
        return again

    def _choose(self, request: Request, length: int, last: bool) -> None:
        self.window_reserved[request.rank] += self._budget(length, request.rank)
        super()._choose(request, length, last)

    def _budget(self, tokens: int, rank: int) -> int:
        left = self.left[rank]
        return self._paged(max(min(tokens, left) if left is not None else tokens, self.peak))


class WindowScheduling(Scheduling):
    """A scheduler with a cache of its own. `window_tokens`: slots of the window's pool per rank; the rest: `Memory`."""

    caller: WindowCaller
    caller_of = WindowCaller

    def __init__(
        self, make_cache: Callable[[CacheInitParams], Any], *, window: int, window_tokens: int, **settings: Any
    ) -> None:
        self.window, self._window_tokens = window, window_tokens
        super().__init__(make_cache, **settings)
        self.caller.windows = self.windows

    def more_pools(self, tokens: int, params: CacheInitParams) -> list[KVPool]:
        """The window's pool; the cache gets an allocator of both."""
        size = self._window_tokens * self.dp_size
        self.window_pool = KVPool(size, self.page_size, self.dp_size)
        if self.page_size == 1:
            slots = TokenSlots(size, self.window_pool, self.dp_size)
        else:
            slots = PagedSlots(size, self.page_size, self.window_pool, self.dp_size)
        self.windows = params.token_to_kv_pool_allocator = WindowSlots(self.allocator, slots)
        params.sliding_window_size = self.window
        return [self.window_pool]

    @property
    def interval(self) -> int:
        """Decode steps between two evictions of what left the window of a request."""
        return max(self.page_size, self.window) // self.page_size * self.page_size

    def admission(self, chunk: int | None, reserved: list[float]) -> Admission:
        """The room for a prefill batch."""
        made = WindowAdmission(self.caller, self.tally, chunk, self.allocator.size_per_rank, reserved, self.ready)
        size = self.page_size
        made.peak = -(-(self.window + self.interval + 2 * size) // size) * size
        made.window_reserved = [
            sum(max(0, made.peak - self._live(each)) for each in requests) for requests in self.running
        ]
        return made

    def _live(self, request: Request) -> int:
        size = self.page_size
        return max(0, -(-request.kv_allocated_len // size) * size - request.swa_evicted_seqlen)

    def before_decode(self, requests: list[Request], rank: int) -> None:
        """Free what left the windows, every so often."""
        for request in requests:
            if request.decode_batch_idx % self.interval == 1 % self.interval:
                length = len(request.origin_input_ids) + len(request.output_ids)
                before, evicted = self.windows.swa_available_size(rank), request.swa_evicted_seqlen
                self.caller.call("evict_req_swa", request, length - 1, dp_rank=rank, note=request)
                assert request.swa_evicted_seqlen >= evicted, "swa_evicted_seqlen went back"
                assert request.swa_evicted_seqlen % self.page_size == 0, "swa_evicted_seqlen is not whole pages"
                self.slid += self.windows.swa_available_size(rank) - before

    slid = 0
    """Window tokens that requests freed while they decoded."""

    def evict(self, tokens: int, rank: int) -> None:
        """Let the cache evict what is missing in either pool."""
        full = max(0, tokens - self.windows.full_available_size(rank))
        window = max(0, tokens - self.windows.swa_available_size(rank))
        if full or window:
            self.caller.evict_both(full, window, rank)
            self.tally.evictions += 1

    def free_slots(self, rank: int) -> int:
        """Slots of a rank that can be had in both pools without evicting."""
        return self.windows.available_size(rank)

    def work(self, request: Request, begin: int) -> Work:
        """Compute a request; its window layers read the last tokens only."""
        work = super().work(request, begin)
        whole, first = work.parts[0], self._first(begin)
        slots = self.windows.map(request.rank)[whole.slots[first:]]
        missing = np.flatnonzero(slots == 0)
        assert not len(missing), f"{request} reads token {first + missing[0]}, whose window slot is not there"
        work.parts.append(Part(slots, whole.marks[first:], begin - first, first))
        return work

    def _first(self, length: int) -> int:
        """The first token that the token after `length` of them sees in its window."""
        return max(0, length - self.window + 1)

    def check(self) -> None:
        """Every slot of both pools has one owner, and sizes are exact. When idle, also the bytes are checked."""
        audit(self)
        for rank, (_, evictable, protected) in enumerate(self.caller.window_sizes()):
            width, own = self.page_size, np.zeros(0, np.int64)
            pages = np.unique(check_map(self.windows, rank) // width)
            for request in self.rows.owners.values():
                if request.rank == rank:
                    first, last = request.cache_protected_len, request.kv_allocated_len
                    own = np.union1d(own, self.rows.slots(request, first, last) // width)
            cached = len(np.setdiff1d(pages, own)) * width
            told = f"but the cache tells of {evictable} evictable and {protected} protected"
            assert cached == evictable + protected, f"rank {rank}: {cached} window tokens are the cache's, {told}"
        if self.idle():
            self.device.wait()
            if self.host.settle is not None:
                self.host.settle(self.cache)
            self._check_contents()

    def _check_contents(self) -> None:
        for rank, (_, evictable, protected) in enumerate(self.caller.sizes()):
            windows = self.caller.window_sizes()[rank][2]
            assert protected + windows == 0, f"rank {rank}: nothing runs, but {protected} and {windows} are protected"
            full, there = self.pool.read(rank), self.window_pool.read(rank)
            for request in [each for each in self.requests if each.rank == rank]:
                tokens = request.origin_input_ids + request.output_ids
                slots = self.caller.match(self.caller.key(tokens, request.extra_key, request.dp_rank)).device_indices
                marks, what = marks_of(tokens, request.extra_key, False)[: len(slots)], f"the prefix of {request}"
                assert len(slots) <= evictable, f"rank {rank}: {evictable} slots are cached, {len(slots)} are found"
                check_bytes(self.pool, full, slots, marks, what)
                first = self._first(len(slots))
                seen = self.windows.map(rank)[slots[first:]]
                assert (seen > 0).all(), f"{what} is found without the window of its end"
                check_bytes(self.window_pool, there, seen, marks[first:], f"the window of {what}", first)
