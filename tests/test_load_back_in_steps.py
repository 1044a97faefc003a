"""`begin_load_back` and `loaded`: other requests' steps go on while the bytes of a prefix come."""

import jax.numpy as jnp
import pytest
from support import WORDS, Script, content, new_cache, path_of, read_page, serve, settle, shared_programs, tiny

from purecache import Load, Loading, PrefixCache, Refusal
from purecache.effects import Interpreter
from purecache.effects.flights import Fetch
from purecache.transitions import Status

AB, CD = [1, 1, 2, 2], [3, 3, 4, 4]


class Bus:
    here = False


@pytest.fixture
def bus(monkeypatch):
    """Whether bytes on their way to the device count as arrived."""
    bus, original = Bus(), Fetch.arrived
    monkeypatch.setattr(Fetch, "arrived", lambda fetch: original(fetch) if bus.here else None)
    return bus


@pytest.fixture
def cache():
    """AB on host only."""
    config = tiny()
    pool = jnp.full((config.ranks * config.device_pages, WORDS), -1, jnp.int32)
    sizes = {"host_pages": config.host_pages, "device_pages": config.device_pages, "ranks": config.ranks}
    plane = Interpreter(pool, gate=Script(), batch_pages=4, copies="fused", **sizes)
    cache = shared_programs(PrefixCache(config, plane, smallest=16, check_laws=True), 16)
    serve(cache, AB)
    settle(cache)
    cache.drain()
    cache.evict(4)
    return cache


def right(cache, pages, tokens):
    paths = path_of(cache.config, tokens)
    return all((read_page(cache, 0, page) == content(paths[: depth + 2])).all() for depth, page in enumerate(pages))


def test_the_pool_is_left_alone_until_the_bytes_are_there(cache, bus):
    match, pool = cache.match(AB), cache.pool
    assert (match.device_length, match.host_length) == (0, 4)
    loading = cache.begin_load_back(match)
    assert isinstance(loading, Loading)
    for _ in range(3):
        cache.tick()
        assert cache.loaded(loading) is None
    assert cache.pool is pool
    assert cache.match(AB).device_length == 0
    settle(cache)
    bus.here = True
    assert cache.loaded(loading) is None
    cache.tick()
    load = cache.loaded(loading)
    assert isinstance(load, Load)
    assert load.pages.tolist() == loading.pages.tolist()
    assert right(cache, load.pages, AB)
    assert cache.match(AB).device_length == 4
    assert cache.violations() == []


def test_what_is_being_loaded_is_not_evicted_and_its_room_is_not_given_away(cache, bus):
    cache.begin_load_back(cache.match(AB))
    free = cache.free_pages()
    lent = cache.allocate(free)
    assert lent is not None
    assert cache.allocate(1) is None
    cache.release(lent)
    settle(cache)
    bus.here = True
    cache.tick()
    assert cache.match(AB).device_length == 4


def test_a_second_request_joins(cache, bus):
    first, second = (cache.begin_load_back(cache.match(AB)) for _ in range(2))
    assert first.pages.tolist() == second.pages.tolist()
    settle(cache)
    bus.here = True
    cache.tick()
    assert cache.loaded(first).pages.tolist() == cache.loaded(second).pages.tolist()


def test_a_request_that_cannot_wait_hurries_what_others_began(cache, bus):
    loading = cache.begin_load_back(cache.match(AB))
    load = cache.load_back(cache.match(AB))
    assert isinstance(load, Load)
    assert right(cache, load.pages, AB)
    assert isinstance(cache.loaded(loading), Load)


def test_a_failed_load_back_ends_in_a_refusal(cache):
    cache._driver.plane._gate.fails = lambda kind, number: [True] * number
    loading = cache.begin_load_back(cache.match(AB))
    cache.tick()
    refused = cache.loaded(loading)
    assert isinstance(refused, Refusal)
    assert refused.status is Status.STALE
    assert cache.violations() == []


def test_what_was_evicted_before_anybody_asked_is_refused(cache):
    loading = cache.begin_load_back(cache.match(AB))
    settle(cache)
    cache.tick()
    cache.evict(4)
    assert isinstance(cache.loaded(loading), Refusal)


def test_a_prefix_that_is_gone_is_refused(cache):
    loading = cache.begin_load_back(cache.match(AB))
    cache.reset()
    assert isinstance(cache.loaded(loading), Refusal)


def test_where_copies_are_not_staged_the_next_tick_has_the_answer():
    cache, _ = new_cache(tiny())
    serve(cache, AB)
    settle(cache)
    cache.drain()
    cache.evict(4)
    loading = cache.begin_load_back(cache.match(AB))
    cache.tick()
    assert right(cache, cache.loaded(loading).pages, AB)
