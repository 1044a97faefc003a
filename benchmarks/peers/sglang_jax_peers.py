"""sglang-jax's trees as peers, out of a checkout of its source. Keys are Python lists, as its scheduler has them."""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.peers import stubs
from benchmarks.peers.sglang_peers import Counted, SglangRequest, SlotPeer

SOURCE = "PURECACHE_SGLANG_JAX"
"""Environment variable with the checkout."""
PARTS = ("sgl_jax.srt.kernels", "sgl_jax.srt.layers", "sgl_jax.srt.models")
"""What runs on TPUs only."""


class JaxAllocator(Counted):
    """As sglang-jax calls it."""

    def free(self, indices: Any, dp_rank: int = 0) -> None:
        """Take slots back."""
        self.left += len(indices)


class JaxRadix(SlotPeer):
    """`RadixCache`."""

    form = "list"
    module, name = "radix_cache", "RadixCache"

    def __init__(self, page: int, capacity: int) -> None:
        self._parts = _modules()
        super().__init__(page, JaxAllocator(capacity // page * page))
        cache: Any = getattr(getattr(self._parts, self.module), self.name)
        self._cache = cache(None, self.pool, page_size=page)

    def key(self, tokens: np.ndarray) -> Any:
        """`RadixKey` over a list."""
        return self._parts.radix_cache.RadixKey(tokens.tolist())

    def values(self, tokens: int) -> Any:
        """An array."""
        return np.arange(tokens, dtype=np.int32)

    def match(self, request: SglangRequest) -> int:
        """`match_prefix`, which answers with the slots."""
        found = self._cache.match_prefix(self._parts.base.MatchPrefixParams(key=request.prompt))
        request.matched, request.node = len(found.device_indices), found.last_device_node
        return request.matched

    def slots(self, request: SglangRequest) -> None:
        """`match_prefix` has answered."""

    def lock(self, request: SglangRequest) -> None:
        """`inc_lock_ref`."""
        request.lock = self._cache.inc_lock_ref(request.node).to_dec_params()

    def evict(self, tokens: int) -> None:
        """`evict`, which tells the allocator."""
        self._cache.evict(self._parts.base.EvictParams(num_tokens=tokens, dp_rank=0))

    def insert(self, request: SglangRequest) -> None:
        """`insert`; the slots of duplicates and the begun page are given back."""
        found = self._cache.insert(self._parts.base.InsertParams(key=request.whole, value=request.values))
        there = found if isinstance(found, int) else found.prefix_len
        self.back(request, there)

    def unlock(self, request: SglangRequest) -> None:
        """`dec_lock_ref`."""
        self._cache.dec_lock_ref(request.node, request.lock)

    def cached(self) -> int:
        """Tokens of the tree."""
        return self._cache.evictable_size() + self._cache.protected_size()


class JaxUnified(JaxRadix):
    """`UnifiedRadixCache` with full attention alone."""

    module, name = "unified_radix_cache", "UnifiedRadixCache"


def _modules() -> SimpleNamespace:
    package = Path(os.environ[SOURCE]) / "python" / "sgl_jax"
    importlib.import_module("jax")
    sys.path.append(str(package.parent))
    stubs.install(("sgl_jax",), PARTS)
    stubs.bare_package("sgl_jax", package)
    names = {"base": "base_prefix_cache", "radix_cache": "radix_cache", "unified_radix_cache": "unified_radix_cache"}
    return SimpleNamespace(
        **{short: importlib.import_module(f"sgl_jax.srt.mem_cache.{name}") for short, name in names.items()}
    )
