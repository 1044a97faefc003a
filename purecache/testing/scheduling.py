"""A small scheduler that drives a prefix cache through the lives of requests, in the order of calls of sglang-jax's.

Written from its call sites: event_loop_normal and event_loop_overlap, get_next_batch_to_run, prepare_for_extend and
prepare_for_decode, the output processor, retract_decode, abort_request, pause_generation and flush_cache.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from purecache.testing.admission import Admission, match, order
from purecache.testing.audit import audit, audit_contents
from purecache.testing.device import Forward
from purecache.testing.memory import Memory
from purecache.testing.stand_ins import CacheInitParams, Request

_SPARE = 8  # tokens that a request may compute beyond the last it says


@dataclass(eq=False)
class Batch:
    """What runs together, per rank; `answers` are the tokens that each request will say."""

    extend: bool
    requests: list[list[Request]]
    chunked: list[Request | None]
    answers: dict[Request, list[int]] = field(default_factory=dict)
    forward: Forward = field(default_factory=lambda: Forward([]))


class Scheduling(Memory):
    """A scheduler with a cache of its own. It takes what `Memory` takes."""

    def __init__(self, make_cache: Callable[[CacheInitParams], Any], **settings: Any) -> None:
        super().__init__(make_cache, **settings)
        self._clear()

    def _clear(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[list[Request]] = [[] for _ in range(self.dp_size)]
        self.chunked: list[Request | None] = [None] * self.dp_size
        self.aborting: list[Request | None] = [None] * self.dp_size
        self._unmerged: Batch | None = None  # the last batch, if it was a prefill whose requests don't decode yet
        self._results: deque[Batch] = deque()
        self._loads: list = []
        self._admitted = []

    # ---- what users of a server do ----

    def submit(
        self,
        prompt: list[int],
        new_tokens: int = 1,
        *,
        extra_key: str | None = None,
        dp_rank: int | None = None,
        logprob_start_len: int | None = None,
    ) -> Request:
        """A new request, which will say `new_tokens` tokens. Prompt and answer must be fewer than a rank's tokens."""
        says = [self.random.randrange(1, 10) for _ in range(new_tokens + _SPARE)]
        rid = f"r{self.tally.submitted}"
        request = Request(rid, list(prompt), list(prompt) + says, new_tokens, extra_key, dp_rank, logprob_start_len)
        if len(prompt) + new_tokens >= self.allocator.size_per_rank:
            raise ValueError(f"{len(prompt)} tokens and {new_tokens} more can never be in memory at once")
        self._wait(request)
        self.requests.append(request)
        self.tally.submitted += 1
        return request

    def abort(self, request: Request) -> None:
        """The user has gone away, at whatever stage the request is."""
        rank = request.rank
        if request in self.waiting:
            self.waiting.remove(request)
            request.is_finished = True
            self.tell(self.host.gone, request)
            self.tally.aborted += 1
        elif not request.finished():
            if self.chunked[rank] is request:
                self.aborting[rank] = request
            request.to_finish = True
            self.tally.aborted += 1

    def retract(self) -> None:
        """Everything that runs is thrown out of memory, and waits again."""
        self.device.wait()
        while self._results:
            self._process(self._results.popleft())
        self._finish_aborted_chunks()
        self._merge(self.chunked)
        for rank in range(self.dp_size):
            for request in [each for each in self.running[rank] if not each.finished()]:
                self._retract(request)
            self.running[rank] = []
            if (parked := self.chunked[rank]) is not None:
                self.chunked[rank] = None
                self._retract(parked)

    def idle(self) -> bool:
        """Whether no request waits or runs, and no result is outstanding."""
        return not (self.waiting or self._results or self.rows.owners)

    def flush(self) -> bool:
        """Throw away all that is cached, if idle."""
        if not self.idle():
            return False
        self.device.wait()
        before = [self.allocator.available_size(rank) for rank in range(self.dp_size)]
        self.caller.call("reset")
        after = [self.allocator.available_size(rank) for rank in range(self.dp_size)]
        assert before == after, "reset must not free slots: the scheduler clears the allocator itself"
        self.rows.clear()
        self.handed.clear()
        self._clear()
        self.requests = []
        for free, evictable, protected in self.caller.sizes():
            assert not evictable + protected, f"after reset, {free=}, {evictable=}, {protected=}"
        if self.host.pages is not None:
            free, total = self.host.pages(self.cache)
            assert free == total, f"after reset, {free} of {total} host pages are free"
        self.tally.flushes += 1
        return True

    def step(self, retract: bool = False) -> bool:
        """One turn of the event loop; whether a batch ran. `retract`: as if memory had run out in decoding."""
        batch = self._next_batch(retract)
        if self._loads:
            self.device.wait()
            loads, self._loads = self._loads, []
            self.caller.call("finish_load_back", loads)
        if batch is not None:
            self.device.launch(batch.forward)
            self._results.append(batch)
        self._admitted = []
        # With overlap, a result is looked at when the batch after it has been launched and has put its arrays in place.
        while len(self._results) > (self.overlap and batch is not None):
            self.device.wait()
            self._process(self._results.popleft())
        return batch is not None

    def close(self) -> None:
        """The cache is not used any more."""
        if self.host.close is not None:
            self.host.close(self.cache)

    def drain(self, steps: int = 400) -> None:
        """Steps until all requests have ended; then check, also what is in the cache."""
        for _ in range(steps):
            if self.idle():
                break
            if not self.step() and self.host.settle is not None:
                self.host.settle(self.cache)
        else:
            stuck = self.waiting + list(self.rows.owners.values())
            raise AssertionError(f"after {steps} steps, {', '.join(map(str, stuck))} have not ended")
        self.check()

    def check(self) -> None:
        """Every slot has one owner, and sizes are exact. When idle, also everything cached has the right bytes."""
        audit(self)
        if self.idle():
            self.device.wait()
            if self.host.settle is not None:
                self.host.settle(self.cache)
            audit_contents(self)

    # ---- the next batch ----

    def _next_batch(self, retract: bool) -> Batch | None:
        chunked = list(self.chunked)
        for rank, request in enumerate(chunked):
            if request is None or self.aborting[rank] is not None:
                continue
            if len(request.fill_ids) > len(request.prefix_indices):
                self.caller.unfinished(request)
        self._finish_aborted_chunks()
        self._merge(chunked)
        return self._prefill() or self._decode(retract)

    def _finish_aborted_chunks(self) -> None:
        for rank, request in enumerate(self.aborting):
            if request is not None and not request.is_chunked:
                request.check_finished()
                self.release(request, is_insert=False)
                self.chunked[rank] = self.aborting[rank] = None

    def _merge(self, chunked: list[Request | None]) -> None:
        """Requests of the last prefill decode from now on, but not those that have more chunks to compute."""
        for rank, requests in enumerate(self._unmerged.requests if self._unmerged else ()):
            self.running[rank] += [each for each in requests if not each.finished() and each is not chunked[rank]]
        self._unmerged = None

    def _prefill(self) -> Batch | None:
        if self.caller.with_host:
            self.caller.call("check_hicache_events")
        if not self.waiting and not any(self.chunked):
            return None
        order(self.policy, self.waiting, self.caller)
        reserved = [sum(each.left() * self.optimism for each in requests) for requests in self.running]
        mixed = self.chunk is not None and self.random.random() < 0.3
        chunk = self.chunk - len(self.running[0]) if self.chunk is not None and mixed else self.chunk
        admission = self.admission(chunk, reserved)
        for rank, request in enumerate(self.chunked):
            if request is not None and self.aborting[rank] is None:
                self.chunked[rank] = admission.go_on(request)
        for request in list(self.waiting):
            rank = request.rank
            full = len(self.running[rank]) + len(admission.chosen[rank]) >= self.max_running
            if not full and self.chunked[rank] is None and admission.chunked[rank] is None and admission.add(request):
                self.waiting.remove(request)
                self._admitted.append(request)
        self._loads += admission.loads
        if not any(admission.chosen):
            return None
        for rank, request in enumerate(admission.chunked):
            if request is not None:
                self.chunked[rank] = request
        batch = Batch(True, admission.chosen, [None] * self.dp_size)
        for rank, request in enumerate(self.chunked):
            if request is not None and request in batch.requests[rank]:
                request.is_chunked += 1
                batch.chunked[rank] = request
        self._extend(batch)
        self._unmerged = batch
        return batch

    def admission(self, chunk: int | None, reserved: list[float]) -> Admission:
        """The room for a prefill batch."""
        return Admission(self.caller, self.tally, chunk, self.allocator.size_per_rank, reserved, self.ready)

    def before_rows(self, requests: list[Request], rank: int) -> None:
        """What a scheduler does before it gives rows to the requests of a rank."""

    def before_decode(self, requests: list[Request], rank: int) -> None:
        """What a scheduler does to the requests of a rank before it takes slots for their next token."""

    def _extend(self, batch: Batch) -> None:
        for rank, requests in enumerate(batch.requests):
            if not requests:
                continue
            self.before_rows(requests, rank)
            assert self.rows.alloc(requests) is not None, "the scheduler has too few rows"
            begins = [len(each.fill_ids) - each.extend_input_len for each in requests]
            for request, begin in zip(requests, begins, strict=True):
                request.kv_committed_len = request.kv_allocated_len = len(request.fill_ids)
                request.cache_protected_len = request.last_matched_prefix_len
                request.is_retracted = False
                if begin:
                    self.rows.write((self.rows.row(request), slice(0, begin)), request.prefix_indices[:begin])
            ends = [len(request.fill_ids) for request in requests]
            self.allocate(requests, begins, ends, rank)
            for request, begin in zip(requests, begins, strict=True):
                if request is not batch.chunked[rank]:
                    batch.answers[request] = [request.future[len(request.fill_ids)]]
                batch.forward.works.append(self.work(request, begin))

    def _decode(self, retract: bool) -> Batch | None:
        self.running = [[each for each in requests if not each.finished()] for requests in self.running]
        if not any(self.running):
            return None
        if self.caller.with_host:
            self.caller.call("flush_write_through_acks")
        for rank, requests in enumerate(self.running):
            if requests and (not self._fits(requests, rank) or retract):
                self._make_room(requests, rank, retract)
        if not any(self.running):
            return None
        batch = Batch(False, [list(requests) for requests in self.running], [None] * self.dp_size)
        for rank, requests in enumerate(self.running):
            if requests:
                self._decode_rank(batch, requests, rank)
        return batch

    def _decode_rank(self, batch: Batch, requests: list[Request], rank: int) -> None:
        self.before_decode(requests, rank)
        begins = [each.kv_allocated_len for each in requests]
        ends = [self._reach(each) for each in requests]
        self.allocate(requests, begins, ends, rank)
        for request, end in zip(requests, ends, strict=True):
            begin = request.kv_committed_len
            # A draft model has guessed some tokens right; with overlap, how many is not known in time.
            said = self.random.randint(1, 3) if self.is_eagle and not self.overlap else 1
            request.kv_allocated_len = end
            request.kv_committed_len += said
            request.decode_batch_idx += 1
            batch.answers[request] = request.future[begin + 1 : begin + 1 + said]
            batch.forward.works.append(self.work(request, begin))

    def _reach(self, request: Request) -> int:
        return max(request.kv_allocated_len, request.kv_committed_len + (4 if self.is_eagle else 1))

    def _fits(self, requests: list[Request], rank: int) -> bool:
        size = self.page_size
        pages = [-(-self._reach(each) // size) - -(-each.kv_allocated_len // size) for each in requests]
        needed = sum(pages) * size
        self.evict(needed, rank)
        return self.free_slots(rank) >= needed

    def _make_room(self, requests: list[Request], rank: int, retract: bool) -> None:
        requests.sort(key=lambda each: (-len(each.output_ids), len(each.origin_input_ids)))
        while len(requests) > 1 and (retract or not self._fits(requests, rank)):
            self._retract(requests.pop())
            self.evict(20 * len(requests), rank)
            retract = False
        if not self._fits(requests, rank):
            request = requests.pop()
            request.to_finish = True
            request.check_finished()
            self.release(request, is_insert=False)
            self.tally.aborted += 1

    # ---- forwards and their results ----

    def _process(self, batch: Batch) -> None:
        if not batch.extend:
            self.handed.free_group_begin()
        for rank, requests in enumerate(batch.requests):
            for request in requests:
                if request.finished() or request.is_retracted:
                    continue
                if request in batch.answers:
                    self._say(request, batch)
                    continue
                request.is_chunked -= 1
                if self.aborting[rank] is request:
                    self._finish_aborted_chunks()
        if not batch.extend:
            self.handed.free_group_end()

    def _say(self, request: Request, batch: Batch) -> None:
        request.output_ids = request.output_ids + batch.answers[request]
        request.check_finished()
        if request.finished():
            self.release(request, is_insert=True)
            self.tally.finished += 1
        elif batch.extend:
            self.caller.unfinished(request)

    def _retract(self, request: Request) -> None:
        self.release(request, is_insert=False)
        request.reset_for_retract()
        self._wait(request)
        self.tally.retracted += 1

    def _wait(self, request: Request) -> None:
        self.waiting.append(request)
        self.tell(self.host.queued, request)

    def ready(self, request: Request) -> bool:
        """Whether storage has ended with a request that waits. What it has brought is matched."""
        if self.host.ready is None:
            return True
        if not self.tell(self.host.ready, request):
            return False
        match(self.caller, request, request.adjust_max_prefix_ids(), req=request)
        return True
