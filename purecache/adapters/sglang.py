"""purecache in sglang (0.5.14): the backend `purecache` of its registry of radix caches.

Installing purecache beside sglang is enough, since sglang loads it as a plug-in in every process of the server:

    python -m sglang.launch_server --model-path ... --radix-cache-backend purecache

It keeps prefixes on the device only. `docs/sglang.md` says what is different from sglang's own tree.
"""

import importlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import jax

from purecache.adapters.build_choice import Choice, Place, UnsupportedError, choose
from purecache.adapters.sglang_cache import MatchResult, SglangCache
from purecache.replay import Recorder

__all__ = ["NAME", "MatchResult", "Options", "SglangCache", "build", "factory", "install"]

logger = logging.getLogger(__name__)

NAME = "purecache"
"""What `--radix-cache-backend` calls it."""


@dataclass(frozen=True)
class Options:
    """What sglang has no arguments for.

    warm: compile for prompts of so many tokens before serving (default: the longest there can be; 0: don't).
    record: a folder for recordings of the cache, one file per process, which `purecache replay` repeats.
    check_laws: check every law after every call (slow).
    """

    warm: int | None = None
    record: str | None = None
    check_laws: bool = False


_options = Options()


def install(options: Options | None = None) -> None:
    """Register the backend in this process. sglang calls it in every process of a server where purecache is installed.

    Calling it again replaces the options. Raises ImportError without sglang.
    """
    global _options
    _options = options or Options()
    registry = importlib.import_module("sglang.srt.mem_cache.registry")
    if registry.get_radix_cache_factory(NAME) is None:
        registry.register_radix_cache_backend(NAME, factory)
        registry.BasePrefixCache.register(SglangCache)


def factory(context: Any) -> Any:
    """The cache of a scheduler process, for a `TreeCacheBuildContext`. Raises what `build` raises.

    In this process torch has the device: JAX only runs the tree, on the CPU, and by the caller's thread. It is told so
    here, which has no effect if the process has used JAX before.
    """
    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return build(context, _options)


class _Arguments:
    """A server's arguments, and what the server made of them."""

    def __init__(self, arguments: Any, **effective: Any) -> None:
        self._arguments = arguments
        self.__dict__.update(effective)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arguments, name)


def build(context: Any, options: Options | None = None) -> Any:
    """Choose and make the cache for a `TreeCacheBuildContext`; sglang's own where the radix cache is off.

    Raises ArgumentsError for arguments that exclude each other, UnsupportedError for what purecache has not got.
    """
    options = options or Options()
    choice = _choose(context)
    if not choice.ours:
        return importlib.import_module("sglang.srt.mem_cache.registry").default_radix_cache_factory(context)
    if context.params.enable_kv_cache_events:
        logger.warning("purecache publishes no KV cache events: routers that listen to them will see an empty cache")
    record = Recorder.in_folder(options.record) if options.record is not None else None
    cache = SglangCache(context.params, check_laws=options.check_laws, record=record)
    tokens = options.warm
    if tokens is None:
        tokens = min(int(context.model_config.context_len), cache.token_to_kv_pool_allocator.size)
    if tokens > 0:
        cache.warm(tokens, lambda done, total, name: logger.info("purecache: compiled %s, %d of %d", name, done, total))
    logger.info("purecache: %s, %s", choice.kind, cache.cache.config)
    return cache


def _choose(context: Any) -> Choice:
    arguments = _Arguments(
        context.server_args,
        disable_radix_cache=context.disable_radix_cache,
        chunked_prefill_size=context.effective_chunked_prefill_size,
        enable_hierarchical_cache=context.enable_hierarchical_cache,
    )
    choice = choose(
        arguments,
        hybrid_swa=context.is_hybrid_swa,
        hybrid_recurrent=context.is_hybrid_ssm,
        environment=os.environ,
    )
    if Place.HOST in choice.places:
        raise UnsupportedError(
            "purecache has no host memory in this server: it copies pages of JAX arrays, and these pools are torch"
            " tensors. Drop --enable-hierarchical-cache (or --enable-lmcache), or drop --radix-cache-backend"
        )
    return choice
