"""Adapters to sglang's storage interface. sglang itself is not here: controllers, host pools and storages are fakes."""

import dataclasses
import enum
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.stores.envelope import TRAILER
from purecache.stores.hicache import (
    HiCacheBackend,
    PoolHitPolicy,
    PoolTransfer,
    StoreFromHiCache,
)
from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.names import HeadGroups, ObjectRecord, heads_of_rank, objects_of

PAGE, HEADS, HEAD_BYTES = 4, 8, 6
RECORD = ObjectRecord("org/model", "1", "bfloat16", "kv,head,token", PAGE, (0, 2), (0, HEADS))
NAMINGS = [RECORD, HeadGroups(RECORD, 2), {"kv": RECORD, "mamba": dataclasses.replace(RECORD, pool="mamba")}]
SOON = 60.0


def later():
    return time.monotonic() + SOON


class DictStore(Store):
    """A store whose answers a test can spoil: `spoil` maps the name of a method to what it does with its answer."""

    def __init__(self):
        self.data = {}
        self.spoil = {}
        self.regions = []
        self.closed = 0

    def _answer(self, method, answer):
        return self.spoil.get(method, lambda good: good)(answer)

    def exists(self, keys, deadline):
        return self._answer("exists", [Presence(key in self.data) for key in keys])

    def get(self, keys, buffers, deadline):
        answers = []
        for key, buffer in zip(keys, buffers, strict=True):
            data = self.data.get(key)
            if data is not None and len(data) == len(buffer):
                buffer[:] = data
            elif data is not None:
                buffer[: len(data)] = data[: len(buffer)]  # scribbles
            answers.append(Fetch.MISSING if data is None else Fetch.HIT if len(data) == len(buffer) else Fetch.FAILED)
        return self._answer("get", answers)

    def put(self, keys, buffers, deadline):
        for key, buffer in zip(keys, buffers, strict=True):
            self.data.setdefault(key, bytes(buffer))
        return self._answer("put", [True] * len(keys))

    def delete(self, keys, deadline):
        for key in keys:
            self.data.pop(key, None)
        return self._answer("delete", [True] * len(keys))

    def clear(self):
        self.data.clear()

    def stats(self):
        return {"objects": len(self.data)}

    def close(self):
        self.closed += 1

    def register(self, region):
        self.regions.append(region)


class FakeHostPool:
    """Pages in `parts` arrays (as K and V are), addressed as a host pool of sglang says: by token index, by pointer."""

    def __init__(self, pages=16, page_size=PAGE, parts=2, size=HEADS * HEAD_BYTES, fill=0):
        self.page_size = page_size
        self.buffer = np.full((parts, pages, size), fill, np.uint8)
        if not fill:
            self.buffer[:] = np.random.default_rng(1).integers(0, 256, self.buffer.shape)

    def get_page_buffer_meta(self, indices):
        starts = np.asarray(indices)[:: self.page_size] // self.page_size
        pages = [self.buffer[part, page] for page in starts for part in range(len(self.buffer))]
        return [page.ctypes.data for page in pages], [page.nbytes for page in pages]

    def page(self, number):
        return self.buffer[:, number].tobytes()


def indices_of(pages, page_size=PAGE):
    return np.concatenate([np.arange(page * page_size, (page + 1) * page_size) for page in pages])


def keys_of(count):
    return [f"{number:064x}" for number in range(count)]


