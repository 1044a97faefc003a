"""Prompts and namespaces that are deleted."""

import pytest
from support import new_cache, serve, settle, tiny

from purecache import CacheConfig, PrefixCache
from purecache.answers import CacheError
from purecache.state import Policy, PoolSpec, Window
from purecache.state.layout import Account, Tier
from purecache.transitions import TransferKind

A, AB, ABC, ABD, E = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4], [5, 5]


def cache_with(*prompts, namespace=None, **options):
    cache, gate = new_cache(tiny(**options))
    for prompt in prompts:
        serve(cache, prompt, namespace=namespace)
    cache.drain()
    return cache, gate


def lengths(cache, *prompts, **space):
    return [cache.peek(prompt, **space).length for prompt in prompts]


def test_of_a_prompt_goes_what_no_other_prompt_shares():
    cache, _ = cache_with(ABC, ABD, E)
    assert cache.forget(ABC) == (1, 1, 0)
    assert lengths(cache, ABC, ABD, E) == [4, 6, 2]
    assert cache.forget(ABD) == (3, 3, 0)
    assert lengths(cache, ABC, ABD, E) == [0, 0, 2]
    assert cache.free_pages() == 7


def test_what_goes_on_from_a_prompt_goes_with_it():
    cache, _ = cache_with(ABC, ABD, E)
    assert cache.forget(AB) == (4, 4, 0)
    assert lengths(cache, AB, E) == [0, 2]


def test_a_part_that_is_kept_is_a_number_of_tokens():
    cache, _ = cache_with(ABC, ABD)
    assert cache.forget(ABC, keep=3) == (3, 3, 0)  # only whole pages are kept
    assert lengths(cache, ABC, ABD) == [2, 2]
    assert cache.forget(ABC, keep=2) == (0, 0, 0)
    assert cache.forget([9, 9]) == (0, 0, 0)
    with pytest.raises(CacheError, match="keep is -1"):
        cache.forget(ABC, keep=-1)
    with pytest.raises(CacheError, match="rank"):
        cache.forget(ABC, rank=2)


def test_a_prompt_that_the_tree_has_in_part_takes_nobody_elses_pages():
    cache, _ = cache_with(AB, ABD)
    assert cache.forget(ABC) == (0, 0, 0)  # C was never there, and D goes on from B
    assert lengths(cache, ABD) == [6]


@pytest.mark.parametrize("policy", Policy)
def test_what_is_locked_stays_and_can_be_evicted_afterwards(policy):
    cache, _ = cache_with(ABC, E, policy=policy)
    receipt = cache.lock(cache.peek(AB).node)
    assert cache.forget(A, keep=0) == (1, 1, 2)
    assert lengths(cache, ABC) == [4]
    cache.unlock(receipt)
    assert cache.forget(A) == (2, 2, 0)
    assert cache.evict(9) == 1
    cache.evict_host(9)
    assert [cache.pages(Account.FREE, tier) for tier in (Tier.DEVICE, Tier.HOST)] == [8, 6]


def backed_up_late(*prompts, first=()):
    """A cache whose backups of `prompts` are held, those of `first` not; and how to let them end."""
    cache, gate = cache_with(*first)
    gate.holding = {TransferKind.BACKUP}
    for prompt in prompts:
        serve(cache, prompt)

    def let_go():
        gate.holding = set()
        settle(cache)
        cache.tick()

    return cache, let_go


def test_pages_on_their_way_to_host_are_left():
    cache, let_go = backed_up_late(AB)
    assert cache.forget(A, keep=0) == (2, 0, 2)
    assert cache.free_pages() == 8
    let_go()
    assert lengths(cache, AB) == [4]
    assert cache.forget(A, keep=0) == (0, 2, 0)
    assert lengths(cache, AB) == [0]


def test_they_go_by_themselves_where_what_is_above_has_gone():
    cache, let_go = backed_up_late(AB, first=[A])
    assert cache.forget(A, keep=0) == (2, 1, 1)
    let_go()
    assert lengths(cache, AB) == [0]
    assert [cache.pages(Account.FREE, tier) for tier in (Tier.DEVICE, Tier.HOST)] == [8, 6]


def test_a_page_that_is_being_loaded_stays():
    cache, gate = cache_with(ABC)
    cache.evict(2)
    gate.holding = {TransferKind.LOAD_BACK}
    cache.begin_load_back(cache.match(ABC))
    assert cache.forget(A, keep=0) == (0, 0, 3)
    gate.holding = set()
    settle(cache)
    cache.tick()
    assert cache.forget(A, keep=0) == (3, 3, 0)


def test_the_page_above_counts_as_used():
    cache, _ = cache_with(AB, E)
    cache.forget(AB, keep=2)
    cache.evict(1)
    assert [cache.peek(prompt).device_length for prompt in (A, E)] == [2, 0]


def test_a_namespace_goes_in_every_rank():
    cache, _ = cache_with(AB, namespace="tenant")
    for rank in (1, None):
        serve(cache, AB, namespace="tenant", rank=rank)
    serve(cache, AB)
    cache.drain()
    assert cache.forget_namespace("tenant") == (6, 6, 0)
    assert lengths(cache, AB, namespace="tenant") == [0]
    assert lengths(cache, AB) == [4]
    assert cache.forget_namespace("nobody") == (0, 0, 0)
    assert cache.forget_namespace(None) == (2, 2, 0)


def test_a_namespace_of_bigrams():
    cache = PrefixCache(tiny(bigrams=True), check_laws=True)
    for tokens in ([1, 2, 3], [7, 8, 9]):
        cache.insert(tokens, cache.allocate(1), namespace="a")
        cache.insert(tokens, cache.allocate(1), namespace="b")
    cache.drain()
    assert cache.forget_namespace("a") == (2, 2, 0)
    assert lengths(cache, [1, 2, 3], namespace="a") == [0]
    assert lengths(cache, [1, 2, 3], namespace="b") == [2]


def test_values_of_a_tail_pool_go_with_their_pages():
    config = CacheConfig(page_size=2, device_pages=6, host_pages=4, max_operations=4, max_receipts=4, levels=2)
    config = config.register_pool(PoolSpec("window", Window(4), device_pages=4, host_pages=3))
    cache = PrefixCache(config, check_laws=True)
    pages, values = cache.allocate(3), cache.allocate(3, pool="window")
    cache.insert(ABC, pages, values={"window": values})
    cache.drain()
    assert cache.forget(ABC, keep=2) == (2, 2, 0)
    cache.forget(A)
    for pool, name in enumerate(config.pool_names):
        free = [cache.pages(Account.FREE, tier, pool=name) for tier in (Tier.DEVICE, Tier.HOST)]
        assert free == [config.layout.capacity(tier, pool) for tier in (Tier.DEVICE, Tier.HOST)]
