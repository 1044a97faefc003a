"""What an operator may ask of a running cache."""

import numpy as np
import pytest
from controlled import AB, ABC, A, D, plain_cache, run, ticking

from purecache.answers import CacheError
from purecache.control import ControlError, Operator, PinError, Pins
from purecache.effects import AgreedPlane
from purecache.stores.memory import MemoryStore


@pytest.fixture
def operated():
    """Caches with an operator, ticked by a thread; closed afterwards."""
    opened = []

    def make(*prompts, sessions=None, storages=None, **options):
        cache = plain_cache(*prompts, **options)
        operator = Operator(cache, pins=Pins(cache, share=1), sessions=sessions, storages=storages, timeout=120)
        context = ticking(cache)
        context.__enter__()
        opened.append((context, operator))
        return cache, operator

    yield make
    for context, operator in opened:
        context.__exit__(None, None, None)
        operator.close()


def test_numbers_of_a_running_cache(operated):
    _, operator = operated(AB)
    operator.pin(AB, 60, name="p")
    stats = operator.stats()
    assert stats["config"]["device_pages"] == 8
    assert stats["pages"]["kv"]["device"][0] == {
        "free": 6, "evictable": 0, "protected": 2, "in_flight": 0, "lent": 0, "withheld": 0,
    }  # fmt: skip
    assert [pin["name"] for pin in stats["pins"]] == ["p"]
    assert (stats["storage"], stats["resizing"], stats["counters"]["inserted_pages"]) == (None, [], 2)


def test_the_tree_hot_prefixes_and_who_holds_locks(operated):
    cache, operator = operated(ABC, D)
    operator.pin(AB, 60, name="p")
    assert "tokens 4 4" in operator.tree()
    hot = operator.hot(1)
    assert [(each["tokens"], each["first_tokens"]) for each in hot] == [(4, AB)]  # what is held is hottest
    (lock,) = operator.locks()
    assert lock == {"by": "pin p", "rank": 0, "pages": 2, "on": {"device": 2, "host": 2}, "first_tokens": AB}
    cache.admit(D)
    assert [each["by"].split(" (")[0] for each in operator.locks()] == ["pin p", "request"]


def test_a_prompt_or_a_namespace_goes(operated):
    cache, operator = operated(ABC, D)
    assert operator.forget(AB) == {"device_pages": 3, "host_pages": 3, "left": 0}
    assert operator.forget_namespace(None) == {"device_pages": 1, "host_pages": 1, "left": 0}
    with pytest.raises(CacheError):
        operator.forget(A, rank=9)
    assert cache.free_pages() == 8


def test_flushing_the_device_copies_first_what_the_write_policy_wants(operated):
    cache = plain_cache(write="write_through_selective")
    for prompt in (AB, AB, D):
        run(cache, prompt)
    cache.drain()
    cache.evict_host(9)
    operator = Operator(cache, timeout=120)
    with ticking(cache):
        assert operator.flush("device")["freed"] == 3
        with pytest.raises(ControlError, match="a tier is one of"):
            operator.flush("disk")
    assert (cache.peek(AB).length, cache.peek(D).length, cache.free_pages()) == (4, 0, 8)
    with ticking(cache):
        assert operator.flush("host") == {"freed": 2, "copied": 0}
    assert cache.peek(AB).length == 0


def test_a_prompt_is_copied_to_host_whatever_the_policy(operated):
    _, operator = operated(AB, write="write_back")
    assert operator.offload(AB) == {"tokens_on_device": 4, "begun": 2}
    assert operator.flush("host") == {"freed": 0, "copied": 0}  # copies of pages on device go with these
    assert operator.offload([9, 9]) == {"tokens_on_device": 0, "begun": 0}
    _, operator = operated(AB, host_pages=0)
    with pytest.raises(ControlError, match="no host pages"):
        operator.offload(AB)


