"""Any order of requests, evictions, prefetches and answers of storage: right bytes, sound state, nothing leaked.

Storage answers when the test says so: in any order, in part, never, late after its buffers were scribbled on, or lying.
"""

import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from support import content, new_cache, read_page, settle, tiny, write_pages

from purecache.answers import Load, Refusal
from purecache.state import Policy, WritePolicy
from purecache.state.layout import Account, Tier
from purecache.storage import EndPolicy, Progress, StorageOptions, StorageTier
from purecache.stores import envelope
from purecache.stores.guard import Done, Kind
from purecache.stores.interface import Fetch, Presence
from purecache.stores.names import ObjectRecord

RECORD = ObjectRecord("m", "r", "int32", "words", 2, (0, 1))
PAGES = st.lists(st.integers(1, 3), max_size=5)
SPACE = st.sampled_from([{}, {"namespace": "a"}, {"rank": 1}, {"rank": None}])
OUTCOME = st.sampled_from(["good", "good", "good", "twice", "fail", "part", "late", "lie"])


def settle_storage(tier):
    """Wait for the bytes of every copy between host pages and staging buffers."""
    for read in tier._reader._copies:
        jax.block_until_ready([part.token for _, part in read.parts])
    for written in tier._writer._reading:
        jax.block_until_ready([copied.arrays for copied in written.copies])


class ScriptedGuard:
    """Keeps requests until the test answers them. `objects`: name -> sealed bytes, which outlive it."""

    def __init__(self, objects):
        self.objects, self.pending, self.late, self.news = objects, [], [], []
        self.refusing = False

    def start(self, request):
        if not self.refusing:
            self.pending.append(request)
        return not self.refusing

    def poll(self):
        news, self.news = self.news, []
        return news

    def stats(self):
        return {}

    def close(self, timeout):
        """Nothing to wait for."""

    def answer(self, index, outcome):
        request = self.pending.pop(index % len(self.pending))
        if outcome == "late":
            self.late.append(request)
            self.news.append(Done(request.number, request.kind, self.failures(request), finished=False))
            return
        good = [
            outcome in ("good", "lie", "twice") or (outcome == "part" and place % 2 == 0)
            for place in range(len(request.keys))
        ]
        answers = [self.one(request, place, ok, outcome) for place, ok in enumerate(good)]
        self.news += [Done(request.number, request.kind, answers, finished=True)] * (1 + (outcome == "twice"))

    def finish_late(self):
        for request in self.late:
            for buffer in request.buffers if request.kind is Kind.GET else ():
                buffer[:] = b"\xee" * len(buffer)
            self.news.append(Done(request.number, request.kind, self.failures(request), finished=True))
        self.late = []

    def failures(self, request):
        failure = {Kind.EXISTS: Presence.UNKNOWN, Kind.GET: Fetch.FAILED, Kind.PUT: False}[request.kind]
        return [failure] * len(request.keys)

    def one(self, request, place, good, outcome):
        key = request.keys[place]
        if request.kind is Kind.EXISTS:
            if not good:
                return Presence.UNKNOWN
            return Presence.YES if outcome == "lie" or key in self.objects else Presence.NO
        if request.kind is Kind.PUT:
            if good:
                envelope.seal(key, request.buffers[place])
                self.objects.setdefault(key, bytes(request.buffers[place]))
            return good
        buffer = request.buffers[place]
        if good and key in self.objects:
            buffer[:] = self.objects[key]
            return Fetch.HIT
        buffer[:] = b"\xdd" * len(buffer)
        return Fetch.FAILED if key in self.objects else Fetch.MISSING


