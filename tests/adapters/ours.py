"""Our caches for sglang-jax's scheduler, over the stand-ins of the conformance kit."""

from dataclasses import replace

from purecache.adapters.scheduler_pool import SchedulerPool
from purecache.adapters.sglang_jax import SglangJaxCache
from purecache.effects import Interpreter
from purecache.state import CacheConfig
from purecache.state.layout import Account, Tier
from purecache.storage import EndPolicy, StorageOptions
from purecache.stores.memory import MemoryStore
from purecache.stores.names import ObjectRecord
from purecache.testing import HostTier


def maker(host_pages=0, store=None, settled=False, **settings):
    """A `make_cache`. store: of the storage tier, or what makes one for each cache. settled: copies have ended
    whenever the cache looks, so that a run can be repeated."""

    def make(params):
        allocator = params.token_to_kv_pool_allocator
        pool, width, ranks = allocator.get_kvcache(), params.page_size, allocator.dp_size
        config = CacheConfig(
            page_size=width,
            device_pages=allocator.size_per_rank // width + 1,
            ranks=ranks,
            host_pages=host_pages,
            bigrams=params.is_eagle,
            load_back_threshold=0,
            external_pages=True,
            **settings,
        )

        def plane(barrier):
            owner = SchedulerPool(pool, ["kv_buffer"], barrier)
            return Interpreter(
                owner.take(), host_pages=host_pages, device_pages=config.device_pages, ranks=ranks, owner=owner
            )

        cache = SglangJaxCache(
            params.req_to_token_pool,
            allocator,
            config=config,
            make_plane=plane if host_pages else None,
            smallest=32,  # one size of each program is enough, and compiled sooner
        )
        if settled:
            cache.check_hicache_events = cache.flush_write_through_acks = cache.cache.drain
        if store is not None:
            record = ObjectRecord("m", "r", "float32", "any", width, (0, 1))
            options = StorageOptions(threshold=width, tokens_in_flight=64 * width, policy=EndPolicy.WAIT_COMPLETE)
            cache.prefetches.attach(store() if callable(store) else store, record, options)
        return cache

    return make


class Shelf(MemoryStore):
    """Stays when a cache lets it go."""

    def close(self):
        pass


def host_pages_of(cache):
    """Free host pages, and all of them."""
    ranks = range(cache.cache.config.ranks)
    return sum(cache.cache.pages(Account.FREE, Tier.HOST, rank) for rank in ranks), cache.cache.config.host_pages * len(
        ranks
    )


def settle(cache):
    """Wait for all copies, and for storage."""
    cache.cache.drain()
    if cache.prefetches.tier is not None:
        assert cache.prefetches.tier.flush(30)


def ready(cache, request):
    """Whether the prefetch of a request has ended; what it brought is of no interest here."""
    done = cache.check_prefetch_progress(request.rid)
    if done:
        cache.pop_prefetch_loaded_tokens(request.rid)
    return done


HOST = HostTier(pages=host_pages_of, settle=settle, close=lambda cache: cache.prefetches.detach())
STORAGE = replace(
    HOST,
    queued=lambda cache, request: cache.ask_storage(request, request.adjust_max_prefix_ids()),
    ready=ready,
    gone=lambda cache, request: cache.release_aborted_request(request.rid),
)
TWO_RANKS = {"page_size": 4, "dp_size": 2, "tokens": 64}
"""The shape that most tests have, since every one is compiled for itself."""
