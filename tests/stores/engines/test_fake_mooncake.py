"""MooncakeStore over a fake of Mooncake's client: what a real one can't be made to do, or not at a given moment.

The fake refuses memory that is not registered, as RDMA would; the real one reads and writes it with TCP.
"""

import ctypes
import importlib
import logging
import re
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import FAILED, HIT, MISSING, NO, UNKNOWN, YES, Objects, ask, over_clients, soon

from purecache.stores.envelope import TRAILER
from purecache.stores.guard import Guard, Kind
from purecache.stores.interface import Fetch, Presence
from purecache.stores.registry import open_store
from purecache.stores.staging import StagingRing
from purecache.testing import check_store

SIZE = 4096
MODULE = "purecache.stores.engines.mooncake"
ENGINE = (MODULE, f"{MODULE}_client")
OBJECTS = Objects(SIZE)
page, put, get = OBJECTS.content, OBJECTS.put, OBJECTS.get
OK, NO_SPACE, BAD, NOT_READY, NOT_THERE, LEASED, BROKEN, NO_MASTER = 0, -200, -600, -703, -704, -706, -800, -900


class Cluster:
    """What the clients of a fake master share."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.leased: set[str] = set()
        self.unfinished: set[str] = set()
        """Names that somebody is writing, or was writing when it died."""
        self.on_disk: set[str] = set()


@dataclass
class Descriptor:
    """Of a replica; that of a disk doesn't tell a size."""

    size: int
    disk: bool

    def is_memory_replica(self) -> bool:
        return not self.disk

    def get_memory_descriptor(self) -> Any:
        assert not self.disk
        return types.SimpleNamespace(buffer_descriptor=types.SimpleNamespace(size=self.size))


