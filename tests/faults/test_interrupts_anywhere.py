"""KeyboardInterrupt at any point of any method: the cache is sound afterwards, goes on, and no page is lost."""

import os
import random

import pytest
from interrupting import Interrupter
from support import settle
from tiers import ABCD, EFGH, LastingStore, attached, emptied, prefetched, sound, stored

from purecache.answers import Loading
from purecache.transitions import TransferKind

pytestmark = pytest.mark.filterwarnings("ignore:a page is 2 tokens")
MOST = 10_000 if os.environ.get("PURECACHE_HYPOTHESIS") in ("soak", "deep") else 4
"""Points that are tried of one method: all in a long run, else some, spread by chance."""
LAST = {"reset": 24, "prefetch": 16}
"""Points at the end that are tried in any case: several owners must agree there."""
NEW = [9, 9, 8, 8]


class World:
    """A cache in the middle of its life, with something of everything; what a method needs was done before."""

    def __init__(self):
        self.store = LastingStore()
        cache, tier, _ = attached(self.store)
        stored(cache, tier, EFGH)
        tier.detach()
        self.cache, self.tier, self.gate = attached(self.store)
        stored(self.cache, self.tier, ABCD)
        self.cache.evict(2)
        self.match, self.receipt = self.cache.admit(ABCD)
        self.pages = self.cache.allocate(2)
        assert self.pages is not None

    def offer(self):
        return NEW, self.pages


def prefetch_begun(world):
    world.prefetch = world.tier.prefetch(EFGH)


def backup_begun(world):
    world.gate.holding = set(TransferKind)
    world.cache.insert(*world.offer())
    settle(world.cache)
    world.gate.holding = set()


def stores_begun(world):
    backup_begun(world)
    prefetch_begun(world)


def load_begun(world):
    world.loading = world.cache.begin_load_back(world.match)
    assert isinstance(world.loading, Loading)


def one_evicted(world):
    world.cache.evict(2)


NOTHING = None
METHODS = {
    "match": (NOTHING, lambda w: w.cache.match(ABCD)),
    "peek": (NOTHING, lambda w: w.cache.peek(ABCD)),
    "match_many": (NOTHING, lambda w: w.cache.match_many([ABCD, NEW])),
    "admit": (NOTHING, lambda w: w.cache.admit(ABCD)),
    "insert": (NOTHING, lambda w: w.cache.insert(*w.offer())),
    "checkpoint": (NOTHING, lambda w: w.cache.checkpoint(*w.offer(), w.receipt)),
    "finish": (NOTHING, lambda w: w.cache.finish(*w.offer(), w.receipt)),
    "abort": (NOTHING, lambda w: w.cache.abort(w.pages, w.receipt)),
    "retract": (NOTHING, lambda w: w.cache.retract(w.pages, w.receipt)),
    "lock": (NOTHING, lambda w: w.cache.lock(w.match.device_node)),
    "unlock": (NOTHING, lambda w: w.cache.unlock(w.receipt)),
    "allocate": (NOTHING, lambda w: w.cache.allocate(6)),
    "release": (NOTHING, lambda w: w.cache.release(w.pages)),
    "evict": (NOTHING, lambda w: w.cache.evict(4)),
    "evict_host": (one_evicted, lambda w: w.cache.evict_host(4)),
    "backup": (NOTHING, lambda w: w.cache.backup(w.match.node)),
    "load_back": (NOTHING, lambda w: w.cache.load_back(w.match)),
    "begin_load_back": (NOTHING, lambda w: w.cache.begin_load_back(w.match)),
    "loaded": (load_begun, lambda w: w.cache.loaded(w.loading)),
    "tick": (stores_begun, lambda w: [w.cache.tick() for _ in range(4)]),
    "drain": (stores_begun, lambda w: w.cache.drain()),
    "reset": (stores_begun, lambda w: w.cache.reset()),
    "pool": (NOTHING, lambda w: setattr(w.cache, "pool", w.cache.pool)),
    "snapshot": (NOTHING, lambda w: w.cache.snapshot()),
    "counters": (NOTHING, lambda w: (w.cache.counters(), w.cache.clock, w.cache.columns(0), w.cache.free_pages())),
    "violations": (NOTHING, lambda w: w.cache.violations()),
    "prefetch": (backup_begun, lambda w: w.tier.prefetch(EFGH)),
    "progress": (prefetch_begun, lambda w: w.tier.progress(w.prefetch, 1.0)),
    "abort_prefetch": (prefetch_begun, lambda w: w.tier.abort(w.prefetch)),
    "store": (NOTHING, lambda w: w.tier.store(w.match.node)),
    "flush": (stores_begun, lambda w: w.tier.flush(9)),
    "detach": (stores_begun, lambda w: w.tier.detach()),
}


def world_for(prepare):
    world = World()
    if prepare is not None:
        prepare(world)
    return world


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupt_at_any_point_loses_nothing(name):
    prepare, method = METHODS[name]
    method(world_for(prepare))  # compiles; a first call is deferred as a whole
    world = world_for(prepare)
    with Interrupter() as count:
        method(world)
    sound(world.cache, world.tier)
    assert count.points > 0
    raised = 0
    some = random.Random(name).sample(range(count.points), min(MOST, count.points))
    for at in sorted({*some, *range(count.points - LAST.get(name, 0), count.points)}):
        world = world_for(prepare)
        try:
            with Interrupter(at):
                method(world)
        except KeyboardInterrupt:
            raised += 1
        try:
            sound(world.cache, world.tier)
            again(world)
        except BaseException as error:
            raise AssertionError(f"after an interrupt at point {at} of {name}") from error
    assert raised > 0


def again(world):
    """Life goes on: what was stored comes back, and everything can be freed."""
    cache, tier = world.cache, world.tier
    if cache._driver.storage is tier:
        stored(cache, tier, EFGH)
    emptied(cache)
    if cache._driver.storage is tier:
        assert prefetched(tier, cache, EFGH) == 8
    tier.detach()
    emptied(cache)
