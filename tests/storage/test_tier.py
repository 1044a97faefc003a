"""The third tier of a cache with real page bytes: what is stored comes back, and what a store does wrong is a miss."""

import time

import numpy as np
import pytest
from support import content, new_cache, path_of, read_page, serve, settle, tiny

from purecache.answers import CacheError, Load, Refusal
from purecache.storage import EndPolicy, Progress, StorageOptions, StorageTier
from purecache.stores.interface import Fetch
from purecache.stores.memory import MemoryStore
from purecache.stores.names import ObjectRecord
from purecache.transitions import Status

pytestmark = pytest.mark.filterwarnings("ignore:a page is 2 tokens")
RECORD = ObjectRecord(model="m", revision="r", kv_dtype="int32", layout="words", page_size=2, layers=(0, 1))
ABCD = [1, 1, 2, 2, 3, 3, 4, 4]


class Shelf(MemoryStore):
    """A memory store that outlives the tier, and does wrong on demand."""

    def __init__(self):
        super().__init__(1 << 20)
        self.breaks = None

    def get(self, keys, buffers, deadline):
        answers = super().get(keys, buffers, deadline)
        if self.breaks == "flip":
            for buffer in buffers:
                buffer[3] ^= 1
        if self.breaks == "second":
            answers = [Fetch.FAILED if place == 1 else answer for place, answer in enumerate(answers)]
        if self.breaks == "raise":
            raise OSError("the cable is out")
        return answers

    def put(self, keys, buffers, deadline):
        return [False] * len(keys) if self.breaks == "refuse" else super().put(keys, buffers, deadline)

    def close(self):
        """Stay."""


def attached(shelf, config=None, **options):
    cache, gate = new_cache(config or tiny(), check_laws=True)
    options = {"threshold": 2, "staging_pages": 8, "batch_pages": 4, "policy": EndPolicy.WAIT_COMPLETE} | options
    return cache, StorageTier(cache, shelf, RECORD, StorageOptions(**options)), gate


def stored(cache, tier, tokens, **space):
    """Serve a request and wait until it is on host and in storage."""
    serve(cache, tokens, **space)
    settle(cache)
    cache.drain()
    assert tier.flush(90)


def warmed(**options):
    """A new cache and tier over a shelf that has ABCD from an earlier one."""
    shelf = Shelf()
    cache, tier, _ = attached(shelf)
    stored(cache, tier, ABCD)
    tier.detach()
    cache, tier, _ = attached(shelf, **options)
    return cache, tier, shelf


def prefetched(tier, cache, tokens, **space):
    """Prefetch to the end; the tokens that came."""
    prefetch = tier.prefetch(tokens, **space)
    assert not isinstance(prefetch, Refusal)
    end = time.monotonic() + 90  # the first use compiles
    while tier.progress(prefetch, time.monotonic()) is Progress.NOT_YET:
        cache.tick()
        assert time.monotonic() < end
    return prefetch.loaded


def check_bytes(cache, tokens, **space):
    """Load the prompt back and compare every page with what it must hold."""
    match = cache.match(tokens, **space)
    pages = match.device_pages
    if match.host_length:
        load = cache.load_back(match)
        assert isinstance(load, Load)
        pages = np.concatenate([pages, load.pages])
    path = path_of(cache.config, tokens, **space)
    assert len(pages) == len(path) - 1
    for depth, page in enumerate(pages, 1):
        np.testing.assert_array_equal(read_page(cache, path[0], page), content(path[: depth + 1]))


@pytest.mark.parametrize("space", [{}, {"namespace": "tenant"}, {"namespace": (("adapter", "a"),), "rank": None}])
def test_a_new_cache_starts_warm_from_storage(space):
    shelf = Shelf()
    cache, tier, _ = attached(shelf)
    stored(cache, tier, ABCD, **space)
    assert shelf.stats()["objects"] == 4
    tier.detach()
    cache, tier, _ = attached(shelf)
    assert cache.match(ABCD, **space).length == 0
    assert prefetched(tier, cache, ABCD, **space) == 8
    assert cache.match(ABCD, **space).host_length == 8
    check_bytes(cache, ABCD, **space)
    assert cache.violations() == []
    tier.detach()


def test_namespaces_and_records_do_not_meet_in_storage():
    shelf = Shelf()
    cache, tier, _ = attached(shelf)
    stored(cache, tier, ABCD, namespace="a")
    for space in ({}, {"namespace": "b"}, {"namespace": ("a",)}):
        assert prefetched(tier, cache, ABCD, **space) == 0
    tier.detach()
    other = ObjectRecord(model="m", revision="r2", kv_dtype="int32", layout="words", page_size=2, layers=(0, 1))
    cache, _ = new_cache(tiny())
    tier = StorageTier(cache, shelf, other, StorageOptions(threshold=2, policy=EndPolicy.WAIT_COMPLETE))
    assert prefetched(tier, cache, ABCD, namespace="a") == 0
    tier.detach()


