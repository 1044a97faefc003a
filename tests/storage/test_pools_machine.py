"""Any order of requests, evictions, prefetches and answers of storage, in a cache with several pools.

Whatever happens, the bytes of every pool are right, the state is sound, and nothing is leaked.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from pool_worlds import (
    PAGE,
    RECORDS,
    check_bytes,
    drained,
    hybrid,
    in_flight,
    new_hybrid,
    serve,
    settle_all,
)
from test_machine import ScriptedGuard, settle_storage

from purecache.answers import Refusal
from purecache.state import WritePolicy
from purecache.storage import EndPolicy, Progress, StorageOptions, StorageTier

PAGES = st.lists(st.integers(1, 2), max_size=4)
SPACE = st.sampled_from([{}, {}, {"namespace": "a"}, {"rank": 1}])
POOL = st.sampled_from(["kv", "window", "state"])
OUTCOME = st.sampled_from(["good", "good", "good", "good", "twice", "fail", "part", "late", "lie"])


class ThreeTiersOfPools(RuleBasedStateMachine):
    """A hybrid cache, its host memory and a storage that outlives it."""

    prefetches = Bundle("prefetches")

    @initialize(write=st.sampled_from(WritePolicy), end=st.sampled_from(EndPolicy), staging=st.integers(1, 5))
    def start(self, write, end, staging):
        self.config = hybrid(write=write)
        self.options = StorageOptions(threshold=2, policy=end, staging_pages=staging, batch_pages=2)
        self.objects, self.epoch, self.tier = {}, 0, None
        self.restart()

    def tokens(self, pages):
        return [page for page in pages for _ in range(PAGE)]

    @rule()
    def restart(self):
        """The process ends, and another one starts with an empty cache and what storage has."""
        self.epoch += 1
        self.cache = new_hybrid(self.config)
        self.guard = ScriptedGuard(self.objects)
        self.tier = StorageTier(self.cache, self.guard, RECORDS, self.options)

    @rule()
    def reset(self):
        self.cache.reset()

    @rule(pages=PAGES, states=st.lists(st.integers(0, 3), max_size=2), space=SPACE)
    def request(self, pages, states, space):
        if pages:
            serve(self.cache, self.tokens(pages), [len(pages) - 1, *states], **space)

    @rule()
    def tick(self):
        settle_all(self.cache)
        settle_storage(self.tier)
        self.cache.tick()

    @rule(index=st.integers(0, 5), outcome=OUTCOME)
    def answer(self, index, outcome):
        if self.guard.pending:
            self.guard.answer(index, outcome)

    @rule(rounds=st.integers(1, 6))
    def all_is_well(self, rounds):
        """Storage answers everything, for a while."""
        for _ in range(rounds):
            self.tick()
            while self.guard.pending:
                self.guard.answer(0, "good")
        self.tick()

    @rule()
    def finish_late(self):
        self.guard.finish_late()

    @rule(refusing=st.booleans())
    def refuse(self, refusing):
        self.guard.refusing = refusing

    @rule(number=st.integers(1, 6), host=st.booleans(), pool=POOL)
    def evict(self, number, host, pool):
        (self.cache.evict_host if host else self.cache.evict)(number, pool=pool)

    @rule(target=prefetches, pages=PAGES, space=SPACE)
    def prefetch(self, pages, space):
        started = self.tier.prefetch(self.tokens(pages), **space)
        return (self.epoch, None if isinstance(started, Refusal) else started)

    @rule(prefetch=prefetches, now=st.integers(0, 3))
    def ask(self, prefetch, now):
        epoch, started = prefetch
        if started is not None and epoch == self.epoch:
            progress = self.tier.progress(started, float(now))
            assert (progress is Progress.YES) <= (started.loaded > 0)

    @rule(prefetch=consumes(prefetches))
    def abort(self, prefetch):
        epoch, started = prefetch
        if started is not None and epoch == self.epoch:
            self.tier.abort(started)

    @rule(pages=PAGES, space=SPACE)
    def check_bytes(self, pages, space):
        check_bytes(self.cache, self.tokens(pages), **space)

    @invariant()
    def sound(self):
        if self.tier is not None:
            assert self.cache.violations() == []

    def teardown(self):
        if self.tier is None:
            return
        self.guard.refusing = False
        for _ in range(200):
            while self.guard.pending:
                self.guard.answer(0, "good")
            self.guard.finish_late()
            self.tick()
            if not (self.tier.in_flight or self.guard.pending or self.cache._driver.plane.in_flight):
                break
        assert self.tier.in_flight == 0
        self.guard.finish_late()
        self.cache.tick()
        for pages in self.tier._pools.values():
            assert pages.free == self.options.staging_pages
        assert (self.tier._occupied, in_flight(self.cache), self.cache.violations()) == (0, 0, [])
        self.tier.detach()
        assert drained(self.cache)


TestThreeTiersOfPools = ThreeTiersOfPools.TestCase
TestThreeTiersOfPools.settings = settings(max_examples=25, stateful_step_count=30)
pytestmark = [pytest.mark.filterwarnings("ignore:a page is 2 tokens"), pytest.mark.xdist_group("hybrid-tree")]


def test_the_machine_reaches_every_kind_of_hit():
    """A fixed run through it, so that the machine is known to store, prefetch and load real bytes of every pool."""
    machine = ThreeTiersOfPools()
    machine.start(WritePolicy.WRITE_THROUGH, EndPolicy.WAIT_COMPLETE, 5)
    machine.request([1, 2, 1], [0], {})
    machine.all_is_well(9)
    assert len(machine.objects) == 3 * 2 + 3 + 2
    machine.restart()
    _, prefetch = machine.prefetch([1, 2, 1], {})
    machine.all_is_well(9)
    assert machine.tier.progress(prefetch, 0.0) is Progress.YES
    assert machine.cache.match(machine.tokens([1, 2, 1])).host_length == 6
    assert check_bytes(machine.cache, machine.tokens([1, 2, 1])) == 3
    machine.teardown()
