"""MemoryStore: answers per key, copies, the order of eviction, and its book-keeping against a model."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.stores.interface import Fetch, Presence
from purecache.stores.memory import MemoryStore

LATER = float("inf")


def page(content: bytes) -> memoryview:
    return memoryview(bytearray(content))


def read(store: MemoryStore, key: str, size: int = 4) -> tuple[Fetch, bytes]:
    buffer = page(bytes(size))
    return store.get([key], [buffer], LATER)[0], bytes(buffer)


def test_answers_stand_at_their_keys_with_holes():
    store = MemoryStore(100)
    assert store.put(["a", "c"], [page(b"aaaa"), page(b"cccc")], LATER) == [True, True]
    buffers = [page(b"....") for _ in range(4)]
    assert store.exists(["a", "b", "c"], LATER) == [Presence.YES, Presence.NO, Presence.YES]
    assert store.get(["c", "b", "a", "b"], buffers, LATER) == [Fetch.HIT, Fetch.MISSING, Fetch.HIT, Fetch.MISSING]
    assert [bytes(buffer) for buffer in buffers] == [b"cccc", b"....", b"aaaa", b"...."]
    assert store.delete(["b", "a"], LATER) == [True, True]
    assert store.exists(["a", "c"], LATER) == [Presence.NO, Presence.YES]
    assert store.stats() == {"objects": 1, "bytes": 4, "capacity": 100, "evictions": 0}


def test_the_callers_buffer_is_copied():
    store, mine = MemoryStore(100), page(b"good")
    store.put(["a"], [mine], LATER)
    mine[:] = b"evil"
    hit, got = read(store, "a")
    assert (hit, got) == (Fetch.HIT, b"good")


def test_another_length_fails_and_is_replaced_by_a_put():
    store = MemoryStore(100)
    store.put(["a"], [page(b"short")], LATER)
    assert read(store, "a", 4)[0] == read(store, "a", 6)[0] == Fetch.FAILED
    assert store.put(["a"], [page(b"whole!")], LATER) == [True]
    assert read(store, "a", 6) == (Fetch.HIT, b"whole!")
    assert store.stats()["bytes"] == 6


def test_the_least_recently_used_goes_first_and_exists_is_no_use():
    store = MemoryStore(12)
    for key in "abc":
        store.put([key], [page(key.encode() * 4)], LATER)
    read(store, "a")
    store.exists(["b"], LATER)
    store.put(["d"], [page(b"dddd")], LATER)
    assert store.exists(list("abcd"), LATER) == [Presence.YES, Presence.NO, Presence.YES, Presence.YES]
    assert store.stats()["evictions"] == 1


def test_of_a_batch_the_head_stays_longest_and_nothing_of_it_is_evicted():
    store = MemoryStore(12)
    assert store.put(list("abcd"), [page(b"1234")] * 4, LATER) == [True, True, True, False]
    store.put(["x", "y"], [page(b"1234")] * 2, LATER)
    assert store.exists(list("abc"), LATER) == [Presence.YES, Presence.NO, Presence.NO]
    assert store.put(["z"], [page(bytes(13))], LATER) == [False]


def test_too_late_and_closed():
    store, buffer = MemoryStore(100), page(b"1234")
    past = time.monotonic() - 1
    store.put(["a"], [buffer], LATER)
    answers = (["a"], past), (["a"], LATER)
    for i, (keys, deadline) in enumerate(answers):
        if i == 1:
            store.close()
            store.close()
        assert store.exists(keys, deadline) == [Presence.UNKNOWN]
        assert store.get(keys, [buffer], deadline) == [Fetch.FAILED]
        assert store.put(keys, [buffer], deadline) == [False]
        assert store.delete(keys, deadline) == [False]


def test_clear_and_a_bad_capacity():
    store = MemoryStore(100)
    store.put(["a"], [page(b"1234")], LATER)
    store.clear()
    assert store.stats()["objects"] == store.stats()["bytes"] == 0
    assert read(store, "a")[0] == Fetch.MISSING
    with pytest.raises(ValueError, match="at least 1"):
        MemoryStore(0)


KEYS = st.sampled_from("abcdef")
STEPS = st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), KEYS, st.integers(1, 5)), max_size=40)


@given(STEPS)
def test_against_a_list_in_order_of_use(steps: list[tuple[str, str, int]]):
    store, model = MemoryStore(10), []  # least recently used first: (key, size)
    for what, key, size in steps:
        known = dict(model)
        rest = [(other, length) for other, length in model if other != key]
        if what == "put":
            assert store.put([key], [page(bytes([size]) * size)], LATER) == [True]
            while sum(length for _, length in rest) + size > 10:
                rest.pop(0)
            model = [*rest, (key, size)]
        elif what == "get":
            wanted = Fetch.MISSING if key not in known else Fetch.HIT if known[key] == size else Fetch.FAILED
            hit, content = read(store, key, size)
            assert hit == wanted
            if hit == Fetch.HIT:
                assert content == bytes([size]) * size
                model = [*rest, (key, size)]
        else:
            store.delete([key], LATER)
            model = rest
        assert store.stats()["bytes"] == sum(length for _, length in model)
        assert store.exists("abcdef", LATER) == [Presence(int(key in dict(model))) for key in "abcdef"]


def test_several_threads():
    store, wrong = MemoryStore(64 * 20), []

    def work(seed: int) -> None:
        for step in range(400):
            number = (seed * 31 + step * 7) % 40
            store.put([str(number)], [page(bytes([number]) * 64)], LATER)
            hit, content = read(store, str((number + 3) % 40), 64)
            if hit == Fetch.HIT and content != bytes([(number + 3) % 40]) * 64:
                wrong.append(number)
            if hit == Fetch.FAILED:
                wrong.append(-1)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.stats()["objects"] * 64 == store.stats()["bytes"] <= 64 * 20