def pair(naming=RECORD, **options):
    """A store, a backend, and what it writes from and reads to."""
    store = DictStore()
    source, target = FakeHostPool(), FakeHostPool(fill=7)
    writer, reader = HiCacheBackend(store, naming, **options), HiCacheBackend(store, naming, **options)
    writer.register_mem_pool_host(source)
    reader.register_mem_pool_host(target)
    return store, writer, reader, source, target


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("batch_pages", [1, 3, 32])
def test_a_fake_hicache_controller_gets_holes_where_they_are(naming, batch_pages):
    store, writer, reader, source, target = pair(naming, batch_pages=batch_pages)
    keys, pages, slots = keys_of(6), [5, 3, 9, 1, 0, 2], [1, 8, 2, 0, 15, 4]
    assert writer.batch_set_v1(keys, indices_of(pages)) == [True] * 6
    holes = {1, 4}
    for hole in holes:
        assert writer.delete(keys[hole])
    assert reader.batch_get_v1(keys, indices_of(slots)) == [number not in holes for number in range(6)]
    for number, (page, slot) in enumerate(zip(pages, slots, strict=True)):
        assert target.page(slot) == (bytes([7]) * len(target.page(slot)) if number in holes else source.page(page))
    untouched = set(range(16)) - set(slots)
    assert {target.page(slot) for slot in untouched} == {bytes([7]) * 2 * HEADS * HEAD_BYTES}
    assert reader.batch_exists(keys) == 1  # the leading run, where a get answers per key
    assert reader.batch_exists(keys[2:]) == 2
    assert [reader.exists(key) for key in keys] == [number not in holes for number in range(6)]
    assert {region.nbytes > 0 for region in store.regions} == {True}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes(len(data)),
        lambda data: data[:-TRAILER] + bytes(TRAILER),
    ],
)
@pytest.mark.parametrize("naming", NAMINGS[:2])
def test_a_fake_hicache_controller_never_sees_a_damaged_page_and_it_is_written_anew(naming, damage):
    store, writer, reader, source, target = pair(naming)
    keys = keys_of(3)
    writer.batch_set_v1(keys, indices_of([0, 1, 2]))
    name = objects_of(keys[1], naming)[-1]
    store.data[name] = damage(store.data[name])
    assert reader.batch_get_v1(keys, indices_of([0, 1, 2])) == [True, False, True]
    assert target.page(1) == bytes([7]) * len(target.page(1))
    assert reader.stats()["corrupt"] == 1
    assert not reader.exists(keys[1])
    assert writer.batch_set_v1(keys, indices_of([0, 1, 2])) == [True] * 3
    assert reader.batch_get_v1(keys, indices_of([0, 1, 2])) == [True] * 3
    assert target.page(1) == source.page(1)


def test_a_fake_hicache_controller_never_sees_the_page_of_another_key_or_a_short_one():
    store, writer, reader, _, target = pair()
    keys = keys_of(3)
    writer.batch_set_v1(keys, indices_of([0, 1, 2]))
    names = [objects_of(key, RECORD)[0] for key in keys]
    store.data[names[0]] = store.data[names[1]]
    store.data[names[1]] = store.data[names[1]][:-TRAILER]
    assert reader.batch_get_v1(keys, indices_of([0, 1, 2])) == [False, False, True]
    store.data[names[2]] = store.data[names[2]][:50]
    store.spoil["get"] = lambda answers: [Fetch.HIT] * len(answers)  # a store that calls short ones whole
    target.buffer[:] = 7
    assert reader.batch_get_v1(keys, indices_of([0, 1, 2])) == [False] * 3
    assert set(target.buffer.ravel().tolist()) == {7}


def failing(_):
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    "spoil", [failing, lambda good: good[:-1], lambda good: [], lambda good: [-900] * len(good), lambda good: None]
)
def test_a_fake_hicache_controller_sees_misses_whatever_a_store_answers(spoil):
    store, writer, reader, _, target = pair()
    reader.register_mem_host_pool_v2(target, "mamba")
    keys, where = keys_of(3), indices_of([0, 1, 2])
    assert writer.batch_set_v1(keys, where) == [True] * 3
    store.spoil = dict.fromkeys(("exists", "get", "put", "delete"), spoil)
    transfer = PoolTransfer("mamba", where, keys=keys)
    assert reader.batch_exists(keys) == 0
    assert not reader.exists(keys[0])
    assert reader.batch_exists_v2(keys, [transfer]).kv_hit_pages == 0
    assert reader.batch_get_v1(keys, where) == [False] * 3
    assert writer.batch_set_v1(keys, where) == [False] * 3
    assert reader.batch_get_v2([transfer]) == {"mamba": [False] * 3}
    assert reader.get(keys[0], bytearray(2 * HEADS * HEAD_BYTES)) is None
    assert writer.set(keys[0], bytes(9)) is False
    assert set(target.buffer.ravel().tolist()) == {7}


def test_a_fake_hicache_controller_sees_misses_where_the_store_does_not_know():
    store, writer, reader, _, _ = pair()
    keys = keys_of(4)
    writer.batch_set_v1(keys, indices_of(range(4)))
    store.spoil["exists"] = lambda good: [*good[:2], Presence.UNKNOWN, *good[3:]]
    assert reader.batch_exists(keys) == 2
    store.spoil = {"put": lambda good: [True, False, True, 2]}
    assert writer.batch_set_v1(keys, indices_of(range(4))) == [True, False, True, False]
    store.spoil = {"stats": failing}
    store.stats = lambda: failing(0)
    assert reader.stats() == {"errors": 1, "corrupt": 0}


