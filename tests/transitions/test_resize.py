"""Tiers that are made smaller and larger while the cache works."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import new_cache, serve, settle, tiny

from purecache import CacheConfig, PrefixCache
from purecache.answers import CacheError
from purecache.effects import Interpreter
from purecache.state import PoolSpec, Window
from purecache.state.layout import Account, Tier
from purecache.transitions import Status, TransferKind

A, AB, C, D = [1, 1], [1, 1, 2, 2], [3, 3], [4, 4]


def cache_of(**options):
    return new_cache(tiny(ranks=1, **options), plane=False)[0]


def accounts(cache, tier, pool="kv"):
    return {each.name: number for each in Account if (number := cache.pages(each, tier, pool=pool))}


def test_free_pages_go_out_of_use_and_come_back():
    cache = cache_of()
    assert cache.resize(device_pages=3, host_pages=0) == (3, 0)
    assert accounts(cache, Tier.DEVICE) == {"FREE": 3, "WITHHELD": 5}
    assert accounts(cache, Tier.HOST) == {"WITHHELD": 6}
    assert cache.allocate(4) is None
    assert cache.resize(device_pages=8, host_pages=6) == (8, 6)
    assert len(cache.allocate(8)) == 8


def test_the_oldest_pages_go_and_what_host_has_stays():
    cache = cache_of(host_pages=6)
    for prompt in (AB, C, D):
        serve_plain(cache, prompt)
    cache.drain()
    cache.resize(device_pages=1)
    assert [cache.peek(prompt).device_length for prompt in (AB, C, D)] == [0, 0, 2]
    assert [cache.peek(prompt).length for prompt in (AB, C, D)] == [4, 2, 2]


def test_copies_of_pages_on_device_go_last():
    cache = cache_of()
    for prompt in (AB, C, D):
        serve_plain(cache, prompt)
    cache.drain()
    cache.evict(1)  # B, on host alone now
    assert cache.resize(host_pages=3).host_pages == 3
    assert (cache.peek(AB).length, cache.peek(AB).device_length) == (2, 2)
    assert accounts(cache, Tier.HOST) == {"PROTECTED": 3, "WITHHELD": 3}
    assert cache.resize(host_pages=0).host_pages == 0
    assert [cache.peek(prompt).device_length for prompt in (A, C, D)] == [2, 2, 2]


def test_what_is_locked_lent_or_in_flight_stays_until_it_is_called_again():
    cache, gate = new_cache(tiny(ranks=1))
    serve(cache, AB)
    cache.drain()
    gate.holding = {TransferKind.BACKUP}
    serve(cache, C)
    receipt = cache.lock(cache.peek(AB).node)
    pages = cache.allocate(2)
    assert cache.resize(device_pages=1, host_pages=0) == (4, 1)  # C is on its way to host, and has left the device
    cache.unlock(receipt)
    cache.release(pages)
    gate.holding = set()
    settle(cache)
    cache.tick()
    assert cache.resize(device_pages=1, host_pages=0) == (1, 0)
    assert cache.violations() == []


def test_a_bound_per_call():
    cache = cache_of()
    assert [cache.resize(device_pages=2, most=4).device_pages for _ in range(3)] == [4, 2, 2]


def test_what_is_out_of_use_stays_so_after_a_reset_and_is_not_anyones():
    cache = cache_of()
    serve_plain(cache, AB)
    cache.allocate(1)
    cache.resize(device_pages=6, host_pages=2)
    cache.reset()
    assert accounts(cache, Tier.DEVICE) == {"FREE": 5, "LENT": 1, "WITHHELD": 2}
    assert accounts(cache, Tier.HOST) == {"FREE": 2, "WITHHELD": 4}
    owners = np.asarray(cache.state.shelves)[1, :8]
    for page in np.flatnonzero(owners == -3):
        with pytest.raises(CacheError) as raised:
            cache.release([page])
        assert raised.value.status == Status.BAD_PAGE


def test_under_write_back_pages_are_copied_before_they_go():
    cache = cache_of(write="write_back")
    serve_plain(cache, AB)
    cache.resize(device_pages=1)
    cache.drain()
    assert cache.peek(AB).length == 4


def test_one_rank_alone():
    cache = new_cache(tiny(), plane=False)[0]
    assert cache.resize(device_pages=2, rank=1) == (2, 6)
    assert cache.resize(device_pages=8, rank=0) == (8, 6)
    assert [cache.free_pages(rank) for rank in (0, 1)] == [8, 2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_pages": 9}, "device_pages of kv must be an int from 1 to 8"),
        ({"device_pages": 0}, "from 1 to 8"),
        ({"host_pages": -1}, "host_pages of kv must be an int from 0 to 6"),
        ({"host_pages": 2.0}, "got 2.0"),
        ({"device_pages": 4, "rank": 2}, "the rank is not one"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, text):
    cache = cache_of()
    with pytest.raises(CacheError, match=text):
        cache.resize(**options)
    assert cache.resize() == (8, 6)


def test_the_pages_of_an_allocator_outside_are_not_the_caches():
    cache = PrefixCache(tiny(ranks=1, external_pages=True))
    with pytest.raises(CacheError, match="allocator outside"):
        cache.resize(device_pages=4)
    assert cache.resize(host_pages=1).host_pages == 1


def test_values_of_a_tail_pool():
    config = CacheConfig(page_size=2, device_pages=6, host_pages=4, max_operations=4, max_receipts=4, levels=2)
    config = config.register_pool(PoolSpec("window", Window(4), device_pages=4, host_pages=3))
    cache = PrefixCache(config, check_laws=True)
    pages, values = cache.allocate(3), cache.allocate(3, pool="window")
    cache.insert([1, 1, 2, 2, 3, 3], pages, values={"window": values})
    cache.drain()
    assert cache.resize(device_pages=1, host_pages=1, pool="window") == (1, 1)
    assert accounts(cache, Tier.DEVICE, "window") == {"EVICTABLE": 1, "WITHHELD": 3}
    assert accounts(cache, Tier.HOST, "window") == {"EVICTABLE": 1, "WITHHELD": 2}
    assert cache.resize(device_pages=4, host_pages=3, pool="window") == (4, 3)
    assert len(cache.allocate(4, pool="window")) == 4


def test_memory_of_host_pages_that_are_arrays_goes_back():
    config = tiny(ranks=1)
    pool = jnp.zeros((config.device_pages, 4), jnp.int32)
    sizes = {"host_pages": config.host_pages, "device_pages": config.device_pages}
    plane = Interpreter(pool, host_form="arrays", **sizes)
    cache = PrefixCache(config, plane)
    serve_plain(cache, AB)
    serve_plain(cache, C)
    cache.drain()
    assert plane._tier._held == 3
    cache.resize(host_pages=1)
    assert plane._tier._held == 1
    assert len(jax.tree.leaves(cache.pool)) == 1


def serve_plain(cache, tokens):
    """Insert a prompt without bytes."""
    match, receipt = cache.admit(tokens)
    new = cache.allocate(len(tokens) // cache.config.page_size - len(match.device_pages))
    cache.finish(tokens, np.concatenate([match.device_pages, new]), receipt)
