"""A decode server with decode offload: a prompt's KV comes from elsewhere, and what is generated goes to storage."""

import pytest
from ours import HOST, TWO_RANKS, Shelf, maker, settle

from purecache.adapters.decode_offload import DecodeOffload
from purecache.testing import Scheduling
from purecache.testing.stand_ins import MatchPrefixParams, RadixKey, Request

pytestmark = [
    pytest.mark.xdist_group("sglang-jax"),
    pytest.mark.filterwarnings("ignore:a page is 4 tokens"),  # too little for storage, but quick to test
]
PROMPT, ANSWER = list(range(1, 11)), list(range(50, 64))


def decoding(write="write_through", shelf=None):
    """A decode server, and a request of 10 tokens whose KV another server has filled."""
    run = Scheduling(maker(24, shelf or Shelf(1 << 22), write=write), host=HOST, **TWO_RANKS)
    run.allocator.on_free = lambda rank, slots: None  # the kit takes prefix lengths for what the tree has
    request = Request("r", list(PROMPT), list(ANSWER), len(ANSWER) + 1)
    request.output_ids = [ANSWER[0]]
    request.fill_ids = list(PROMPT)
    run.rows.alloc([request])
    request.kv_committed_len = request.kv_allocated_len = 0
    grow(run, request, len(PROMPT))
    cache = run.cache
    request.last_node = cache.root_node
    request.swa_uuid_for_lock = cache.inc_lock_ref(cache.root_node).swa_uuid_for_lock
    request.last_matched_prefix_len = request.cache_protected_len = len(PROMPT)
    return run, request


def grow(run, request, length):
    """The request gets slots up to `length`, and they are computed."""
    while request.kv_allocated_len < length:
        slots = run.allocator.alloc(4)
        run.rows.write((request.req_pool_idx, slice(request.kv_allocated_len, request.kv_allocated_len + 4)), slots)
        request.kv_allocated_len += 4
    request.kv_committed_len = length


def step(run, request):
    """One decode step."""
    grow(run, request, len(PROMPT) + len(request.output_ids))
    request.output_ids.append(ANSWER[len(request.output_ids)])


def found(cache, rid="next"):
    """Tokens of prompt and answer that storage brings for the next turn, to a server that knows nothing."""
    prompt = PROMPT + ANSWER
    request = Request(rid, prompt, [1], 1)
    key = RadixKey(prompt, None, None)
    assert cache.match_prefix(MatchPrefixParams(key, req=request)).host_hit_length == 0
    cache.check_prefetch_progress(rid)
    settle(cache)
    cache.check_prefetch_progress(rid)
    return cache.pop_prefetch_loaded_tokens(rid)


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_what_is_generated_is_in_storage_while_the_request_runs(write):
    shelf = Shelf(1 << 22)
    run, request = decoding(write, shelf)
    offload, offloaded = DecodeOffload(run.cache, every=4), []
    for _ in ANSWER[1:]:
        step(run, request)
        offloaded.append(offload.offload_kv_cache(request))
        offload.check_offload_progress()
    settle(run.cache)
    offload.check_offload_progress()
    settle(run.cache)
    # Two pages of the prompt at the first step, then one page every four tokens.
    assert [index for index, done in enumerate(offloaded) if done] == [0, 1, 5, 9]
    assert shelf.stats()["objects"] == 5  # 20 of 23 tokens: whole pages
    assert (run.cache.protected_size(0), run.cache.evictable_size(0)) == (20, 0)
    other = Scheduling(maker(24, shelf, write=write), host=HOST, **TWO_RANKS)
    assert found(other.cache) == 20
    run.cache.cache_finished_req(request)
    assert run.cache.cache.violations() == []
    assert run.cache.protected_size(0) == 0
    for each in (run, other):
        each.close()


def test_nothing_is_offloaded_before_there_is_enough():
    shelf = Shelf(1 << 22)
    run, request = decoding(shelf=shelf)
    offload = DecodeOffload(run.cache, every=16)
    assert [bool(step(run, request)) or offload.offload_kv_cache(request) for _ in range(5)] == [False] * 5
    assert run.cache.total_size() == 0
    step(run, request)  # 16 tokens
    assert offload.offload_kv_cache(request)
    settle(run.cache)
    assert shelf.stats()["objects"] == 4
    run.close()


def test_a_request_that_was_offloaded_can_be_aborted():
    run, request = decoding()
    step(run, request)
    assert DecodeOffload(run.cache, every=4).offload_kv_cache(request)
    run.cache.cache_finished_req(request, is_insert=False)
    settle(run.cache)
    assert run.allocator.available_size(0) + run.cache.evictable_size(0) == 64
    assert run.cache.cache.violations() == []
    run.close()


def test_mistakes_are_told():
    run, _ = decoding()
    with pytest.raises(ValueError, match="at least a page of 4 tokens"):
        DecodeOffload(run.cache, every=3)
    plain = Scheduling(maker(24), host=HOST, **TWO_RANKS)
    with pytest.raises(ValueError, match="needs storage"):
        DecodeOffload(plain.cache)
    for each in (run, plain):
        each.close()
