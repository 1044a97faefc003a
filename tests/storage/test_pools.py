"""Storage of a cache with several pools: what the laws ask for comes back, of every pool, or the prefix is shorter."""

import time
from dataclasses import replace

import numpy as np
import pytest
from pool_worlds import (
    NEAR,
    PAGE,
    RECORDS,
    check_bytes,
    drained,
    hybrid,
    in_flight,
    new_hybrid,
    serve,
    settle_all,
    with_tiers,
)

from purecache.answers import Refusal
from purecache.namespaces import namespace_digest
from purecache.state.layout import Account, Column, Tier
from purecache.storage import EndPolicy, Progress, StorageOptions, StorageTier
from purecache.storage.prefixes import look_up
from purecache.stores.interface import Fetch
from purecache.stores.keys import page_keys
from purecache.stores.memory import MemoryStore
from purecache.transitions import Status

pytestmark = [pytest.mark.filterwarnings("ignore:a page is 2 tokens"), pytest.mark.xdist_group("hybrid-tree")]
FOUR = [1, 1, 2, 2, 3, 3, 4, 4]
KEYS = page_keys(np.array(FOUR, np.uint32), PAGE)
STATES = (1, 3)
"""Pages of FOUR after which the first cache keeps a state."""


class Shelf(MemoryStore):
    """A memory store that outlives the tier, and does wrong on demand: see `spoils` and `hides`."""

    def __init__(self):
        super().__init__(1 << 20)
        self.spoils, self.hides, self.refuses = (), (), ()
        self.read = []

    def exists(self, keys, deadline):
        found = super().exists(keys, deadline)
        return [type(answer)(0) if key in self.hides else answer for key, answer in zip(keys, found, strict=True)]

    def get(self, keys, buffers, deadline):
        self.read += keys
        answers = super().get(keys, buffers, deadline)
        for key, buffer in zip(keys, buffers, strict=True):
            if key in self.spoils:
                buffer[3] ^= 1
        return [Fetch.MISSING if key in self.hides else answer for key, answer in zip(keys, answers, strict=True)]

    def put(self, keys, buffers, deadline):
        kept = super().put(keys, buffers, deadline)
        return [ok and pool_of(key) not in self.refuses for key, ok in zip(keys, kept, strict=True)]

    def delete(self, keys, deadline):
        return [True] * len(keys)  # so that a spoilt object is there again for the next cache

    def close(self):
        """Stay."""


def pool_of(name):
    return name.split(".")[1]


def page_of(name):
    return KEYS.index(name.split(".")[0])


def name_of(pool, page):
    """The object of a page of FOUR."""
    return next(name for name in _WRITTEN if name.startswith(f"{KEYS[page]}.{pool}."))


def attached(shelf, config=None, naming=RECORDS, **options):
    cache = new_hybrid(config)
    options = {"threshold": PAGE, "staging_pages": 4, "batch_pages": 3, "policy": EndPolicy.WAIT_COMPLETE} | options
    return cache, StorageTier(cache, shelf, naming, StorageOptions(**options))


def stored(cache, tier, tokens, states=STATES, **space):
    assert serve(cache, tokens, states, **space) is not None
    settle_all(cache)
    cache.drain()
    assert tier.flush(90)


_WRITTEN: dict = {}


def full_shelf():
    """A shelf that has all of FOUR, from a cache that is gone."""
    if not _WRITTEN:
        shelf = Shelf()
        cache, tier = attached(shelf)
        stored(cache, tier, FOUR)
        tier.detach()
        _WRITTEN.update(shelf._objects)
    shelf = Shelf()
    shelf._objects.update(_WRITTEN)
    return shelf


def prefetched(tier, cache, tokens, **space):
    """Prefetch to the end; the tokens that it brought."""
    prefetch = tier.prefetch(tokens, **space)
    assert not isinstance(prefetch, Refusal)
    end = time.monotonic() + 90  # the first use compiles
    while tier.progress(prefetch, time.monotonic()) is Progress.NOT_YET:
        cache.tick()
        assert time.monotonic() < end
    return prefetch.loaded


def deepest(kv, window, state):
    """The deepest valid prefix, straight from the laws: sets of pages that each pool has."""
    for depth in range(4, 0, -1):
        near = range(max(0, depth - NEAR), depth)
        if set(range(depth)) <= kv and set(near) <= window and depth - 1 in state:
            return depth
    return 0