@dataclass
class FakeClient:
    """MooncakeDistributedStore as it is documented and measured (0.3.13.post1)."""

    cluster: Cluster = field(default_factory=Cluster)
    calls: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    """What is answered about a name by whatever call, instead of doing it."""
    alive: bool = True
    raising: Exception | None = None
    answer: Any = None
    """Instead of a right answer of a batch."""
    entered: Callable[[], None] = lambda: None
    refuses_memory: bool = False
    setup_code: int = 0
    setup_arguments: tuple[Any, ...] = ()
    configs: list[Any] = field(default_factory=list)
    regions: dict[int, int] = field(default_factory=dict)
    inside: int = 0
    closed: bool = False

    def setup(self, *arguments: Any) -> int:
        self.setup_arguments = arguments
        return self.setup_code

    def register_buffer(self, pointer: int, size: int) -> int:
        self._begin("register_buffer")
        overlaps = any(pointer < start + length and start < pointer + size for start, length in self.regions.items())
        if overlaps or self.refuses_memory:
            return BAD
        self.regions[pointer] = size
        return OK

    def unregister_buffer(self, pointer: int) -> int:
        self._begin("unregister_buffer")
        del self.regions[pointer]
        return OK

    def batch_is_exist(self, names: list[str]) -> Any:
        def ask(name: str) -> int:
            if name in self.cluster.objects and name not in self.cluster.unfinished:
                self.cluster.leased.add(name)
                return 1
            return 0

        return self._batch("batch_is_exist", names, [(name,) for name in names], ask)

    def batch_put_from(self, names: list[str], pointers: list[int], sizes: list[int], config: Any) -> Any:
        self.configs.append(config)
        places = [[(pointer, size)] for pointer, size in zip(pointers, sizes, strict=True)]
        return self._batch("batch_put_from", names, list(zip(names, places, strict=True)), self._put)

    def batch_put_from_multi_buffers(self, names: list[str], pointers: Any, sizes: Any, config: Any) -> Any:
        self.configs.append(config)
        places = [list(zip(*each, strict=True)) for each in zip(pointers, sizes, strict=True)]
        return self._batch("batch_put_from_multi_buffers", names, list(zip(names, places, strict=True)), self._put)

    def batch_get_into(self, names: list[str], pointers: list[int], sizes: list[int]) -> Any:
        places = [[(pointer, size)] for pointer, size in zip(pointers, sizes, strict=True)]
        return self._batch("batch_get_into", names, self._last(names, places), self._get)

    def batch_get_into_multi_buffers(self, names: list[str], pointers: Any, sizes: Any) -> Any:
        places = [list(zip(*each, strict=True)) for each in zip(pointers, sizes, strict=True)]
        return self._batch("batch_get_into_multi_buffers", names, self._last(names, places), self._get)

    def batch_remove(self, names: list[str], force: bool = False) -> Any:
        def remove(name: str) -> int:
            if name not in self.cluster.objects:
                return NOT_THERE
            if name in self.cluster.leased and not force:
                return LEASED
            del self.cluster.objects[name]
            self.cluster.leased.discard(name)
            return OK

        return self._batch("batch_remove", names, [(name,) for name in names], remove)

    def remove_by_regex(self, pattern: str, force: bool = False) -> Any:
        self._begin("remove_by_regex")
        if not self.alive:
            return NO_MASTER
        names = [name for name in self.cluster.objects if re.search(pattern, name)]
        names = [name for name in names if force or name not in self.cluster.leased]
        for name in names:
            del self.cluster.objects[name]
        return len(names)

    def batch_get_replica_desc(self, names: list[str]) -> Any:
        self._begin("batch_get_replica_desc")
        objects = {name: self.cluster.objects[name] for name in names if name in self.cluster.objects}
        disk = self.cluster.on_disk
        return {
            name: [Descriptor(len(content), name in disk)]
            for name, content in objects.items()
            if self.alive and name not in self.cluster.unfinished
        }

    def get_size(self, name: str) -> int:
        self._begin("get_size")
        return len(self.cluster.objects[name]) if name in self.cluster.objects else NOT_THERE

    def close(self) -> int:
        assert self.inside == 0, "closed under a call: the real one crashes"
        assert not self.closed
        self.closed = True
        return 0

    def _begin(self, method: str) -> None:
        assert not self.closed, f"{method} after close: the real one crashes"
        self.calls.append(method)
        if self.raising:
            raise self.raising

    def _batch(self, method: str, names: list[str], items: list[Any], work: Callable[..., int]) -> Any:
        assert all(type(name) is str for name in names)
        self._begin(method)
        self.inside += 1
        self.entered()
        try:
            if self.answer is not None:
                return self.answer
            if not self.alive:
                return [NO_MASTER] * len(names)
            return [self.codes.get(item[0], None) or work(*item) for item in items]
        finally:
            self.inside -= 1

    def _last(self, names: list[str], places: list[Any]) -> list[Any]:
        """A name that is twice in a batch is read into one of its places only, and both are a success."""
        return [(name, dict(zip(names, places, strict=True))[name]) for name in names]

    def _registered(self, places: list[tuple[int, int]]) -> bool:
        return all(
            any(start <= pointer and pointer + size <= start + length for start, length in self.regions.items())
            for pointer, size in places
        )

    def _put(self, name: str, places: list[tuple[int, int]]) -> int:
        assert self._registered(places), "memory that isn't registered"
        if not all(size for _, size in places):
            return BAD
        if name in self.cluster.unfinished:
            return OK
        self.cluster.objects.setdefault(name, b"".join(ctypes.string_at(*place) for place in places))
        return OK

    def _get(self, name: str, places: list[tuple[int, int]]) -> int:
        assert self._registered(places), "memory that isn't registered"
        if name in self.cluster.unfinished:
            return NOT_READY
        if name not in self.cluster.objects:
            return NOT_THERE
        rest = self.cluster.objects[name]
        size = len(rest)
        if size > sum(size for _, size in places):
            return BAD
        if len(places) > 1 and size < sum(size for _, size in places):
            return BROKEN
        for pointer, length in places:
            ctypes.memmove(pointer, rest[:length], min(length, len(rest)))
            rest = rest[length:]
        return size


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine() -> Iterator[Any]:
    """The module of the store, over a fake of Mooncake's, whether that is installed or not."""
    fake: Any = types.ModuleType("mooncake.store")
    fake.MooncakeDistributedStore = FakeClient
    fake.ReplicateConfig = types.SimpleNamespace
    fake.SoftPinAction = types.SimpleNamespace(ENABLE="enable")
    with over_clients({"mooncake": types.ModuleType("mooncake"), "mooncake.store": fake}, *ENGINE):
        yield importlib.import_module(MODULE)


