"""Our cache for sglang-jax's models with recurrent layers: the conformance kit, and whose a state is."""

import numpy as np
import pytest
from ours_hybrid import STATES, STATES_OF_TOKENS, recurrent_cache

from purecache.adapters.sglang_jax_recurrent import SglangJaxRecurrentCache
from purecache.state import CacheConfig
from purecache.testing import check_prefix_cache
from purecache.testing.stand_ins import EvictParams, MatchPrefixParams, RadixKey, Request
from purecache.testing.state_scheduling import StateScheduling

pytestmark = [pytest.mark.xdist_group("sglang-jax-states")]
KIT = {
    "page 1": STATES_OF_TOKENS,
    "page 1, overlap": STATES_OF_TOKENS | {"overlap": True},
    "page 4, snapshots, two ranks": STATES,
    "page 4, snapshots, two ranks, overlap": STATES | {"overlap": True},
}


@pytest.mark.parametrize("name", KIT)
def test_the_conformance_kit_finds_nothing(name):
    tally = check_prefix_cache(recurrent_cache, seeds=range(4), steps=60, **KIT[name])
    assert tally.finished > 50
    assert tally.cached_tokens > 10
    assert min(tally.evictions, tally.retracted, tally.aborted, tally.chunks) > 0


# ---- a cache that does one thing wrong is refused --------------------------------------------------------------------


class TwoOwners(SglangJaxRecurrentCache):
    """Leaves a state to the request that gave it."""

    def _states_taken(self, req, offered, held, *, ended):
        pass


class TooEarly(SglangJaxRecurrentCache):
    """Takes the state of a request that goes on to change it."""

    def _states(self, req, length, *, ended):
        return super()._states(req, length, ended=True)

    def _states_taken(self, req, offered, held, *, ended):
        if ended:
            super()._states_taken(req, offered, held, ended=ended)


class Lazy(SglangJaxRecurrentCache):
    """Evicts no states for themselves."""

    def evict(self, params):
        return super().evict(EvictParams(params.num_tokens, 0, params.dp_rank))


class Silent(SglangJaxRecurrentCache):
    """Does not say which state to copy."""

    def match_prefix(self, params):
        return super().match_prefix(MatchPrefixParams(params.key))


def make(kind):
    return lambda params: kind(
        params.req_to_token_pool, params.token_to_kv_pool_allocator, params.page_size, smallest=32
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TwoOwners, "states|free already"),
        (TooEarly, "not lent to this request|of 10 states|wrong bytes|free already"),
        (Lazy, "were wanted"),
        (Silent, "the state to copy is None"),
    ],
)
def test_a_broken_cache_is_refused(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_prefix_cache(make(kind), seeds=range(2), **STATES_OF_TOKENS)


# ---- what the kit does not know of -----------------------------------------------------------------------------------


def ended(run, tokens, said=1):
    request = run.submit(tokens, said)
    run.drain()
    return request


def test_the_state_of_a_request_that_ends_is_the_trees():
    run = StateScheduling(recurrent_cache, **STATES_OF_TOKENS)
    cache, rows = run.cache, run.rows
    ended(run, [1, 2, 3])
    assert (cache.recurrent_evictable_size(0), rows.recurrent_available_size(0)) == (1, 9)
    asks = Request("asks", [1, 2, 3, 4], [], 1)
    found = cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4]), cow_recurrent=True, req=asks))
    assert len(found.device_indices) == 3
    state = asks.recurrent_cow_src_index
    assert state not in (None, 0)
    lock = cache.inc_lock_ref(found.last_device_node)
    assert (cache.recurrent_evictable_size(0), cache.recurrent_protected_size(0)) == (0, 1)
    assert cache.evict(EvictParams(recurrent_num=1, dp_rank=0)).recurrent_num_evicted == 0
    cache.dec_lock_ref(found.last_device_node, lock.to_dec_params())
    assert cache.evict(EvictParams(recurrent_num=1, dp_rank=0)).recurrent_num_evicted == 1
    assert state in rows.recurrent_free_slots[0]
    assert cache.evictable_size(0) == 3


def test_a_state_that_the_tree_has_already_goes_back():
    run = StateScheduling(recurrent_cache, **STATES_OF_TOKENS)
    ended(run, [1, 2, 3])
    # The last token is computed again, from the beginning since there is no state before it.
    ended(run, [1, 2, 3])
    assert (run.cache.recurrent_evictable_size(0), run.rows.recurrent_available_size(0)) == (1, 9)
    assert run.cache.evictable_size(0) == 3


def test_prompts_are_told_where_they_branch_off():
    run = StateScheduling(recurrent_cache, **STATES)
    ended(run, list(range(1, 18)))
    key = RadixKey([*range(1, 13), 90, 91, 92, 93, 94])
    found = run.cache.match_prefix(MatchPrefixParams(key))
    assert (len(found.device_indices), found.recurrent_branching_seqlen) == (8, None)
    run.evict_states(1, 0)
    found = run.cache.match_prefix(MatchPrefixParams(key))
    assert (len(found.device_indices), found.recurrent_branching_seqlen) in ((0, 8), (8, None))


def test_models_that_guess_ahead_cache_nothing():
    run = StateScheduling(recurrent_cache, **STATES_OF_TOKENS)
    cache = SglangJaxRecurrentCache(run.rows, run.allocator, is_eagle=True, smallest=32)
    request = Request("r", [1, 2, 3], [], 1)
    request.recurrent_pool_idx = 5
    assert cache._states(request, 3, ended=True) == {}


def test_pages_of_several_tokens_need_snapshots():
    run = StateScheduling(recurrent_cache, **STATES)
    with pytest.raises(ValueError, match="enable_recurrent_extra_buffer"):
        SglangJaxRecurrentCache(run.rows, run.allocator, 4)
    plain = CacheConfig(page_size=1, device_pages=61, external_pages=True)
    with pytest.raises(ValueError, match="add one named 'state'"):
        SglangJaxRecurrentCache(run.rows, run.allocator, 1, config=plain)


def test_the_ledger_notices_a_state_that_is_lost():
    run = StateScheduling(recurrent_cache, **STATES_OF_TOKENS)
    assert run.cache.assert_recurrent_slot_ledger(0, []) == 0
    run.rows.recurrent_free_slots[0].pop()
    assert run.cache.assert_recurrent_slot_ledger(0) == 1
    with pytest.raises(AssertionError, match="9 are free and 0 in the tree, and requests have 0"):
        run.cache.assert_recurrent_slot_ledger(0, [])
    run.rows.recurrent_free_slots[0] += [1, 2, 3]
    with pytest.raises(AssertionError, match="12 are free"):
        run.cache.assert_recurrent_slot_ledger(0)


def test_offers_end_at_the_last_page():
    run = StateScheduling(recurrent_cache, **STATES_OF_TOKENS)
    request = Request("r", [1, 2, 3], [], 1)
    request.recurrent_pool_idx = 5
    offered = run.cache._states(request, 3, ended=True)["state"]
    assert np.array_equal(offered, [-1, -1, 5])
    assert run.cache._states(request, 3, ended=False) == {}