def ended_well(cache, tier):
    """Nothing is under way, all buffers are back, and every page of every pool can be had."""
    assert tier.flush(90)
    assert [pages.free for pages in tier._pools.values()] == [tier._options.staging_pages] * len(tier._pools)
    assert (tier._occupied, in_flight(cache), cache.violations()) == (0, 0, [])
    assert drained(cache)
    tier.detach()


def test_all_pools_are_written_under_their_own_names():
    shelf = full_shelf()
    found = sorted((pool_of(name), page_of(name)) for name in shelf._objects)
    each = [(name, page) for name in ("indexer", "kv") for page in range(4)]
    assert found == [*each, *(("state", page) for page in STATES), *(("window", page) for page in range(4))]
    assert RECORDS["kv"].objects(KEYS[2], "kv")[0] in shelf._objects
    assert len({len(value) for value in shelf._objects.values()}) > 2


@pytest.mark.parametrize("space", [{}, {"namespace": "tenant"}, {"rank": 1}])
def test_everything_comes_back_bit_for_bit_but_not_more_than_the_laws_ask_for(space):
    shelf = full_shelf()
    if "namespace" in space:
        cache, tier = attached(shelf)
        stored(cache, tier, FOUR, **space)
        tier.detach()
    cache, tier = attached(shelf)
    shelf.read = []
    assert prefetched(tier, cache, FOUR, **space) == 8
    counts = {pool: [pool_of(name) for name in shelf.read].count(pool) for pool in RECORDS}
    assert counts == {"kv": 4, "indexer": 4, "window": NEAR, "state": 1}
    assert check_bytes(cache, FOUR, **space) == 4
    ended_well(cache, tier)


def test_the_restorable_prefix_is_what_the_laws_say_whatever_is_missing():
    """Storage lacks any objects: as deep as by the definition, and no page is reserved or read beyond that."""
    shelf, draw = full_shelf(), np.random.default_rng(7)
    names = sorted(shelf._objects)
    for _ in range(40):
        shelf.hides = tuple(name for name in names if draw.random() < 0.2)
        there = {pool: {page_of(n) for n in names if n not in shelf.hides and pool_of(n) == pool} for pool in RECORDS}
        expected = deepest(there["kv"] & there["indexer"], there["window"], there["state"])
        cache, tier = attached(shelf)
        shelf.read = []
        assert prefetched(tier, cache, FOUR) == expected * PAGE
        assert cache.match(FOUR).length == expected * PAGE
        assert check_bytes(cache, FOUR) == expected
        assert not set(shelf.read) & set(shelf.hides)
        assert {pool_of(n) for n in shelf.read} == (set(RECORDS) if expected else set())
        assert cache.violations() == []
        tier.detach()
    cache, tier = attached(shelf)
    ended_well(cache, tier)


def test_what_arrives_spoilt_makes_the_prefix_shorter_and_never_wrong():
    shelf, draw = full_shelf(), np.random.default_rng(8)
    names = sorted(shelf._objects)
    chosen = [(name,) for name in names] + [tuple(n for n in names if draw.random() < 0.15) for _ in range(15)]
    for spoilt in chosen:
        shelf.spoils = spoilt
        cache, tier = attached(shelf)
        loaded = prefetched(tier, cache, FOUR)
        bad = {(pool_of(name), page_of(name)) for name in spoilt}
        whole = {page for page in range(4) if not {("kv", page), ("indexer", page)} & bad}
        near = {page for page in (2, 3) if ("window", page) not in bad}
        expected = deepest(whole, near, {3} - {page for pool, page in bad if pool == "state"})
        assert (loaded, cache.match(FOUR).length) == (expected * PAGE, expected * PAGE), spoilt
        assert check_bytes(cache, FOUR) == expected
        ended_well(cache, tier)


def test_values_alone_are_prefetched_where_kv_is_still_there():
    """The window and the state have gone; kv is on host. Only they are read, and the tokens gained are what counts."""
    shelf = full_shelf()
    cache, tier = attached(shelf, threshold=6)
    stored(cache, tier, FOUR)
    for evict in (cache.evict, cache.evict_host):
        evict(99, pool="window")
        evict(99, pool="state")
    match = cache.match(FOUR)
    assert (match.length, match.full_length) == (0, 8)
    shelf.read = []
    assert prefetched(tier, cache, FOUR) == 8
    assert sorted(pool_of(name) for name in shelf.read) == ["state", "window", "window"]
    assert check_bytes(cache, FOUR) == 4
    ended_well(cache, tier)


