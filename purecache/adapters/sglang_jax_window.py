"""The prefix cache for models of sglang-jax with sliding windows, in the shape of its `SWARadixCache`."""

import itertools
from typing import Any

import numpy as np

from purecache.adapters.scheduler_cache import EvictResult, InsertResult, tree_part
from purecache.adapters.sglang_jax_cache import SglangJaxCache
from purecache.adapters.slots import SlotAllocator
from purecache.adapters.window_tail import WINDOW, WindowTail, window_config
from purecache.state import CacheConfig
from purecache.state.layout import Account, Tier
from purecache.state.pools import ANCHOR


class FullSlots:
    """The slots of full attention of an allocator of both pools. What is freed takes its window slots along."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator

    def alloc(self, need_size: int, dp_rank: int = 0) -> np.ndarray | None:
        """`need_size` slots (whole pages) without window slots, or None."""
        return self._allocator.full_attn_allocator.alloc(need_size, dp_rank=dp_rank)

    def free(self, free_index: np.ndarray, dp_rank: int = 0) -> None:
        """Take slots back, and the window slots that they are mapped to."""
        self._allocator.free(free_index, dp_rank=dp_rank)

    def available_size(self, dp_rank: int = 0) -> int:
        """Free slots of a rank."""
        return self._allocator.full_available_size(dp_rank=dp_rank)


class SglangJaxWindowCache(SglangJaxCache):
    """purecache for a scheduler with an allocator of two pools, `SWATokenToKVPoolAllocator`.

    A prefix is used where the last `sliding_window_size` tokens of it have window KV. Sizes are in tokens.
    """

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        sliding_window_size: int = 0,
        page_size: int = 1,
        disable: bool = False,
        *,
        config: CacheConfig | None = None,
        **more: Any,
    ) -> None:
        """The first five as for `SWARadixCache` there.

        config: as for `SglangJaxCache`, with a pool named "window"; by default the sizes of the allocator. more: other
        arguments of `SglangJaxCache`.
        Raises ValueError for a configuration without that pool.
        """
        allocator = token_to_kv_pool_allocator
        if config is None:
            pages = allocator.swa_attn_allocator.size_per_rank // page_size + 1
            config = window_config(self._default_config(allocator, page_size, False), pages, sliding_window_size)
        if WINDOW not in config.pool_names:
            raise ValueError(f"the configuration has the pools {config.pool_names}: add one named {WINDOW!r}")
        self.sliding_window_size = sliding_window_size
        self._both = allocator
        super().__init__(req_to_token_pool, allocator, page_size, disable, config=config, **more)

    def _allocator(self) -> SlotAllocator:
        return FullSlots(self._both)

    def _tails(self) -> dict[str, WindowTail]:
        return {WINDOW: WindowTail(self._both, self.page_size)}

    # ---- prompts and requests ------------------------------------------------------------------------------------

    def insert(self, params: Any) -> InsertResult:
        """Give slots to the tree, and free those that it did not take, but the first `prev_prefix_len` of them.

        The first `swa_evicted_seqlen` have no window slots any more. Without a value, the tokens are the slots.
        """
        if self.disable:
            return InsertResult(0)
        tokens, first, owner = self._memo.of(self._tokens(params.key)), params.prev_prefix_len, self._owner(params.key)
        row = tokens if params.value is None else np.asarray(params.value, np.int32)
        if params.swa_evicted_seqlen > first:
            self._both.free_swa(row[first : params.swa_evicted_seqlen], dp_rank=owner.rank or 0)
        return InsertResult(self.slots.insert(tokens, row, owner, take_from=first)[0])

    def evict_req_swa(self, req: Any, pre_len: int, dp_rank: int = 0) -> None:
        """Free a running request's own window slots that lie more than a window and a page before `pre_len`."""
        first = max(req.swa_evicted_seqlen, tree_part(req))
        last = (pre_len - self.sliding_window_size - self.page_size) // self.page_size * self.page_size
        if last > first:
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx, first:last]
            self._both.free_swa(row.copy(), dp_rank=dp_rank)
        req.swa_evicted_seqlen = max(first, last)

    # ---- room ----------------------------------------------------------------------------------------------------

    def evict(self, params: Any) -> EvictResult:
        """Free at least `params.num_tokens` slots and `params.swa_num_tokens` window slots, as far as there are some.

        Window slots that leave with others count.
        """
        if self.disable:
            return EvictResult()
        rank, window = getattr(params, "dp_rank", 0), params.swa_num_tokens
        before = self._window_slots(rank)
        full = self.slots.evict(params.num_tokens, rank) if params.num_tokens > 0 else 0
        left = before - self._window_slots(rank)
        if left < window:
            left += self.slots.evict_values(-(-(window - left) // self.page_size), rank, WINDOW) * self.page_size
        return EvictResult(full, left)

    def _window_slots(self, rank: int | None) -> int:
        """Window slots that the tree has."""
        ranks = range(self.cache.config.ranks) if rank is None else (rank,)
        return sum(self.swa_evictable_size(each) + self.swa_protected_size(each) for each in ranks)

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        """Tokens of full attention of a rank that eviction can free. O(1)."""
        return self.slots.evictable(dp_rank)

    def full_protected_size(self, dp_rank: int = 0) -> int:
        """Tokens of full attention of a rank that locks protect. O(1)."""
        return self.slots.protected(dp_rank)

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        """Window tokens of a rank that eviction can free. O(1)."""
        return self.cache.evictable_pages(dp_rank, WINDOW) * self.page_size

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        """Window tokens of a rank that locks protect. O(1)."""
        return self.cache.protected_pages(dp_rank, WINDOW) * self.page_size

    def evictable_size(self, dp_rank: int = 0) -> int:
        """The smaller of the two."""
        return min(self.full_evictable_size(dp_rank), self.swa_evictable_size(dp_rank))

    def total_size(self) -> tuple[int, int]:  # type: ignore[override]
        """Tokens of all ranks that the tree holds on device: of full attention, and of the window."""
        ranks = range(self.cache.config.ranks)
        full = sum(self.full_evictable_size(rank) + self.full_protected_size(rank) for rank in ranks)
        return full, self._window_slots(None)

    def sanity_check(self) -> None:
        """Raises AssertionError unless the pages of every rank and pool add up. Quick: schedulers ask whenever they are
        idle. `cache.violations()` checks all laws."""
        config = self.cache.config
        for rank, (pool, name) in itertools.product(range(config.ranks), enumerate((ANCHOR, WINDOW))):
            counts = {account: self.cache.pages(account, Tier.DEVICE, rank, name) for account in Account}
            if sum(counts.values()) != config.layout.capacity(Tier.DEVICE, pool) or min(counts.values()) < 0:
                raise AssertionError(f"rank {rank}, {name}: {counts} are not all device pages")

    def full_lru_list_evictable_size(self) -> int:
        """Tokens of full attention of all ranks that eviction can free."""
        return sum(self.full_evictable_size(rank) for rank in range(self.cache.config.ranks))

    def swa_lru_list_evictable_size(self) -> int:
        """Window tokens of all ranks that eviction can free."""
        return sum(self.swa_evictable_size(rank) for rank in range(self.cache.config.ranks))

    def supports_swa(self) -> bool:
        """Sliding windows are cached."""
        return True
