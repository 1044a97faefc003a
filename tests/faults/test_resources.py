"""Resources that fail: memory, threads, clocks, stores that never answer; and two caches in one process."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from scheduling import ask
from support import WORDS, new_cache, new_plane, serve, tiny
from tiers import ABCD, DEADLINE, EFGH, OBJECT, LastingStore, attached, emptied, prefetched, sound, stored

import purecache.programs
from purecache import Interpreter, PrefixCache
from purecache.answers import Refusal
from purecache.effects.host_memory import HostMemoryError
from purecache.state import Tier
from purecache.state.layout import Account
from purecache.storage import Progress
from purecache.stores.files import FileStore
from purecache.stores.guard import Guard, Kind, Request
from purecache.stores.local import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore:a page is 2 tokens")


# ---- memory ------------------------------------------------------------------------------------------------------


def test_where_no_memory_can_be_pinned_a_cache_without_a_second_tier_does(monkeypatch):
    """What fails is said at the start, and costs nothing: the same pool then serves a cache of one tier."""

    def none(layout, pages):
        raise RuntimeError("RESOURCE_EXHAUSTED: cuMemHostRegister failed")

    config = tiny(host_pages=0)
    pool = jnp.full((config.ranks * config.device_pages, WORDS), -1, jnp.int32)
    with monkeypatch.context() as patch:
        patch.setattr("purecache.effects.host_slots.zero_host_pool", none)
        with pytest.raises(HostMemoryError, match="ask for fewer"):
            Interpreter(pool, host_pages=6, device_pages=8, ranks=2)
    assert not pool.is_deleted()
    plane = new_plane(config)
    plane.pool = pool
    cache = PrefixCache(config, plane)
    serve(cache, ABCD)
    assert ask(cache, ABCD) == 8
    assert cache.evict(8) == 4
    emptied(cache)


# ---- threads -----------------------------------------------------------------------------------------------------


def no_threads(patch):
    def start(self):
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", start)


def test_without_threads_storage_is_a_miss_and_comes_back_with_them(monkeypatch):
    """No call of the cache raises or waits; the pages that were promised come back; and then all goes well again."""
    store = LastingStore()
    cache, tier, _ = attached(store)
    stored(cache, tier, EFGH)
    tier.detach()
    with monkeypatch.context() as patch:
        no_threads(patch)
        cache, tier, _ = attached(store, call_timeout=0.05)
        assert prefetched(tier, cache, EFGH) == 0
        stored(cache, tier, ABCD)
        assert store.stats()["objects"] == 4
        assert ask(cache, ABCD) == 8
        assert "can't start new thread" in tier.guard.last_error
        sound(cache, tier)
    tier.guard.breaker.succeeded()
    cache.tick()
    assert prefetched(tier, cache, EFGH) == 8
    sound(cache, tier)
    tier.detach()


def test_a_guard_that_gets_no_thread_to_close_its_store_says_so_and_tries_again(monkeypatch):
    store = LastingStore()
    closed = []
    monkeypatch.setattr(store, "close", lambda: closed.append(True))
    guard = Guard(store)
    with monkeypatch.context() as patch:
        no_threads(patch)
        assert not guard.close(0.01)
        assert "can't start new thread" in guard.last_error
    assert not guard.start(Request(Kind.EXISTS, 1, ["a"]))
    assert guard.close()
    assert guard.close()
    assert closed == [True]


# ---- a store that never answers -----------------------------------------------------------------------------------


class Hung(LastingStore):
    """Every call hangs until `freed` is set."""

    def __init__(self):
        super().__init__()
        self.freed = threading.Event()

    def exists(self, keys, deadline):
        self.freed.wait()
        return super().exists(keys, deadline)

    def put(self, keys, buffers, deadline):
        self.freed.wait()
        return super().put(keys, buffers, deadline)


def test_a_store_that_hangs_blocks_no_step_and_holds_no_page():
    """Its buffers are all that it keeps, until it returns. (That a process can exit meanwhile: test_process_ends.)"""
    store = Hung()
    cache, tier, _ = attached(store, call_timeout=0.05)
    tier.warm(8)  # a compiler is not what is timed
    for tokens in ABCD, EFGH, [1, 1, 9, 9], [2, 2, 9, 9]:
        serve(cache, tokens)
        cache.drain()
        tier.prefetch([*tokens, 3, 3])
        cache.tick()
    end = time.monotonic() + DEADLINE
    while tier._reader.in_flight or not all(write.reported for write in tier._writer._writing.values()):
        began = time.monotonic()
        cache.tick()
        assert time.monotonic() - began < 5
        assert time.monotonic() < end
    assert tier.counters()["stuck_threads"] > 0
    for _ in range(3):
        cache.evict(100)
        cache.evict_host(100)
    assert cache.pages(Account.FREE, Tier.HOST) == cache.config.host_pages
    store.freed.set()
    end = time.monotonic() + DEADLINE
    while tier.ring.free != 8 or tier.counters()["stuck_threads"]:
        cache.tick()
        assert time.monotonic() < end
    sound(cache, tier)
    tier.detach()


# ---- clocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-1e9, 1e9, -1.0])
def test_the_clock_of_the_wall_may_jump(monkeypatch, tmp_path, jump):
    """Back by 30 years, forward by 30, and back by a second with every look."""
    base, looks = time.time(), []

    def now():
        looks.append(None)
        return base + jump * (len(looks) if abs(jump) == 1 else len(looks) % 2)

    monkeypatch.setattr(time, "time", now)
    monkeypatch.setattr(time, "time_ns", lambda: int(now() * 1e9))
    for store in FileStore(tmp_path / "files", 1 << 20), LocalStore(tmp_path / "local", OBJECT, 64 * 4096):
        cache, tier, _ = attached(store)
        stored(cache, tier, ABCD)
        emptied(cache)
        assert prefetched(tier, cache, ABCD) == 8
        assert ask(cache, ABCD) == 8
        sound(cache, tier)
        tier.detach()


def test_a_scheduler_whose_clock_goes_back_waits_for_the_answers_alone():
    """`progress` takes the time as an input: backwards it never ends a prefetch, and the store's answer still does."""
    store = LastingStore()
    cache, tier, _ = attached(store, policy="timeout")
    stored(cache, tier, ABCD)
    emptied(cache)
    prefetch, now = tier.prefetch(ABCD), 1e9
    assert not isinstance(prefetch, Refusal)
    while tier.progress(prefetch, now) is Progress.NOT_YET:
        now -= 1000
        cache.tick()
        assert now > 0
    assert prefetch.loaded == 8
    sound(cache, tier)
    tier.detach()


