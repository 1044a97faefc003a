"""Device pages of an allocator outside the cache: what the tree does not hold is lent, always."""

import numpy as np
import pytest

from purecache.cache import PrefixCache
from purecache.state import CacheConfig, ConfigError
from purecache.state.layout import Account, Tier

PAGES, WIDTH = 12, 2


def make(**more):
    config = CacheConfig(page_size=WIDTH, device_pages=PAGES, host_pages=4, ranks=2, external_pages=True, **more)
    return PrefixCache(config, check_laws=True)


def prompt(first, pages):
    return np.arange(first, first + pages * WIDTH, dtype=np.int32)


def free_and_lent(cache, rank=0):
    return cache.free_pages(rank), cache.lent_pages(rank)


def test_all_pages_are_lent_from_the_start_and_after_a_reset():
    cache = make()
    assert [free_and_lent(cache, rank) for rank in (0, 1)] == [(0, PAGES)] * 2
    cache.insert(prompt(1, 3), np.array([7, 2, 9]))
    assert free_and_lent(cache) == (0, PAGES - 3)
    cache.reset()
    assert [free_and_lent(cache, rank) for rank in (0, 1)] == [(0, PAGES)] * 2
    assert cache.pages(Account.FREE, Tier.HOST) == 4


def test_what_a_request_leaves_behind_stays_lent():
    cache = make()
    cache.insert(prompt(1, 2), np.array([1, 2]))
    _, receipt = cache.admit(prompt(500, 2))
    kept = cache.checkpoint(prompt(1, 3), np.array([5, 6, 7]), receipt)
    assert kept.pages.tolist() == [1, 2, 7]
    assert kept.duplicates.tolist() == [5, 6]
    assert free_and_lent(cache) == (0, PAGES - 3)
    done = cache.finish(prompt(1, 3), np.array([1, 2, 7, 8]), receipt)
    assert done.length == 3 * WIDTH
    assert free_and_lent(cache) == (0, PAGES - 3)
    _, receipt = cache.admit(prompt(1, 3))
    cache.abort(np.array([10]), receipt)
    assert free_and_lent(cache) == (0, PAGES - 3)
    assert cache.evictable_pages() == 3


def test_allocate_takes_evictable_pages_only_and_a_load_back_what_was_released():
    cache = make(write="write_through", load_back_threshold=0)
    assert cache.allocate(1) is None
    cache.insert(prompt(1, 3), np.array([4, 5, 6]))
    cache.drain()
    assert sorted(cache.allocate(3).tolist()) == [4, 5, 6]
    cache.release(np.array([11, 3, 8]))
    match = cache.match(prompt(1, 3))
    assert (match.device_length, match.host_length) == (0, 3 * WIDTH)
    assert sorted(cache.load_back(match).pages.tolist()) == [3, 8, 11]
    assert free_and_lent(cache) == (0, PAGES - 3)


@pytest.mark.parametrize(("threshold", "started"), [(None, 1), (1, 1), (2, 2), (3, 3)])
def test_a_backup_threshold_counts_uses(threshold, started):
    cache = make(backup_threshold=threshold)
    for use in range(1, 4):
        cache.insert(prompt(1, 1), np.array([4]))
        assert (cache.counters()["backup_pages"] == 1) == (use >= started)


def test_thresholds_below_one_are_refused():
    with pytest.raises(ConfigError, match="backup_threshold must be at least 1"):
        make(backup_threshold=0)
