"""What the tests of storage for several pools share: a hybrid cache with real bytes of every pool, and an engine."""

import hashlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from support import Script, shared_programs

from purecache.answers import Load
from purecache.cache import PrefixCache
from purecache.effects import Interpreter, Planes
from purecache.state import NONE, CacheConfig, Checkpoint, PoolSpec, Window
from purecache.state.layout import Account, Tier
from purecache.stores.names import ObjectRecord

PAGE, NEAR = 2, 2
"""Tokens of a page, and pages of the window."""
POOLS = (
    PoolSpec("indexer", anchor="kv"),
    PoolSpec("window", Window(3), device_pages=5, host_pages=4),
    PoolSpec("state", Checkpoint(), device_pages=4, host_pages=3),
)
RECORDS = {
    "kv": ObjectRecord("m", "r", "int32", "words", PAGE, (0, 1)),
    "indexer": ObjectRecord("m", "r", "int16", "words", PAGE, (0, 1)),
    "window": ObjectRecord("m", "r", "int32", "near,far", PAGE, (1, 3)),
    "state": ObjectRecord("m", "r", "float32", "numbers", PAGE, (3, 4)),
}
LEAVES = {
    "kv": [(np.int32, 4)],
    "indexer": [(np.int16, 3)],
    "window": [(np.int32, 2), (np.int32, 5)],
    "state": [(np.float32, 9)],
}
"""Type and numbers of each leaf of a page: pages of the pools differ in size."""
_PLANES: dict = {}


def hybrid(**options):
    """The configuration of all these tests: full attention with an indexer, a window of two pages, a state.

    Its layout is one of those of `tests/hybrid`, so that they share programs.
    """
    sizes = {"page_size": PAGE, "device_pages": 8, "host_pages": 6, "ranks": 2, "pools": POOLS, "levels": 4}
    limits = {"max_operations": 64, "max_receipts": 6, "load_back_threshold": 0}
    return CacheConfig(**(sizes | limits | options))


def with_tiers(**tiers):
    """Its pools, some of them with other tiers."""
    return tuple(replace(spec, tiers=tiers.get(spec.name, spec.tiers)) for spec in POOLS)


def sizes_of(config, name):
    """Device and host pages of a pool, per rank."""
    layout, pool = config.layout, config.pool_of(name)
    return layout.capacity(Tier.DEVICE, pool), layout.capacity(Tier.HOST, pool)


def _blank(config, name):
    pages = config.ranks * sizes_of(config, name)[0]
    return [jnp.full((pages, numbers), -1, dtype) for dtype, numbers in LEAVES[name]]


def new_hybrid(config=None):
    """A cache over emptied interpreters, one for all tests."""
    config = config or hybrid()
    for name in LEAVES:
        if name not in _PLANES:
            device, host = sizes_of(config, name)
            options = {"host_pages": host, "device_pages": device, "ranks": config.ranks}
            _PLANES[name] = Interpreter(_blank(config, name), gate=Script(), batch_pages=4, **options)
        plane = _PLANES[name]
        plane.drain()
        plane.reset()
        plane._gate.__init__()
        plane.pool = _blank(config, name)
    return shared_programs(PrefixCache(config, Planes(_PLANES), smallest=16), 16)


def settle_all(cache):
    """Wait for the bytes of every transfer in flight."""
    for plane in cache._driver.plane.planes.values():
        plane.settle()


def content(name, path):
    """What a pool holds at the end of a prefix: one array per leaf, a function of the pool and the whole prefix."""
    seed = int.from_bytes(hashlib.blake2b(repr((name, path)).encode(), digest_size=8).digest(), "little")
    draw = np.random.default_rng(seed)
    return [draw.integers(-9999, 9999, numbers).astype(dtype) for dtype, numbers in LEAVES[name]]


def paths_of(tokens, namespace=None):
    """What stands for the content of each whole page."""
    return [(namespace, tuple(tokens[:end])) for end in range(PAGE, len(tokens) + 1, PAGE)]


@jax.jit
def _write(leaf, index, values):
    return leaf.at[index].set(values, mode="drop", wrap_negative_indices=False)


