"""Whatever a cache does, its events folded back give exactly what is resident, in every medium, on every rank."""

import random
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from resident import MEDIA, folded, resident
from support import new_cache, tiny

from purecache.events import AllBlocksCleared, BlockRemoved, BlockStored, Fold, block_hashes, decode, encode
from purecache.events.changes import Watch
from purecache.events.table import BlockTable
from purecache.events.wire import Batch
from purecache.state import WritePolicy

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
from test_machine import ThreeTiers

BITS = dict(zip((1, 2, 4), MEDIA, strict=True))
SPACES = (None, "a", (("adapter", "x"), ("salt", "y")))


class Told:
    """Watch, table and fold, without threads and sockets."""

    def __init__(self, cache, storage=False, form="maps"):
        self.cache, self.form, self.storage = cache, form, storage
        self.watch = Watch(cache.config, storage)
        self.table = BlockTable(cache.config, BITS if storage else {bit: BITS[bit] for bit in (1, 2)})
        self.fold, self.parents = Fold(), {}

    def look(self):
        """Tell what has changed; returns the events."""
        if self.watch.is_idle(self.cache):
            return []
        changes = self.watch.take(self.cache)
        told = [] if changes is None else self.table.apply(changes)
        for group, events in told:
            self.fold.apply(decode(encode(Batch(0.0, events, group), self.form)))
        self.check_order(told)
        return [event for _, events in told for event in events]

    def check_order(self, told):
        """Within what is told at once: first what went, children before their parents, then what came."""
        stored = [isinstance(event, BlockStored) for _, events in told for event in events]
        assert stored == sorted(stored)
        for (_, events), medium in product(told, MEDIA):
            removed = [event for event in events if isinstance(event, BlockRemoved) and event.medium == medium]
            names = [name for event in removed for name in event.block_hashes]
            assert not any(self.parents[name] in names[:place] for place, name in enumerate(names))
        for blocks in folded(self.fold).values():
            self.parents |= blocks

    def check(self, spaces=SPACES):
        self.look()
        assert folded(self.fold) == resident(self.cache, spaces, self.storage)
        assert self.table.blocks == sum(map(len, folded(self.fold).values()))
        assert self.table.unnamed == 0


