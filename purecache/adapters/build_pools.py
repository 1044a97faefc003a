"""The pools of sglang-jax as purecache sees them, and the sizes and policies of a cache for them."""

from dataclasses import dataclass
from typing import Any, Literal

from purecache.adapters.build_arguments import get
from purecache.adapters.build_choice import UNSUPPORTED, Choice, Component, Place, UnsupportedError
from purecache.effects import Interpreter, PoolOwner
from purecache.state import CacheConfig

POOLS = {
    "SWAKVPool": UNSUPPORTED[Component.SWA],
    "HybridLinearKVPool": UNSUPPORTED[Component.MAMBA],
}
"""Pools that purecache can't take as they are, and why."""


@dataclass(frozen=True)
class DevicePool:
    """A pool of sglang-jax as purecache sees it: page p of rank r is index r * device_pages + p of every array."""

    arrays: dict[str, list[Any]]
    """jax.Array[ranks * device_pages, ...] per layer, under the names that the pool keeps them by."""
    page_size: int
    """Tokens."""
    device_pages: int
    """Per rank, with page 0, which is padding and never handed out."""
    ranks: int
    page_bytes: int
    """Of one page over all layers and all shards of its rank."""

    @classmethod
    def of(cls, allocator: Any) -> "DevicePool":
        """The pool behind an allocator of sglang-jax.

        Raises UnsupportedError for a pool that has pages of another kind, ValueError for sizes that don't fit together.
        """
        pool = allocator.get_kvcache()
        names = [base.__name__ for base in type(pool).__mro__]
        if reason := next((POOLS[name] for name in names if name in POOLS), None):
            raise UnsupportedError(f"{names[0]}: {reason}")
        if not {"MHATokenToKVPool", "MLATokenToKVPool"} & set(names):
            raise UnsupportedError(f"{names[0]} is not a pool that purecache knows: MHATokenToKVPool, MLATokenToKVPool")
        arrays = {"kv_buffer": list(pool.kv_buffer)}
        if indexer := getattr(pool, "indexer_key_buffer", None):
            arrays["indexer_key_buffer"] = list(indexer)
        page_size, ranks = int(allocator.page_size), int(allocator.dp_size)
        pages = allocator.size // page_size
        if allocator.size % page_size or pages % ranks:
            raise ValueError(f"{allocator.size} tokens are not whole pages of {page_size} on each of {ranks} ranks")
        leaves = [leaf for group in arrays.values() for leaf in group]
        total = pages + ranks
        if other := {leaf.shape[0] for leaf in leaves} - {total}:
            raise ValueError(f"the pool's arrays have {other} pages, expected {total}: {pages} and one per rank")
        return cls(arrays, page_size, total // ranks, ranks, sum(leaf.nbytes for leaf in leaves) // total)

    def interpreter(
        self,
        config: CacheConfig,
        owner: PoolOwner | None = None,
        host_form: Literal["slots", "arrays"] = "slots",
    ) -> Interpreter | None:
        """What copies the pages of this pool, `owner` keeping it; None without a host tier, where nothing is copied."""
        if not config.host_pages:
            return None
        return Interpreter(
            self.arrays,
            host_pages=config.host_pages,
            device_pages=self.device_pages,
            page_axis=0,
            ranks=self.ranks,
            host_form=host_form,
            owner=owner,
        )


def cache_config(arguments: Any, choice: Choice, pool: DevicePool, *, is_eagle: bool = False) -> CacheConfig:
    """The configuration of a cache that purecache stands behind; the server's allocator keeps the free pages.

    Host pages per rank come from `hicache_size` (GB of 10^9 bytes per rank, all its shards together) or else from
    `hicache_ratio` (tokens on host per token on device). `load_back_threshold` is 10 tokens unless `arguments` has it.
    Raises ValueError when the host tier has no room for a page, ConfigError for what CacheConfig can't take.
    """
    if not choice.ours:
        raise ValueError(f"{choice.kind} stays the server's own: there is nothing to configure")
    host_pages = 0
    if Place.HOST in choice.places:
        if gigabytes := get(arguments, "hicache_size", 0):
            host_pages = int(gigabytes * 10**9) // pool.page_bytes
        else:
            tokens = int(get(arguments, "hicache_ratio", 2.0) * (pool.device_pages - 1) * pool.page_size)
            host_pages = tokens // pool.page_size
        if not host_pages:
            raise ValueError(f"the host tier has no room for a page of {pool.page_bytes} bytes: raise its size")
    threshold = get(arguments, "hicache_write_through_threshold", 1)
    return CacheConfig(
        page_size=pool.page_size,
        device_pages=pool.device_pages,
        host_pages=host_pages,
        ranks=pool.ranks,
        policy=get(arguments, "radix_eviction_policy", "lru"),
        write=get(arguments, "hicache_write_policy", "write_through"),
        load_back_threshold=get(arguments, "load_back_threshold", 10),
        bigrams=is_eagle,
        # 1 is the servers' default and says nothing: "selective" would then be no different from "write through".
        backup_threshold=threshold if threshold > 1 else None,
        external_pages=True,
    )
