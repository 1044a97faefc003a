"""sglang's prefix caches as peers: the Rust core by itself, the unified cache on it, and the Python tree.

Keys are `array('q')`, as sglang's scheduler has them, and values a tensor of slots of their own; both are made outside
of the time that counts.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.peers.sglang_modules import sglang_modules
from benchmarks.peers.workload import buffer


@dataclass(slots=True)
class SglangRequest:
    """What a request carries from one step to the next."""

    prompt: Any
    whole: Any
    values: Any
    need: int
    """Tokens of the pool for all of it."""
    matched: int = 0
    node: Any = None
    lock: Any = None


class Counted:
    """An allocator that counts tokens and has no memory: for the caches that free what they evict by themselves."""

    device = "cpu"

    def __init__(self, capacity: int) -> None:
        self.left = capacity

    def available_size(self) -> int:
        """Tokens that are free."""
        return self.left

    def free_segment(self, indices: Any, start_pos: int = 0) -> None:
        """Take slots back."""
        self.left += len(indices)

    free = free_segment


class SlotPeer:
    """What caches have in common whose slots an allocator beside them has, which is counted here."""

    def __init__(self, page: int, pool: Counted) -> None:
        self._page, self.pool = page, pool

    def prepare(self, tokens: np.ndarray, prompt: int) -> SglangRequest:
        """Keys of whole pages, and slots."""
        page = self._page
        usable, whole = (prompt - 1) // page * page, len(tokens) // page * page
        keys = self.key(tokens[:usable]), self.key(tokens[:whole])
        return SglangRequest(*keys, self.values(whole), -(-len(tokens) // page) * page)

    def key(self, tokens: np.ndarray) -> Any:
        """The form of a key."""
        raise NotImplementedError

    def values(self, tokens: int) -> Any:
        """So many slots."""
        raise NotImplementedError

    def room(self, request: SglangRequest) -> None:
        """Evict what is short, then take it."""
        wanted = request.need - request.matched
        if wanted > self.pool.left:
            self.evict(wanted - self.pool.left)
        self.pool.left -= wanted

    def evict(self, tokens: int) -> None:
        """By the cache itself."""
        raise NotImplementedError

    def back(self, request: SglangRequest, there: int) -> None:
        """Give back the begun page, and slots of what was `there` when it was inserted."""
        self.pool.left += request.need - len(request.values) + max(there - request.matched, 0)

    def unused(self) -> int:
        """Tokens that are free."""
        return self.pool.left


class SglangPeer(SlotPeer):
    """What sglang's caches have in common."""

    form = "array('q')"

    def __init__(self, page: int, capacity: int) -> None:
        self.parts = sglang_modules()
        super().__init__(page, Counted(capacity // page * page))

    def key(self, tokens: np.ndarray) -> Any:
        """`RadixKey` over the buffer of sglang's scheduler."""
        return self.parts.radix.RadixKey(buffer(tokens))

    def values(self, tokens: int) -> Any:
        """A tensor."""
        return self.parts.torch.arange(tokens)


class RustCore(SglangPeer):
    """`RustUnifiedTreeCoreBinding`, called directly."""

    def __init__(self, page: int, capacity: int) -> None:
        super().__init__(page, capacity)
        bindings = self._bindings = self.parts.bindings
        settings = bindings.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=page, device="cpu")
        self._core = bindings.RustUnifiedTreeCoreBinding(settings, [0])
        self._root = self._core.root_node_handle()

    def key(self, tokens: np.ndarray) -> Any:
        """The buffer itself."""
        return buffer(tokens)

    def match(self, request: SglangRequest) -> int:
        """`match_prefix`."""
        found = self._core.match_prefix(self._bindings.MatchParamsBinding(request.prompt))
        request.matched, request.node = found.device_prefix_len, found.last_device_node_id
        return request.matched

    def slots(self, request: SglangRequest) -> None:
        """`collect_full_device_indices`."""
        self._core.collect_full_device_indices(request.node, self._root)

    def lock(self, request: SglangRequest) -> None:
        """`inc_lock_ref`."""
        request.lock = self._core.inc_lock_ref(request.node, [])

    def evict(self, tokens: int) -> None:
        """The steps of an eviction, leaf by leaf."""
        core, freed = self._core, 0
        core.evict_device_start(0, tokens)
        while True:
            step = core.evict_device_next_node(0, {0: freed})
            freed += self._freed(step)
            if step.node_id is None:
                if not step.made_progress:
                    break
            else:
                freed += self._freed(core.evict_device_leaf(step.node_id))
        core.evict_device_end(0)
        self.pool.left += freed

    @staticmethod
    def _freed(step: Any) -> int:
        return sum(len(slots) for each in step.new_device_frees.values() for slots in each)

    def insert(self, request: SglangRequest) -> None:
        """`insert`, with the slots of duplicates counted by hand."""
        parameters = self._bindings.InsertParamsBinding(request.whole, request.values, prev_prefix_len=request.matched)
        self.back(request, self._core.insert(parameters).prefix_len)

    def unlock(self, request: SglangRequest) -> None:
        """`dec_lock_ref` with the receipt."""
        receipt = request.lock
        parameters = self._bindings.DecLockRefParamsBinding(
            receipt.node_id, receipt.skipped_lock_components, component_lock_uuids=receipt.component_lock_uuids
        )
        self._core.dec_lock_ref(request.node, parameters)

    def cached(self) -> int:
        """Tokens of the tree."""
        return self._core.full_evictable_size() + self._core.full_protected_size()


class PublicCache(SglangPeer):
    """A cache of sglang through its public methods."""

    frees_duplicates = False
    """Whether an insert frees the slots of duplicates by itself."""

    def __init__(self, page: int, capacity: int) -> None:
        super().__init__(page, capacity)
        self._cache = self.make(self.parts, page)

    def make(self, parts: SimpleNamespace, page: int) -> Any:
        """The cache."""
        raise NotImplementedError

    def settings(self, parts: SimpleNamespace, page: int, **more: Any) -> Any:
        """`CacheInitParams`."""
        pool: Any = self.pool
        return parts.params.CacheInitParams(False, None, pool, page, **more)

    def match(self, request: SglangRequest) -> int:
        """`match_prefix`."""
        found = self._cache.match_prefix(self.parts.base.MatchPrefixParams(key=request.prompt))
        request.matched, request.node = found.device_prefix_len, found.last_device_node
        return request.matched

    def slots(self, request: SglangRequest) -> None:
        """`path_device_indices`."""
        self._cache.path_device_indices(request.node)

    def lock(self, request: SglangRequest) -> None:
        """`lock`."""
        request.lock = self._cache.lock(request.node)

    def evict(self, tokens: int) -> None:
        """`evict`, which tells the allocator."""
        self._cache.evict(self.parts.base.EvictParams(num_tokens=tokens))

    def insert(self, request: SglangRequest) -> None:
        """`insert`."""
        parameters = self.parts.base.InsertParams(
            key=request.whole, value=request.values, prev_prefix_len=request.matched
        )
        found = self._cache.insert(parameters)
        self.back(request, 0 if self.frees_duplicates else found.prefix_len)

    def unlock(self, request: SglangRequest) -> None:
        """`unlock`."""
        self._cache.unlock(request.lock)

    def cached(self) -> int:
        """Tokens of the tree."""
        return self._cache.evictable_size() + self._cache.protected_size()


class Radix(PublicCache):
    """`RadixCache`."""

    def make(self, parts: SimpleNamespace, page: int) -> Any:
        """The Python tree."""
        return parts.radix.RadixCache(self.settings(parts, page))


class UnifiedRust(PublicCache):
    """`UnifiedRadixCache(tree_core_backend="rust")`."""

    frees_duplicates = True
    backend = "rust"

    def make(self, parts: SimpleNamespace, page: int) -> Any:
        """The unified cache with full attention alone."""
        components = (parts.components.ComponentType.FULL,)
        settings = self.settings(parts, page, tree_components=components, tree_core_backend=self.backend)
        return parts.unified.UnifiedRadixCache(settings)


class UnifiedPython(UnifiedRust):
    """`UnifiedRadixCache(tree_core_backend="python")`."""

    backend = "python"
