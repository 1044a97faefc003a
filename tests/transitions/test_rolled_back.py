"""What failed, full or joined operations leave behind: everything that could be evicted still can be."""

import numpy as np
import pytest
from support import content as content_of
from support import new_cache, path_of, read_page, serve, tiny

from purecache.answers import CacheError, Load, Refusal
from purecache.namespaces import namespace_digest
from purecache.state import Policy, Tier, WritePolicy
from purecache.state.layout import Account
from purecache.transitions import Status, TransferKind

A, AB, ABC, X = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [7, 7]
EVERY_POLICY = pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.name)


def all_fail(kind, number):
    return [True] * number


def loads_fail(kind, number):
    return [kind == TransferKind.LOAD_BACK] * number


def evict_all(cache):
    """P3: nothing is locked or in flight, so everything can go."""
    cache.evict(16)
    cache.drain()
    cache.evict_host(16)
    assert cache.violations() == []
    for rank in range(2):
        assert cache.free_pages(rank) == cache.config.device_pages
        assert cache.pages(Account.FREE, Tier.HOST, rank) == cache.config.host_pages


@EVERY_POLICY
def test_a_failed_load_back_leaves_its_anchor_evictable(policy):
    cache, gate = new_cache(tiny(policy=policy))
    serve(cache, AB)
    cache.drain()
    assert cache.evict(1) == 1
    gate.fails, gate.holding = loads_fail, {TransferKind.LOAD_BACK}
    assert cache.load_back(cache.match(AB)).status == Status.STALE
    assert cache.evict(8) == 0  # the anchor is pinned
    gate.holding = set()
    cache.tick()
    evict_all(cache)


@EVERY_POLICY
def test_unlocking_a_page_on_host_frees_the_pages_above_it(policy):
    cache, _ = new_cache(tiny(policy=policy))
    serve(cache, AB)
    cache.drain()
    assert cache.evict(1) == 1
    receipt = cache.lock(cache.match(AB).node)
    assert cache.evict(8) == 0
    cache.unlock(receipt)
    evict_all(cache)


@EVERY_POLICY
def test_a_failed_load_back_leaves_its_source_evictable(policy):
    cache, gate = new_cache(tiny(policy=policy))
    serve(cache, A)
    cache.drain()
    assert cache.evict(1) == 1
    gate.fails, gate.holding = loads_fail, {TransferKind.LOAD_BACK}
    assert cache.load_back(cache.match(A)).status == Status.STALE
    assert cache.evict_host(8) == 0
    gate.holding = set()
    cache.tick()
    evict_all(cache)


@EVERY_POLICY
@pytest.mark.parametrize("locked", [False, True])
def test_a_host_page_whose_child_is_lost_stays_evictable(policy, locked):
    cache, gate = new_cache(tiny(policy=policy))
    serve(cache, A)
    cache.drain()
    gate.fails, gate.holding = all_fail, {TransferKind.BACKUP}
    serve(cache, AB)
    path = cache.match(AB)
    assert cache.evict(2) == 2  # now A is on host, B on its way
    receipt = cache.lock(path.node) if locked else None
    assert cache.evict_host(8) == 0
    gate.holding = set()
    cache.tick()
    assert cache.peek(AB).length == 2
    if receipt:
        assert cache.evict_host(8) == 0
        cache.unlock(receipt)
    evict_all(cache)


def test_a_load_back_keeps_the_last_operation_for_itself():
    cache, gate = new_cache(tiny(write=WritePolicy.WRITE_BACK))
    serve(cache, A)
    assert cache.evict(1) == 1
    cache.drain()
    gate.holding = {TransferKind.BACKUP}
    for first in range(10, 13):
        serve(cache, [first, first])
        assert cache.evict(1) == 1  # three of four operations are out
    for first in range(20, 28):
        serve(cache, [first, first])
    answer = cache.load_back(cache.match(A))
    assert isinstance(answer, Load)
    np.testing.assert_array_equal(read_page(cache, 0, answer.pages[0]), content_of(path_of(cache.config, A)))
    assert cache.violations() == []


def test_with_the_table_full_an_insert_is_carried_out_and_a_load_back_refused():
    cache, gate = new_cache(tiny())
    serve(cache, A)
    cache.drain()
    gate.holding = {TransferKind.BACKUP}
    for first in range(10, 14):
        serve(cache, [first, first])
    assert serve(cache, X).length == 2
    assert cache.counters()["backup_refused_pages"] == 1
    assert cache.backup(cache.match(X).node) == 0
    cache.evict(8)
    answer = cache.load_back(cache.match(A))
    assert isinstance(answer, Refusal)
    assert answer.status == Status.TABLE_FULL


@pytest.mark.parametrize("fails", [False, True])
def test_joining_a_load_that_has_not_ended_promises_nothing(fails):
    cache, gate = new_cache(tiny())
    serve(cache, A)
    cache.drain()
    cache.evict(1)
    gate.holding = {TransferKind.LOAD_BACK}
    gate.fails = loads_fail if fails else gate.fails
    assert cache.load_back(cache.match(A)).status == Status.STALE
    assert isinstance(cache.load_back(cache.match(A)), Refusal)
    gate.holding = set()
    if fails:
        assert isinstance(cache.load_back(cache.match(A)), Refusal)
        assert cache.peek(A).device_length == 0
    else:
        answer = cache.load_back(cache.match(A))
        assert isinstance(answer, Load)
        np.testing.assert_array_equal(read_page(cache, 0, answer.pages[0]), content_of(path_of(cache.config, A)))


def test_a_match_that_went_stale_is_refused():
    cache, _ = new_cache(tiny())
    serve(cache, ABC)
    cache.drain()
    cache.evict(1)
    match = cache.match(ABC)
    cache.evict(1)
    answer = cache.load_back(match)
    assert isinstance(answer, Refusal)
    assert answer.status == Status.STALE
    assert cache.violations() == []


def test_a_refused_finish_changes_nothing():
    cache, _ = new_cache(tiny())
    wide, _ = new_cache(tiny(ranks=1, device_pages=24, host_pages=0), smallest=32)  # more pages than a call takes
    for facade, number in ((cache, 3), (wide, 20)):
        _, receipt = facade.admit(A)
        pages = facade.allocate(number)
        facade.unlock(receipt)
        before = facade.state
        for call in (facade.finish, facade.checkpoint):
            with pytest.raises(CacheError) as error:
                call(A, pages, receipt)
            assert error.value.status == Status.BAD_RECEIPT
        after = facade.state
        for name in ("tokens", "nodes", "links", "orders", "shelves", "ledger", "books"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name), err_msg=name)


def test_namespaces_that_compare_equal_are_kept_apart():
    spaces = [1, True, 0, False, None, "1", b"1", (1,), (True,), ((1, "a"),), ((True, "a"),), ()]
    assert len({namespace_digest(space).tobytes() for space in spaces}) == len(spaces)
    with pytest.raises(TypeError):
        namespace_digest(1.0)
