"""Our cache for sglang-jax's models with sliding windows: the conformance kit, and what a map of slots must say."""

import numpy as np
import pytest
from ours import HOST
from ours_hybrid import WINDOWS, WINDOWS_OF_TOKENS, window_maker

from purecache.adapters.sglang_jax_window import SglangJaxWindowCache
from purecache.adapters.window_tail import WINDOW, WindowTail
from purecache.state import CacheConfig
from purecache.testing import check_prefix_cache
from purecache.testing.stand_ins import EvictParams, InsertParams, MatchPrefixParams, RadixKey, Request
from purecache.testing.window_pools import check_map
from purecache.testing.window_scheduling import WindowScheduling

# Few shapes, since every one is compiled for itself, and in one process.
pytestmark = [pytest.mark.xdist_group("sglang-jax-windows")]
THROUGH, BACK = window_maker(56, 40, write="write_through"), window_maker(56, 40, write="write_back")
KIT = {
    "page 16, two ranks, write through": (THROUGH, WINDOWS | {"host": HOST}),
    "page 16, two ranks, write back, overlap": (BACK, WINDOWS | {"host": HOST, "overlap": True}),
    "page 1, overlap": (window_maker(), WINDOWS_OF_TOKENS | {"overlap": True}),
}


@pytest.mark.parametrize("name", KIT)
def test_the_conformance_kit_finds_nothing(name):
    make, settings = KIT[name]
    tally = check_prefix_cache(make, seeds=range(4), steps=60, **settings)
    assert tally.finished > 50
    assert tally.cached_tokens > 100
    assert min(tally.evictions, tally.retracted, tally.aborted, tally.chunks) > 0
    assert tally.loaded_tokens > 0 or "host" not in settings


# ---- a cache that does one thing wrong is refused --------------------------------------------------------------------


class StaleTail(WindowTail):
    def _unmap(self, pages, rank):
        pass


class Stale(SglangJaxWindowCache):
    """Leaves entries of the map behind."""

    def _tails(self):
        return {WINDOW: StaleTail(self._both, self.page_size)}


class UnpairedTail(WindowTail):
    def _pair(self, pages, values, rank):
        pass


class Unpaired(SglangJaxWindowCache):
    """The map does not say what the tree has taken."""

    def _tails(self):
        return {WINDOW: UnpairedTail(self._both, self.page_size)}


class Greedy(SglangJaxWindowCache):
    """Frees window slots of the tree's part of a request."""

    def evict_req_swa(self, req, pre_len, dp_rank=0):
        last = max(0, pre_len - self.sliding_window_size - self.page_size) // self.page_size * self.page_size
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : max(last, self.page_size)]
        self._both.free_swa(row.copy(), dp_rank=dp_rank)


class Keeping(SglangJaxWindowCache):
    """Frees nothing while a request decodes."""

    def evict_req_swa(self, req, pre_len, dp_rank=0):
        pass


class Lazy(SglangJaxWindowCache):
    """Evicts no windows for themselves."""

    def evict(self, params):
        return super().evict(EvictParams(params.num_tokens, 0, params.dp_rank))


class Forgetful(SglangJaxWindowCache):
    """Tells of fewer protected window tokens than there are."""

    def swa_protected_size(self, dp_rank=0):
        return 0


MISTAKEN = "mapped|is lost|free already|not lent to this request|not there|are the cache's"
"""What the kit says of window slots that are in two places, or in none."""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Stale, MISTAKEN),
        (Unpaired, MISTAKEN),
        (Greedy, MISTAKEN),
        (Keeping, "freed nothing that left a window|promised room"),
        (Lazy, "window tokens of rank"),
        (Forgetful, "window tokens are the cache's|evict turned"),
    ],
)
def test_a_broken_cache_is_refused(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_prefix_cache(window_maker(kind=kind), seeds=range(2), **WINDOWS_OF_TOKENS)


# ---- what the kit does not know of -----------------------------------------------------------------------------------


def scheduling(**settings):
    return WindowScheduling(window_maker(), **WINDOWS_OF_TOKENS | {"chunk": 4} | settings)


def given(run, tokens):
    """Slots of both pools for tokens."""
    return run.windows.alloc(len(tokens)), RadixKey(tokens)


def test_a_window_that_comes_back_goes_with_the_slots_that_stayed():
    run = scheduling()
    cache, windows = run.cache, run.windows
    first, key = given(run, list(range(1, 11)))
    cache.insert(InsertParams(key, first))
    cache.evict(EvictParams(0, 10, 0))
    assert (cache.full_evictable_size(), cache.swa_evictable_size()) == (10, 0)
    assert windows.map(0)[first].tolist() == [0] * 10
    second, key = given(run, list(range(1, 11)))
    fresh = windows.map(0)[second].tolist()
    cache.insert(InsertParams(key, second, swa_evicted_seqlen=0))
    assert windows.map(0)[first].tolist() == fresh
    assert windows.map(0)[second].tolist() == [0] * 10
    check_map(windows, 0)
    assert windows.full_available_size() == 50
    assert cache.match_prefix(MatchPrefixParams(key)).device_indices.tolist() == first.tolist()


def test_a_prefix_may_lack_what_left_the_window_and_still_be_found():
    run = scheduling()
    cache = run.cache
    slots, key = given(run, list(range(1, 11)))
    run.windows.free_swa(slots[:4])
    cache.insert(InsertParams(key, slots, swa_evicted_seqlen=4))
    assert (cache.full_evictable_size(), cache.swa_evictable_size()) == (10, 6)
    found = cache.match_prefix(MatchPrefixParams(RadixKey(list(range(1, 12)))))
    assert found.device_indices.tolist() == slots.tolist()
    # A shorter one would see what is gone.
    assert cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4, 5, 6, 7]))).device_indices.tolist() == []
    assert cache.total_size() == (10, 6)


