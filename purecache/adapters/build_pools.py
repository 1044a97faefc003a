"""The pools of sglang-jax as purecache sees them, and the sizes and policies of a cache for them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from purecache.adapters.build_arguments import get
from purecache.adapters.build_choice import Choice, Component, Place, UnsupportedError
from purecache.adapters.scheduler_pool import SchedulerPool
from purecache.adapters.state_tail import state_config
from purecache.adapters.window_tail import WINDOW, window_config
from purecache.effects import AgreedPlane, HostOptions, Interpreter, Planes, PoolOwner, agreed
from purecache.effects.host_memory import fitting_host_pages
from purecache.state import CacheConfig


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
    source: Any = None
    """The server's pool with these arrays."""
    window: "DevicePool | None" = None
    """The pool of the layers with a sliding window, which has pages of its own; None without such layers."""

    @classmethod
    def of(cls, allocator: Any) -> "DevicePool":
        """The pool behind an allocator of sglang-jax; that of full attention where there is more than one.

        Raises UnsupportedError for a pool that has pages of another kind, ValueError for sizes that don't fit together.
        """
        pool = allocator.get_kvcache()
        names = {base.__name__ for base in type(pool).__mro__}
        if "SWAKVPool" in names:
            window = cls._of(allocator.swa_attn_allocator, pool.swa_kv_pool)
            return cls._of(allocator.full_attn_allocator, pool.full_kv_pool, window)
        # Recurrent layers have their states in another pool, which is on device only.
        return cls._of(allocator, pool.full_kv_pool if "HybridLinearKVPool" in names else pool)

    @classmethod
    def _of(cls, allocator: Any, pool: Any, window: "DevicePool | None" = None) -> "DevicePool":
        names = [base.__name__ for base in type(pool).__mro__]
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
        size = sum(leaf.nbytes for leaf in leaves) // total
        return cls(arrays, page_size, total // ranks, ranks, size, pool, window)

    def plane(
        self,
        config: CacheConfig,
        barrier: Callable[[], Callable[[], None] | None],
        host: HostOptions | None = None,
    ) -> Interpreter | Planes | AgreedPlane | None:
        """What copies the pages, the server keeping its pools; None without a host tier, where nothing is copied.

        barrier: see `SchedulerPool`. A server of several processes agrees on how transfers ended.
        """
        if not config.host_pages:
            return None
        host = host or HostOptions()
        own = self._interpreter(config.host_pages, SchedulerPool(self.source, list(self.arrays), barrier), host)
        if self.window is None:
            return agreed(own)
        host_pages = config.layout.capacity(1, config.pool_of(WINDOW))
        owner = SchedulerPool(self.window.source, list(self.window.arrays), barrier)
        return agreed(Planes({"kv": own, WINDOW: self.window._interpreter(max(host_pages, 1), owner, host)}))

    def interpreter(
        self,
        config: CacheConfig,
        owner: PoolOwner | None = None,
        host: HostOptions | None = None,
    ) -> Interpreter | None:
        """What copies the pages of this pool, `owner` keeping it; None without a host tier, where nothing is copied."""
        if not config.host_pages:
            return None
        return self._interpreter(config.host_pages, owner, host or HostOptions())

    def _interpreter(self, host_pages: int, owner: PoolOwner | None, host: HostOptions) -> Interpreter:
        return Interpreter(
            self.arrays,
            host_pages=host_pages,
            device_pages=self.device_pages,
            page_axis=0,
            ranks=self.ranks,
            owner=owner,
            **asdict(host),
        )


def cache_config(
    arguments: Any,
    choice: Choice,
    pool: DevicePool,
    *,
    is_eagle: bool = False,
    sliding_window_size: int | None = None,
    req_to_token_pool: Any = None,
) -> CacheConfig:
    """The configuration of a cache that purecache stands behind; the server's allocator keeps the free pages.

    Host pages per rank come from `hicache_size` (GB of 10^9 bytes per rank, all its shards together, for all pools) or
    else from `hicache_ratio` (tokens on host per token on device). `load_back_threshold` is 10 tokens unless
    `arguments` has it. sliding_window_size: in tokens. req_to_token_pool: of a model with recurrent layers.
    Raises ValueError when the host tier has no room for a page, ConfigError for what CacheConfig can't take,
    UnsupportedError for components without their pools.
    """
    if not choice.ours:
        raise ValueError(f"{choice.kind} stays the server's own: there is nothing to configure")
    host_pages, window_pages = _host_pages(arguments, pool) if Place.HOST in choice.places else (0, 0)
    threshold = get(arguments, "hicache_write_through_threshold", 1)
    config = CacheConfig(
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
        # Servers draw it at random, and all processes of one have the same: prompts that collide can't be prepared.
        seed=get(arguments, "random_seed", 0),
    )
    if (Component.SWA in choice.components) != (pool.window is not None):
        raise UnsupportedError("sliding windows need a pool of their own: that of a SWATokenToKVPoolAllocator")
    if pool.window is not None:
        config = window_config(config, pool.window.device_pages, sliding_window_size or 0, window_pages)
    if Component.MAMBA in choice.components:
        config = state_config(config, req_to_token_pool)
    return config


def _host_pages(arguments: Any, pool: DevicePool) -> tuple[int, int]:
    """Host pages per rank, of full attention and of windows: as many of either for each page on device."""
    window = pool.window.device_pages - 1 if pool.window is not None else 0
    if gigabytes := get(arguments, "hicache_size", 0):
        both = pool.page_bytes * (pool.device_pages - 1)
        both += pool.window.page_bytes * window if pool.window is not None else 0
        host_pages = int(gigabytes * 10**9 * (pool.device_pages - 1) / both)
    else:
        tokens = int(get(arguments, "hicache_ratio", 2.0) * (pool.device_pages - 1) * pool.page_size)
        host_pages = tokens // pool.page_size
    if not host_pages:
        raise ValueError(f"the host tier has no room for a page of {pool.page_bytes} bytes: raise its size")
    host_pages = fitting_host_pages(pool.arrays, host_pages, device_pages=pool.device_pages, ranks=pool.ranks)
    return host_pages, host_pages * window // (pool.device_pages - 1)