class Life:
    """Requests, evictions, loads and resets at random, on a cache whose transfers end at the next tick."""

    def __init__(self, seed, **options):
        self.random = random.Random(seed)
        self.cache, _ = new_cache(tiny(**options), check_laws=False, plane=False)

    def step(self):
        chance = self.random.random()
        if chance < 0.55:
            self.request()
        elif chance < 0.7:
            self.cache.tick()
        elif chance < 0.8:
            self.cache.evict(self.random.randint(1, 4), rank=self.random.choice((0, 1, None)))
        elif chance < 0.87:
            self.cache.evict_host(self.random.randint(1, 3))
        elif chance < 0.97:
            self.load()
        else:
            self.cache.reset()

    def prompt(self):
        pages = [self.random.randint(1, 3) for _ in range(self.random.randint(1, 5))]
        space = self.random.choice(SPACES)
        return [page for page in pages for _ in range(2)], {
            "namespace": space,
            "rank": self.random.choice((0, 1, None)),
        }

    def request(self):
        tokens, space = self.prompt()
        match, receipt = self.cache.admit(tokens, **space)
        new = self.cache.allocate(len(tokens) // 2 - len(match.device_pages), rank=space["rank"])
        if new is None:
            self.cache.unlock(receipt)
        else:
            self.cache.finish(tokens, np.concatenate([match.device_pages, new]), receipt, **space)

    def load(self):
        tokens, space = self.prompt()
        self.cache.load_back(self.cache.match(tokens, **space))


@pytest.mark.parametrize("write", WritePolicy)
@pytest.mark.parametrize("form", ["maps", "arrays"])
def test_events_folded_back_give_the_resident_set(write, form):
    """Looks are rare, so that ids are used again and whole lives of blocks pass in between."""
    life = Life(f"{write}{form}", write=write)
    told = Told(life.cache, form=form)
    for _ in range(60):
        for _ in range(life.random.randint(1, 12)):
            life.step()
        told.check()


def test_a_parent_is_always_there_before_its_child():
    """Told after every call, with transfers that end at once, no block ever comes below one that is nowhere."""
    life = Life(7)
    told = Told(life.cache)
    for _ in range(300):
        life.step()
        life.cache.tick()
        told.check()
    assert told.fold.orphans == 0


def test_pairs_of_tokens():
    """A tree of bigrams: tokens are pairs, and the hashes are those that a router makes of the prompt."""
    cache, _ = new_cache(tiny(bigrams=True), check_laws=False, plane=False)
    told = Told(cache)
    for tail in ([], [8, 9, 10]):
        tokens = [4, 5, 6, 7, *tail]
        cache.insert(tokens, cache.allocate((len(tokens) - 1) // 2, rank=1), namespace="a", rank=1)
        told.look()
    tokens = [4, 5, 6, 7, 8, 9, 10]
    blocks = told.fold.blocks("GPU", 1)
    names = block_hashes(tokens, 2, "a", bigrams=True)
    assert list(blocks) == names
    assert [block.tokens for block in blocks.values()] == [((4, 5), (5, 6)), ((6, 7), (7, 8)), ((8, 9), (9, 10))]
    assert told.fold.longest(names, rank=1) == 3
    assert told.fold.longest(block_hashes(tokens, 2, "b", bigrams=True), rank=1) == 0


def test_what_is_told_of_a_block():
    cache, _ = new_cache(tiny(), check_laws=False, plane=False)
    told = Told(cache)
    assert [type(event) for event in told.look()] == [AllBlocksCleared]
    cache.insert([1, 1, 2, 2], cache.allocate(2), namespace=SPACES[2])
    first, second = block_hashes([1, 1, 2, 2], 2, SPACES[2])
    stored = BlockStored([first, second], None, [1, 1, 2, 2], 2, None, "GPU", "x", "y")
    assert told.look() == [stored]
    cache.tick()
    stored.medium = "CPU_PINNED"
    assert told.look() == [stored]
    cache.evict(1)
    assert told.look() == [BlockRemoved([second], "GPU")]
    cache.insert(
        [1, 1, 2, 2, 3, 3],
        np.concatenate([cache.match([1, 1], namespace=SPACES[2]).device_pages, cache.allocate(2)]),
        namespace=SPACES[2],
    )
    third = block_hashes([1, 1, 2, 2, 3, 3], 2, SPACES[2])[2]
    assert told.look() == [BlockStored([second, third], first, [2, 2, 3, 3], 2, None, "GPU", "x", "y")]
    cache.reset()
    assert told.look() == [AllBlocksCleared()]
    assert told.fold.places == []


def test_a_namespace_that_the_cache_has_forgotten_is_left_out():
    cache, _ = new_cache(tiny(), check_laws=False, plane=False)
    cache.insert([1, 1, 2, 2], cache.allocate(2), namespace="a")
    cache.insert([3, 3], cache.allocate(1))
    cache._inputs._origins.clear()
    cache.match([3, 3])
    told = Told(cache)
    told.look()
    assert set(told.fold.blocks("GPU")) == set(block_hashes([3, 3], 2))
    assert told.table.unnamed == 2


def test_namespaces_that_are_gone_are_forgotten(monkeypatch):
    monkeypatch.setattr("purecache.events.table.PATHS", 8)
    cache, _ = new_cache(tiny(), check_laws=False, plane=False)
    told, spaces = Told(cache), [f"tenant {number}" for number in range(60)]
    for space in spaces:
        cache.insert([1, 1, 2, 2], cache.allocate(2), namespace=space)
        cache.tick()
        told.check(spaces)
    assert len(told.table._paths) < 40


class FoldedTiers(ThreeTiers):
    """The random life of three tiers, with storage that fails, and the events of all three."""

    @rule()
    def restart(self):
        super().restart()
        self.told = Told(self.cache, storage=True)

    @invariant()
    def events_say_what_is_there(self):
        self.told.check((None, "a"))


@pytest.mark.filterwarnings("ignore:a page is 2 tokens")
def test_with_storage_that_does_anything():
    run_state_machine_as_test(
        FoldedTiers, settings=settings(max_examples=12, stateful_step_count=25, deadline=None, derandomize=True)
    )
