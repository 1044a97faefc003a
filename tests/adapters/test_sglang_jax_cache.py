"""Our cache for sglang-jax's scheduler: the conformance kit, and what the kit does not know of."""

import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from ours import HOST, STORAGE, TWO_RANKS, Shelf, maker, settle

from purecache.adapters.attachment import Shelf as Shelf_
from purecache.adapters.sglang_jax import SglangJaxCache
from purecache.stores.names import ObjectRecord
from purecache.testing import Scheduling, check_prefix_cache
from purecache.testing.stand_ins import MatchPrefixParams, RadixKey, Request

# Few shapes, since every one is compiled for itself, and in one process. What is deep is in test_nodes.
pytestmark = [
    pytest.mark.xdist_group("sglang-jax"),
    pytest.mark.filterwarnings("ignore:a page is 4 tokens"),  # too little for storage, but quick to test
]
KIT = {
    "page 4, two ranks, write through": (maker(24, write="write_through"), TWO_RANKS),
    "and with storage": (maker(24, lambda: Shelf(1 << 20), write="write_through"), TWO_RANKS | {"host": STORAGE}),
    "page 1, eagle, write back": (maker(24, write="write_back"), {"page_size": 1, "is_eagle": True}),
}


@pytest.mark.parametrize("overlap", [False, True], ids=["one thread", "overlap"])
@pytest.mark.parametrize("name", KIT)
def test_the_conformance_kit_finds_nothing(name, overlap):
    make, settings = KIT[name]
    tally = check_prefix_cache(make, overlap=overlap, skip=["deep"], **{"host": HOST} | settings)
    assert tally.finished > 50
    assert tally.cached_tokens > 100
    assert min(tally.evictions, tally.retracted, tally.aborted) > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["one thread", "overlap"])
def test_what_one_cache_stored_another_one_serves(overlap):
    shelf = Shelf(1 << 22)
    make = maker(24, shelf, write="write_through")
    settings = TWO_RANKS | {"overlap": overlap, "host": HOST}
    prompt = [7, 8, 9, 10] * 6
    first = Scheduling(make, **settings)
    first.submit(prompt, 2)
    first.drain()
    settle(first.cache)
    first.close()
    second = Scheduling(make, **settings)
    asked = second.submit(prompt, 2)
    key = RadixKey(asked.adjust_max_prefix_ids(), None, None)
    assert second.cache.match_prefix(MatchPrefixParams(key, req=asked)).host_hit_length == 0
    assert not second.cache.check_prefetch_progress(asked.rid)
    settle(second.cache)
    assert second.cache.check_prefetch_progress(asked.rid)
    assert second.cache.pop_prefetch_loaded_tokens(asked.rid) == 20
    assert second.cache.match_prefix(MatchPrefixParams(key, req=asked)).host_hit_length == 20
    second.drain()
    assert second.tally.loaded_tokens == 20
    second.close()


def one_request():
    """A scheduler of 16 pages of 4 tokens whose cache is empty, and a request with a row that says nothing yet."""
    run = Scheduling(maker(24, write="write_through"), host=HOST, **TWO_RANKS)
    request = Request("r", list(range(1, 11)), list(range(1, 20)), 4)
    request.fill_ids = list(request.origin_input_ids)
    run.rows.alloc([request])
    return run, request


def fill(run, request, length):
    """The request has slots for all of its tokens, written by somebody else."""
    slots = run.allocator.alloc(-(-length // 4) * 4)[:length]
    run.rows.write((request.req_pool_idx, slice(0, length)), slots)
    request.prefix_indices = slots
    request.kv_committed_len = request.kv_allocated_len = length


@pytest.mark.parametrize("is_insert", [True, False])
def test_kv_that_another_server_filled_is_the_requests_until_the_tree_takes_it(is_insert):
    """A decode server of a disaggregated pair: it matches nothing, locks the root, and counts all of it as matched."""
    run, request = one_request()
    cache = run.cache
    fill(run, request, 10)
    request.last_node = cache.root_node
    request.swa_uuid_for_lock = cache.inc_lock_ref(cache.root_node).swa_uuid_for_lock
    request.last_matched_prefix_len = request.cache_protected_len = 10
    run.allocator.on_free = lambda rank, slots: None  # the kit takes these lengths for what the tree has
    assert (cache.evictable_size(0), cache.protected_size(0)) == (0, 0)
    cache.cache_finished_req(request, is_insert=is_insert)
    kept = 8 if is_insert else 0
    assert (cache.evictable_size(0), cache.protected_size(0)) == (kept, 0)
    assert run.allocator.available_size(0) == 64 - kept
    assert cache.cache.violations() == []


def test_a_pool_that_is_deleted_is_a_miss_and_not_an_error():
    run, request = one_request()
    cache, pool = run.cache, run.allocator.get_kvcache()
    fill(run, request, 8)
    request.origin_input_ids = request.fill_ids = request.origin_input_ids[:8]
    request.last_node = cache.root_node
    arrays = list(pool.kv_buffer)
    pool.kv_buffer[:] = [array + 0 for array in arrays]
    for array in pool.kv_buffer:
        array.delete()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.cache_finished_req(request)
        cache.check_hicache_events()
    assert ["can't be used" in str(each.message) for each in caught] == [True]
    pool.kv_buffer[:] = arrays
    assert cache.cache.counters()["backup_failed_pages"] == 2
    assert run.allocator.available_size(0) + cache.evictable_size(0) == 64
    assert cache.cache.violations() == []


def test_a_copy_waits_for_the_barrier_of_the_scheduler():
    run, request = one_request()
    cache, waited = run.cache, threading.Event()
    fill(run, request, 8)
    request.last_node = cache.root_node
    cache._donation_barrier = waited.set
    cache.cache_finished_req(request)
    assert waited.is_set()


def test_locks_without_a_receipt_are_undone_by_their_node():
    run, request = one_request()
    cache = run.cache
    fill(run, request, 10)
    request.last_node = cache.root_node
    cache.cache_finished_req(request)
    node = cache.match_prefix(MatchPrefixParams(RadixKey(list(range(1, 9))))).last_device_node
    first, second = cache.inc_lock_ref(node), cache.inc_lock_ref(node)
    assert (first.delta, second.delta) == (-8, 0)
    assert (cache.dec_lock_ref(node), cache.dec_lock_ref(node), cache.dec_lock_ref(node)) == (0, 8, 0)
    assert cache.protected_size(0) == 0


def test_a_disabled_cache_gives_all_slots_back():
    run, request = one_request()
    cache = SglangJaxCache(run.rows, run.allocator, page_size=4, disable=True)
    fill(run, request, 10)
    cache.cache_unfinished_req(request)
    assert len(request.prefix_indices) == 10
    cache.cache_finished_req(request)
    assert run.allocator.available_size(0) == 64
    assert cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4]))).device_indices.tolist() == []
    assert cache.is_chunk_cache()


