"""A cache that starts anew fetches the hottest prefixes of a snapshot from storage, within its bounds, bytes right."""

import time

import pytest
from support import new_cache, serve, settle, tiny
from test_tier import Shelf, attached, check_bytes

from purecache.snapshots import Snapshot, SnapshotError
from purecache.state import Tier
from purecache.state.layout import Account
from purecache.storage import EndPolicy
from purecache.storage.rewarm import Rewarm

pytestmark = pytest.mark.filterwarnings("ignore:a page is 2 tokens")
PROMPTS = [[1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4], [5, 5], [7, 7]]
"""Six pages, which is what host memory takes. The last is the hottest."""
SPACES = [{}, {}, {"namespace": "tenant"}, {"namespace": (("a", 1),), "rank": None}]


def lived(config, prompts=PROMPTS, spaces=SPACES):
    """A cache that has served prompts and stored them; its shelf and its snapshot."""
    shelf = Shelf()
    cache, tier, _ = attached(shelf, config)
    for tokens, space in zip(prompts, spaces, strict=True):
        serve(cache, tokens, **space)
        settle(cache)
        cache.drain()
        assert tier.flush(90)
    snapshot = cache.snapshot()
    tier.detach()
    return shelf, Snapshot.from_bytes(snapshot.to_bytes())


def run(rewarm, cache, watch=lambda: None):
    """Tick to the end."""
    end = time.monotonic() + 90
    while True:
        cache.tick()
        more = rewarm.tick()
        watch()
        if not more:
            return
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("policy", EndPolicy)
def test_a_new_cache_has_the_hottest_prefixes_with_the_right_bytes(policy):
    shelf, snapshot = lived(tiny())
    cache, tier, _ = attached(shelf, tiny(), policy=policy)
    rewarm = Rewarm(cache, tier, snapshot, share=1.0)
    run(rewarm, cache)
    for tokens, space in zip(PROMPTS, SPACES, strict=True):
        assert cache.peek(tokens, **space).host_length == len(tokens)
    for tokens, space in zip(PROMPTS, SPACES, strict=True):
        check_bytes(cache, tokens, **space)
    assert (rewarm.tokens, rewarm.left_out) == (2 * 6, 0)
    assert cache.violations() == []
    assert not rewarm.tick()
    tier.detach()


def test_the_hottest_come_where_there_is_no_room_for_all_and_are_evicted_last():
    shelf, snapshot = lived(tiny())
    cache, tier, _ = attached(shelf)
    rewarm = Rewarm(cache, tier, snapshot, share=0.9)
    run(rewarm, cache)
    lengths = [cache.peek(tokens, **space).host_length for tokens, space in zip(PROMPTS, SPACES, strict=True)]
    assert (lengths, rewarm.left_out) == ([4, 6, 2, 2], 1)
    assert cache.pages(Account.FREE, Tier.HOST) == 1
    # By recency: the first goes first, the last stays to the end.
    gone = []
    while cache.evict_host(1):
        left = [cache.peek(tokens, **space).host_length for tokens, space in zip(PROMPTS, SPACES, strict=True)]
        gone += [number for number in (1, 2, 3) if not left[number] and number not in gone]
    assert gone == [1, 2, 3]
    assert cache.violations() == []
    tier.detach()


def test_no_more_is_under_way_than_allowed_and_nothing_twice():
    prompts = [[1, 1, 2, 2, number, 3] for number in range(10, 13)] + [[20] * 8, [21] * 4]
    spaces = [{}] * 3 + [{"rank": 1}] * 2
    shelf, snapshot = lived(tiny(), prompts, spaces)
    cache, tier, _ = attached(shelf)
    rewarm, most = Rewarm(cache, tier, snapshot, operations=2, pages=3, share=1.0), []

    def watch():
        most.append((len(rewarm._flying), sum(each.end - each.first for each in rewarm._flying)))
        assert sum(cache.pages(Account.IN_FLIGHT, Tier.HOST, rank) for rank in (0, 1)) <= 3

    run(rewarm, cache, watch)
    assert max(operations for operations, _ in most) == 2
    assert max(pages for _, pages in most) == 3
    for tokens, space in zip(prompts, spaces, strict=True):
        assert cache.peek(tokens, **space).host_length == len(tokens)
    assert cache.counters()["prefetched_pages"] == rewarm.tokens // 2 == (2 + 3) + (4 + 2)
    tier.detach()


def test_requests_go_on_meanwhile():
    shelf, snapshot = lived(tiny())
    cache, tier, _ = attached(shelf)
    rewarm, served = Rewarm(cache, tier, snapshot, operations=1, share=1.0), []

    def watch():
        if len(served) < 6:
            serve(cache, [30 + len(served)] * 4)
            served.append(1)

    run(rewarm, cache, watch)
    assert cache.violations() == []
    tier.detach()


def test_what_storage_lost_is_a_miss():
    config = tiny()
    shelf, snapshot = lived(config)
    shelf.breaks = "flip"
    cache, tier, _ = attached(shelf, config)
    rewarm = Rewarm(cache, tier, snapshot)
    run(rewarm, cache)
    assert rewarm.tokens == 0
    assert all(cache.peek(tokens, **space).length == 0 for tokens, space in zip(PROMPTS, SPACES, strict=True))
    assert cache.violations() == []
    tier.detach()


def test_prefixes_that_were_never_stored_are_not_asked_for():
    cache, _ = new_cache(tiny())
    serve(cache, PROMPTS[0])
    snapshot = cache.snapshot()
    assert [each.pages_stored for each in snapshot.prefixes()] == [0]
    fresh, tier, _ = attached(Shelf())
    rewarm = Rewarm(fresh, tier, snapshot)
    run(rewarm, fresh)
    assert (rewarm.begun, rewarm.left_out) == (0, 0)
    tier.detach()


def test_a_detached_tier_ends_it():
    shelf, snapshot = lived(tiny())
    cache, tier, _ = attached(shelf)
    rewarm = Rewarm(cache, tier, snapshot, operations=1)
    rewarm.tick()
    tier.detach()
    run(rewarm, cache)
    assert not rewarm._flying


def test_snapshots_of_other_caches_are_refused():
    shelf, snapshot = lived(tiny())
    cache, tier, _ = attached(shelf, tiny(bigrams=True))
    with pytest.raises(SnapshotError, match="bigrams"):
        Rewarm(cache, tier, snapshot)
    tier.detach()
    cache, tier, _ = attached(shelf)
    for wrong in ({"operations": 0}, {"pages": 0}, {"share": 0.0}, {"share": 1.5}):
        with pytest.raises(ValueError, match="at least 1"):
            Rewarm(cache, tier, snapshot, **wrong)
    tier.detach()


def test_bigrams_come_back():
    config = tiny(device_pages=10, host_pages=10, bigrams=True)
    prompts = [[1, 2, 3, 4, 5], [9, 2, 3, 4, 5]]
    shelf, snapshot = lived(config, prompts, [{}, {}])
    cache, tier, _ = attached(shelf, config)
    run(Rewarm(cache, tier, snapshot, share=1.0), cache)
    assert [cache.match(tokens).host_length for tokens in prompts] == [4, 4]
    assert len(snapshot) == 2
    tier.detach()
