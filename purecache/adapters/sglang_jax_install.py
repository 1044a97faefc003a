"""Putting purecache in the place of sglang-jax's prefix cache: the factory, and where it is hooked in.

sglang-jax has no registration: what can be replaced is the factory that `create_tree_cache` looks up by name, and
`init_hicache`, which insists on its own class. Storage needs two more places, since that scheduler knows none.
"""

import functools
import hashlib
import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from purecache.adapters.attachment import Shelf
from purecache.adapters.build import KVCacheBuildResult, build_kv_cache
from purecache.adapters.build_choice import Choice, Component, UnsupportedError
from purecache.adapters.build_pools import DevicePool
from purecache.adapters.sglang_jax_cache import SglangJaxCache
from purecache.adapters.sglang_jax_recurrent import SglangJaxRecurrentCache
from purecache.adapters.sglang_jax_window import SglangJaxWindowCache
from purecache.adapters.showing import Showing
from purecache.effects import HostOptions
from purecache.replay import Recorder
from purecache.state import CacheConfig
from purecache.storage.tier import StorageOptions
from purecache.stores.envelope import TRAILER
from purecache.stores.names import ObjectRecord
from purecache.stores.registry import open_store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What sglang-jax has no arguments for.

    store: of the storage tier, as `open_store` takes it (None: no storage); it needs HiCache on. revision: of the
    weights, part of the names in storage (default: `--revision`, or else a digest of the files of a local model).
    storage: bounds and policies. load_back_threshold: tokens on host below which computing again is quicker. warm:
    compile for so many tokens before serving (default: as long as a request can be, unless `--disable-precompile`).
    host: how host pages are kept and copied. record: a folder for recordings of the cache, one file per process, which
    `purecache replay` repeats. show: metrics, KV events and an admin server. check_laws: check every law after every
    call (slow).
    """

    store: str | None = None
    revision: str | None = None
    storage: StorageOptions | None = None
    load_back_threshold: int = 10
    warm: int | None = None
    host: HostOptions = field(default_factory=HostOptions)
    record: str | None = None
    show: Showing = field(default_factory=Showing)
    check_laws: bool = False


class _Arguments:
    """A server's arguments, and those that it has none for."""

    def __init__(self, arguments: Any, **more: Any) -> None:
        self._arguments = arguments
        self.__dict__.update(more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arguments, name)


_undo: list[Callable[[], None]] = []


def install(options: Options | None = None) -> None:
    """Make every sglang-jax engine of this process build its prefix cache here. Call it before the engine is made.

    Calling it again replaces the options. Raises ImportError without sglang-jax.
    """
    uninstall()
    options = options or Options()
    registry = importlib.import_module("sgl_jax.srt.mem_cache.registry")
    builder = importlib.import_module("sgl_jax.srt.mem_cache.kv_cache_builder")
    base = importlib.import_module("sgl_jax.srt.mem_cache.base_prefix_cache")
    windows = importlib.import_module("sgl_jax.srt.mem_cache.swa_radix_cache")
    base.BasePrefixCache.register(SglangJaxCache)
    # A scheduler with an allocator of two pools asks whether its cache is of this class before it uses it as one.
    windows.SWARadixCache.register(SglangJaxWindowCache)
    own_factory, own_hicache = registry.default_radix_cache_factory, builder.init_hicache

    def factory(context: Any) -> Any:
        return build(context, own_factory, options).tree_cache

    def init_hicache(cache: Any, *arguments: Any) -> None:
        if not isinstance(cache, SglangJaxCache):  # ours has been given its host memory by the factory
            own_hicache(cache, *arguments)

    _replace(registry, "default_radix_cache_factory", factory)
    _replace(builder, "init_hicache", init_hicache)
    if options.store is not None:
        _hold_requests()
    if options.show.wanted:
        _tick_without_host()


def uninstall() -> None:
    """Undo `install`. Engines that were built keep their cache."""
    while _undo:
        _undo.pop()()


def build(context: Any, own_factory: Callable[[Any], Any], options: Options) -> KVCacheBuildResult:
    """The cache for a `TreeCacheBuildContext` of sglang-jax. Raises what `build_kv_cache` raises."""
    params, arguments = context.params, context.server_args

    def make_tree(config: CacheConfig, pool: DevicePool, choice: Choice) -> SglangJaxCache:
        if options.store is not None and config.pools:
            raise UnsupportedError("storage keeps full attention only in this server: serve this model without a store")
        cache = _tree(choice, params)(
            params.req_to_token_pool,
            params.token_to_kv_pool_allocator,
            config=config,
            make_plane=functools.partial(pool.plane, config, host=options.host),
            check_laws=options.check_laws,
            record=Recorder.in_folder(options.record) if options.record is not None else None,
        )
        # Windows have pages of their own, which need names of their own: not yet.
        cache.shelf = _shelf(options, context, pool) if config.host_pages and not config.pools else None
        if options.store is not None:
            _attach(cache, options)
        _warm(cache, options, arguments)
        cache.shown = options.show.begin(cache.slots, model_name=str(arguments.model_path))
        return cache

    result = build_kv_cache(
        _Arguments(arguments, load_back_threshold=options.load_back_threshold),
        req_to_token_pool=params.req_to_token_pool,
        token_to_kv_pool_allocator=params.token_to_kv_pool_allocator,
        make_tree=make_tree,
        make_own=lambda choice: own_factory(context),
        environment=os.environ,
        is_eagle=params.is_eagle,
        hybrid_swa=context.is_hybrid_swa,
        hybrid_recurrent=context.is_hybrid_recurrent,
        sliding_window_size=params.sliding_window_size,
    )
    logger.info("purecache: %s, %s", result.choice.kind, result.config)
    return result