@pytest.fixture(params=["page", "k_v"])
def objects(request: pytest.FixtureRequest) -> str:
    return request.param


def make(engine: Any, client: FakeClient, objects: str = "page", layers: int = 1, **options: Any) -> Any:
    return engine.MooncakeStore(client, engine.Layout("p", objects, layers), object_bytes=SIZE, **options)


def exists(store: Any, *keys: str) -> list[Presence]:
    return store.exists(keys, soon())


def counted(store: Any, cluster: Cluster) -> Any:
    """A store whose `objects` are known: the fake has no HTTP port."""
    plain = store.stats
    store.stats = lambda: plain() | {"objects": store._layout.count(list(cluster.objects))}
    return store


@pytest.mark.parametrize(("objects", "layers"), [("page", 1), ("k", 1), ("k_v", 1), ("k_v", 5)])
def test_the_fake_conforms_in_every_layout(engine: Any, objects: str, layers: int):
    clusters = iter(Cluster() for _ in range(100))

    def make_one() -> Any:
        cluster = next(clusters)
        return counted(make(engine, FakeClient(cluster), objects, layers), cluster)

    check_store(make_one, SIZE)


@pytest.mark.parametrize("layers", [1, 3])
def test_pages_of_all_sizes_survive_being_divided(engine: Any, layers: int):
    client = FakeClient()
    store = make(engine, client, "k_v", layers)
    for size in [*range(1, 100), 1000, 1001]:
        stored = put(store, f"k{size}", size=size)
        buffer = memoryview(bytearray(size))
        fits = (size - TRAILER if size > TRAILER else size) >= 2 * layers
        assert stored == [fits]
        assert store.get([f"k{size}"], [buffer], soon()) == [HIT if fits else FAILED]
        assert not fits or buffer == page(f"k{size}", size)
        parts = [client.cluster.objects.get(f"p/k{size}{suffix}", b"") for suffix in ("_k", "_v")]
        assert sum(map(len, parts)) == (size if fits else 0)
        assert not fits or size <= TRAILER or len(parts[1]) >= len(parts[0]) + TRAILER


def test_registered_buffers_are_not_copied(engine: Any, objects: str):
    client = FakeClient()
    store = make(engine, client, objects)
    ring = StagingRing(4, SIZE - TRAILER)
    store.register(ring.region)
    store.register(ring.region)
    views = [ring.sealed(slot) for slot in ring.acquire(4) or []]
    views[0][:], views[1][:] = page("a"), page("b")
    assert store.put(["a", "b"], views[:2], soon()) == [True, True]
    assert store.get(["b", "none", "a"], [views[2], views[1], views[3]], soon()) == [HIT, MISSING, HIT]
    assert (views[2], views[3]) == (page("b"), page("a"))
    assert client.regions == {np.frombuffer(ring.region, np.uint8).ctypes.data: ring.region.nbytes}
    assert [name for name in client.calls if name.startswith("batch")] == [
        "batch_put_from",
        "batch_get_replica_desc",
        "batch_get_into",
    ]
    store.close()
    assert client.regions == {}


def test_other_buffers_are_copied_through_registered_memory(engine: Any):
    """In batches that fit there; registered ones among them need none of it."""
    client = FakeClient()
    store = make(engine, client, scratch=3 * SIZE)
    ring = StagingRing(1, SIZE - TRAILER)
    store.register(ring.region)
    mine = ring.sealed((ring.acquire(1) or [])[0])
    keys = [f"k{index}" for index in range(8)]
    buffers = [page(key) for key in keys]
    buffers[4] = mine
    mine[:] = page("k4")
    assert store.put(keys, buffers, soon()) == [True] * 8
    assert client.calls.count("batch_put_from") == 1 + 3
    mine[:] = bytes(SIZE)
    into = [memoryview(bytearray(SIZE)) for _ in keys]
    into[4] = mine
    assert store.get(keys, into, soon()) == [HIT] * 8
    assert into == [page(key) for key in keys]
    assert client.calls.count("batch_get_into") == 1 + 3
    assert store.put(["large"], [page("x", 3 * SIZE + 1)], soon()) == [False]


