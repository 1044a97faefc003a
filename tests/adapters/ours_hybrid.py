"""Our caches for models with sliding windows and recurrent layers, over the stand-ins of the conformance kit."""

from purecache.adapters.scheduler_pool import SchedulerPool
from purecache.adapters.sglang_jax_recurrent import SglangJaxRecurrentCache
from purecache.adapters.sglang_jax_window import SglangJaxWindowCache
from purecache.adapters.window_tail import WINDOW, window_config
from purecache.effects import Interpreter, Planes
from purecache.state import CacheConfig


def window_maker(host_pages=0, window_host_pages=0, kind=SglangJaxWindowCache, **settings):
    """A `make_cache` for schedulers with windows."""

    def make(params):
        both, width = params.token_to_kv_pool_allocator, params.page_size
        pools = both.get_kvcache()
        config = CacheConfig(
            page_size=width,
            device_pages=both.size_per_rank // width + 1,
            ranks=both.dp_size,
            host_pages=host_pages,
            load_back_threshold=0,
            external_pages=True,
            **settings,
        )
        pages = both.swa_attn_allocator.size_per_rank // width + 1
        config = window_config(config, pages, params.sliding_window_size, window_host_pages)

        def plane(barrier):
            parts = (
                ("kv", pools.full_kv_pool, config.device_pages, host_pages),
                (WINDOW, pools.swa_kv_pool, pages, max(window_host_pages, 1)),
            )
            planes = {}
            for name, pool, device, host in parts:
                owner = SchedulerPool(pool, ["kv_buffer"], barrier)
                planes[name] = Interpreter(
                    owner.take(), host_pages=host, device_pages=device, ranks=both.dp_size, owner=owner
                )
            return Planes(planes)

        return kind(
            params.req_to_token_pool,
            both,
            params.sliding_window_size,
            width,
            config=config,
            make_plane=plane if host_pages else None,
            smallest=32,
        )

    return make


def recurrent_cache(params):
    """A cache for schedulers with recurrent states."""
    return SglangJaxRecurrentCache(
        params.req_to_token_pool,
        params.token_to_kv_pool_allocator,
        params.page_size,
        enable_recurrent_extra_buffer=params.enable_recurrent_extra_buffer,
        recurrent_track_interval=params.recurrent_track_interval,
        smallest=32,
    )


WINDOWS = {"page_size": 16, "dp_size": 2, "tokens": 448, "window": 24, "window_tokens": 256}
WINDOWS_OF_TOKENS = {"page_size": 1, "tokens": 60, "window": 5, "window_tokens": 30}
STATES = {"page_size": 4, "dp_size": 2, "tokens": 128, "states": 24, "interval": 8}
STATES_OF_TOKENS = {"page_size": 1, "tokens": 60, "states": 10}
