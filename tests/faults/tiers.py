"""A cache with real page bytes over a store, and what must be true of it whatever happened."""

import time

import numpy as np
from support import Script, new_cache, serve, settle, tiny

from purecache import PrefixCache
from purecache.answers import Refusal
from purecache.state import Tier
from purecache.state.layout import LENT, Account, Shelf
from purecache.storage import EndPolicy, Prefetch, Progress, StorageOptions, StorageTier
from purecache.stores.interface import Store
from purecache.stores.memory import MemoryStore
from purecache.stores.names import ObjectRecord
from purecache.transitions import Status

RECORD = ObjectRecord(model="m", revision="r", kv_dtype="int32", layout="words", page_size=2, layers=(0, 1))
OBJECT = 16 + 64
"""Bytes of a page of the test pools, and its trailer."""
ABCD, EFGH = [1, 1, 2, 2, 3, 3, 4, 4], [5, 5, 6, 6, 7, 7, 8, 8]
DEADLINE = 120
"""Seconds: programs are compiled while something is waited for."""


class LastingStore(MemoryStore):
    """A memory store that outlives its tier."""

    def __init__(self) -> None:
        super().__init__(1 << 20)

    def close(self) -> None:
        """Stay."""


def attached(
    store: Store, config=None, record: ObjectRecord = RECORD, **options
) -> tuple[PrefixCache, StorageTier, Script]:
    """A cache over a store. Pages are small, buffers few, prefetches wait."""
    cache, gate = new_cache(config or tiny(), check_laws=False)
    options = {"threshold": 2, "staging_pages": 8, "batch_pages": 4, "policy": EndPolicy.WAIT_COMPLETE} | options
    return cache, StorageTier(cache, store, record, StorageOptions(**options)), gate


def stored(cache: PrefixCache, tier: StorageTier, tokens: list[int], **space) -> None:
    """Serve a request, and wait until it is on host and in storage."""
    serve(cache, tokens, **space)
    settle(cache)
    cache.drain()
    assert tier.flush(DEADLINE)


def prefetched(tier: StorageTier, cache: PrefixCache, tokens: list[int], **space) -> int:
    """Tokens that a prefetch brought; none where it is not worth it."""
    started = tier.prefetch(tokens, **space)
    if started == Refusal(Status.BELOW_THRESHOLD):
        return 0
    assert isinstance(started, Prefetch), started
    end = time.monotonic() + DEADLINE
    while tier.progress(started, time.monotonic()) is Progress.NOT_YET:
        cache.tick()
        assert time.monotonic() < end
    return started.loaded


def sound(cache: PrefixCache, tier: StorageTier | None) -> None:
    """Nothing is lost: all ends, all can be evicted, and every page is free, or held by a lock or a loan."""
    assert cache.violations() == []
    settle(cache)
    cache.drain()
    if tier is not None and cache._driver.storage is tier:
        assert tier.flush(DEADLINE)
        end = time.monotonic() + DEADLINE
        while tier.counters()["unreported"]:  # of what was given up
            cache.tick()
            assert time.monotonic() < end
        assert tier.ring.free == 8
        assert tier._occupied == 0
    assert cache._driver.plane.in_flight == 0
    for _ in range(3):
        cache.evict(100)
        cache.drain()
        cache.evict_host(100)
    assert cache.violations() == []
    for rank in range(cache.config.ranks):
        for each, capacity in (Tier.DEVICE, cache.config.device_pages), (Tier.HOST, cache.config.host_pages):
            kept = (Account.FREE, Account.PROTECTED, Account.LENT)
            assert sum(cache.pages(account, each, rank) for account in kept) == capacity


def emptied(cache: PrefixCache) -> None:
    """Take back what a caller has lost the answers to: locks by a reset, lent pages by looking who has them."""
    cache.reset()
    layout, owners = cache.config.layout, np.array(cache.state.shelves)[Shelf.OWNERS]
    for rank in range(layout.ranks):
        first = layout.shelf(Tier.DEVICE) + rank * layout.device_pages
        cache.release(np.flatnonzero(owners[first : first + layout.device_pages] == LENT), rank=rank)
        assert cache.free_pages(rank) == layout.device_pages
    assert cache.violations() == []
