"""The prefix cache for the scheduler of sglang-jax, in the shape of its `BasePrefixCache`."""

import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from purecache.adapters.nodes import TreeNode
from purecache.adapters.scheduler_cache import SchedulerCache
from purecache.cache import PrefixCache
from purecache.driver import Record
from purecache.effects import Interpreter, Planes
from purecache.entries import of_pool
from purecache.programs import SMALLEST
from purecache.state import CacheConfig

USED = ("match", "peek", "insert", "checkpoint", "finish", "lock", "unlock", "allocate", "release", "reset")
"""Transitions that the scheduler's calls come to."""
USED_BY_HOST = ("begin_backup", "finish_backup", "begin_load_back", "finish_load_back")
"""Those of host memory."""
USED_OF_TAILS, USED_BY_HOST_OF_TAILS = ("allocate", "release"), ("finish_backup", "finish_load_back")
"""Likewise, of each tail pool."""


class MatchResult(NamedTuple):
    """Answer to `match_prefix`, with the fields of sglang-jax's and of upstream's that come after them."""

    device_indices: np.ndarray
    """int32[n]: slots of the part on device, local to the rank; the caller's own."""
    last_device_node: TreeNode
    last_host_node: TreeNode
    """Deepest usable node: what to load back."""
    best_match_node: TreeNode
    host_hit_length: int = 0
    """Tokens between the two."""
    recurrent_branching_seqlen: int | None = None
    cache_protected_len: int | None = None


class SglangJaxCache(SchedulerCache):
    """purecache as sglang-jax's prefix cache: for its scheduler, schedule policy and schedule batch, unchanged.

    Slots are int32 NumPy arrays, local to a data-parallel rank; slot or page 0 is padding and never in the tree.
    """

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        page_size: int = 1,
        disable: bool = False,
        is_eagle: bool = False,
        *,
        config: CacheConfig | None = None,
        make_plane: "Callable[[Callable[[], Any]], Interpreter | Planes | None] | None" = None,
        smallest: int = SMALLEST,
        check_laws: bool = False,
        record: Record | None = None,
        **_: Any,
    ) -> None:
        """The first five as for `RadixCache` there, whose other arguments are ignored.

        config: sizes and policies, with `external_pages`; by default those of the allocator, without host memory.
        make_plane: makes what copies pages, given a function that returns the scheduler's donation barrier or None.
        smallest, check_laws, record: as for `PrefixCache`.
        Raises ValueError for a configuration of other pages than the allocator's.
        """
        allocator = token_to_kv_pool_allocator
        if config is None:
            config = self._default_config(allocator, page_size, is_eagle)
        plane = make_plane(lambda: self._donation_barrier) if make_plane is not None else None
        cache = PrefixCache(config, plane, smallest=smallest, check_laws=check_laws, record=record)
        super().__init__(cache, req_to_token_pool, allocator, disable=disable)

    @staticmethod
    def _default_config(allocator: Any, page_size: int, is_eagle: bool) -> CacheConfig:
        """Sizes of an allocator, without host memory."""
        return CacheConfig(
            page_size=page_size,
            device_pages=allocator.size_per_rank // page_size + 1,
            ranks=allocator.dp_size,
            bigrams=is_eagle,
            external_pages=True,
            seed=secrets.randbits(62),
        )

    def _row(self, req: Any, length: int) -> np.ndarray:
        return self.req_to_token_pool.read(req.req_pool_idx, length).astype(np.int32, copy=False)

    def _write_row(self, req: Any, first: int, slots: np.ndarray) -> None:
        self.req_to_token_pool.write((req.req_pool_idx, slice(first, first + len(slots))), slots)

    def _out(self, slots: np.ndarray) -> np.ndarray:
        return slots

    def match_prefix(self, params: Any) -> MatchResult:
        """The longest usable prefix of `params.key` (a RadixKey or a list of tokens), which becomes the youngest."""
        found = self._found(params.key, getattr(params, "req", None))
        return MatchResult(found.slots, found.device_node, found.node, found.node, found.host_length)

    def init_load_back(
        self, last_host_node: TreeNode, host_hit_length: int, mem_quota: int | None = None
    ) -> tuple[np.ndarray, TreeNode, list[Any]]:
        """Bring the part of a match that only host has to the device: its slots, the node, and nothing left to do.

        All of it or nothing (no slots). `mem_quota` is what is free; what can be evicted counts as well, and both are
        known here. The copies have been dispatched when this returns, after the donation barrier.
        """
        slots = self._load_back(last_host_node, host_hit_length)
        return slots, last_host_node, []

    def finish_load_back(self, flush_plan: list[Any]) -> None:
        """Nothing: the copies were dispatched by `init_load_back`."""

    def precompile_hicache_transfers(self) -> None:
        """Compile the copies between device and host, which would otherwise hold up the first requests."""
        self.cache.warm(self.page_size, [*USED_BY_HOST, *self._of_tails(USED_BY_HOST_OF_TAILS)])

    def _of_tails(self, names: tuple[str, ...]) -> list[str]:
        """Programs of the tail pools."""
        return [of_pool(name, pool) for pool in range(1, self.cache.config.layout.pools) for name in names]

    def warm(self, tokens: int, progress: Callable[[int, int, str], None] | None = None) -> int:
        """Compile all that prompts of up to so many tokens need; returns the number of new programs."""
        names = [*USED, *self._of_tails(USED_OF_TAILS)]
        if self.hicache_enabled:
            names += [*USED_BY_HOST, *self._of_tails(USED_BY_HOST_OF_TAILS)]
        new = self.cache.warm(tokens, names, progress)
        return new + (self.prefetches.tier.warm(tokens) if self.prefetches.tier is not None else 0)

    def recurrent_evictable_size(self, dp_rank: int = 0) -> int:
        """0: there are no recurrent states."""
        return 0
