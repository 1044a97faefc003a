"""A small scheduler of a model with recurrent layers, in the order of calls of sglang-jax's.

Written from its call sites: recurrent_admission_blocked, alloc_req_slots, the copy before a forward, and the entries of
snapshots.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from purecache.testing.admission import Admission
from purecache.testing.audit import audit
from purecache.testing.caller import Caller
from purecache.testing.device import Part, Work, check_bytes
from purecache.testing.pools import KVPool, marks_of
from purecache.testing.scheduling import Scheduling
from purecache.testing.stand_ins import CacheInitParams, Request
from purecache.testing.state_rows import StateRows


class StateCaller(Caller):
    """Asks which state to copy, for requests that have none."""

    def match(self, key: Any, **keywords: Any) -> Any:
        """Match, sometimes twice, and check the answer."""
        request = keywords.get("req")
        if request is not None:
            request.recurrent_cow_src_index = None
            keywords["cow_recurrent"] = request.recurrent_pool_idx is None
        found = super().match(key, **keywords)
        length, branching = len(found.device_indices), found.recurrent_branching_seqlen
        if branching is not None:
            assert branching > length, f"a prompt that matches {length} tokens can't branch off at {branching}"
            assert branching <= len(key), f"a prompt of {len(key)} tokens can't branch off at {branching}"
        if request is not None and keywords["cow_recurrent"]:
            told = request.recurrent_cow_src_index
            assert (told is not None) == (length > 0), f"{length} tokens match, and the state to copy is {told}"
        return found


class StateAdmission(Admission):
    """Knows of states. `interval`: of the snapshots of requests, None without them."""

    rows: StateRows
    interval: int | None = None

    def fits(self, request: Request) -> bool:
        """Whether there are states for one request more."""
        rank = request.rank
        demand = self.rows.request_owned_slots * (len(self.chosen[rank]) + 1)
        room = self.rows.recurrent_available_size(rank) + self.caller.size("recurrent_evictable_size", rank)
        return room - (request.recurrent_cow_src_index is not None) >= demand

    def go_on(self, request: Request) -> Request | None:
        """The next chunk of a request, up to its next snapshot."""
        return self._capped(request, super().go_on)

    def _add_locked(self, request: Request) -> bool:
        return self._capped(request, super()._add_locked)

    def _capped(self, request: Request, step: Callable[[Request], Any]) -> Any:
        left, rank = self.left[request.rank], request.rank
        if self.interval is None:
            return step(request)
        begin = len(request.prefix_indices)
        cap = (begin // self.interval + 1) * self.interval - begin
        lowered = cap if left is None else min(left, cap)
        self.left[rank] = lowered
        answer = step(request)
        used = lowered - (self.left[rank] or 0)
        self.left[rank] = None if left is None else left - used
        return answer


class StateScheduling(Scheduling):
    """A scheduler with a cache of its own. `states`: slots per rank; the rest: `Memory`.

    interval: tokens between two snapshots of a request, for pages of several tokens. None: requests keep none.
    """

    caller_of = StateCaller
    rows: StateRows

    def __init__(
        self,
        make_cache: Callable[[CacheInitParams], Any],
        *,
        states: int,
        interval: int | None = None,
        **settings: Any,
    ) -> None:
        self._states, self.interval = states, interval
        super().__init__(make_cache, **settings)

    def rows_of(self, size: int, max_context_len: int) -> StateRows:
        """The table of rows, with states."""
        tracks = 0 if self.interval is None else 1 + self.overlap
        return StateRows(size, max_context_len, self._states, self.dp_size, tracks)

    def more_pools(self, tokens: int, params: CacheInitParams) -> list[KVPool]:
        """The pool of states, each as big as a token of KV."""
        params.enable_recurrent_extra_buffer = self.interval is not None
        params.recurrent_track_interval = self.interval
        self.state_pool = KVPool(self._states * self.dp_size, 1, self.dp_size)
        return [self.state_pool]

    def admission(self, chunk: int | None, reserved: list[float]) -> Admission:
        """The room for a prefill batch."""
        made = StateAdmission(self.caller, self.tally, chunk, self.allocator.size_per_rank, reserved, self.ready)
        made.rows, made.interval = self.rows, self.interval
        return made

    def before_rows(self, requests: list[Request], rank: int) -> None:
        """Let the cache evict states if there are too few."""
        demand = self.rows.request_owned_slots * sum(each.recurrent_pool_idx is None for each in requests)
        missing = demand - self.rows.recurrent_available_size(rank)
        if missing > 0:
            self.evict_states(missing, rank)

    def evict_states(self, number: int, rank: int | None) -> None:
        """Let the cache evict states; what can be evicted must be free when the call returns."""
        ranks = range(self.dp_size) if rank is None else [rank]
        evictable = sum(self.caller.size("recurrent_evictable_size", each) for each in ranks)
        before = [self.rows.recurrent_available_size(each) for each in range(self.dp_size)]
        params = self.caller.vocabulary.EvictParams(recurrent_num=number, dp_rank=rank)
        told = self.caller.call("evict", params, note=f"{number} states, dp_rank={rank}").recurrent_num_evicted
        after = [self.rows.recurrent_available_size(each) for each in range(self.dp_size)]
        freed = sum(after[each] - before[each] for each in ranks)
        assert freed >= min(number, evictable), f"of {evictable} states, {number} were wanted and {freed} became free"
        assert told == freed == sum(after) - sum(before), f"evict tells of {told} states: {before} became {after}"

    def work(self, request: Request, begin: int) -> Work:
        """Compute a request: from the state before to the one after, and a snapshot of that where one is due."""
        work, end, own = super().work(request, begin), request.kv_committed_len, request.recurrent_pool_idx
        marks, source = work.parts[0].marks, request.recurrent_cow_src_index
        request.recurrent_cow_src_index = None
        assert source is None or begin, f"{request} begins at 0, but is to copy state {source}"
        slots, values = ([source or own], [marks[begin - 1]]) if begin else ([], [])
        slots, values = [*slots, own], [*values, marks[end - 1]]
        if self.interval is not None and end % self.interval == 0:
            place, buffer = request.recurrent_next_track_idx, request.recurrent_ping_pong_track_buffer
            slots, values = [*slots, buffer[place]], [*values, marks[end - 1]]
            request.recurrent_last_track_seqlen = end
            request.recurrent_next_track_idx = self.rows.get_recurrent_ping_pong_other_idx(place)
        here = int(begin > 0)
        work.parts.append(Part(np.array(slots, np.int64), np.array(values, np.int64), here, begin - here))
        return work

    def check(self) -> None:
        """Every slot and state has one owner, and sizes are exact. When idle, also the bytes are checked."""
        audit(self)
        for rank in range(self.dp_size):
            live = [each for each in self.rows.owners.values() if each.rank == rank]
            own = [slot for request in live for slot in self.rows.states_of(request)]
            assert len(set(own)) == len(own), f"rank {rank}: two requests have one state: {sorted(own)}"
            free = self.rows.recurrent_free_slots[rank]
            assert not set(own) & set(free), f"rank {rank}: state {set(own) & set(free)} is free, but a request has it"
            sizes = [self.caller.size(f"recurrent_{name}_size", rank) for name in ("evictable", "protected")]
            ledger = f"{len(free)} are free, requests have {len(own)}, and the cache {sizes[0]} and {sizes[1]}"
            total = len(free) + len(own) + sum(sizes)
            assert total == self.rows.slots_per_rank, f"rank {rank}: of {self.rows.slots_per_rank} states {ledger}"
            active = self.caller.call("assert_recurrent_slot_ledger", rank, live)
            assert active == len(own), f"rank {rank}: {ledger}, but assert_recurrent_slot_ledger says {active}"
        if self.idle():
            self.device.wait()
            self._check_contents()

    def _check_contents(self) -> None:
        for rank, (_, evictable, protected) in enumerate(self.caller.sizes()):
            states = self.caller.size("recurrent_protected_size", rank)
            assert protected + states == 0, f"rank {rank}: nothing runs, but {protected} and {states} are protected"
            there, known = self.pool.read(rank), self.state_pool.read(rank)
            for request in [each for each in self.requests if each.rank == rank]:
                tokens = request.origin_input_ids + request.output_ids
                marks, what = marks_of(tokens, request.extra_key, False), f"the prefix of {request}"
                asks = Request("asks", tokens, tokens, 1)
                found = self.caller.match(self.caller.key(tokens, request.extra_key, request.dp_rank), req=asks)
                slots = found.device_indices
                assert len(slots) <= evictable, f"rank {rank}: {evictable} slots are cached, {len(slots)} are found"
                check_bytes(self.pool, there, slots, marks[: len(slots)], what)
                if len(slots):
                    end, state = len(slots) - 1, np.array([asks.recurrent_cow_src_index])
                    check_bytes(self.state_pool, known, state, marks[end : end + 1], f"the state of {what}", end)
