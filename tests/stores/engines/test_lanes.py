"""What stores with lanes share, over a service that is a dictionary: steps, deadlines, and keys that are remembered."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from calls import FAILED, HIT, MISSING, NO, UNKNOWN, YES, Objects, soon

from purecache.stores.engines.entrance import Entrance
from purecache.stores.engines.lanes import Lane, LaneStore
from purecache.stores.interface import Fetch, Presence
from purecache.testing import check_store

SIZE = 4096
OBJECTS = Objects(SIZE)
put, get = OBJECTS.put, OBJECTS.get


class DictStore(LaneStore[Lane]):
    """`before` is called at the begin of every step."""

    def __init__(self, slots: int = 3, lanes: int = 2, least_bytes: int = 0):
        super().__init__("a dictionary", [Lane(slots, SIZE) for _ in range(lanes)], SIZE, least_bytes)
        self.objects: dict[str, bytes] = {}
        self.before: Callable[[], object] = lambda: None
        self.steps: list[int] = []
        self.given_back: list[int] = []

    def _begin(self, keys: Sequence[str]) -> None:
        self.before()
        self.steps.append(len(keys))

    def _ask(self, keys: Sequence[str]) -> list[Presence]:
        self._begin(keys)
        return [YES if key in self.objects else NO for key in keys]

    def _read(self, lane: Lane, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Fetch]:
        self._begin(keys)
        answers = [MISSING] * len(keys)
        for slot, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if key in self.objects:
                memory = lane.memory(slot, len(self.objects[key]))
                memory[:] = self.objects[key]
                answers[slot] = HIT if memory.nbytes == buffer.nbytes else FAILED
                if answers[slot] is HIT:
                    buffer[:] = memory
        return answers

    def _write(self, lane: Lane, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        self._begin(keys)
        assert len(set(keys)) == len(keys)
        self.objects |= {key: bytes(buffer) for key, buffer in zip(keys, buffers, strict=True)}
        return [True] * len(keys)

    def _remove(self, keys: Sequence[str], deadline: float) -> list[bool]:
        self._begin(keys)
        for key in keys:
            self.objects.pop(key, None)
        return [True] * len(keys)

    def _let_go(self, lanes: list[Lane]) -> None:
        self.given_back.append(len(lanes))


def until(moment: float) -> None:
    while time.monotonic() < moment:
        time.sleep(0.001)


def test_the_contract():
    check_store(DictStore, SIZE)


def test_steps_are_as_large_as_a_lane():
    store = DictStore(slots=3)
    OBJECTS.check_holes(store, 12)
    assert store.steps == [3, 3, 2, 12, 3, 3, 3, 3]
    store.steps.clear()
    assert store.exists([f"k{i}" for i in range(300)], soon())[256:] == [NO] * 44
    assert store.steps == [256, 44]


def test_no_step_begins_after_the_deadline():
    store = DictStore(slots=1)
    put(store, "a", "b")
    deadline = 0.0

    def late() -> None:
        until(deadline)

    store.before = late
    deadline = soon(0.3)
    assert store.put(["c", "d"], [OBJECTS.content("c"), OBJECTS.content("d")], deadline) == [True, False]
    deadline = soon(0.3)
    assert store.get(["a", "b"], [memoryview(bytearray(SIZE)) for _ in "ab"], deadline) == [HIT, FAILED]
    deadline = soon(0.3)
    keys = [f"k{i}" for i in range(257)]
    assert store.exists(keys, deadline)[255:] == [NO, UNKNOWN]
    deadline = soon(0.3)
    assert store.delete(keys, deadline)[255:] == [True, False]
    assert sorted(store.objects) == ["a", "b", "c"]


def test_keys_and_buffers_must_pair():
    store = DictStore()
    for call in (store.put, store.get):
        with pytest.raises(ValueError, match="2 keys but 1 buffers"):
            call(["a", "b"], [OBJECTS.content("a")], soon())
    assert store.steps == []


def test_objects_that_are_too_small_fail_alone():
    store = DictStore(least_bytes=2)
    contents = [OBJECTS.content("a", size) for size in (1, 2, SIZE)]
    assert store.put(["a", "b", "c"], contents, soon()) == [False, True, True]
    assert store.get(["a", "b"], contents[:2], soon()) == [FAILED, HIT]


def test_what_is_known_to_be_there_is_counted_and_cleared():
    store = DictStore()
    put(store, "a", "b", "c", "d")
    store.objects["other"] = b"of another process"
    for key in "abc":
        del store.objects[key]
    assert store.stats() == {"objects": 4}
    assert get(store, "a") == [MISSING]
    assert store.exists(["b"], soon()) == [NO]
    assert store.delete(["c"], soon()) == [True]
    assert store.stats() == {"objects": 1}
    store.clear()
    assert list(store.objects) == ["other"]
    assert store.stats() == {"objects": 0}


def test_a_step_that_raises_gives_its_lane_back():
    store = DictStore(lanes=1)
    store.before = lambda: 1 // 0
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            put(store, "a")
    store.before = lambda: None
    assert put(store, "a", seconds=5) == [True]


def test_closing_waits_and_lets_go_once():
    store, began, go_on = DictStore(), threading.Event(), threading.Event()
    store.before = lambda: (began.set(), go_on.wait(20))
    caller = threading.Thread(target=put, args=(store, "a"))
    caller.start()
    assert began.wait(20)
    closers = [threading.Thread(target=store.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    closers[0].join(0.05)
    assert store.given_back == []
    go_on.set()
    for thread in (caller, *closers):
        thread.join(20)
        assert not thread.is_alive()
    assert store.given_back == [2]
    assert (put(store, "b"), get(store, "a"), store.exists(["a"], soon())) == ([False], [FAILED], [UNKNOWN])
    assert store.given_back == [2]


def test_an_entrance_waits_for_those_inside():
    entrance = Entrance()
    with entrance.entered() as first:
        assert first
        assert entrance.close() is True
        assert entrance.is_closed
        assert entrance.close() is False
        with entrance.entered() as second:
            assert not second
        assert entrance.wait(0.02) is False
    assert entrance.wait() is True