def test_values_that_the_cache_has_are_not_read_again():
    shelf = full_shelf()
    cache, tier = attached(shelf)
    stored(cache, tier, FOUR[:6], states=(2,))
    for evict in (cache.evict, cache.evict_host):
        evict(99, pool="state")
    match = cache.match(FOUR)
    assert (match.length, match.full_length) == (0, 6)
    shelf.read = []
    assert prefetched(tier, cache, FOUR) == 8
    assert sorted((pool_of(name), page_of(name)) for name in shelf.read) == [(name, 3) for name in sorted(RECORDS)]
    assert check_bytes(cache, FOUR) == 4
    ended_well(cache, tier)


def test_gains_below_the_threshold_are_not_worth_it():
    shelf = full_shelf()
    cache, tier = attached(shelf, threshold=6)
    shelf.hides = (name_of("state", 3),)
    assert prefetched(tier, cache, FOUR) == 0
    assert not shelf.read
    assert tier.counters()["prefetches_given_up"] == 1
    ended_well(cache, tier)


def test_too_little_host_memory_for_values_means_a_shorter_prefix_or_none():
    """Another prefetch holds the pages of a pool: what is left decides, and everything comes back."""
    shelf = full_shelf()
    for pool, left, expected in ((1, 1, 0), (1, 2, 8), (2, 0, 0), (2, 1, 8)):
        cache, tier = attached(shelf)
        size = cache.config.layout.capacity(Tier.HOST, pool)
        root = cache.config.layout.root(0)
        held = cache._run(f"begin_prefetch@{pool}", 16, root, 0, size - left)
        assert prefetched(tier, cache, FOUR) == expected
        assert cache.match(FOUR).length == expected
        prompt = (np.zeros(0, np.int32), 0, np.zeros(4, np.int32), 0)
        none = np.zeros(16, np.int32)
        operation = (held.operation, held.generation)
        cache._run(f"finish_prefetch@{pool}", 16, *operation, *prompt, 0, held.pages, none)
        ended_well(cache, tier)


def test_a_page_of_kv_is_stored_only_with_its_side_pools():
    shelf = Shelf()
    shelf.refuses = ("indexer",)
    cache, tier = attached(shelf)
    stored(cache, tier, FOUR)
    assert cache.counters()["stored_pages"] == 6  # values
    shelf.refuses = ()
    assert tier.store(cache.peek(FOUR).node) == 4
    assert tier.flush(90)
    assert cache.counters()["stored_pages"] == 10
    ended_well(cache, tier)


def test_what_finds_no_buffer_is_stored_later_in_every_pool():
    shelf = Shelf()
    cache, tier = attached(shelf, staging_pages=1)
    stored(cache, tier, FOUR)
    assert sorted(shelf._objects) == sorted(full_shelf()._objects)
    ended_well(cache, tier)


def test_pools_of_large_pages_have_fewer_buffers():
    _, tier = attached(Shelf(), staging_pages=8, staging_bytes=100)
    assert [pages.free for pages in tier._pools.values()] == [6, 3, 2]
    tier.detach()


def test_a_pool_without_the_storage_tier_is_not_stored_and_its_values_come_from_the_cache_alone():
    shelf, config = full_shelf(), hybrid(pools=with_tiers(state=("device", "host")))
    naming = {name: record for name, record in RECORDS.items() if name != "state"}
    cache, tier = attached(shelf, config, naming)
    assert tier.prefetch(FOUR).status == Status.BELOW_THRESHOLD
    other = Shelf()
    tier.detach()
    cache, tier = attached(other, config, naming)
    stored(cache, tier, FOUR)
    assert {pool_of(name) for name in other._objects} == {"kv", "indexer", "window"}
    for evict in (cache.evict, cache.evict_host):
        evict(99, pool="window")
    assert prefetched(tier, cache, FOUR) == 8
    assert check_bytes(cache, FOUR) == 4
    ended_well(cache, tier)


@pytest.mark.parametrize("ticks", range(7))
def test_an_abort_at_any_point_returns_pages_buffers_and_budget_of_every_pool(ticks):
    cache, tier = attached(full_shelf())
    prefetch = tier.prefetch(FOUR)
    for _ in range(ticks):
        time.sleep(0.002)
        cache.tick()
    tier.abort(prefetch)
    assert tier.flush(90)
    deadline = time.monotonic() + 90
    while any(pages.free < 4 for pages in tier._pools.values()):
        cache.tick()
        assert time.monotonic() < deadline
    assert check_bytes(cache, FOUR) == prefetch.loaded // PAGE
    ended_well(cache, tier)


