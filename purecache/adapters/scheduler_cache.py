"""The prefix cache that sglang-shaped schedulers drive: whole request lives, in terms of their request objects.

What the shapes of the contract share stands here; `sglang_jax` and `sglang` say what differs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from purecache.adapters import attachment
from purecache.adapters.nodes import TreeNode
from purecache.adapters.prefetches import Prefetches
from purecache.adapters.slot_cache import Found, Owner, SlotCache
from purecache.adapters.slots import SlotAllocator
from purecache.adapters.tails import Tail
from purecache.adapters.tokens import TokenMemo, TokenRow
from purecache.answers import Receipt
from purecache.cache import PrefixCache
from purecache.logs import log

RECORD, RECEIPT_FIELD = "_purecache_record", "swa_uuid_for_lock"


@dataclass(eq=False)
class Record:
    """What the cache remembers of a request, on the request itself."""

    tokens: TokenRow = field(default_factory=TokenRow)
    counted: int = 0
    """Tokens at its front that it gave to the tree itself: passing over them again is no use of them."""
    ended: bool = False
    """Whether it was finished and has not started again."""
    asked: bool = False
    """Whether storage was asked for the rest of its prompt."""
    replacement: int | None = None
    """A free slot that takes the place of a recurrent state which it is about to give to the tree."""


class LockResult:
    """Answer to `inc_lock_ref`, and what `dec_lock_ref` takes back."""

    __slots__ = ("delta", "skip_lock_node_ids", "swa_uuid_for_lock")

    def __init__(self, delta: int, receipt: Receipt | None) -> None:
        self.delta = delta
        """Tokens by which the evictable size changed: negative for a lock."""
        self.swa_uuid_for_lock = receipt
        """The receipt, under the name of the field in which schedulers keep it with the request."""
        self.skip_lock_node_ids: dict[int, bool] = {}

    def to_dec_params(self) -> "LockResult":
        """What to give to `dec_lock_ref`."""
        return self


@dataclass
class EvictResult:
    """Answer to `evict`."""

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    mamba_num_evicted: int = 0
    recurrent_num_evicted: int = 0


class InsertResult(int):
    """Answer to `insert`: how many tokens were on device before. An int for some callers, an object for others."""

    recurrent_exist = recurrent_committed = False
    """Whether the tree had a recurrent state there already, and whether it took the one it was given."""

    @property
    def prefix_len(self) -> int:
        """The same number."""
        return int(self)


def _name_of(req: Any) -> str:
    """What log lines call a request: nothing that a line is for may depend on it."""
    return str(getattr(req, "rid", ""))


class SchedulerCache(ABC):
    """A prefix cache with the methods and attributes that schedulers of the sglang family use.

    It owns a `PrefixCache`; the scheduler owns the slots of requests, in its allocator and its table of rows. All
    calls come from the scheduler's thread. With `disable`, nothing is cached and slots only go back.
    """

    _donation_barrier: Callable[[], None] | None = None
    """Set by a scheduler whose steps are dispatched by another thread: waits until the pool is not being donated."""

    def __init__(
        self,
        cache: PrefixCache,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        *,
        disable: bool = False,
    ) -> None:
        """Raises ValueError for a cache that was not made with `external_pages`."""
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.disable = disable
        self.cache = cache
        self.page_size = cache.config.page_size
        self.is_eagle = cache.config.bigrams
        self.slots = SlotCache(cache, self._allocator(), self._tails())
        self.prefetches = Prefetches(cache)
        self.shelf: attachment.Shelf | None = None
        """Set by who makes the cache, if storage may be attached to it."""
        self.shown = ExitStack()
        """Ends what was started to show this cache to others (`Showing.begin`)."""
        self._memo = TokenMemo()
        self._math = self.slots.math

    # ---- what the shapes differ in -------------------------------------------------------------------------------

    def _allocator(self) -> SlotAllocator:
        """The scheduler's allocator, with NumPy arrays and ranks."""
        return self.token_to_kv_pool_allocator

    def _tails(self) -> Mapping[str, Tail]:
        """The scheduler's side of the tail pools of the cache."""
        return {}

    @abstractmethod
    def _row(self, req: Any, length: int) -> np.ndarray:
        """int32[length]: a copy of the slots of a request."""

    @abstractmethod
    def _write_row(self, req: Any, first: int, slots: np.ndarray) -> None:
        """Write slots from token `first` on."""

    @abstractmethod
    def _out(self, slots: np.ndarray) -> Any:
        """Slots as this scheduler's kind of array."""

    def _states(self, req: Any, length: int, *, ended: bool) -> dict[str, np.ndarray]:
        """What a request has for tail pools whose values don't go by its slots, after `length` tokens: by page."""
        return {}

    def _states_taken(
        self, req: Any, offered: dict[str, np.ndarray], held: dict[str, np.ndarray], *, ended: bool
    ) -> None:
        """The tree has `held` now of what was `offered`."""
        return  # nothing was

    def _tokens(self, key: Any) -> Any:
        """The tokens of a key, or of a plain list of tokens; without those beyond the key's limit, if it has one."""
        return getattr(key, "token_ids", key)

    def _fill_ids(self, req: Any) -> Any:
        """The tokens of a running request that have KV."""
        return req.fill_ids

    def _rank(self, holder: Any) -> int | None:
        """The data-parallel rank of a request or key."""
        return getattr(holder, "dp_rank", None)

    def _owner(self, holder: Any) -> Owner:
        """Whose tokens a request or key has."""
        return Owner(getattr(holder, "extra_key", None), self._rank(holder), getattr(holder, "priority", None) or 0)

    # ---- prompts -------------------------------------------------------------------------------------------------

    @property
    def root_node(self) -> TreeNode:
        """The root, whose `children` policies may walk."""
        return self.slots.view.root

    @property
    def hicache_enabled(self) -> bool:
        """Whether there is host memory below the device."""
        return self.cache.config.host_pages > 0

    def _found(self, key: Any, req: Any = None) -> Found:
        """What the cache has of a key (or a plain list of tokens)."""
        tokens = self._tokens(key)
        if self.disable or not len(tokens):
            return Found(np.zeros(0, np.int32), self.root_node, self.root_node, 0, 0, {})
        owner = self._owner(key)
        row = self._memo.of(tokens) if req is None else record_of(req).tokens.of(tokens)
        if req is not None:
            record_of(req).ended = False
            self.ask_storage(req, tokens)
        found = self.slots.match(row, owner, remember=self.prefetches.tier is not None)
        if req is not None:
            log("matched", _name_of(req), prompt_tokens=len(row), device=len(found.slots), host=found.host_length)
        return found

    def ask_storage(self, req: Any, tokens: Sequence[int]) -> None:
        """Start the prefetch of a request's prompt, once. Does nothing without storage."""
        record = record_of(req)
        if self.prefetches.tier is not None and not record.asked and not self.disable:
            record.asked = True
            self.prefetches.start(str(req.rid), record.tokens.of(tokens), self._owner(req))

    def insert(self, params: Any) -> InsertResult:
        """Give slots to the tree; duplicates are still the caller's. Without a value, the tokens are the slots."""
        if self.disable:
            return InsertResult(0)
        key, value = params.key, params.value
        tokens = self._memo.of(self._tokens(key))
        row = tokens if value is None else np.asarray(value, np.int32)
        return InsertResult(self.slots.insert(tokens, row, self._owner(key))[0])

    def cache_unfinished_req(self, req: Any, **_: Any) -> None:
        """Take over what a running request has computed, and point it to the tree's slots."""
        tokens = self._fill_ids(req)
        row = self._row(req, len(tokens))
        if self.disable:
            req.prefix_indices = self._out(row)
            return
        record, owner = record_of(req), self._owner(req)
        record.ended = False
        receipt = self._receipt(req) or self.slots.lock(self.root_node)
        req.swa_uuid_for_lock = receipt
        offered = self._states(req, len(tokens), ended=False)
        kept = self.slots.keep(record.tokens.of(tokens), row, receipt, owner, record.counted, offered)
        self._states_taken(req, offered, kept.values, ended=False)
        held = len(kept.slots)
        first = min(tree_part(req), held)
        self._write_row(req, first, kept.slots[first:])
        req.last_matched_prefix_len = req.cache_protected_len = record.counted = held
        req.prefix_indices = self._out(np.concatenate([kept.slots, row[held:]]))
        req.last_node = kept.node

    def cache_finished_req(self, req: Any, is_insert: bool = True, **_: Any) -> None:
        """End a request: the tree takes over what it computed (or not: `is_insert`), the rest is freed; unlocks it."""
        length = req.pop_committed_kv_cache()
        owner, receipt = self._owner(req), self._receipt(req)
        row = self._row(req, length) if length else np.zeros(0, np.int32)
        if self.disable:
            self.slots.drop(row, None, owner)
            return
        record = record_of(req)
        req.swa_uuid_for_lock, record.ended = None, True
        if is_insert and length:
            tokens = record.tokens.of((req.origin_input_ids + req.output_ids)[:length])
            # The state of a request that was cut short is not that of its last token.
            offered = self._states(req, length, ended=True) if len(tokens) == length else {}
            held = self.slots.finish(tokens, row, receipt, owner, record.counted, offered)
            self._states_taken(req, offered, held, ended=True)
        else:
            self.slots.drop(row[tree_part(req) :], receipt, owner)
        log("finished", _name_of(req), tokens=length, kept=bool(is_insert and length))
        record.counted = 0

    def _receipt(self, req: Any) -> Receipt | None:
        """The lock of a request. Locks of one node are alike: if its own was undone for another, any will do."""
        receipt = getattr(req, RECEIPT_FIELD, None)
        if receipt is None and hasattr(req, RECEIPT_FIELD):
            return None  # it was never locked
        if receipt is not None and self.slots.locks(receipt, req.last_node):
            return receipt
        if record_of(req).ended or req.last_node is None or req.last_node == self.root_node:
            return None
        return self.slots.receipt_of(req.last_node)

    # ---- locks and room ------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode | None) -> LockResult:
        """Protect a prefix; the result, or the receipt in it, goes to `dec_lock_ref` once."""
        if self.disable or node is None:
            return LockResult(0, None)
        before = self.slots.evictable(node.rank or 0)
        receipt = self.slots.lock(node)
        return LockResult(self.slots.evictable(node.rank or 0) - before, receipt)

    def dec_lock_ref(self, node: TreeNode | None, params: Any = None, **_: Any) -> int:
        """Undo one lock: that of the receipt in `params`, else the youngest of `node`. Returns the change of evictable
        tokens."""
        receipt = getattr(params, "swa_uuid_for_lock", None)
        if self.disable or node is None:
            return 0
        receipt = self.slots.receipt_of(node) if receipt is None else receipt
        if receipt is None:
            return 0
        before = self.slots.evictable(node.rank or 0)
        self.slots.unlock(receipt)
        return self.slots.evictable(node.rank or 0) - before

    def evict(self, params: Any) -> EvictResult:
        """Free at least `params.num_tokens` slots in the allocator, as far as there are evictable ones."""
        if self.disable or params.num_tokens <= 0:
            return EvictResult()
        return EvictResult(self.slots.evict(params.num_tokens, getattr(params, "dp_rank", 0)))

    def evictable_size(self, dp_rank: int = 0) -> int:
        """Tokens of a rank that eviction can free. O(1)."""
        return self.slots.evictable(dp_rank)

    def protected_size(self, dp_rank: int = 0) -> int:
        """Tokens of a rank that locks protect. O(1)."""
        return self.slots.protected(dp_rank)

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        """0: there is no window."""
        return 0

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        """0: there is no window."""
        return 0

    def total_size(self) -> int:
        """Tokens of all ranks that the tree holds on device."""
        ranks = range(self.cache.config.ranks)
        return sum(self.evictable_size(rank) + self.protected_size(rank) for rank in ranks)

    def reset(self) -> None:
        """Forget every prefix. The scheduler clears its allocator itself."""
        self.slots.reset()
        self.prefetches.reset()

    # ---- host memory and storage ---------------------------------------------------------------------------------

    def _load_back(self, node: TreeNode, host_length: int) -> np.ndarray:
        if self.disable or host_length <= 0 or node.length < host_length:
            return np.zeros(0, np.int32)
        return self.slots.load_back(node, host_length)

    def check_hicache_events(self) -> None:
        """Take note of copies that have ended, and move storage on. Never blocks."""
        self.cache.tick()

    flush_write_through_acks = check_hicache_events

    def ready_to_load_host_cache(self) -> int:
        """0: loads are dispatched when they are asked for."""
        return 0

    def take_events(self) -> list[Any]:
        """No events are recorded."""
        return []

    def prefetch_from_storage(
        self, req_id: str, last_host_node: TreeNode, new_input_tokens: Sequence[int], *_: Any
    ) -> None:
        """Ask storage for the tokens that follow a matched prefix."""
        known = last_host_node.prompt
        more = np.asarray(new_input_tokens, np.int32)
        if known is not None:
            tokens, namespace = np.concatenate([known[0][: last_host_node.length], more]), known[1]
            self.prefetches.start(str(req_id), tokens, Owner(namespace, last_host_node.rank))
        elif last_host_node == self.root_node:
            self.prefetches.start(str(req_id), more, Owner(None, 0))

    def check_prefetch_progress(self, req_id: str) -> bool:
        """Whether a request need not wait for storage (any longer)."""
        return self.prefetches.done(str(req_id))

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        """Tokens that came from storage for a request, once."""
        return self.prefetches.pop_loaded(str(req_id))

    def terminate_prefetch(self, req_id: str) -> None:
        """End the prefetch of a request now; what has landed stays."""
        self.prefetches.stop(str(req_id))

    def release_aborted_request(self, rid: str) -> None:
        """The request is gone: end its prefetch."""
        self.prefetches.forget(str(rid))

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Put a store under the cache, while nothing runs; whether it was done, and a sentence.

        storage_backend: as `open_store` takes it. See `purecache.adapters.attachment.attach`.
        """
        if hicache_write_policy not in (None, str(self.cache.config.write)):
            return False, f"the write policy is {self.cache.config.write}: it can't be changed while the server runs"
        extra, policy = storage_backend_extra_config_json, hicache_storage_prefetch_policy
        return attachment.attach(self.prefetches, self.shelf, storage_backend, extra, policy)

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Take the store off the cache; whether it was done, and a sentence. Nothing to do is done."""
        return attachment.detach(self.prefetches)

    def clear_storage_backend(self) -> bool:
        """Remove all objects of the store; whether there was one that could."""
        return attachment.clear(self.prefetches)

    # ---- what kind of cache this is ------------------------------------------------------------------------------

    def supports_swa(self) -> bool:
        """Whether sliding windows are cached."""
        return False

    def supports_mamba(self) -> bool:
        """Whether recurrent states are cached."""
        return False

    supports_recurrent = supports_mamba
    recurrent_extra_buffer_active = supports_mamba

    def supports_streaming_session(self) -> bool:
        """Sessions are a wrapper: `purecache.adapters.sessions`."""
        return False

    def is_chunk_cache(self) -> bool:
        """Whether nothing is cached between requests."""
        return self.disable

    def is_tree_cache(self) -> bool:
        """Whether prefixes are cached."""
        return not self.disable

    def sanity_check(self) -> None:
        """Raises AssertionError if the state breaks a law. Slow: for tests and debugging."""
        broken = self.cache.violations()
        if broken:
            raise AssertionError("; ".join(broken))

    def pretty_print(self) -> None:
        """Print the branches on device, and the sizes."""
        ranks = range(self.cache.config.ranks)
        _print_branches(self.root_node)
        print(f"total tokens: {self.total_size()}")
        print(f"evictable size per dp_rank: {[self.evictable_size(rank) for rank in ranks]}")
        print(f"protected size per dp_rank: {[self.protected_size(rank) for rank in ranks]}")


def record_of(req: Any) -> Record:
    """The record of a request, made at its first use."""
    record = getattr(req, RECORD, None)
    if record is None:
        record = Record()
        setattr(req, RECORD, record)
    return record


def tree_part(req: Any) -> int:
    """Tokens at the front of a request whose slots are the tree's: those that it locks.

    Not `cache_protected_len`, in which schedulers also count slots that were filled by another server.
    """
    node = req.last_node
    return node.length if isinstance(node, TreeNode) else int(req.cache_protected_len)


def _print_branches(root: TreeNode) -> None:
    waiting = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        print(f"{'  ' * depth}{node.node.number}")
        waiting.extend((child, depth + 1) for child in node.children.values())