def test_a_tier_gets_smaller_as_soon_as_it_can(operated):
    cache, operator = operated(AB)
    receipt = cache.lock(cache.peek(AB).node)
    now = operator.resize(device_pages=1, rank=0)
    assert now == {"device_pages": 2, "host_pages": 6, "wanted": [{"rank": 0, "pool": "kv", "device_pages": 1}]}
    operator._ask(lambda cache: cache.unlock(receipt))
    operator.stats()
    assert operator.stats()["resizing"] == []
    assert operator.resize(device_pages=8) == {"device_pages": 8, "host_pages": 6, "wanted": []}
    with pytest.raises(CacheError, match="from 1 to 8"):
        operator.resize(device_pages=9)


def test_sessions_are_pins_that_move_on_and_the_scheduler_is_told(operated):
    told = []

    class Sessions:
        def release_session(self, session_id):
            told.append(session_id)

    cache, operator = operated(ABC, sessions=Sessions())
    operator.open_session("s", A, 60)
    assert operator.open_session("s", ABC, 60)["pages"] == 3
    assert cache.protected_pages() == 3
    assert operator.close_session("s") == {"pin": True, "scheduler": True}
    assert operator.close_session("s") == {"pin": False, "scheduler": True}
    assert (told, cache.protected_pages()) == (["s", "s"], 0)


def test_pins_are_renewed_and_released(operated):
    _, operator = operated(AB)
    operator.pin(AB, 10, name="p")
    assert operator.renew("p", 50)["seconds_left"] > 10
    operator.release("p")
    with pytest.raises(PinError):
        operator.release("p")


def test_forgetting_everything(operated):
    cache, operator = operated(AB)
    operator.reset()
    assert cache.peek(AB).length == 0


class Tier:
    """Stands for a storage tier."""

    def __init__(self, store):
        self.guard = type("Guard", (), {"store": store})
        self.in_flight = 0

    def counters(self):
        return {"prefetches": 0}

    def tick(self):
        pass


class MemoryStorages:
    def open(self, url):
        if not url.startswith("memory:"):
            raise ValueError("only memory")
        return MemoryStore(1000)

    def attach(self, cache, store):
        cache._driver.storage = Tier(store)

    def detach(self, cache):
        had, cache._driver.storage = cache._driver.storage, None
        return had is not None


def test_storage_is_attached_cleared_resized_and_detached(operated):
    _, operator = operated(storages=MemoryStorages())
    with pytest.raises(ControlError, match="no storage"):
        operator.clear_storage()
    with pytest.raises(ControlError, match="was not opened: only memory"):
        operator.attach_storage("disk:")
    operator.attach_storage("memory:")
    with pytest.raises(ControlError, match="attached already"):
        operator.attach_storage("memory:")
    assert operator.stats()["storage"] == {"prefetches": 0, "in_flight": 0}
    assert operator.clear_storage()["objects"] == 0
    assert operator.resize_storage(500)["capacity"] == 500
    with pytest.raises(ControlError, match="at least 1"):
        operator.resize_storage(0)
    assert operator.detach_storage()
    assert not operator.detach_storage()
    _, operator = operated()
    with pytest.raises(ControlError, match="does not say how"):
        operator.attach_storage("memory:")


def test_an_allocator_outside_gets_the_pages_that_are_freed():
    cache = plain_cache(external_pages=True)
    with pytest.raises(ValueError, match="say by `freed`"):
        Operator(cache)
    taken = []
    operator = Operator(cache, freed=lambda: taken.extend(cache.allocate(cache.free_pages())), timeout=120)
    for prompt in (AB, D):
        cache.insert(prompt, np.arange(len(prompt) // 2, dtype=np.int32) + 2 * (prompt == D))
    with ticking(cache):
        operator.forget(AB)
        assert len(taken) == 2
        operator.flush("device")
        assert sorted(taken) == [0, 1, 2]
        with pytest.raises(ControlError, match="reset its cache"):
            operator.reset()
    assert (cache.free_pages(), cache.lent_pages()) == (0, 8)


def test_a_cache_of_several_processes_has_no_operator():
    cache = plain_cache()
    cache._driver.plane = AgreedPlane.__new__(AgreedPlane)
    for make in (Operator, Pins):
        with pytest.raises(ValueError, match="several processes share"):
            make(cache)
