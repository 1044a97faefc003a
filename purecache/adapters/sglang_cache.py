"""The prefix cache for the scheduler of sglang (0.5.14), in the shape of its `BasePrefixCache`."""

import importlib
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from purecache.adapters.nodes import TreeNode
from purecache.adapters.scheduler_cache import EvictResult, InsertResult, LockResult, SchedulerCache
from purecache.adapters.sglang_jax_cache import USED
from purecache.adapters.slot_cache import Owner
from purecache.adapters.slots import SlotAllocator
from purecache.answers import Receipt
from purecache.cache import PrefixCache
from purecache.driver import Record
from purecache.state import CacheConfig

FEWEST_LOCKS = 4096
"""Locks that there is room for in a small server."""


class MatchResult(NamedTuple):
    """Answer to `match_prefix`, with sglang's fields."""

    device_indices: Any
    """torch.int64[n] on the allocator's device: slots of the prefix; the caller's own."""
    last_device_node: TreeNode
    last_host_node: TreeNode
    best_match_node: TreeNode
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    mamba_host_hit_length: int = 0
    mamba_branching_seqlen: int | None = None
    cache_protected_len: int | None = None


class UnlockResult(int):
    """Answer to `dec_lock_ref`: tokens that became evictable. An int, and an object with sglang's field."""

    @property
    def delta(self) -> int:
        """The same number."""
        return int(self)