def test_memory_that_is_refused_is_copied(engine: Any, caplog: pytest.LogCaptureFixture):
    client = FakeClient()
    store = make(engine, client)
    ring = StagingRing(1, SIZE - TRAILER)
    client.refuses_memory = True
    with caplog.at_level(logging.WARNING):
        store.register(ring.region)
        mine = ring.sealed((ring.acquire(1) or [])[0])
        mine[:] = page("a")
        assert store.put(["a"], [mine], soon()) == [False]  # nor is there memory to copy through
        assert "refused to register" in caplog.text
    client.refuses_memory = False
    assert store.put(["a"], [mine], soon()) == [True]
    assert get(store, "a") == [HIT]


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize(("objects", "layers", "most"), [("page", 1, 512), ("k_v", 1, 256), ("k_v", 8, 32)])
def test_a_call_moves_no_more_than_the_engine_queues(
    engine: Any, registered: bool, objects: str, layers: int, most: int
):
    client = FakeClient()
    store = make(engine, client, objects, layers)
    ring = StagingRing(600, 128 - TRAILER)
    if registered:
        store.register(ring.region)
    views = [ring.sealed(slot) for slot in ring.acquire(600) or []]
    keys = [f"k{index}" for index in range(600)]
    for key, view in zip(keys, views, strict=True):
        view[:] = page(key, 128)
    assert store.put(keys, views, soon()) == [True] * 600
    for view in views:
        view[:] = bytes(128)
    assert store.get(keys, views, soon()) == [HIT] * 600
    assert views == [page(key, 128) for key in keys]
    calls = [name for name in client.calls if name.startswith("batch_get_into")]
    assert len(calls) == -(-600 // most)


@pytest.mark.parametrize("code", [-1, -101, -600, -703, -707, -800, -801, -1102])
def test_negative_codes_are_no_answer(engine: Any, objects: str, code: int):
    """And all of them are true in Python."""
    client = FakeClient()
    store = make(engine, client, objects)
    assert put(store, "a", "b", "c") == [True] * 3
    name = "p/b" if objects == "page" else "p/b_v"
    client.codes[name] = code
    assert exists(store, "a", "b", "none", "c") == [YES, UNKNOWN, NO, YES]
    assert get(store, "a", "b", "none", "c") == [HIT, FAILED, MISSING, HIT]
    assert put(store, "a", "b", "c") == [True, False, True]
    assert store.delete(["a", "b", "c"], soon()) == [True, False, True]
    assert store.stats()["master_losses"] == 0


@pytest.mark.parametrize("lost", ["_k", "_v"])
def test_half_a_page_is_none(engine: Any, lost: str):
    client = FakeClient()
    store = make(engine, client, "k_v")
    assert put(store, "a", "b") == [True, True]
    del client.cluster.objects["p/a" + lost]
    assert exists(store, "a", "b") == [NO, YES]
    assert get(store, "a", "b") == [MISSING, HIT]
    client.codes["p/a_k" if lost == "_v" else "p/a_v"] = BROKEN  # whatever the other half is
    assert exists(store, "a") == [NO]
    assert get(store, "a") == [MISSING]
    client.codes.clear()
    client.codes["p/a" + lost] = NO_SPACE
    assert put(store, "a") == [False]
    client.codes.clear()
    assert put(store, "a") == [True]
    assert get(store, "a") == [HIT]
    assert store.delete(["a"], soon()) == [True]
    assert set(client.cluster.objects) == {"p/b_k", "p/b_v"}


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 100])
@pytest.mark.parametrize("on_disk", [False, True])
def test_an_object_of_another_length_is_no_hit_and_is_replaced(engine: Any, objects: str, size: int, on_disk: bool):
    client = FakeClient()
    store = make(engine, client, objects)
    assert put(store, "a", size=size) == [True]
    client.cluster.on_disk |= set(client.cluster.objects) if on_disk else set()
    client.cluster.leased |= set(client.cluster.objects)
    assert get_any(store, "a") == [FAILED]
    assert put(store, "none", "a", "b") == [True] * 3
    assert get(store, "none", "a", "b") == [HIT] * 3
    assert put(store, "a") == [True]


