"""What the policies and options beyond the classic ones do, by example. `tests/test_against_oracle.py` has the rest."""

import pytest
from support import new_cache, tiny

from purecache.answers import Load
from purecache.state import CacheConfig, ConfigError
from purecache.state.layout import Account, Tier

OPTIONS = {"policy": "retention", "retention": (0, 100, 160, 300)}


def cache_of(**options):
    return new_cache(tiny(**options), check_laws=False, plane=False)[0]


def held(cache, tokens):
    """Tokens of a prompt that are on device."""
    return cache.peek(tokens).device_length


def run(cache, tokens, **how):
    """A request: allocate, compute, finish."""
    match, receipt = cache.admit(tokens)
    pages = cache.allocate((len(tokens) - match.device_length) // 2)
    assert pages is not None
    return cache.finish(tokens, [*match.device_pages, *pages], receipt, **how)


def test_what_was_not_kept_goes_before_older_prompts():
    cache = cache_of(**OPTIONS)
    old, new = [1] * 4, [2] * 6
    run(cache, old)
    cache.advance(50)
    run(cache, new, keep=3)  # the answer begins within the second page, which is kept whole
    assert cache.evict(1) == 1
    assert (held(cache, old), held(cache, new)) == (4, 4)
    assert cache.evict(2) == 2
    assert (held(cache, old), held(cache, new)) == (0, 4)


def test_an_answer_that_became_part_of_a_prompt_is_kept():
    cache = cache_of(**OPTIONS)
    turn = [1] * 6
    run(cache, turn, keep=2)
    run(cache, [*turn, 5, 5], keep=6)
    cache.advance(10)
    run(cache, [2] * 4)
    cache.evict(1)
    assert held(cache, [*turn, 5, 5]) == 6
    cache.evict(1)
    assert (held(cache, turn), held(cache, [2] * 4)) == (4, 4), "from here on by the time of the last use"


def test_a_priority_counts_for_less_the_longer_a_page_lies_idle():
    cache = cache_of(**OPTIONS)
    important, plain = [1, 1], [2, 2]
    run(cache, important, priority=1)  # 60 more than priority 0
    cache.advance(59)
    run(cache, plain)
    cache.evict(1)
    assert (held(cache, important), held(cache, plain)) == (2, 0)
    cache.advance(61)
    run(cache, plain)
    cache.evict(1)
    assert (held(cache, important), held(cache, plain)) == (0, 2)


def test_using_a_page_extends_its_retention():
    cache = cache_of(**OPTIONS)
    run(cache, [1, 1], priority=1)
    cache.advance(61)
    cache.match([1, 1])
    run(cache, [2, 2])
    cache.evict(1)
    assert (held(cache, [1, 1]), held(cache, [2, 2])) == (2, 0)


def test_a_request_asks_for_a_time():
    config = CacheConfig(page_size=2, device_pages=8, **OPTIONS)
    assert [config.priority_for(time) for time in (0, 1, 60, 61, 200, 1000)] == [0, 1, 1, 2, 2, 14]
    assert config.retention_of_levels == (0, 100, 160) + (300,) * 13


def test_the_tail_of_every_prompt_goes_first_in_tail_optimized_lru():
    cache = cache_of(**OPTIONS, spare_tail=4)
    first, second = [1] * 8, [2] * 6
    run(cache, first)
    cache.advance(20)
    run(cache, second)
    cache.evict(4)
    assert (held(cache, first), held(cache, second)) == (4, 2)
    cache.evict(1)
    assert (held(cache, first), held(cache, second)) == (2, 2)


def test_time_does_not_go_back():
    cache = cache_of(**OPTIONS)
    cache.advance(70)
    cache.advance(10)
    run(cache, [1, 1], priority=1)
    cache.advance(70 + 59)
    run(cache, [2, 2])
    cache.evict(1)
    assert (held(cache, [1, 1]), held(cache, [2, 2])) == (2, 0), "the first was used at 70, not at 10"
    for time in (-1, 2**30):
        with pytest.raises(ValueError, match="time must be"):
            cache.advance(time)


def test_pages_on_host_are_kept_by_deadline_too():
    cache = cache_of(**OPTIONS)
    for number, priority in ((1, 2), (2, 0), (3, 0)):
        run(cache, [number] * 4, priority=priority)
        cache.advance(20 * number)
    cache.evict(6)
    cache.drain()
    assert cache.pages(Account.FREE, Tier.HOST) == 0
    cache.evict_host(3)
    assert [cache.peek([number] * 4).length for number in (1, 2, 3)] == [4, 0, 2]


def test_a_page_that_was_used_once_is_not_copied_to_host():
    cache = cache_of(write="write_back", backup_threshold=2)
    often, once = [1] * 4, [2] * 4
    for prompt in (often, once, often):
        run(cache, prompt)
    cache.evict(4)
    cache.drain()
    assert [cache.peek(prompt).length for prompt in (often, once)] == [4, 0]


def test_exclusive_tiers_hold_no_page_twice():
    cache = cache_of(write="write_back", exclusive=True)
    prompt = [1] * 6
    run(cache, prompt)
    for _ in range(2):
        cache.evict(3)
        cache.drain()
        assert (cache.pages(Account.FREE, Tier.DEVICE), cache.pages(Account.FREE, Tier.HOST)) == (8, 3)
        assert isinstance(cache.load_back(cache.match(prompt)), Load)
        assert (cache.pages(Account.FREE, Tier.DEVICE), cache.pages(Account.FREE, Tier.HOST)) == (5, 6)
    assert cache.violations() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retention": (5, 3)}, "retention must be"),
        ({"retention": ()}, "retention must be"),
        ({"retention": (0, 2**30)}, "retention must be"),
        ({"retention": (1,) * 17}, "retention must be"),
        ({"retention": 5}, "retention must be"),
        ({"spare_tail": -1}, "spare_tail must be at least 0"),
        ({"exclusive": True}, "exclusive needs write=write_back"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(page_size=2, device_pages=8, host_pages=8, **options)