class SglangCache(SchedulerCache):
    """purecache as sglang's prefix cache: for its scheduler, schedule policy and schedule batch, unchanged.

    Slots come and go as torch.int64 tensors on the allocator's device; slot or page 0 is padding and never in the
    tree. The tree itself is on the CPU, so reading a request's row waits for the device.

    sglang gives a lock back by its node and keeps no receipt, so none leaves this cache: each node has as many locks as
    were taken of it, all alike, and none is kept of the root.

    Streaming sessions are sglang's own wrapper, which `create_tree_cache` puts around a cache that does not support
    them: the rest of that scheduler counts on it (sessions keep their rows, speculation is cut back). It asks of this
    cache one lock of a node per session, given back by the node when the session ends.
    """

    metrics_collector: Any = None
    """sglang's collector of eviction metrics, or None."""

    def __init__(self, params: Any, *, check_laws: bool = False, record: Record | None = None) -> None:
        """params: sglang's `CacheInitParams`. check_laws, record: as for `PrefixCache`.

        Raises ImportError without torch, ValueError for another page size than the allocator's, ConfigError for an
        unknown eviction policy.
        """
        allocator, rows = params.token_to_kv_pool_allocator, params.req_to_token_pool
        if allocator.page_size != params.page_size:
            raise ValueError(f"the allocator's pages have {allocator.page_size} tokens, not {params.page_size}")
        self._torch = importlib.import_module("torch")
        self.device = allocator.device
        self.disable_finished_insert = bool(params.disable_finished_insert)
        config = CacheConfig(
            page_size=params.page_size,
            device_pages=allocator.size // params.page_size + 1,
            policy=params.eviction_policy.lower(),
            bigrams=bool(params.is_eagle),
            # A lock per row, and those that the scheduler holds while it thinks.
            max_receipts=max(FEWEST_LOCKS, 2 * len(rows.req_to_token)),
            external_pages=True,
            seed=secrets.randbits(62),
        )
        cache = PrefixCache(config, check_laws=check_laws, record=record)
        super().__init__(cache, rows, allocator, disable=bool(params.disable))
        if params.enable_metrics:
            self.init_metrics_collector()

    # ---- what this shape differs in ------------------------------------------------------------------------------

    def _allocator(self) -> SlotAllocator:
        return _Slots(self.token_to_kv_pool_allocator, self._out)

    def _row(self, req: Any, length: int) -> np.ndarray:
        return _array(self.req_to_token_pool.req_to_token[req.req_pool_idx, :length])

    def _write_row(self, req: Any, first: int, slots: np.ndarray) -> None:
        self.req_to_token_pool.write((req.req_pool_idx, slice(first, first + len(slots))), self._out(slots))

    def _out(self, slots: np.ndarray) -> Any:
        return self._torch.from_numpy(slots.astype(np.int64)).to(self.device)

    def _tokens(self, key: Any) -> Any:
        # The scheduler gives all tokens of a request, and the length that counts as the key's limit.
        return key.raw_token_ids() if hasattr(key, "raw_token_ids") else super()._tokens(key)

    def _fill_ids(self, req: Any) -> Any:
        return req.get_fill_ids()

    def _rank(self, holder: Any) -> int | None:
        return 0  # each data-parallel rank has a scheduler, and a cache, of its own

    # ---- requests ------------------------------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> MatchResult:
        """The longest cached prefix of `params.key`, a RadixKey with raw tokens; it becomes the youngest."""
        found = self._found(params.key, params.req)
        return MatchResult(self._out(found.slots), found.device_node, found.node, found.node, found.host_length)

    def insert(self, params: Any) -> InsertResult:
        """Give slots to the tree; duplicates are still the caller's. Without a value, the tokens are the slots."""
        if self.disable:
            return InsertResult(0)
        tokens = self._memo.of(self._tokens(params.key))
        row = tokens if params.value is None else _array(params.value)
        owner = Owner(params.key.extra_key, 0, params.priority or 0)
        return InsertResult(self.slots.insert(tokens, row, owner)[0])

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **_: Any) -> None:
        """Take over what a running request has computed, and point it to the tree's slots.

        `chunked` changes nothing: what a request computed itself is never counted as a use by it.
        """
        super().cache_unfinished_req(req)
        receipt, req.swa_uuid_for_lock = req.swa_uuid_for_lock, None
        if receipt is not None and req.last_node == self.root_node:
            self.slots.unlock(receipt)

    def cache_finished_req(self, req: Any, is_insert: bool = True, **_: Any) -> None:
        """End a request: the tree takes over what it computed (or not: `is_insert`), the rest is freed; unlocks it.

        Raises AssertionError (the request's own) for one that was ended before.
        """
        super().cache_finished_req(req, is_insert and not self.disable_finished_insert)

    # ---- locks and room ------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode | None) -> LockResult:
        """Protect a prefix until `dec_lock_ref` of the same node."""
        delta = 0 if node == self.root_node else super().inc_lock_ref(node).delta
        return LockResult(delta, None)

    def dec_lock_ref(self, node: TreeNode | None, params: Any = None, **_: Any) -> UnlockResult:
        """Undo one lock of a node, whatever `params` says. Does nothing for a node that has none, as the root."""
        return UnlockResult(super().dec_lock_ref(node))

    def _receipt(self, req: Any) -> Receipt | None:
        return None if req.last_node is None else self.slots.receipt_of(req.last_node)

    def evict(self, params: Any) -> EvictResult:
        """Free at least `params.num_tokens` slots in the allocator, as far as there are evictable ones; whole pages."""
        started = time.perf_counter()
        result = super().evict(params)
        if self.metrics_collector is not None and result.num_tokens_evicted:
            self.metrics_collector.observe_eviction_duration(time.perf_counter() - started)
            self.metrics_collector.increment_eviction_num_tokens(result.num_tokens_evicted)
        return result

    def init_load_back(self, params: Any) -> tuple[Any, TreeNode]:
        """No slots, and the node: no prefix is on host."""
        return self._out(self._load_back(params.best_match_node, params.host_hit_length)), params.best_match_node

    def warm(self, tokens: int, progress: Callable[[int, int, str], None] | None = None) -> int:
        """Compile all that prompts of up to so many tokens need; returns the number of new programs."""
        return self.cache.warm(tokens, USED, progress)

    # ---- what the scheduler asks besides -------------------------------------------------------------------------

    def init_metrics_collector(self) -> None:
        """Report evictions to sglang's metrics, by its own means. Raises ImportError without sglang."""
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache").BasePrefixCache
        base.init_metrics_collector(self)

    def available_and_evictable_str(self) -> str:
        """One line about the room there is, for messages."""
        available, evictable = self.token_to_kv_pool_allocator.available_size(), self.evictable_size()
        return f"Available tokens: {available + evictable} ({available} free + {evictable} evictable)\n"

    def supports_fast_match_prefix(self) -> bool:
        """False: no match of every waiting request only to report its length."""
        return False

    def release_session(self, session_id: str) -> None:
        """Nothing: this cache holds no sessions."""

    def session_held_tokens(self, active_pool_idxs: set[int] | None = None) -> int:
        """0: this cache holds no sessions."""
        return 0

    session_held_full_tokens = session_held_swa_tokens = session_held_tokens
    session_held_req_count = session_held_mamba_slots = session_held_tokens


class _Slots:
    """An allocator of sglang with NumPy arrays; it has one rank."""

    def __init__(self, allocator: Any, out: Any) -> None:
        self._allocator, self._out = allocator, out

    def alloc(self, need_size: int, dp_rank: int = 0) -> np.ndarray | None:
        slots = self._allocator.alloc(need_size)
        return None if slots is None else _array(slots)

    def free(self, free_index: np.ndarray, dp_rank: int = 0) -> None:
        self._allocator.free(self._out(free_index))

    def available_size(self, dp_rank: int = 0) -> int:
        return self._allocator.available_size()


def _array(slots: Any) -> np.ndarray:
    """int32[n]: a copy of a tensor of slots."""
    return slots.cpu().numpy().astype(np.int32)