def test_a_prefix_whose_window_is_not_whole_is_given_up():
    run = scheduling()
    slots, key = given(run, list(range(1, 11)))
    run.windows.free_swa(slots[6:8])
    run.cache.insert(InsertParams(key, slots))
    # What the tree can't use has been freed.
    assert (run.cache.full_evictable_size(), run.windows.full_available_size()) == (6, 54)
    check_map(run.windows, 0)


def test_requests_keep_the_windows_of_the_tree_while_they_decode():
    run = scheduling()
    cache = run.cache
    slots, key = given(run, list(range(1, 21)))
    cache.insert(InsertParams(key[:12], slots[:12]))
    node = cache.match_prefix(MatchPrefixParams(RadixKey(list(range(1, 13))))).last_device_node
    request = Request("r", list(range(1, 21)), list(range(1, 30)), 4)
    run.rows.alloc([request])
    run.rows.write((request.req_pool_idx, slice(0, 20)), slots)
    request.last_node = node
    cache.evict_req_swa(request, 12)
    assert (request.swa_evicted_seqlen, run.windows.swa_available_size()) == (12, 10)
    cache.evict_req_swa(request, 20)
    assert (request.swa_evicted_seqlen, run.windows.swa_available_size()) == (14, 12)
    assert (run.windows.map(0)[slots] == 0).nonzero()[0].tolist() == [12, 13]


@pytest.mark.parametrize("lost", ["pool", "window_pool"])
def test_a_load_that_fails_leaves_nothing_wrong_behind(lost):
    run = WindowScheduling(THROUGH, **WINDOWS | {"chunk": 64, "host": HOST})
    cache, prompt = run.cache, list(range(1, 100))
    for _ in range(2):
        run.submit(prompt, 1)
        run.drain()
    cache.evict(EvictParams(1 << 20, 1 << 20, None))
    found = cache.match_prefix(MatchPrefixParams(RadixKey(prompt)))
    assert (len(found.device_indices), found.host_hit_length) == (0, 96)
    pool = getattr(run, lost)
    arrays = list(pool.arrays)
    pool.arrays[:] = [array + 0 for array in arrays]
    for array in pool.arrays:
        array.delete()
    with pytest.warns(UserWarning, match="can't be used"):
        assert not len(cache.init_load_back(found.last_host_node, 96)[0])
    pool.arrays[:] = arrays
    run.check()
    run.submit(prompt, 1)
    run.drain()
    assert run.tally.finished == 3


def test_a_cache_without_a_window_is_refused():
    run = scheduling()
    plain = CacheConfig(page_size=1, device_pages=61, external_pages=True)
    with pytest.raises(ValueError, match="add one named 'window'"):
        SglangJaxWindowCache(run.rows, run.windows, 5, config=plain)
    with pytest.raises(ValueError, match="at least one token"):
        SglangJaxWindowCache(run.rows, run.windows, 0)


def test_a_disabled_cache_gives_all_slots_back():
    run = scheduling()
    cache = SglangJaxWindowCache(run.rows, run.windows, 5, disable=True, smallest=32)
    slots, key = given(run, list(range(1, 11)))
    assert cache.insert(InsertParams(key, slots)) == 0
    request = Request("r", list(range(1, 11)), list(range(1, 20)), 4)
    request.fill_ids = list(request.origin_input_ids)
    run.rows.alloc([request])
    run.rows.write((request.req_pool_idx, slice(0, 10)), slots)
    cache.cache_unfinished_req(request)
    assert np.array_equal(request.prefix_indices, slots)
    request.kv_committed_len = request.kv_allocated_len = 10
    cache.cache_finished_req(request)
    assert (run.windows.full_available_size(), run.windows.swa_available_size()) == (60, 30)
    assert cache.evict(EvictParams(5, 5, 0)).swa_num_tokens_evicted == 0