def write(cache, name, rank, pages, paths):
    """Compute what `paths` end with into device pages of a pool, and of its side pools."""
    for each in [name, *(spec.name for spec in cache.config.pools if spec.anchor == name)]:
        index = np.full(16, NONE, np.int32)
        index[: len(pages)] = np.asarray(pages) + rank * sizes_of(cache.config, each)[0]
        rows = [content(each, path) for path in paths]
        leaves = []
        for place, leaf in enumerate(cache.pools[each]):
            values = np.zeros((16, leaf.shape[1]), leaf.dtype)
            values[: len(rows)] = [row[place] for row in rows] if rows else 0
            leaves.append(_write(leaf, index, values))
        cache.pools = {each: leaves}


def check_page(cache, name, rank, page, path):
    """Assert what a device page, and those of its side pools, hold."""
    assert page >= 0
    for each in [name, *(spec.name for spec in cache.config.pools if spec.anchor == name)]:
        for leaf, expected in zip(cache.pools[each], content(each, path), strict=True):
            found = np.asarray(leaf)[page + rank * sizes_of(cache.config, each)[0]]
            np.testing.assert_array_equal(found, expected, err_msg=f"{each} {path}")


def serve(cache, tokens, states=(-1,), namespace=None, rank=0):
    """Run a request to its end, all or nothing: with a window value on every new page, and states after some pages."""
    paths, space = paths_of(tokens, namespace), {"namespace": namespace, "rank": rank}
    match, receipt = cache.admit(tokens, **space)
    known, wanted = match.device_length // PAGE, sorted({page % len(paths) for page in states}) if paths else []
    fresh = {"kv": range(known, len(paths)), "window": range(known, len(paths))}
    fresh["state"] = [page for page in wanted if page >= known]
    lent = {name: cache.allocate(len(pages), pool=name, rank=rank) for name, pages in fresh.items()}
    if any(pages is None for pages in lent.values()):
        for name, pages in lent.items():
            cache.release(pages if pages is not None else np.zeros(0, np.int32), rank=rank, pool=name)
        cache.unlock(receipt)
        return None
    values = {}
    for name, pages in lent.items():
        write(cache, name, rank, pages, [paths[page] for page in fresh[name]])
        values[name] = np.full(len(paths), NONE, np.int32)
        values[name][list(fresh[name])] = pages
    kv = np.concatenate([match.device_pages, lent["kv"]])
    del values["kv"]
    return cache.finish(tokens, kv, receipt, values=values, **space)


def check_bytes(cache, tokens, namespace=None, rank=0):
    """Load what is usable of a prompt, and compare every page that the laws ask for. Returns the usable pages."""
    space = {"namespace": namespace, "rank": rank}
    match, paths = cache.match(tokens, **space), paths_of(tokens, namespace)
    pages, values, depth = match.device_pages, match.values, match.device_length // PAGE
    if match.host_length:
        load = cache.load_back(match)
        if not isinstance(load, Load):
            return None
        pages, values, depth = np.concatenate([pages, load.pages]), load.values, match.length // PAGE
    assert len(pages) == depth
    for page, path in zip(pages, paths, strict=False):
        check_page(cache, "kv", rank, page, path)
    for name, first in (("window", max(0, depth - NEAR)), ("state", max(0, depth - 1))):
        for place in range(first, depth):
            check_page(cache, name, rank, values[name][place], paths[place])
    return depth


def in_flight(cache):
    """Pages of all pools, tiers and ranks that an operation holds."""
    config = cache.config
    places = [(name, tier, rank) for name in config.pool_names for tier in Tier for rank in range(config.ranks)]
    return sum(cache.pages(Account.IN_FLIGHT, tier, rank, name) for name, tier, rank in places if tier != Tier.INCOMING)


def drained(cache):
    """Evict everything: whether every page of every pool is free then."""
    config = cache.config
    for evict in (cache.evict, cache.evict_host):
        for name in reversed(config.pool_names):
            evict(config.ranks * 99, pool=name)
    cache.drain()
    for name in reversed(config.pool_names):
        cache.evict_host(config.ranks * 99, pool=name)
    for name in config.pool_names:
        for tier in (Tier.DEVICE, Tier.HOST):
            for rank in range(config.ranks):
                if cache.pages(Account.FREE, tier, rank, name) != sizes_of(config, name)[tier]:
                    return False
    return True