def test_indices_are_copies_and_inserts_answer_as_ints_and_objects():
    run, _ = one_request()
    cache, slots = run.cache, run.allocator.alloc(8)
    given = type("InsertParams", (), {"key": RadixKey(list(range(8))), "value": slots})
    assert cache.insert(given) == cache.insert(given).prefix_len - 8 == 0
    found = cache.match_prefix(MatchPrefixParams(RadixKey(list(range(9))))).device_indices
    assert found.dtype == np.int32
    found[:] = 0
    again = cache.match_prefix(MatchPrefixParams(RadixKey(list(range(9))))).device_indices
    assert again.tolist() == slots.tolist()


def test_storage_comes_and_goes_while_the_server_runs():
    run = Scheduling(maker(24, write="write_through"), host=HOST, **TWO_RANKS)
    cache = run.cache
    assert cache.attach_storage_backend("memory:?capacity=1MiB")[1].startswith("this cache has no host memory, or")
    page_bytes = sum(array[0].nbytes for array in run.allocator.get_kvcache().kv_buffer)
    cache.shelf = Shelf_(ObjectRecord("m", "r", "float32", "any", 4, (0, 1)), page_bytes)
    for wrong, why in {
        ("nothing://", None, None): "there is no store",
        ("memory:?capacity=1MiB", "[", None): "Expecting value",
        ("memory:?capacity=1MiB", None, "never"): "never",
        ("memory:?capacity=1MiB", '{"prefetch_threshold": 0}', None): "threshold is 0",
    }.items():
        done, text = cache.attach_storage_backend(
            wrong[0], storage_backend_extra_config_json=wrong[1], hicache_storage_prefetch_policy=wrong[2]
        )
        assert (done, why in text) == (False, True), text
        assert cache.prefetches.tier is None
    assert cache.attach_storage_backend("memory:?capacity=1MiB", hicache_write_policy="write_back")[0] is False
    assert cache.clear_storage_backend() is False
    assert cache.detach_storage_backend()[0]
    done = cache.attach_storage_backend(
        "memory:?capacity=1MiB", '{"prefetch_threshold": 4}', "m", "wait_complete", "write_through"
    )
    assert done == (True, "storage is attached: memory:?capacity=1MiB")
    assert cache.attach_storage_backend("memory:")[1] == "storage is attached already: detach it first"
    run.submit([5, 6, 7, 8] * 3, 2)
    run.drain()
    settle(cache)
    assert cache.prefetches.store.stats()["objects"] == 3
    assert cache.clear_storage_backend()
    assert cache.prefetches.store.stats()["objects"] == 0
    assert cache.detach_storage_backend()[0]
    assert cache.prefetches.tier is None


def test_requests_without_a_field_for_receipts_never_undo_the_lock_of_a_running_one():
    run, first = one_request()
    cache, others = run.cache, []
    fill(run, first, 8)
    first.fill_ids = first.origin_input_ids = first.origin_input_ids[:8]
    first.last_node = cache.root_node
    cache.cache_unfinished_req(first)
    node = first.last_node
    for _ in range(2):
        request = Request("other", list(range(1, 9)), list(range(1, 9)), 1)
        request.last_node, request.cache_protected_len, request.kv_committed_len = node, 8, 8
        run.rows.alloc([request])
        run.rows.write((request.req_pool_idx, slice(0, 8)), first.prefix_indices)
        cache.inc_lock_ref(node)
        fields = {name: value for name, value in vars(request).items() if name != "swa_uuid_for_lock"}
        others.append(SimpleNamespace(pop_committed_kv_cache=request.pop_committed_kv_cache, **fields))
    for other in others:
        cache.cache_finished_req(other)
        assert cache.protected_size(0) == 8
    cache.cache_finished_req(first)
    assert (cache.protected_size(0), cache.evictable_size(0)) == (0, 8)