@pytest.mark.parametrize(("breaks", "loaded"), [("flip", 0), ("second", 2), ("raise", 0)])
def test_what_a_store_does_wrong_is_a_miss(breaks, loaded):
    cache, tier, shelf = warmed()
    shelf.breaks = breaks
    assert prefetched(tier, cache, ABCD) == loaded
    assert cache.match(ABCD).length == loaded
    if loaded:
        check_bytes(cache, ABCD[:loaded])
    assert cache.violations() == []
    assert cache.counters()["prefetch_failed_pages"] == 4 - loaded // 2
    assert tier.flush(90)
    assert tier.ring.free == 8
    tier.detach()


def test_a_refused_put_is_counted_and_tried_with_the_next_backup():
    shelf = Shelf()
    shelf.breaks = "refuse"
    cache, tier, _ = attached(shelf)
    stored(cache, tier, ABCD[:4])
    assert cache.counters()["store_failed_pages"] >= 2
    shelf.breaks = None
    stored(cache, tier, ABCD)
    assert shelf.stats()["objects"] == 4
    assert cache.counters()["stored_pages"] == 4
    tier.detach()


def test_what_finds_no_buffer_is_stored_later():
    shelf = Shelf()
    cache, tier, _ = attached(shelf, staging_pages=1)
    stored(cache, tier, ABCD)
    assert shelf.stats()["objects"] == 4
    assert cache.counters()["stores_refused"] > 0
    tier.detach()


def test_the_rest_of_a_prompt_is_prefetched_below_what_is_cached():
    cache, tier, _ = warmed()
    stored(cache, tier, ABCD[:4])
    assert prefetched(tier, cache, [*ABCD, 9, 9]) == 4
    check_bytes(cache, ABCD)
    tier.detach()


def test_what_was_cached_before_storage_came_gets_keys_and_is_stored():
    shelf = Shelf()
    cache, _ = new_cache(tiny())
    serve(cache, ABCD, namespace="early")
    settle(cache)
    cache.drain()
    tier = StorageTier(cache, shelf, RECORD, StorageOptions(threshold=2))
    assert tier.store(cache.peek(ABCD, namespace="early").node) == 4
    assert tier.flush(90)
    assert shelf.stats()["objects"] == 4
    tier.detach()


def test_end_policies_take_time_as_an_input():
    cache, tier, shelf = warmed(policy=EndPolicy.TIMEOUT, timeout_base=1.0, timeout_per_1024=1024.0)
    prefetch = tier.prefetch(ABCD)
    assert tier.progress(prefetch, 100.0) is Progress.NOT_YET
    assert tier.progress(prefetch, 108.9) is Progress.NOT_YET
    assert tier.progress(prefetch, 109.1) is Progress.GIVEN_UP
    tier.detach()
    cache, tier, _ = attached(shelf, policy=EndPolicy.BEST_EFFORT)
    prefetch = tier.prefetch(ABCD)
    assert tier.progress(prefetch, 0.0) is Progress.GIVEN_UP
    assert tier.flush(90)
    assert (cache.counters()["prefetched_pages"], cache.violations()) == (0, [])
    tier.detach()


@pytest.mark.parametrize("ticks", range(6))
def test_an_abort_at_any_point_returns_pages_buffers_and_budget(ticks):
    cache, tier, _ = warmed(tokens_in_flight=8)
    prefetch = tier.prefetch(ABCD)
    assert tier.prefetch([7] * 8).status == Status.NO_ROOM
    for _ in range(ticks):
        time.sleep(0.002)
        cache.tick()
    tier.abort(prefetch)
    assert tier.flush(90)
    deadline = time.monotonic() + 90  # the first use compiles
    while tier.ring.free < 8:
        cache.tick()
        assert time.monotonic() < deadline
    host = cache.match(ABCD).host_length // 2
    assert cache.counters()["prefetched_pages"] == host
    assert cache.evict_host(6) == host
    assert cache.violations() == []
    assert not isinstance(tier.prefetch([7] * 8), Refusal)
    tier.detach()


