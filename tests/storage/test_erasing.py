"""What is forgotten is deleted from the store, too."""

import pytest
from support import new_cache, serve, settle, tiny

from purecache.control import Operator, PlainStorages
from purecache.storage import EndPolicy, StorageOptions, StorageTier
from purecache.storage.erasing import BATCH, Eraser
from purecache.stores.files import FileStore
from purecache.stores.guard import Done, Kind
from purecache.stores.local import LocalStore
from purecache.stores.memory import MemoryStore
from purecache.stores.names import ObjectRecord

pytestmark = pytest.mark.filterwarnings("ignore:a page is 2 tokens")
RECORD = ObjectRecord(model="m", revision="r", kv_dtype="int32", layout="words", page_size=2, layers=(0, 1))
AB, ABCD, ABE = [1, 1, 2, 2], [1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 2, 5, 5]
OPTIONS = StorageOptions(threshold=2, staging_pages=8, batch_pages=4, policy=EndPolicy.WAIT_COMPLETE)


def attached():
    cache, _ = new_cache(tiny(), check_laws=True)
    store = MemoryStore(1 << 20)
    return cache, StorageTier(cache, store, RECORD, OPTIONS), store


def stored(cache, tier, *prompts, **space):
    for tokens in prompts:
        serve(cache, tokens, **space)
        settle(cache)
        cache.drain()
        assert tier.flush(90)


def test_objects_of_a_forgotten_prompt_go_with_those_that_only_storage_has():
    cache, tier, store = attached()
    stored(cache, tier, ABCD, ABE)
    assert store.stats()["objects"] == 5
    cache.evict(1)  # of the path to D, its end
    cache.evict_host(1)
    cache.forget(ABCD)
    assert tier.flush(90)
    assert store.stats()["objects"] == 3
    assert tier.counters()["erased"] == 2
    cache.forget(AB, keep=0)
    assert tier.flush(90)
    assert store.stats()["objects"] == 0
    tier.detach()


def test_objects_of_a_namespace_go_and_the_others_stay():
    cache, tier, store = attached()
    stored(cache, tier, AB, namespace="tenant")
    stored(cache, tier, AB)
    cache.forget_namespace("tenant")
    assert tier.flush(90)
    assert store.stats()["objects"] == 2
    assert cache.peek(AB).length == 4
    tier.detach()


def test_a_prefetch_of_what_is_forgotten_is_given_up():
    cache, tier, _ = attached()
    stored(cache, tier, ABCD)
    cache.evict(9)
    cache.evict_host(9)
    prefetch = tier.prefetch(ABCD)
    cache.forget(ABCD)
    assert tier.progress(prefetch, 0.0).name == "GIVEN_UP"
    assert tier.flush(90)
    assert cache.peek(ABCD).length == 0
    tier.detach()


class Guard:
    def __init__(self):
        self.asked, self.takes = [], True

    def start(self, request):
        if self.takes:
            self.asked.append(request)
        return self.takes


def test_an_object_is_deleted_after_it_was_written_and_again_if_the_store_is_busy():
    guard = Guard()
    eraser = Eraser(guard, iter(range(100)).__next__)
    eraser.erase(["a", "b"])
    eraser.poll({"a"})
    assert [request.keys for request in guard.asked] == [["b"]]
    assert not eraser.done(Done(99, Kind.DELETE, [True], True))
    assert eraser.done(Done(guard.asked[0].number, Kind.DELETE, [True], True))
    guard.takes = False
    eraser.poll(set())
    assert eraser.in_flight == 1
    guard.takes = True
    eraser.poll(set())
    assert eraser.done(Done(guard.asked[1].number, Kind.DELETE, [False], True))
    assert (eraser.in_flight, eraser.counts) == (0, {"erased": 1, "erase_failed": 1})


def test_many_objects_are_deleted_in_batches():
    guard = Guard()
    eraser = Eraser(guard, iter(range(100)).__next__)
    eraser.erase(str(number) for number in range(BATCH + 1))
    eraser.poll(set())
    eraser.poll(set())
    assert [len(request.keys) for request in guard.asked] == [BATCH]


def test_an_operator_attaches_a_store_by_its_url_but_no_code():
    cache, _ = new_cache(tiny(), check_laws=True)
    storages = PlainStorages(RECORD, page_bytes=16, options=OPTIONS)
    for url in ("os:system", "plugin", "http://x"):
        with pytest.raises(ValueError, match="begins with one of"):
            storages.open(url)
    store = storages.open("memory:?capacity=1MiB")
    storages.attach(cache, store)
    stored(cache, cache._driver.storage, AB)
    assert store.stats()["objects"] == 2
    operator = Operator(cache)
    assert storages.detach(cache)
    assert not storages.detach(cache)
    operator.close()
    assert cache.violations() == []


def test_stores_that_can_change_their_capacity(tmp_path):
    store = MemoryStore(100)
    store.put(["a", "b"], [memoryview(bytearray(40))] * 2, float("inf"))
    assert store.resize(50)
    assert store.stats()["objects"] == 1
    store = FileStore(tmp_path / "files", 10_000)
    store.put(["a", "b"], [memoryview(bytearray(4000))] * 2, float("inf"))
    assert store.resize(5000)
    assert (store.stats()["objects"], store.stats()["capacity"]) == (1, 5000)
    for each in (MemoryStore(100), store):
        with pytest.raises(ValueError, match="at least 1"):
            each.resize(0)
    store = LocalStore(tmp_path / "local", 100, 100_000)
    assert not store.resize(50_000)
    store.close()