def get_any(store: Any, *keys: str) -> list[Fetch]:
    return store.get(keys, [memoryview(bytearray(SIZE)) for _ in keys], soon())


def test_put_is_true_only_for_what_can_be_read(engine: Any, objects: str):
    """Mooncake answers success for a page that somebody else has begun to write."""
    client = FakeClient()
    store = make(engine, client, objects)
    client.cluster.unfinished.add("p/b" if objects == "page" else "p/b_k")
    assert put(store, "a", "b", "c") == [True, False, True]
    assert exists(store, "a", "b", "c") == [YES, NO, YES]


def test_a_key_several_times_in_a_batch(engine: Any, objects: str):
    """Of which Mooncake would fill one buffer, and call all of them a success."""
    store = make(engine, FakeClient(), objects)
    assert put(store, "a", "b", "a") == [True] * 3
    assert get(store, "a", "b", "a", "none", "a", "none") == [HIT, HIT, HIT, MISSING, HIT, MISSING]


def test_without_a_master_one_call_per_cool_down_reaches_the_engine(engine: Any):
    client, clock = FakeClient(), Clock()
    store = make(engine, client, cooldown=5.0, clock=clock)
    assert put(store, "a") == [True]
    client.alive = False
    client.calls.clear()
    for turn in (1, 2, 3):
        for _ in range(3):
            assert exists(store, "a", "b") == [UNKNOWN, UNKNOWN]
            assert get(store, "a", "b") == [FAILED, FAILED]
            assert put(store, "a", "b") == [False, False]
            assert store.delete(["a", "b"], soon()) == [False, False]
            store.clear()
        assert [name for name in client.calls if name.startswith(("batch", "remove"))] == ["batch_is_exist"] * turn
        numbers = store.stats()
        assert (numbers["master_down"], numbers["master_losses"]) == (1, turn)
        clock.now += 4.9
        assert exists(store, "a") == [UNKNOWN]
        assert client.calls.count("batch_is_exist") == turn
        clock.now += 0.2
    client.alive = True
    assert exists(store, "a", "b") == [YES, NO]
    assert get(store, "a") == [HIT]
    assert store.stats()["master_down"] == 0


def test_batches_through_the_scratch_area_stop_at_a_dead_master(engine: Any):
    client = FakeClient()
    store = make(engine, client, scratch=SIZE)
    client.alive = False
    assert put(store, *"abcdefgh") == [False] * 8
    assert client.calls.count("batch_put_from") == 1


def test_what_the_client_raises_is_a_failure(engine: Any, objects: str):
    client = FakeClient()
    store = make(engine, client, objects, cooldown=0.0)
    assert put(store, "a") == [True]
    client.raising = RuntimeError("some panic")
    assert exists(store, "a", "b") == [UNKNOWN, UNKNOWN]
    assert get(store, "a", "b") == [FAILED, FAILED]
    assert put(store, "a", "b") == [False, False]
    assert store.delete(["a", "b"], soon()) == [False, False]
    store.clear()
    client.raising = None
    assert get(store, "a", "b") == [HIT, MISSING]


@pytest.mark.parametrize("answer", [[], [1], [1, 1, 1], 1, "ok", (1, 1), {}])
def test_answers_of_another_shape_are_failures(engine: Any, answer: Any):
    client = FakeClient()
    store = make(engine, client, cooldown=0.0)
    client.answer = answer
    assert exists(store, "a", "b") == [UNKNOWN, UNKNOWN]
    assert get(store, "a", "b") == [FAILED, FAILED]
    assert put(store, "a", "b") == [False, False]
    assert store.delete(["a", "b"], soon()) == [False, False]