def test_gates_of_a_prefetch():
    cache, tier, _ = attached(Shelf(), threshold=4)
    assert tier.prefetch([1, 1, 2]).status == Status.BELOW_THRESHOLD
    assert prefetched(tier, cache, ABCD) == 0
    assert tier.counters()["prefetches_given_up"] == 1
    tier.detach()
    with pytest.raises(ValueError, match="host_pages"):
        StorageTier(new_cache(tiny(host_pages=0))[0], Shelf(), RECORD)


def test_small_pages_are_warned_of():
    cache, _ = new_cache(tiny())
    with pytest.warns(UserWarning, match="a page is 2 tokens"):
        StorageTier(cache, Shelf(), RECORD).detach()


def test_the_caller_may_write_into_its_tokens():
    cache, tier, _ = warmed()
    tokens = np.array(ABCD, np.int32)
    tier.prefetch(tokens)
    tokens[:] = 9
    assert tier.flush(90)
    assert (cache.match(ABCD).length, cache.match(tokens).length) == (8, 0)
    tier.detach()


def test_host_pages_that_were_lost_are_not_stored():
    shelf = Shelf()
    shelf.breaks = "refuse"
    cache, tier, _ = attached(shelf)
    stored(cache, tier, ABCD[:4])
    shelf.breaks = None
    host = cache._driver.plane._tier
    host.broken(host.epoch)  # as after a copy that failed while it ran
    stored(cache, tier, ABCD)
    assert shelf.stats()["objects"] == 2
    tier.detach()
    cache, tier, _ = attached(shelf)
    assert prefetched(tier, cache, ABCD) == 0
    tier.detach()


def test_pages_that_land_in_a_lost_host_memory_are_not_there():
    cache, tier, _ = warmed()
    prefetch = tier.prefetch(ABCD)
    deadline = time.monotonic() + 90
    while not tier._reader._copies and prefetch.loaded == 0 and time.monotonic() < deadline:
        cache.tick()
    if not prefetch.loaded:
        host = cache._driver.plane._tier
        host.broken(host.epoch)
        assert tier.flush(90)
        assert cache.match(ABCD).length == 0
    assert cache.violations() == []
    tier.detach()


def test_a_detached_tier_does_nothing():
    cache, tier, _ = attached(Shelf())
    serve(cache, ABCD)
    settle(cache)
    tier.detach()
    cache.drain()
    assert tier.store(cache.peek(ABCD).node) == 0
    assert tier.prefetch([7] * 8).status == Status.STALE
    again = StorageTier(cache, Shelf(), RECORD, StorageOptions(threshold=2))
    tier.detach()
    assert again.store(cache.peek(ABCD).node) == 4
    again.detach()


def test_negative_ids_have_keys_too():
    shelf = Shelf()
    cache, tier, _ = attached(shelf)
    stored(cache, tier, [-5, -5, -6, -6])
    tier.detach()
    cache, tier, _ = attached(shelf)
    assert prefetched(tier, cache, [-5, -5, -6, -6]) == 4
    tier.detach()


def test_warm_leaves_nothing_to_compile():
    cache, tier, _ = attached(Shelf())
    tier.warm(8)
    assert tier.warm(8) == 0
    before = len(cache.programs())
    stored(cache, tier, ABCD)
    names = {"admit", "allocate", "finish", "begin_backup", "finish_backup"}
    assert {row["name"] for row in cache.programs()[before:]} <= names
    tier.detach()


def test_a_reset_in_the_middle_leaves_nothing():
    cache, tier, _ = warmed()
    serve(cache, [5, 5, 6, 6])
    settle(cache)
    cache.drain()
    prefetch = tier.prefetch(ABCD)
    cache.tick()
    cache.reset()
    assert tier.progress(prefetch, 0.0) is Progress.GIVEN_UP
    assert tier.flush(90)
    assert cache.violations() == []
    assert prefetched(tier, cache, ABCD) == 8
    check_bytes(cache, ABCD)
    tier.detach()


def test_a_backup_may_take_the_room_of_the_end_of_its_own_path():
    """That end, on host alone, is the only page that can go: the backup raised as if its node were an old one."""
    shelf = Shelf()
    cache, tier, _ = attached(shelf)
    stored(cache, tier, ABCD)
    tier.detach()
    cache, tier, _ = attached(shelf, tiny(host_pages=2, write="write_back"))
    serve(cache, ABCD[:4])
    assert prefetched(tier, cache, ABCD) == 4
    match = cache.peek(ABCD)
    assert (match.device_length, match.host_length) == (4, 4)
    assert cache.backup(match.node) == 2
    settle(cache)
    cache.drain()
    assert cache.peek(ABCD).device_length == 4
    assert cache.violations() == []
    with pytest.raises(CacheError, match="no longer in the tree"):
        cache.backup(match.node)
    tier.detach()
