"""The conformance kit for prefix caches passes a plain cache that keeps the contract, and refuses each broken one."""

import numpy as np
import pytest
from broken_caches import BROKEN
from plain_cache import PlainCache

from purecache.testing import (
    HostTier,
    KVPool,
    PagedSlots,
    Request,
    RequestRows,
    Scheduling,
    TokenSlots,
    check_prefix_cache,
)

HOST = HostTier(pages=lambda cache: (cache.host.count(None), len(cache.host)))
TIERS = [
    pytest.param({}, id="device"),
    pytest.param({"host_pages": 12}, id="write_back"),
    pytest.param({"host_pages": 12, "write": "write_through"}, id="write_through"),
    pytest.param({"host_pages": 10, "storage": True}, id="storage"),
]
SETTINGS = [
    {},
    {"page_size": 4, "overlap": True},
    {"is_eagle": True, "overlap": True},
    {"page_size": 4, "dp_size": 2},
    {"page_size": 4, "dp_size": 2, "is_eagle": True},
]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_plain_cache_passes(tier, settings):
    skip = ["deep"] if settings else []
    host = HOST if tier else None
    done = check_prefix_cache(
        lambda params: PlainCache(params, **tier), seeds=range(3), steps=60, host=host, skip=skip, **settings
    )
    happened = {name for name, number in vars(done).items() if number}
    wanted = {"finished", "aborted", "retracted", "chunks", "cached_tokens", "evictions", "flushes"}
    assert happened >= wanted | ({"loaded_tokens"} if tier else set())


@pytest.mark.parametrize(("kind", "message", "settings"), BROKEN)
def test_a_broken_cache_is_refused(kind, message, settings):
    settings = dict(settings)
    tier = settings.pop("host", {})
    with pytest.raises(AssertionError, match=message):
        check_prefix_cache(lambda params: kind(params, **tier), host=HOST if tier else None, **settings)


def test_one_life_is_the_same_every_time():
    def done():
        return check_prefix_cache(PlainCache, seeds=[1], steps=30, skip=["deep"], page_size=4, overlap=True)

    assert done() == done()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([5], "slot 5 of rank 1 is freed, but it is free already"),
        ([0], "slot 0 of rank 1 is freed, but it is padding"),
        ([9], "slot 9 of rank 1 is freed, but there is none"),
        ([-1], "padding|there is none"),
        ([3, 3], "slot 3 of rank 1 is freed twice in one call"),
    ],
)
def test_an_allocator_refuses_slots_that_are_not_owned(slots, message):
    allocator = TokenSlots(16, KVPool(16, 1, 2), 2)
    assert sorted(allocator.alloc(4, dp_rank=1).tolist()) == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match=message):
        allocator.free(np.array(slots, np.int32), dp_rank=1)
    assert (allocator.available_size(0), allocator.available_size(1)) == (8, 4)
    allocator.free(np.array([1, 3], np.int32), dp_rank=1)
    with pytest.raises(AssertionError, match="slot 3 of rank 1 is freed, but it is free already"):
        allocator.free(np.array([3], np.int32), dp_rank=1)
    with pytest.raises(AssertionError, match="NumPy"):
        allocator.free([2], dp_rank=1)


def test_an_allocator_of_pages_fills_pages_and_takes_them_back_whole():
    allocator = PagedSlots(32, 4, KVPool(32, 4))
    first = allocator.alloc_extend([0, 0], [6, 3], [-1, -1], 9)
    assert allocator.available_size() == 20
    assert (first % 4).tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    more = allocator.alloc_decode([7, 4], [int(first[5]), int(first[8])])
    assert more.tolist() == [first[5] + 1, first[8] + 1]
    assert allocator.available_size() == 20
    assert allocator.alloc_extend([7], [32], [int(more[0])], 25) is None
    allocator.free_group_begin()
    allocator.free(first[4:5])
    assert allocator.available_size() == 20
    with pytest.raises(AssertionError, match="free already"):
        allocator.free(more[:1])
    allocator.free_group_end()
    assert allocator.available_size() == 24
    assert allocator.alloc(8).dtype == np.int64


def test_rows_refuse_what_does_not_fit():
    rows, request = RequestRows(2, 8), Request("r", [1], [1, 2], 1)
    with pytest.raises(AssertionError, match="no request has it"):
        rows.write((0, slice(0, 1)), [5])
    (row,) = rows.alloc([request])
    rows.write((row, slice(0, 2)), np.array([5, 6]))
    assert rows.read(row, 3).tolist() == [5, 6, 0]
    rows.read(row, 2)[:] = 9
    assert rows.read(row, 2).tolist() == [5, 6]
    with pytest.raises(AssertionError, match="1 values were written to positions 2 to 4"):
        rows.write((row, slice(2, 4)), [7])
    rows.free(request)
    with pytest.raises(AssertionError, match="has no row"):
        rows.free(request)


def test_storage_may_hold_a_request_back():
    asked, gone = {}, []

    def ready(cache, request):
        asked[request.rid] += 1
        return asked[request.rid] > 2

    host = HostTier(
        queued=lambda cache, request: asked.setdefault(request.rid, 0),
        ready=ready,
        gone=lambda cache, request: gone.append(request.rid),
    )
    run = Scheduling(PlainCache, page_size=4, host=host)
    first, second = run.submit([1, 2, 3, 4, 5], 1), run.submit([1, 2], 1)
    run.step()
    run.abort(second)
    assert not first.output_ids
    run.drain()
    assert first.finished()
    assert (asked, gone, run.tally.waits) == ({"r0": 3, "r1": 1}, ["r1"], 3)