# ---- two caches in one process -----------------------------------------------------------------------------------


def test_caches_of_one_configuration_share_programs_and_nothing_else(monkeypatch):
    config = tiny(max_operations=4)
    first, _ = new_cache(config, check_laws=False)
    serve(first, ABCD)
    first.peek(ABCD)
    compiled = len(purecache.programs._compiled)
    second = PrefixCache(config)
    _, receipt = second.admit(ABCD)
    second.finish(ABCD, second.allocate(4), receipt)
    assert second.peek(ABCD).length == 8
    assert len(purecache.programs._compiled) == compiled
    assert second.peek(EFGH).length == 0
    second.reset()
    assert second.peek(ABCD).length == 0
    assert first.peek(ABCD).length == 8
    assert ask(first, ABCD) == 8
    emptied(first)


def test_caches_of_other_configurations_over_one_directory(tmp_path):
    """Each has its own handle of the store: they find each other's pages, and closing one leaves the other."""
    first, one, _ = attached(LocalStore(tmp_path, OBJECT, 64 * 4096))
    second, two, _ = attached(LocalStore(tmp_path, OBJECT, 64 * 4096), tiny(device_pages=10, host_pages=8, ranks=1))
    stored(first, one, ABCD)
    assert prefetched(two, second, ABCD) == 8
    assert ask(second, ABCD) == 8
    emptied(second)  # host memory has room for one of them
    emptied(first)
    stored(second, two, EFGH)
    two.detach()
    assert prefetched(one, first, EFGH) == 8
    assert ask(first, EFGH) == 8
    sound(first, one)
    one.detach()
    emptied(second)
    np.testing.assert_array_equal(second.violations(), [])