class ThreeTiers(RuleBasedStateMachine):
    """A cache, its host memory and a storage that outlives it."""

    prefetches = Bundle("prefetches")

    @initialize(
        write=st.sampled_from(WritePolicy),
        policy=st.sampled_from(Policy),
        end=st.sampled_from(EndPolicy),
        staging=st.integers(2, 6),
    )
    def start(self, write, policy, end, staging):
        self.config = tiny(write=write, policy=policy)
        self.options = StorageOptions(threshold=2, policy=end, staging_pages=staging, batch_pages=2)
        self.objects, self.epoch, self.tier = {}, 0, None
        self.restart()

    def contents(self, tokens, space):
        """What stands for the content of each page: its prefix and namespace. Ranks hold the same KV."""
        return [(space.get("namespace"), tuple(tokens[:end])) for end in range(2, len(tokens) + 1, 2)]

    def tokens(self, pages):
        return [page for page in pages for _ in range(2)]

    @rule()
    def restart(self):
        """The process ends, and another one starts with an empty cache and what storage has."""
        self.epoch += 1
        self.cache, _ = new_cache(self.config, check_laws=False)
        self.guard = ScriptedGuard(self.objects)
        self.tier = StorageTier(self.cache, self.guard, RECORD, self.options)

    @rule()
    def reset(self):
        self.cache.reset()

    @rule(pages=PAGES, space=SPACE)
    def request(self, pages, space):
        tokens = self.tokens(pages)
        new = len(pages) - len(self.cache.peek(tokens, **space).device_pages)
        rank = space.get("rank") or 0
        if new > self.cache.free_pages(rank) + self.cache.evictable_pages(rank):
            return
        match, receipt = self.cache.admit(tokens, **space)
        lent = self.cache.allocate(new, rank=rank)
        if lent is None:  # what it matched was all that could be evicted
            self.cache.unlock(receipt)
            return
        pages = self.contents(tokens, space)
        write_pages(self.cache, rank, lent, pages[len(match.device_pages) :])
        self.cache.finish(tokens, np.concatenate([match.device_pages, lent]), receipt, **space)

    @rule()
    def tick(self):
        settle(self.cache)
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

    @rule(number=st.integers(1, 8), host=st.booleans())
    def evict(self, number, host):
        (self.cache.evict_host if host else self.cache.evict)(number)

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
        tokens, rank = self.tokens(pages), space.get("rank") or 0
        match = self.cache.match(tokens, **space)
        found = match.device_pages
        if match.host_length:
            load = self.cache.load_back(match)
            found = np.concatenate([found, load.pages]) if isinstance(load, Load) else found
        for page, inside in zip(found, self.contents(tokens, space), strict=False):
            np.testing.assert_array_equal(read_page(self.cache, rank, page), content(inside))

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
        assert self.tier.ring.free == self.options.staging_pages
        assert self.tier._occupied == 0
        for tier in Tier.DEVICE, Tier.HOST:
            for rank in range(self.config.ranks):
                assert self.cache.pages(Account.IN_FLIGHT, tier, rank) == 0
                assert self.cache.pages(Account.PROTECTED, Tier.DEVICE, rank) == 0
        assert self.cache.violations() == []
        self.tier.detach()


TestThreeTiers = ThreeTiers.TestCase
pytestmark = pytest.mark.filterwarnings("ignore:a page is 2 tokens")


def test_the_machine_reaches_every_kind_of_hit():
    """A fixed run through it, so that the machine is known to store, prefetch and load real bytes."""
    machine = ThreeTiers()
    machine.start(WritePolicy.WRITE_THROUGH, Policy.LRU, EndPolicy.WAIT_COMPLETE, 6)
    machine.request([1, 2, 3], {})
    for _ in range(9):
        machine.tick()
        machine.answer(0, "good")
    assert len(machine.objects) == 3
    machine.restart()
    _, prefetch = machine.prefetch([1, 2, 3], {})
    for _ in range(9):
        machine.tick()
        machine.answer(0, "good")
    assert machine.tier.progress(prefetch, 0.0) is Progress.YES
    assert machine.cache.match(machine.tokens([1, 2, 3])).host_length == 6
    machine.check_bytes([1, 2, 3], {})
    machine.teardown()
