"""Build the prefix cache of a server from its arguments, for sglang and sglang-jax. Neither is imported.

`docs/sglang-dispatch.md` explains the tables of ways and exclusions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from purecache.adapters.build_arguments import Facts, get
from purecache.adapters.build_choice import WAYS, Choice, Component, Kind, Place, UnsupportedError, choose, dispatch
from purecache.adapters.build_exclusions import RULES, ArgumentsError
from purecache.adapters.build_pools import DevicePool, cache_config
from purecache.adapters.sessions import SessionCache
from purecache.state import CacheConfig

__all__ = [
    "RULES",
    "WAYS",
    "ArgumentsError",
    "Choice",
    "Component",
    "DevicePool",
    "Facts",
    "KVCacheBuildResult",
    "Kind",
    "Place",
    "UnsupportedError",
    "build_kv_cache",
    "cache_config",
    "choose",
    "dispatch",
]


@dataclass(frozen=True, kw_only=True)
class KVCacheBuildResult:
    """What a server's scheduler takes from the builder: sglang's fields, then ours."""

    is_hybrid_swa: bool
    is_hybrid_ssm: bool
    sliding_window_size: int | None
    full_tokens_per_layer: int | None
    swa_tokens_per_layer: int | None
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    disable_radix_cache: bool
    tree_cache: Any
    choice: Choice
    config: CacheConfig | None
    """None where the server's own cache stays."""


def build_kv_cache(
    arguments: Any,
    *,
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
    make_tree: Callable[[CacheConfig, DevicePool, Choice], Any],
    make_own: Callable[[Choice], Any],
    environment: Mapping[str, str],
    is_eagle: bool = False,
    hybrid_swa: bool = False,
    hybrid_recurrent: bool = False,
    sliding_window_size: int | None = None,
    full_tokens_per_layer: int | None = None,
    swa_tokens_per_layer: int | None = None,
) -> KVCacheBuildResult:
    """Choose, check and build the cache of a server with pools like those of sglang-jax.

    make_tree: makes the adapter of purecache. make_own: makes the server's own cache where that stays.
    Raises what `choose`, `DevicePool.of` and `cache_config` raise, before anything is made.
    """
    choice = choose(
        arguments,
        hybrid_swa=hybrid_swa,
        hybrid_recurrent=hybrid_recurrent,
        environment=environment,
        keeps=tuple(Component),
    )
    config = None
    if choice.ours:
        pool = DevicePool.of(token_to_kv_pool_allocator)
        config = cache_config(
            arguments,
            choice,
            pool,
            is_eagle=is_eagle,
            sliding_window_size=sliding_window_size,
            req_to_token_pool=req_to_token_pool,
        )
        tree = make_tree(config, pool, choice)
    else:
        tree = make_own(choice)
    if choice.sessions and not getattr(tree, "supports_streaming_session", bool)():
        tree = SessionCache(tree)
    return KVCacheBuildResult(
        is_hybrid_swa=hybrid_swa,
        is_hybrid_ssm=hybrid_recurrent,
        sliding_window_size=sliding_window_size,
        full_tokens_per_layer=full_tokens_per_layer,
        swa_tokens_per_layer=swa_tokens_per_layer,
        req_to_token_pool=req_to_token_pool,
        token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        disable_radix_cache=bool(get(arguments, "disable_radix_cache", False)),
        tree_cache=tree,
        choice=choice,
        config=config,
    )
