"""A stand-in for sglang-jax's pool of requests with recurrent states, `HybridReqToTokenPool`.

Slots of states are numbered per rank from 1; 0 is none. Where the original accepts a mistake silently, this raises
AssertionError.
"""

import numpy as np

from purecache.testing.stand_ins import Request, RequestRows


class StateRows(RequestRows):
    """Rows, and `states` slots per rank. `tracks`: slots for snapshots that each request has besides its own."""

    def __init__(self, size: int, max_context_len: int, states: int, dp_size: int, tracks: int) -> None:
        super().__init__(size, max_context_len)
        self.slots_per_rank, self.dp_size, self.ping_pong_slots = states, dp_size, tracks
        self.enable_recurrent_extra_buffer = tracks > 0
        self._clear_states()

    def _clear_states(self) -> None:
        self.recurrent_free_slots = [list(range(1, self.slots_per_rank + 1)) for _ in range(self.dp_size)]

    @property
    def request_owned_slots(self) -> int:
        """Slots that a request has."""
        return 1 + self.ping_pong_slots

    def alloc(self, requests: list[Request]) -> list[int] | None:
        """Give a row and states to each request that has none, or None if there are too few."""
        rank = requests[0].rank
        new = [request for request in requests if request.recurrent_pool_idx is None]
        if len(new) * self.request_owned_slots > len(self.recurrent_free_slots[rank]):
            return None
        rows = super().alloc(requests)
        if rows is None:
            return None
        for request in new:
            request.recurrent_pool_idx = self.alloc_recurrent_slot(rank)
            if self.ping_pong_slots:
                slots = [self.alloc_recurrent_slot(rank) for _ in range(self.ping_pong_slots)]
                request.recurrent_ping_pong_track_buffer, request.recurrent_next_track_idx = slots, 0
                request.recurrent_last_track_seqlen = None
        return rows

    def alloc_recurrent_slot(self, dp_rank: int = 0) -> int | None:
        """A free slot, or None."""
        slots = self.recurrent_free_slots[dp_rank]
        return slots.pop() if slots else None  # used again at once

    def free_recurrent_slot(self, slot: int, dp_rank: int = 0) -> None:
        """Take a slot back."""
        where = f"state {slot} of rank {dp_rank}"
        assert isinstance(slot, int | np.integer), f"{where} must be a whole number"
        assert 1 <= slot <= self.slots_per_rank, f"{where} is freed, but there is none"
        assert slot not in self.recurrent_free_slots[dp_rank], f"{where} is freed, but it is free already"
        self.recurrent_free_slots[dp_rank].append(int(slot))

    def recurrent_available_size(self, dp_rank: int = 0) -> int:
        """Free slots of a rank."""
        return len(self.recurrent_free_slots[dp_rank])

    def get_recurrent_ping_pong_other_idx(self, next_idx: int) -> int:
        """The place of the snapshot before the one that comes to `next_idx`."""
        return (next_idx + 1) % self.ping_pong_slots

    def get_recurrent_ping_pong_keep_idx(self, req: Request) -> int:
        """The place of the last snapshot of a request."""
        assert req.recurrent_next_track_idx is not None, f"{req} has no snapshots"
        return self.get_recurrent_ping_pong_other_idx(req.recurrent_next_track_idx)

    def set_recurrent_ping_pong_slot(self, req: Request, idx: int, slot: int) -> None:
        """Give a request another slot for a snapshot; 0: none."""
        assert req.recurrent_ping_pong_track_buffer is not None, f"{req} has no snapshots"
        req.recurrent_ping_pong_track_buffer[idx] = int(slot)

    def commit_to_tree(self, req: Request) -> None:
        """The tree has the state of a request from now on."""
        assert req.recurrent_pool_idx is not None, f"{req} has no state to give away"
        req.recurrent_pool_idx = None

    def states_of(self, req: Request) -> list[int]:
        """The slots that a request has."""
        return [slot for slot in (req.recurrent_pool_idx, *(req.recurrent_ping_pong_track_buffer or ())) if slot]

    def count_request_owned_recurrent_slots(self, live_reqs: list[Request], dp_rank: int = 0) -> int:
        """The slots that requests of a rank have."""
        return sum(len(self.states_of(each)) for each in live_reqs if each.rank == dp_rank)

    def free(self, request: Request) -> None:
        """Take the row and the states back."""
        for slot in self.states_of(request):
            self.free_recurrent_slot(slot, request.rank)
        request.recurrent_pool_idx = request.recurrent_ping_pong_track_buffer = None
        request.recurrent_next_track_idx = request.recurrent_last_track_seqlen = None
        super().free(request)

    def clear(self) -> None:
        """Take all rows and states back."""
        super().clear()
        self._clear_states()