def test_a_reset_or_a_detach_in_the_middle_leaves_nothing():
    cache, tier = attached(full_shelf())
    prefetch = tier.prefetch(FOUR)
    while not prefetch.shares and prefetch.stage.value < 2:
        cache.tick()
    cache.reset()
    assert tier.progress(prefetch, 0.0) is Progress.GIVEN_UP
    assert tier.flush(90)
    assert prefetched(tier, cache, FOUR) == 8
    assert check_bytes(cache, FOUR) == 4
    cache.reset()
    prefetch = tier.prefetch(FOUR)
    while not prefetch.shares and prefetch.stage.value < 2:
        cache.tick()
    tier.detach()
    assert (in_flight(cache), cache.violations()) == (0, [])
    assert drained(cache)


def test_what_the_cache_has_is_found_below_the_usable_prefix_along_branches():
    """The states are gone, so nothing is usable, but kv and some values of every branch are still there."""
    cache = new_hybrid()
    prompts = [[1, 1, 2, 2], [1, 1, 3, 3, 4, 4], [1, 1, 2, 2, 5, 5], [9, 9]]
    serve(cache, [1, 1], namespace="a")
    for tokens in (*prompts, prompts[1]):
        serve(cache, tokens)
    settle_all(cache)
    cache.drain()
    for evict in (cache.evict, cache.evict_host):
        evict(99, pool="state")
        evict(1, rank=0, pool="window")
    nodes, layout = np.array(cache.state.nodes), cache.config.layout
    for tokens in (*prompts, [1, 1, 3, 3, 7, 7], [8, 8]):
        prompt = cache._inputs.prompt(tokens, None, 0)[1]
        known, node = look_up(cache._driver, layout, prompt), layout.root(0)
        assert known.usable == 0
        for page in range(known.full):
            node = child(cache, node, tokens[page * PAGE : page * PAGE + PAGE])
            for pool, values in enumerate(known.values, 1):
                rows = [layout.page_row(tier, pool) for tier in (Tier.DEVICE, Tier.HOST)]
                assert values[page] == bool((nodes[rows, node] >= 0).any())
        assert known.anchor.number == node
        assert known.full == cache.peek(tokens).full_length // PAGE


def child(cache, node, page):
    """The node of a page below another one, by looking at all of them."""
    nodes, tokens = np.array(cache.state.nodes), np.array(cache.state.tokens).reshape(-1, PAGE)
    named = (namespace_digest() == nodes[Column.NAMESPACE : Column.NAMESPACE + 4].T).all(axis=1)
    there = (nodes[Column.PARENT] == node) & (tokens[: len(named)] == page).all(axis=1)
    below = np.flatnonzero(there & (named | (node < cache.config.layout.nodes)))
    assert len(below) == 1
    return int(below[0])


def test_every_pool_needs_a_naming_of_its_own():
    cache = new_hybrid()
    for naming in (RECORDS["kv"], {"kv": RECORDS["kv"]}):
        with pytest.raises(ValueError, match="a naming for each of"):
            StorageTier(cache, Shelf(), naming)
    assert cache._driver.storage is None


@pytest.mark.parametrize("change", ["revision", "kv_dtype", "layout", "layers", "format_version"])
@pytest.mark.parametrize("pool", RECORDS)
def test_whatever_changes_the_bytes_of_a_pool_changes_its_names(pool, change):
    record = RECORDS[pool]
    other = {"layers": (7, 9), "format_version": 2}.get(change, "other")
    cache, tier = attached(full_shelf(), naming=RECORDS | {pool: replace(record, **{change: other})})
    assert prefetched(tier, cache, FOUR) == 0
    ended_well(cache, tier)


def test_the_kind_of_a_law_is_part_of_the_names():
    """A pool of the same name, record and size whose values are of another kind."""
    cache, tier = attached(full_shelf())
    window = tier._pools[1].objects(KEYS[0])
    assert window != RECORDS["window"].objects(KEYS[0], "window")
    assert window[0].startswith(f"{KEYS[0]}.window.")
    assert tier._pools[0].objects(KEYS[0])[:1] == RECORDS["kv"].objects(KEYS[0], "kv")
    assert cache.pages(Account.FREE, Tier.HOST, 0, "window") == 4
    tier.detach()