def test_nothing_is_asked_after_the_deadline(engine: Any):
    client = FakeClient()
    store = make(engine, client)
    assert put(store, "a") == [True]
    client.calls.clear()
    late = time.monotonic() - 0.001
    assert store.exists(["a"], late) == [UNKNOWN]
    assert store.get(["a"], [page("a")], late) == [FAILED]
    assert store.put(["b"], [page("b")], late) == [False]
    assert store.delete(["a"], late) == [False]
    assert client.calls == []


def test_the_scratch_area_is_not_waited_for_after_the_deadline(engine: Any):
    client, entered, go_on = FakeClient(), threading.Event(), threading.Event()
    store = make(engine, client)
    assert put(store, "a") == [True]
    client.entered = lambda: (entered.set(), go_on.wait(20), None)[2]
    thread = threading.Thread(target=lambda: get(store, "a"))
    thread.start()
    assert entered.wait(20)
    begin = time.monotonic()
    assert store.get(["a"], [memoryview(bytearray(SIZE))], soon(0.2)) == [FAILED]
    assert time.monotonic() - begin < 5
    go_on.set()
    thread.join(20)


def test_close_waits_for_calls_and_nothing_is_called_afterwards(engine: Any):
    """The real client crashes the process otherwise."""
    client, entered, go_on = FakeClient(), threading.Event(), threading.Event()
    given_back: list[bool] = []
    store = make(engine, client, on_close=lambda: given_back.append(True))
    store.register(StagingRing(1, SIZE).region)
    client.entered = lambda: (entered.set(), go_on.wait(20), None)[2]
    answers: list[Any] = []
    caller = threading.Thread(target=lambda: answers.append(put(store, "a")))
    caller.start()
    assert entered.wait(20)
    closer = threading.Thread(target=store.close)
    closer.start()
    while not store._entrance.is_closed:
        time.sleep(0.001)
    assert exists(store, "a") == [UNKNOWN]
    closer.join(0.2)
    assert closer.is_alive()
    assert not client.closed
    go_on.set()
    for thread in (caller, closer):
        thread.join(20)
    assert client.closed
    assert answers == [[False]]  # it was written, but not confirmed any more
    assert given_back == [True]
    store.close()
    store.register(StagingRing(1, SIZE).region)
    store.clear()
    assert store.stats()["objects"] == -1


def test_damaged_pages_are_replaced_through_the_guard(engine: Any, objects: str):
    client = FakeClient()
    guard = Guard(make(engine, client, objects))
    keys, views = ["a", "b", "c"], [page(key) for key in "abc"]
    assert ask(guard, Kind.PUT, keys, views) == [True] * 3
    name = "p/b" if objects == "page" else "p/b_k"
    client.cluster.objects[name] = bytes([client.cluster.objects[name][0] ^ 1]) + client.cluster.objects[name][1:]
    client.cluster.leased |= set(client.cluster.objects)
    assert ask(guard, Kind.GET, keys, [page("x") for _ in keys]) == [HIT, FAILED, HIT]
    assert guard.stats()["get_corrupt"] == 1
    assert ask(guard, Kind.EXISTS, keys) == [YES, NO, YES]
    assert ask(guard, Kind.PUT, keys, views) == [True] * 3
    assert ask(guard, Kind.GET, keys, [page("x") for _ in keys]) == [HIT] * 3
    guard.close()


def test_what_goes_with_every_write(engine: Any):
    configs: list[Any] = []
    assert put(make(engine, FakeClient(configs=configs), "k_v", hard_pin=True, soft_pin=1.5, replicas=2), "a", "b") == [
        True,
        True,
    ]
    assert put(make(engine, FakeClient(configs=configs), "k_v", group=False), "c") == [True]
    assert put(make(engine, FakeClient(configs=configs), "page"), "d") == [True]
    groups = ["p/a", "p/a", "p/b", "p/b"]
    first = {"replica_num": 2, "with_hard_pin": True, "soft_pin_action": "enable", "soft_pin_ttl_ms": 1500}
    plain = {"replica_num": 1, "with_hard_pin": False}
    assert [vars(config) for config in configs] == [first | {"group_ids": groups}, plain, plain]