def test_mistakes_of_a_fake_hicache_controller_are_misses():
    store, writer, reader, source, target = pair()
    keys = keys_of(2)
    writer.batch_set_v1(keys, indices_of([0, 1]))
    for indices in (None, [], indices_of([0]), indices_of([0, 1, 2])):
        assert reader.batch_get_v1(keys, indices) == [False] * 2
        assert writer.batch_set_v1(["f" * 64, "e" * 64], indices) == [False] * 2
    assert reader.batch_get_v1([], []) == []
    assert reader.batch_get_v1(["../x", keys[1]], indices_of([0, 1])) == [False, True]
    assert reader.batch_exists([keys[0], "", keys[1]]) == 1
    assert HiCacheBackend(store, RECORD).batch_get_v1(keys, indices_of([0, 1])) == [False] * 2
    for meta in (([], []), ([0] * 4, [8] * 4), ([source.buffer.ctypes.data] * 3, [8] * 3)):
        target.get_page_buffer_meta = lambda indices, meta=meta: meta
        assert reader.batch_get_v1(keys, indices_of([0, 1])) == [False] * 2
    assert reader.stats()["errors"] > 0
    with pytest.raises(TypeError, match="get_page_buffer_meta"):
        reader.register_mem_pool_host(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_pages"):
        HiCacheBackend(store, RECORD, batch_pages=0)
    assert reader.get_stats() is None
    assert reader.clear()
    assert not store.data
    reader.close()
    assert store.closed == 1


class FakePolicy(str, enum.Enum):  # noqa: UP042 - as sglang has it
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


class FakePool(str, enum.Enum):  # noqa: UP042 - as sglang has it
    MAMBA = "mamba"
    SWA = "swa"


@given(st.data())
def test_a_fake_hicache_controller_is_promised_only_what_every_pool_has(data):
    """Against the definition: the longest prefix that satisfies all policies at once."""
    keys = keys_of(data.draw(st.integers(0, 7)))
    store = DictStore()
    backend = HiCacheBackend(store, RECORD)
    rows = {name: [data.draw(st.integers(0, 3)) > 0 for _ in keys] for name in ("kv", "mamba", "swa")}
    for name, row in rows.items():
        for key, there in zip(keys, row, strict=True):
            if there:
                store.data[objects_of(key, RECORD, (name,))[0]] = b""
    transfers = []
    for name in data.draw(st.lists(st.sampled_from(list(FakePool)), unique=True)):
        policy = data.draw(st.sampled_from([*FakePolicy, *PoolHitPolicy, "all_pages", "trailing_pages"]))
        window = data.draw(st.none() | st.integers(0, 3).map(lambda count: ["?"] * count))
        transfers.append(PoolTransfer(name, keys=window, hit_policy=policy))

    def serves(length):
        good = all(rows["kv"][:length])
        for transfer in transfers:
            row = rows[transfer.name.value][:length]
            trailing = transfer.hit_policy == "trailing_pages"
            good = good and all(row[-max(1, len(transfer.keys or [])) :] if trailing else row)
        return good

    best = max(length for length in range(len(keys) + 1) if serves(length))
    result = backend.batch_exists_v2(keys, transfers)
    assert result.kv_hit_pages == best
    assert result.extra_pool_hit_pages == (
        dict.fromkeys(["kv", *(t.name.value for t in transfers)], best) if best else {}
    )
    assert backend.batch_exists_v2(keys).kv_hit_pages == backend.batch_exists(keys)


def test_a_fake_hicache_controller_moves_several_pools():
    store, writer, reader, source, target = pair(NAMINGS[2])
    states, restored = FakeHostPool(4, 1, 3, 20), FakeHostPool(4, 1, 3, 20, fill=9)
    writer.register_mem_host_pool_v2(states, FakePool.MAMBA)
    reader.register_mem_host_pool_v2(restored, FakePool.MAMBA)
    keys = keys_of(4)
    written = writer.batch_set_v2(
        [
            PoolTransfer("kv", indices_of(range(4)), keys=keys),
            PoolTransfer(FakePool.MAMBA, [2, 1], keys=keys[2:]),
            PoolTransfer("swa", [0, 0], keys=keys[:2]),
        ]
    )
    assert written == {"kv": [True] * 4, "mamba": [True] * 2, "swa": [False] * 2}
    tail = PoolTransfer(FakePool.MAMBA, [0, 3], keys=keys[2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert reader.batch_exists_v2(keys, [tail]).extra_pool_hit_pages == {"kv": 4, "mamba": 4}
    assert reader.batch_exists_v2(keys[:3], [tail]).kv_hit_pages == 0  # the window of 3 pages lacks page 1
    assert writer.delete(keys[0])
    read = reader.batch_get_v2([PoolTransfer("kv", indices_of([8, 9, 10, 11]), keys=keys), tail])
    assert read == {"kv": [False, True, True, True], "mamba": [True, True]}
    assert [target.page(slot) for slot in (9, 10, 11)] == [source.page(page) for page in (1, 2, 3)]
    assert [restored.page(slot) for slot in (0, 3)] == [states.page(page) for page in (2, 1)]
    assert len(store.data) == 5
    same = [PoolTransfer("kv", indices_of([0]), keys=keys[:1]), PoolTransfer("kv", indices_of([1]), keys=keys[1:2])]
    assert reader.batch_get_v2(same) == {"kv": [False, True]}


def test_a_fake_hicache_controller_of_tp4_reads_what_tp8_wrote():
    store, keys = DictStore(), keys_of(3)
    whole = np.random.default_rng(2).integers(0, 256, (2, len(keys), HEADS, HEAD_BYTES), np.uint8)

    def backend_of(rank, ranks, data):
        first, end = heads_of_rank(HEADS, rank, ranks)
        record = dataclasses.replace(RECORD, heads=(first, end), tp=(rank, ranks))
        backend = HiCacheBackend(store, HeadGroups(record, 1))
        pool = FakeHostPool(len(keys), size=(end - first) * HEAD_BYTES, fill=7)
        pool.buffer[:] = data[:, :, first:end].reshape(pool.buffer.shape) if data is not None else 7
        backend.register_mem_pool_host(pool)
        return backend, pool, (first, end)

    where = indices_of(range(len(keys)))
    for rank in range(8):
        assert backend_of(rank, 4, None)[0].batch_exists(keys) == 0 if rank < 4 else True
        assert backend_of(rank, 8, whole)[0].batch_set_v1(keys, where) == [True] * 3
    for ranks in (4, 2, 1):
        for rank in range(ranks):
            backend, pool, (first, end) = backend_of(rank, ranks, None)
            assert backend.batch_exists(keys) == 3
            assert backend.batch_get_v1(keys, where) == [True] * 3
            assert np.array_equal(pool.buffer.reshape(2, 3, end - first, HEAD_BYTES), whole[:, :, first:end])
    store.data.popitem()  # one group of the last page
    assert sum(backend_of(rank, 4, None)[0].batch_exists(keys) for rank in range(4)) == 3 * 3 + 2


class FakeTensor:
    """As much of a CPU tensor as the adapter asks for, of a dtype that NumPy does not know."""

    def __init__(self, array, device="cpu"):
        self.array, self.device = array, device

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def contiguous(self):
        return FakeTensor(np.ascontiguousarray(self.array), self.device)

    def data_ptr(self):
        return self.array.ctypes.data

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize


def test_a_fake_hicache_controller_uses_the_generic_interface():
    store, backend, *_ = pair()
    keys = keys_of(6)
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert backend.set(keys[0], values)
    assert backend.set(keys[1], FakeTensor(values[:, ::2]))  # not contiguous
    assert backend.set(keys[2], target_location=values[:, ::2])
    assert not backend.set(keys[3], FakeTensor(values, "cuda:0"))
    assert not backend.set(keys[3], None)
    assert not backend.set(keys[3], object())
    assert not backend.batch_set([keys[3], "no key/", keys[4]], [b"abc", b"abc", bytearray(b"def")])
    target = np.zeros((4, 6), np.float32)
    assert backend.get(keys[0], target) is target
    assert np.array_equal(target, values)
    tensor = FakeTensor(np.zeros((4, 3), np.float32))
    assert backend.get(keys[1], tensor) is tensor
    assert np.array_equal(tensor.array, values[:, ::2])
    texts = [bytearray(3) for _ in range(3)]
    assert backend.batch_get([keys[3], keys[5], keys[4]], texts) == [texts[0], None, texts[2]]
    assert [bytes(text) for text in texts] == [b"abc", bytes(3), b"def"]
    assert backend.get(keys[0]) is None  # without a target
    assert backend.get(keys[0], target[:, ::2]) is None  # not contiguous
    assert backend.get(keys[3], bytes(3)) is None  # not writable
    assert backend.get(keys[3], bytearray(2)) is None
    assert backend.get(keys[3], bytearray(4)) is None
    assert backend.batch_get(keys[:2], [target]) == [None, None]
    assert backend.batch_exists(keys) == 5
    assert all(len(name) <= 200 for name in store.data)


def test_threads_of_a_fake_hicache_controller_do_not_mix_pages():
    _, backend, _, source, _ = pair(batch_pages=2)
    expected = source.buffer.copy()
    keys = keys_of(16)
    assert all(backend.batch_set_v1(keys, indices_of(range(16))))
    barrier = threading.Barrier(3)

    def work(own):
        barrier.wait(SOON)
        for _ in range(20):
            assert all(backend.batch_get_v1([keys[n] for n in own], indices_of(own)))
            assert all(backend.batch_set_v1([keys[n] for n in own], indices_of(own)))

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(work, range(first, 15, 3)) for first in range(3)]:
            done.result(SOON)
    assert np.array_equal(source.buffer, expected)


class FakeHiCache:
    """The documented generic interface over a dict: get fills the target and returns it, or None."""

    def __init__(self):
        self.data = {}

    def exists(self, key):
        return key in self.data

    def get(self, key, target_location=None, target_sizes=None):
        data = self.data.get(key)
        if data is None:
            return None
        assert target_location is not None
        target_location[: len(data)] = np.frombuffer(data, np.uint8)[: len(target_location)]
        return self.told(key, target_location, data)

    def told(self, key, target, data):
        return target

    def set(self, key, value=None, target_location=None, target_sizes=None):
        self.data[key] = bytes(value)
        return True

    def clear(self):
        self.data.clear()


def test_a_store_from_a_fake_hicache_answers_per_key():
    store = StoreFromHiCache(FakeHiCache())
    keys, pages = ["a", "b", "c", "d"], [bytes([number]) * 40 for number in range(4)]
    assert store.put(keys, [memoryview(page) for page in pages], later()) == [True] * 4
    assert store.delete(["b"], later()) == [False]  # the interface has no delete
    del store._backend.data["b"]
    assert store.delete(["b"], later()) == [True]
    assert store.exists(keys, later()) == [Presence.YES, Presence.NO, Presence.YES, Presence.YES]
    buffers = [bytearray(b"\7" * 40) for _ in keys]
    answers = store.get(keys, [memoryview(buffer) for buffer in buffers], later())
    assert answers == [Fetch.HIT, Fetch.MISSING, Fetch.HIT, Fetch.HIT]
    assert [bytes(buffers[n]) for n in (0, 2, 3)] == [pages[n] for n in (0, 2, 3)]
    assert store.stats()["objects"] == -1
    store.clear()
    assert store.exists(keys, later()) == [Presence.NO] * 4


@pytest.mark.parametrize(
    ("answer", "presence"),
    [
        (True, Presence.YES),
        (1, Presence.YES),
        (np.True_, Presence.YES),
        (np.int64(1), Presence.YES),
        (False, Presence.NO),
        (0, Presence.NO),
        (-900, Presence.UNKNOWN),
        (2, Presence.UNKNOWN),
        (None, Presence.UNKNOWN),
        ("yes", Presence.UNKNOWN),
        ([True], Presence.UNKNOWN),
        (1.0, Presence.UNKNOWN),
        (np.array([1]), Presence.UNKNOWN),
    ],
)
def test_only_one_and_zero_of_a_fake_hicache_count(answer, presence):
    backend = FakeHiCache()
    backend.exists = lambda key: answer
    backend.set = lambda key, value: answer
    store = StoreFromHiCache(backend)
    assert store.exists(["a"], later()) == [presence]
    assert store.put(["a"], [memoryview(b"abc")], later()) == [presence == Presence.YES]


SHORT, WHOLE, LONG = b"s" * 30, b"w" * 40, b"l" * 50


@pytest.mark.parametrize(
    ("data", "told", "fetch"),
    [
        (WHOLE, lambda target, data: target, Fetch.HIT),
        (WHOLE, lambda target, data: target[:], Fetch.HIT),  # another view of the same memory
        (WHOLE, lambda target, data: data, Fetch.HIT),
        (WHOLE, lambda target, data: np.frombuffer(data, np.float64), Fetch.HIT),
        (WHOLE, lambda target, data: FakeTensor(np.frombuffer(data, np.uint8)), Fetch.HIT),
        (WHOLE, lambda target, data: len(data), Fetch.HIT),
        (WHOLE, lambda target, data: np.int64(len(data)), Fetch.HIT),
        (WHOLE, lambda target, data: True, Fetch.FAILED),  # says nothing of the length
        (WHOLE, lambda target, data: "ok", Fetch.FAILED),
        (WHOLE, lambda target, data: object(), Fetch.FAILED),
        (WHOLE, lambda target, data: -704, Fetch.FAILED),
        (WHOLE, lambda target, data: 0, Fetch.FAILED),
        (WHOLE, lambda target, data: False, Fetch.MISSING),
        (WHOLE, lambda target, data: b"", Fetch.MISSING),
        (SHORT, lambda target, data: target, Fetch.FAILED),  # the fault: a short object, called whole
        (SHORT, lambda target, data: len(target), Fetch.FAILED),
        (SHORT, lambda target, data: len(data), Fetch.FAILED),
        (SHORT, lambda target, data: data, Fetch.FAILED),
        (LONG, lambda target, data: len(data), Fetch.FAILED),
        (LONG, lambda target, data: data, Fetch.FAILED),
    ],
)
def test_a_get_of_a_fake_hicache_counts_only_if_all_of_it_came(data, told, fetch):
    backend = FakeHiCache()
    backend.told = lambda key, target, data: told(target, data)
    backend.data["a"] = data
    buffer = bytearray(len(WHOLE))
    assert StoreFromHiCache(backend).get(["a"], [memoryview(buffer)], later()) == [fetch]
    assert bytes(buffer) == WHOLE or fetch != Fetch.HIT


def test_a_page_of_a_fake_hicache_may_end_in_any_byte():
    backend = FakeHiCache()
    store = StoreFromHiCache(backend)
    for size in (1, 40):
        for last in range(256):
            backend.data["a"] = bytes([*range(1, size), last])
            buffer = bytearray(size)
            assert store.get(["a"], [memoryview(buffer)], later()) == [Fetch.HIT]
            assert bytes(buffer) == backend.data["a"]


def test_a_fake_hicache_that_raises_is_late_or_is_closed_gives_no_hit():
    backend = FakeHiCache()
    store = StoreFromHiCache(backend)
    page = memoryview(bytearray(4))
    store.put(["a"], [page], later())
    none = ([Presence.UNKNOWN], [Fetch.FAILED], [False], [False])

    def answers(deadline):
        return (
            store.exists(["a"], deadline),
            store.get(["a"], [page], deadline),
            store.put(["a"], [page], deadline),
            store.delete(["a"], deadline),
        )

    assert answers(later()) == ([Presence.YES], [Fetch.HIT], [True], [False])
    assert answers(time.monotonic()) == none
    backend.exists = backend.get = backend.set = backend.delete = backend.clear = lambda *_: failing(0)
    assert answers(later()) == none
    store.clear()
    closed = []
    backend.close = lambda: closed.append(True)
    for name in ("exists", "get", "set", "delete", "clear"):
        delattr(backend, name)
    store.close()
    store.close()
    assert closed == [True]
    assert answers(later()) == none


def test_a_fake_hicache_may_keep_what_it_is_given():
    backend, kept = FakeHiCache(), []
    backend.set = lambda key, value: kept.append(value) or True
    page = bytearray(b"before")
    wrapped = []
    store = StoreFromHiCache(backend, wrap=lambda array: wrapped.append(array) or array)
    assert store.put(["a"], [memoryview(page)], later()) == [True]
    page[:] = b"after!"
    assert kept[0].tobytes() == b"before"
    assert wrapped[0] is kept[0]


@given(
    st.lists(
        st.tuples(st.sampled_from("pged"), st.sampled_from(["a", "b.c", "D-_"]), st.binary(min_size=1, max_size=3))
    )
)
def test_both_adapters_in_a_row_are_a_store(calls):
    inner = DictStore()
    store = StoreFromHiCache(HiCacheBackend(inner, RECORD))
    model: dict[str, bytes] = {}
    for call, key, data in calls:
        if call == "p":
            assert store.put([key], [memoryview(data)], later()) == [True]
            model.setdefault(key, data)
        elif call == "g":
            buffer = bytearray(len(data))
            hit = len(model.get(key, b"")) == len(data)
            answer = store.get([key], [memoryview(buffer)], later())
            assert (answer == [Fetch.HIT]) == hit
            assert not hit or bytes(buffer) == model[key]
        elif call == "e":
            assert store.exists([key], later()) == [Presence(key in model)]
        else:
            assert store.delete([key], later()) == [True]
            model.pop(key, None)
    store.clear()
    assert not inner.data
    store.close()
    store.close()
    assert inner.closed == 1