def _tick_without_host() -> None:
    """Observers hear of every step. Where nothing is copied, the scheduler doesn't ask for copies that have ended."""
    scheduler = importlib.import_module("sgl_jax.srt.managers.scheduler").Scheduler
    own = scheduler.get_new_batch_prefill

    @functools.wraps(own)
    def get_new_batch_prefill(self: Any, *arguments: Any, **more: Any) -> Any:
        cache = self.tree_cache
        if isinstance(cache, SglangJaxCache) and not cache.hicache_enabled:
            cache.check_hicache_events()
        return own(self, *arguments, **more)

    _replace(scheduler, "get_new_batch_prefill", get_new_batch_prefill)


def _tree(choice: Choice, params: Any) -> Callable[..., SglangJaxCache]:
    """The class for the components of a model, with its own arguments."""
    if Component.SWA in choice.components:
        return functools.partial(SglangJaxWindowCache, sliding_window_size=params.sliding_window_size)
    if Component.MAMBA in choice.components:
        return functools.partial(
            SglangJaxRecurrentCache,
            enable_recurrent_extra_buffer=params.enable_recurrent_extra_buffer,
            recurrent_track_interval=params.recurrent_track_interval,
        )
    return SglangJaxCache


def _replace(owner: Any, name: str, new: Any) -> None:
    old = getattr(owner, name)
    setattr(owner, name, new)
    _undo.append(functools.partial(setattr, owner, name, old))


def _warm(cache: SglangJaxCache, options: Options, arguments: Any) -> None:
    tokens = options.warm
    if tokens is None:
        most = (cache.cache.config.device_pages - 1) * cache.page_size
        longest = getattr(arguments, "context_length", None) or getattr(arguments, "max_seq_len", None) or most
        tokens = 0 if getattr(arguments, "disable_precompile", False) else min(longest, most)
    if tokens > 0 and not cache.disable:
        cache.warm(tokens, lambda done, total, name: logger.info("purecache: compiled %s, %d of %d", name, done, total))


# ---- storage ---------------------------------------------------------------------------------------------------------


def _shelf(options: Options, context: Any, pool: DevicePool) -> Shelf | None:
    """Names for the pages of this model in storage; None if nobody says which weights these are."""
    arguments, revision = context.server_args, _revision(options, context.server_args)
    if revision is None:
        return None
    layers, heads = context.model_config.num_hidden_layers, context.model_config.get_total_num_kv_heads()
    shapes = {name: [(leaf.shape[1:], str(leaf.dtype)) for leaf in leaves] for name, leaves in pool.arrays.items()}
    record = ObjectRecord(
        model=str(arguments.model_path),
        revision=revision,
        kv_dtype=str(pool.arrays["kv_buffer"][0].dtype),
        layout=f"sglang-jax {shapes}, tp {context.tp_size}, jax {jax.__version__} on {jax.default_backend()}",
        page_size=pool.page_size,
        layers=(0, int(layers)),
        heads=(0, int(heads)),
    )
    return Shelf(record, pool.page_bytes)


def _attach(cache: SglangJaxCache, options: Options) -> None:
    if not cache.hicache_enabled:
        raise ValueError("storage lies below host memory: start the server with --hicache-storage none")
    if cache.shelf is None:
        raise ValueError("storage outlives this server: say which weights these are, by --revision or Options.revision")
    store = open_store(str(options.store), cache.shelf.page_bytes + TRAILER)
    cache.prefetches.attach(store, cache.shelf.naming, options.storage)


def _revision(options: Options, arguments: Any) -> str | None:
    """What tells these weights from others under the same name."""
    given = options.revision or getattr(arguments, "revision", None)
    if given:
        return str(given)
    folder = Path(str(arguments.model_path))
    if not folder.is_dir():
        return None
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _hold_requests() -> None:
    """Start a prefetch when a request is queued, and pass over requests whose prefetch has not ended."""
    policy = importlib.import_module("sgl_jax.srt.managers.schedule_policy")
    scheduler = importlib.import_module("sgl_jax.srt.managers.scheduler").Scheduler
    own_add, own_enqueue = policy.PrefillAdder.add_one_req, scheduler._add_request_to_queue

    @functools.wraps(own_enqueue)
    def enqueue(self: Any, req: Any, *arguments: Any, **more: Any) -> Any:
        answer = own_enqueue(self, req, *arguments, **more)
        if isinstance(self.tree_cache, SglangJaxCache):
            self.tree_cache.ask_storage(req, req.adjust_max_prefix_ids())
        return answer

    @functools.wraps(own_add)
    def add_one_req(self: Any, req: Any, *arguments: Any, **more: Any) -> Any:
        cache = self.tree_cache
        if isinstance(cache, SglangJaxCache) and cache.prefetches.knows(str(req.rid)):
            if not cache.check_prefetch_progress(req.rid):
                return policy.AddReqResult.CONTINUE  # it stays in the queue
            if cache.pop_prefetch_loaded_tokens(req.rid):
                req.init_next_round_input(cache)  # it was matched before this landed
        return own_add(self, req, *arguments, **more)

    _replace(policy.PrefillAdder, "add_one_req", add_one_req)
    _replace(scheduler, "_add_request_to_queue", enqueue)
