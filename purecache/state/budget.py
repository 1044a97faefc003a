"""One budget of host memory for all pools."""

from collections.abc import Mapping
from dataclasses import replace

from purecache.state.config import CacheConfig, ConfigError
from purecache.state.pools import ANCHOR


def share_host_memory(config: CacheConfig, page_bytes: Mapping[str, int], total: int) -> CacheConfig:
    """The configuration with host pages for every pool that goes to host, `total` bytes at most over pools and ranks.

    Each pool gets as many times its device pages as the others. page_bytes: bytes of one page by name of pool, side
    pools too; see `Interpreter.page_bytes`. Raises ConfigError for a pool without page_bytes, and where kv would get no
    page.
    """
    names = [ANCHOR, *(spec.name for spec in config.pools)]
    if missing := set(names) - set(page_bytes):
        raise ConfigError(f"page_bytes lacks the pools {sorted(missing)}")
    on_host = {ANCHOR} | {spec.name for spec in config.pools if "host" in spec.tiers}
    width = [0] * config.layout.pools
    for name in on_host:
        width[config.pool_of(name)] += page_bytes[name]
    sizes = [config.layout.capacity(0, pool) for pool in range(config.layout.pools)]
    whole = config.ranks * sum(size * each for size, each in zip(sizes, width, strict=True))
    pages = {name: sizes[config.pool_of(name)] * total // whole for name in config.pool_names if name in on_host}
    if not pages[ANCHOR]:
        raise ConfigError(f"{total} bytes of host memory are not one page of each rank: raise the budget")
    pools = tuple(replace(spec, host_pages=pages[spec.name]) if spec.name in pages else spec for spec in config.pools)
    return replace(config, host_pages=pages[ANCHOR], pools=pools)