@pytest.fixture
def listening() -> Iterator[str]:
    """A port that something listens on, as a master would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_options_reach_the_client(engine: Any, listening: str, tmp_path: Path):
    directory = str(tmp_path / "ssd")
    store: Any = open_store(
        f"mooncake://{listening}/some/prefix?protocol=rdma&device=mlx5_0&metadata=http://meta:1/m&segment=1GiB"
        f"&local_buffer=32MiB&local_host=10.0.0.7&tenant=blue&ssd={directory}&objects=k_v&layers=2&scratch=1MiB"
        "&cooldown=2.5&replicas=2&hard_pin=yes&soft_pin=60&group=no",
        SIZE,
        engine="inner engine",
    )
    wanted = ("10.0.0.7", "http://meta:1/m", 1 << 30, 32 << 20, "rdma", "mlx5_0", listening, "inner engine")
    assert store._client.setup_arguments == (*wanted, True, directory, "blue")
    assert store._layout.names("x") == ["some/prefix/x_k", "some/prefix/x_v"]
    plain: Any = open_store(f"mooncake://{listening}", SIZE, engine=types.SimpleNamespace(get_engine=lambda: "inner"))
    wanted = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", listening, "inner", False, "", "default")
    assert plain._client.setup_arguments == wanted
    assert plain._layout.names("x") == ["purecache/x"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("protocol=udp", "there are tcp, rdma"),
        ("objects=both", "there are page, k, k_v"),
        ("layers=2", "layers must be at least 1"),
        ("objects=k_v&layers=0", "layers must be at least 1"),
        ("segment=1MiB", "a segment has at least"),
        ("ssd=/x", "ssd needs a segment"),
        ("replicas=0", "replicas >= 1"),
        ("cooldown=-1", "not a number of seconds"),
        ("metrics=host", "say which host and port"),
        ("color=blue", "unknown option color"),
    ],
)
def test_wrong_options(engine: Any, listening: str, options: str, error: str):
    with pytest.raises(ValueError, match=error):
        open_store(f"mooncake://{listening}?{options}", SIZE)


@pytest.mark.parametrize("prefix", ["a b", "a//b", "a%2Ab", "a$"])
def test_wrong_prefixes(engine: Any, listening: str, prefix: str):
    with pytest.raises(ValueError, match="a prefix has letters"):
        open_store(f"mooncake://{listening}/{prefix}", SIZE)


def test_a_client_that_refuses(engine: Any, listening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeClient, "setup", lambda *_: -1)
    url = f"mooncake://{listening}?segment=16MiB&ssd={tmp_path}"
    for _ in range(2):  # the directory was given back
        with pytest.raises(ConnectionError, match=r"could not be set up \(code -1\)"):
            open_store(url, SIZE)


def test_a_directory_serves_one_store_at_a_time(engine: Any, listening: str, tmp_path: Path):
    url = f"mooncake://{listening}?segment=16MiB&ssd={tmp_path}/ssd"
    store = open_store(url, SIZE)
    with pytest.raises(ValueError, match="another store has its ssd there"):
        open_store(url, SIZE)
    open_store(url + "2", SIZE).close()
    store.close()
    open_store(url, SIZE).close()


def test_clear_removes_leased_objects_under_the_prefix_only(engine: Any):
    cluster = Cluster()
    stores = {
        prefix: engine.MooncakeStore(FakeClient(cluster), engine.Layout(prefix)) for prefix in ("a.b", "axb", "a.b/c")
    }
    for store in stores.values():
        assert put(store, "k") == [True]
        assert exists(store, "k") == [YES]
    stores["a.b"].clear()
    assert set(cluster.objects) == {"axb/k", "a.b/c/k"}
