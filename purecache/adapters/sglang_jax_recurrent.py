"""The prefix cache for models of sglang-jax with recurrent layers, in the shape of its `UnifiedRadixCache`."""

from typing import Any

import numpy as np

from purecache.adapters.scheduler_cache import EvictResult, InsertResult, record_of
from purecache.adapters.sglang_jax_cache import MatchResult, SglangJaxCache
from purecache.adapters.state_tail import STATE, StateTail, state_config
from purecache.state import NONE, CacheConfig


class SglangJaxRecurrentCache(SglangJaxCache):
    """purecache for a scheduler whose requests have recurrent states too, in a `HybridReqToTokenPool`.

    A prefix is used where the state right behind it is known. The next forward copies that state into the request's own
    slot; until the request ends, its lock protects the state too.

    States come from requests that end, which give their own; with an extra buffer they are snapshots every
    `recurrent_track_interval` tokens, which running requests give too. In a model that guesses tokens ahead (EAGLE),
    the state of a request is not that of the tokens it is sure of: nothing is cached.
    """

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        page_size: int = 1,
        disable: bool = False,
        is_eagle: bool = False,
        *,
        enable_recurrent_extra_buffer: bool = False,
        recurrent_track_interval: int | None = None,
        config: CacheConfig | None = None,
        **more: Any,
    ) -> None:
        """The first five and the next two as for `UnifiedRadixCache` there.

        config: as for `SglangJaxCache`, with a pool named "state"; by default the sizes of the pools. more: other
        arguments of `SglangJaxCache`.
        Raises ValueError for a configuration without that pool, or for pages of several tokens without extra buffer.
        """
        if config is None:
            config = self._default_config(token_to_kv_pool_allocator, page_size, is_eagle)
            config = state_config(config, req_to_token_pool)
        if STATE not in config.pool_names:
            raise ValueError(f"the configuration has the pools {config.pool_names}: add one named {STATE!r}")
        self.enable_recurrent_extra_buffer = enable_recurrent_extra_buffer
        self.recurrent_track_interval = recurrent_track_interval
        if config.page_size > 1 and not self.recurrent_extra_buffer_active():
            raise ValueError(
                f"pages of {config.page_size} tokens need snapshots of recurrent states: enable_recurrent_extra_buffer"
                " and a recurrent_track_interval, or a page_size of 1"
            )
        super().__init__(
            req_to_token_pool, token_to_kv_pool_allocator, page_size, disable, is_eagle, config=config, **more
        )

    def _tails(self) -> dict[str, StateTail]:
        return {STATE: StateTail(self.req_to_token_pool)}

    # ---- prompts and requests ------------------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> MatchResult:
        """The longest usable prefix of `params.key`, which becomes the youngest.

        With `cow_recurrent`, `params.req` is told which state to copy. `recurrent_branching_seqlen`: how far the KV of
        full attention is known, if that is further: a state there would be worth having.
        """
        req = getattr(params, "req", None)
        found = self._found(params.key, req)
        length = len(found.slots)
        if length and getattr(params, "cow_recurrent", False) and req is not None:
            req.recurrent_cow_src_index = int(found.values[STATE][-1])
        step = self.recurrent_track_interval or self.page_size
        branching = found.full_length // step * step
        return MatchResult(
            found.slots,
            found.device_node,
            found.node,
            found.node,
            found.host_length,
            branching if branching > length else None,
        )

    def insert(self, params: Any) -> InsertResult:
        """Give slots to the tree, and the state `params.recurrent_value` int32[1] right behind the last of them.

        The answer says whether the tree took the state; if not, it is still the caller's, and so are duplicates.
        """
        if self.disable:
            return InsertResult(0)
        tokens = self._memo.of(self._tokens(params.key))
        slot = NONE if params.recurrent_value is None else int(params.recurrent_value[0])
        row = tokens if params.value is None else np.asarray(params.value, np.int32)
        offered = {} if slot == NONE else _at(len(tokens) // self.page_size, slot)
        before, held = self.slots.insert(tokens, row, self._owner(params.key), values=offered)
        result = InsertResult(before)
        if offered:
            trees = int(held[STATE][-1]) if len(held[STATE]) == len(offered[STATE]) else NONE
            result.recurrent_committed = trees == slot
            result.recurrent_exist = trees != NONE and not result.recurrent_committed
        return result

    def _states(self, req: Any, length: int, *, ended: bool) -> dict[str, np.ndarray]:
        """The state that a request gives after `length` tokens, at the page that it comes right behind."""
        if self.is_eagle or req.recurrent_pool_idx is None:
            return {}
        if not self.recurrent_extra_buffer_active():
            # A running request goes on to change its own state.
            return _at(length, req.recurrent_pool_idx) if ended else {}
        known = req.recurrent_last_track_seqlen
        if known is None or not 0 < known <= length:
            return {}
        if not ended:
            record_of(req).replacement = self._free_state(self._owner(req).rank or 0)
            if record_of(req).replacement is None:
                return {}  # it has no slot to spare, and keeps the snapshot for later
        keep = self.req_to_token_pool.get_recurrent_ping_pong_keep_idx(req)
        return _at(known // self.page_size, req.recurrent_ping_pong_track_buffer[keep])

    def _states_taken(
        self, req: Any, offered: dict[str, np.ndarray], held: dict[str, np.ndarray], *, ended: bool
    ) -> None:
        """Settle whose the state is that was offered."""
        if STATE not in offered:
            return
        place, rows = len(offered[STATE]) - 1, self.req_to_token_pool
        trees = int(held[STATE][place]) if place < len(held[STATE]) else NONE
        taken = trees == offered[STATE][place]
        if not self.recurrent_extra_buffer_active():
            if taken:
                rows.commit_to_tree(req)
            return
        keep = rows.get_recurrent_ping_pong_keep_idx(req)
        if ended:
            if taken:
                rows.set_recurrent_ping_pong_slot(req, keep, 0)
            return
        replacement, record_of(req).replacement = record_of(req).replacement, None
        if taken:
            rows.set_recurrent_ping_pong_slot(req, keep, replacement)
        else:
            rows.free_recurrent_slot(replacement, self._owner(req).rank or 0)
        if trees != NONE:
            req.recurrent_last_track_seqlen = None  # what the tree has need not be offered again

    def _free_state(self, rank: int) -> int | None:
        """A free slot for a state, if need be after evicting one; None if all are in use."""
        slot = self.req_to_token_pool.alloc_recurrent_slot(rank)
        if slot is None and self.slots.evict_values(1, rank, STATE):
            slot = self.req_to_token_pool.alloc_recurrent_slot(rank)
        return slot

    # ---- room ----------------------------------------------------------------------------------------------------

    def evict(self, params: Any) -> EvictResult:
        """Free at least `params.num_tokens` slots, and `params.recurrent_num` states, as far as there are some."""
        if self.disable:
            return EvictResult()
        rank, before = getattr(params, "dp_rank", 0), self._held_states(getattr(params, "dp_rank", 0))
        tokens = self.slots.evict(params.num_tokens, rank) if params.num_tokens > 0 else 0
        left = before - self._held_states(rank)
        wanted = getattr(params, "recurrent_num", 0)
        if left < wanted:
            left += self.slots.evict_values(wanted - left, rank, STATE)
        return EvictResult(tokens, recurrent_num_evicted=left)

    def _held_states(self, rank: int | None) -> int:
        ranks = range(self.cache.config.ranks) if rank is None else (rank,)
        return sum(self.recurrent_evictable_size(each) + self.recurrent_protected_size(each) for each in ranks)

    def recurrent_evictable_size(self, dp_rank: int = 0) -> int:
        """States of a rank in the tree that eviction can free. O(1)."""
        return self.cache.evictable_pages(dp_rank, STATE)

    def recurrent_protected_size(self, dp_rank: int = 0) -> int:
        """States of a rank in the tree that locks protect. O(1)."""
        return self.cache.protected_pages(dp_rank, STATE)

    def assert_recurrent_slot_ledger(self, dp_rank: int = 0, live_reqs: list[Any] | None = None) -> int:
        """How many states of a rank requests have. Raises AssertionError unless those, the tree's and the free ones
        are all there are; `live_reqs`: all requests that may have some."""
        rows = self.req_to_token_pool
        free, held = rows.recurrent_available_size(dp_rank), self._held_states(dp_rank)
        active = rows.slots_per_rank - free - held
        ledger = f"rank {dp_rank}: of {rows.slots_per_rank} states, {free} are free and {held} in the tree"
        if active < 0:
            raise AssertionError(ledger)
        if live_reqs is not None:
            owned = rows.count_request_owned_recurrent_slots(live_reqs, dp_rank)
            if owned != active:
                raise AssertionError(f"{ledger}, and requests have {owned}")
        return active

    def supports_mamba(self) -> bool:
        """Recurrent states are cached."""
        return True

    supports_recurrent = supports_mamba

    def recurrent_extra_buffer_active(self) -> bool:
        """Whether requests keep snapshots of their states."""
        return self.enable_recurrent_extra_buffer and self.recurrent_track_interval is not None


def _at(depth: int, slot: int) -> dict[str, np.ndarray]:
    """A state after `depth` pages."""
    values = np.full(depth, NONE, np.int32)
    values[-1:] = slot
    return {STATE: values} if depth else {}
