import logging

import pytest

from purecache import CacheConfig, PrefixCache


class Counting:
    def __init__(self, fails_at=None):
        self.ticks, self.fails_at = 0, fails_at

    def ticked(self, cache):
        self.ticks += 1
        if self.ticks == self.fails_at:
            raise RuntimeError("broken")


def a_cache():
    return PrefixCache(CacheConfig(page_size=4, device_pages=8))


def test_an_observer_is_called_at_every_tick_until_it_is_removed():
    cache, observer = a_cache(), Counting()
    cache.observe(observer)
    cache.tick()
    cache.tick()
    cache.unobserve(observer)
    cache.tick()
    assert observer.ticks == 2


def test_an_observer_that_raises_is_logged_and_dropped_and_the_others_go_on(caplog):
    cache, broken, other = a_cache(), Counting(fails_at=1), Counting()
    cache.observe(broken)
    cache.observe(other)
    with caplog.at_level(logging.ERROR):
        cache.tick()
        cache.tick()
    assert (broken.ticks, other.ticks) == (1, 2)
    assert "observes the cache no longer" in caplog.text


def test_observing_twice_or_removing_a_stranger_is_refused():
    cache, observer = a_cache(), Counting()
    cache.observe(observer)
    with pytest.raises(ValueError, match="already"):
        cache.observe(observer)
    cache.unobserve(observer)
    with pytest.raises(ValueError, match="does not observe"):
        cache.unobserve(observer)
