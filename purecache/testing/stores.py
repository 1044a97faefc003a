"""Checks for whoever implements a store of pages."""

import contextlib
import mmap
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from purecache.stores.interface import Fetch, Presence, Store

_GUARD = b"\xa5" * 32
_INVERTED = bytes(range(255, -1, -1))
_LEAST, _MOST, _PUTS = 32, 256, 1024


def check_store(make: Callable[[], Store], object_bytes: int = 4096, *, bounded: bool = False) -> None:
    """Check that a store keeps the contract of `purecache.stores.Store`. Raises AssertionError saying what is wrong.

    `make` opens a new, empty and idle store of objects of `object_bytes` bytes (at least 16), with room for 32 objects;
    it is called about twenty times, and each store is closed before the next one is made. With `bounded`, the store
    must have room for fewer than 256 objects, and 1024 of them are put into it.
    """
    if not __debug__:
        raise RuntimeError("check_store consists of assertions: run it without -O")
    if object_bytes < 16:
        raise ValueError(f"object_bytes must be at least 16, not {object_bytes}")
    for check in (*_CHECKS, *((_check_bounded,) if bounded else ())):
        caller = _Caller(make(), object_bytes)
        try:
            check(caller)
        except BaseException:
            # Closed nevertheless; but a store that is wrong may not even close, which must not hide what is wrong.
            with contextlib.suppress(Exception):
                caller.store.close()
            raise
        caller.other("close")


class _Caller:
    """Calls a store, and checks what holds for every answer: its length, its types, and what is in the buffers."""

    def __init__(self, store: Store, size: int) -> None:
        self.store, self.size = store, size

    def content(self, key: str, size: int | None = None) -> bytes:
        """The bytes of the object of a key."""
        return random.Random(key).randbytes(self.size if size is None else size)

    def exists(self, keys: Sequence[str], deadline: float | None = None) -> list[Presence]:
        return self._call("exists", Presence, keys, deadline)

    def delete(self, keys: Sequence[str], deadline: float | None = None) -> list[bool]:
        return self._call("delete", bool, keys, deadline)

    def put(self, keys: Sequence[str], deadline: float | None = None, size: int | None = None) -> list[bool]:
        """Put the right content of each key, in memory that is overwritten as soon as the call returns."""
        contents = [self.content(key, size) for key in keys]
        buffers = [bytearray(content) for content in contents]
        answers = self._call("put", bool, keys, deadline, [memoryview(buffer) for buffer in buffers])
        assert buffers == contents, "put must not change the buffers it is given"
        for buffer in buffers:
            buffer[:] = buffer.translate(_INVERTED)
        return answers

    def put_all(self, keys: Sequence[str]) -> None:
        """Put, where nothing is in the way of success."""
        answers = self.put(keys)
        assert answers == [True] * len(keys), f"put into an idle store with room must answer True, not {answers}"

    def get(self, keys: Sequence[str], deadline: float | None = None, size: int | None = None) -> list[Fetch]:
        """Get; whatever is a HIT must be right, in its own buffer, and nothing may be written beside the buffers."""
        size = self.size if size is None else size
        step = size + len(_GUARD)
        memory = bytearray((bytes(size) + _GUARD) * len(keys))
        views = [memoryview(memory)[index * step : index * step + size] for index in range(len(keys))]
        answers = self._call("get", Fetch, keys, deadline, views)
        for index, (key, answer) in enumerate(zip(keys, answers, strict=True)):
            where = f"get of {len(keys)} keys, number {index}"
            if answer is Fetch.HIT:
                assert size == self.size, f"{where}: HIT for a buffer of {size} bytes, but objects have {self.size}"
                assert views[index] == self.content(key), f"{where}: HIT, but its buffer doesn't hold the object of key"
            rest = memory[index * step + size : (index + 1) * step]
            assert rest == _GUARD, f"{where}: bytes behind the buffer were written"
        return answers

    def other(self, method: str, *arguments: Any) -> Any:
        """Call a method that is not a batch."""
        try:
            return getattr(self.store, method)(*arguments)
        except Exception as error:
            raise AssertionError(f"{method} must not raise; it raised {error!r}") from error

    def _call(self, method: str, kind: type, keys: Sequence[str], deadline: float | None, *buffers: Any) -> list[Any]:
        deadline = time.monotonic() + 30 if deadline is None else deadline
        try:
            answers = getattr(self.store, method)(list(keys), *buffers, deadline)
        except Exception as error:
            raise AssertionError(f"{method} must not raise, but answer per key; it raised {error!r}") from error
        assert isinstance(answers, list), f"{method} must answer a list, not {answers!r}"
        assert len(answers) == len(keys), f"{method} of {len(keys)} keys answered {len(answers)} times: {answers!r}"
        wrong = [answer for answer in answers if type(answer) is not kind]
        assert not wrong, f"{method} must answer with {kind.__name__} and nothing that resembles it, not {wrong[0]!r}"
        return answers

    def expect(self, keys: Sequence[str], there: Sequence[bool], when: str) -> None:
        """Exactly some of the keys must be there, and be readable."""
        for method, there_is, there_is_not in (
            (self.exists, Presence.YES, Presence.NO),
            (self.get, Fetch.HIT, Fetch.MISSING),
        ):
            for index, (answer, each) in enumerate(zip(method(keys), there, strict=True)):
                wanted = there_is if each else there_is_not
                where = f"{method.__name__} of {len(keys)} keys, number {index} ({keys[index][:40]!r})"
                assert answer is wanted, f"{when}, {where} must answer {wanted.name}, not {answer.name}"

    def count(self) -> int:
        """The objects by the store's own account."""
        stats = self.other("stats")
        assert isinstance(stats, dict), f"stats must answer a dict, not {stats!r}"
        assert type(stats.get("objects")) is int, f"stats must have a whole number `objects`: {stats}"
        return stats["objects"]


def _names(number: int, prefix: str = "key") -> list[str]:
    return [f"{prefix}-{index}" for index in range(number)]


def _check_empty(caller: _Caller) -> None:
    caller.expect(["a"], [False], "in an empty store")
    caller.expect(_names(4), [False] * 4, "in an empty store")
    assert caller.count() == 0, "an empty store must have stats()['objects'] == 0"


def _check_round_trip(caller: _Caller) -> None:
    for number in (1, 2, 7):
        keys = _names(number, f"batch{number}")
        caller.put_all(keys)
        caller.expect(keys, [True] * number, "after put")
    assert caller.count() == 10, f"after 10 objects were put, stats()['objects'] is {caller.count()}"


def _check_empty_batches(caller: _Caller) -> None:
    answers = caller.exists([]), caller.get([]), caller.put([]), caller.delete([])
    assert answers == ([], [], [], [])
    assert caller.count() == 0, "empty batches put nothing"


def _check_keys(caller: _Caller) -> None:
    # What is special to file systems, shells and URLs, and keys that are parts of one another.
    keys = [".", "..", "...", "-", "_", "a", "A", "a.", ".a", "a.tmp", "a.lock", "a-", "aa", "0", "00", "k" * 200]
    caller.put_all(keys)
    caller.expect(keys, [True] * len(keys), "with unusual keys")
    assert caller.delete(["a"]) == [True]
    caller.expect(keys, [key != "a" for key in keys], "after the key 'a' was deleted")
    caller.expect(["k" * 199, "k" * 100, "....", "--"], [False] * 4, "with unusual keys that were not put")


def _check_holes(caller: _Caller) -> None:
    keys = _names(8)
    for holes in ({3}, {0}, {7}, {0, 7}, {2, 3, 5}, {0, 1, 2, 4, 5, 6, 7}):
        caller.other("clear")
        caller.put_all([key for index, key in enumerate(keys) if index not in holes])
        caller.expect(keys, [index not in holes for index in range(8)], f"with holes at {sorted(holes)}")


def _check_order(caller: _Caller) -> None:
    keys = _names(6)
    caller.put_all(keys)
    caller.expect(keys[::-1], [True] * 6, "in reversed order")
    keys = [keys[4], "none", keys[1], keys[4], "none", keys[0], keys[4]]
    caller.expect(keys, [key != "none" for key in keys], "with a key several times in a batch")
    assert caller.put(["twice", "twice"]) == [True, True], "a key may be twice in a batch of put"
    caller.expect(["twice"], [True], "after a key was put twice in a batch")


def _check_lengths(caller: _Caller) -> None:
    keys = _names(3)
    caller.put_all(keys)
    for size in (1, caller.size // 2, caller.size - 1, caller.size + 1, 2 * caller.size):
        answers = caller.get(keys, size=size)
        wrong = f"get of objects of {caller.size} bytes into buffers of {size} must answer FAILED, not {answers}"
        assert answers == [Fetch.FAILED] * 3, wrong
    caller.expect(keys, [True] * 3, "after they were read into buffers of another length")
    # Of whatever other lengths a store takes, nothing may get into the objects beside them.
    for size in (caller.size - 1, caller.size + 1):
        taken = caller.put(_names(2, f"size{size}"), size=size)
        assert Fetch.HIT not in caller.get(_names(2, f"size{size}")), f"an object of {size} bytes was a HIT: {taken}"
    caller.expect(keys, [True] * 3, "after objects of another length were put")


def _check_put_again(caller: _Caller) -> None:
    keys = _names(4)
    caller.put_all(keys[:2])
    for _ in range(3):
        caller.put_all(keys)
    caller.expect(keys, [True] * 4, "after they were put again")
    assert caller.count() == 4, f"4 objects put several times count as {caller.count()} in stats()['objects']"


def _check_own_buffers(caller: _Caller) -> None:
    caller.put_all(["a", "b"])
    first, second = bytearray(caller.size), bytearray(caller.size)
    late = time.monotonic() + 30
    answers = caller.store.get(["a"], [memoryview(first)], late), caller.store.get(["b"], [memoryview(second)], late)
    assert answers == ([Fetch.HIT], [Fetch.HIT])
    assert first == caller.content("a"), "a buffer that was read into earlier has been changed by a later get"
    first[:] = second[:] = bytes(caller.size)
    caller.expect(["a", "b"], [True, True], "after buffers that had been read into were overwritten")
    assert first == second == bytes(caller.size), "a buffer that was read into earlier has been changed by a later get"


def _check_region(caller: _Caller) -> None:
    step = -(-caller.size // mmap.PAGESIZE) * mmap.PAGESIZE
    region, late = memoryview(mmap.mmap(-1, 4 * step)), time.monotonic() + 30
    caller.other("register", region)
    views = [region[index * step : index * step + caller.size] for index in range(4)]
    views[0][:], views[1][:] = caller.content("a"), caller.content("b")
    assert caller.store.put(["a", "b"], views[:2], late) == [True, True], "put from a registered region must work"
    assert caller.store.get(["b", "a"], views[2:], late) == [Fetch.HIT] * 2, "get into a registered region must work"
    assert views[2] == caller.content("b"), "get into a registered region must fill the right buffer"
    assert views[3] == caller.content("a"), "get into a registered region must fill the right buffer"


def _check_delete(caller: _Caller) -> None:
    keys = _names(5)
    caller.put_all(keys)
    answers = caller.delete([keys[3], "none", keys[1]])
    assert answers == [True] * 3, f"delete must answer True where there is nothing now, also before: {answers}"
    caller.expect(keys, [True, False, True, False, True], "after delete")
    assert caller.count() == 3, f"with 3 of 5 objects left, stats()['objects'] is {caller.count()}"
    caller.put_all([keys[1]])
    caller.expect(keys, [True, True, True, False, True], "after a deleted object was put again")
    caller.other("clear")
    caller.expect(keys, [False] * 5, "after clear")
    assert caller.count() == 0, f"after clear, stats()['objects'] is {caller.count()}"
    caller.put_all(keys)
    caller.expect(keys, [True] * 5, "after clear and put")


def _check_past_deadline(caller: _Caller) -> None:
    caller.put_all(["a", "b"])
    begin = time.monotonic()
    past, keys = begin - 1, ["a", "none", "b"]
    seen, read = caller.exists(keys, past), caller.get(keys, past)
    put, deleted = caller.put(["c", "d"], past), caller.delete(["b"], past)
    assert time.monotonic() - begin < 5, "with a deadline in the past, calls must return at once"
    for index, there in enumerate((True, False, True)):
        wanted = (Presence.YES, Fetch.HIT) if there else (Presence.NO, Fetch.MISSING)
        wrong = f"too late, a store may not know, but must not say what isn't so: {seen}, {read}"
        assert seen[index] in (Presence.UNKNOWN, wanted[0]), wrong
        assert read[index] in (Fetch.FAILED, wanted[1]), wrong
    if deleted[0]:
        caller.expect(["b"], [False], "after a late delete that answered True")
    for key, done in zip(["c", "d"], put, strict=True):
        if done:
            caller.expect([key], [True], "after a late put that answered True")
    caller.expect(["a"], [True], "after calls with a deadline in the past")


def _check_threads(caller: _Caller) -> None:
    barrier, errors, hits = threading.Barrier(2), [], [0, 0]

    def work(number: int) -> None:
        try:
            barrier.wait(30)
            for turn in range(12):
                # Own objects, and some that both put and one removes: content must be right whoever was first.
                own, common = _names(4, f"thread{number}"), _names(4, "common")
                stored = caller.put(own + common)[:4]
                answers = caller.get((own + common)[::-1])[::-1]
                caller.exists(common + own)
                hits[number] += answers.count(Fetch.HIT)
                for put, answer in zip(stored, answers[:4], strict=True):
                    assert not put or answer is not Fetch.MISSING, "an object that was put was MISSING at once"
                if turn % 3 == number:
                    caller.delete(common)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "two threads that use the store got stuck"
    if errors:
        raise AssertionError(f"with calls from two threads: {errors[0]}") from errors[0]
    assert all(hits), "with calls from two threads, one of them never read anything"


def _check_closed(caller: _Caller) -> None:
    caller.put_all(["a", "b"])
    caller.other("close")
    caller.other("close")
    for keys in (["a", "b"], ["a", "none"]):
        answers = caller.exists(keys), caller.get(keys), caller.put(keys), caller.delete(keys)
        wanted = ([Presence.UNKNOWN] * 2, [Fetch.FAILED] * 2, [False] * 2, [False] * 2)
        assert answers == wanted, f"after close, calls must answer {wanted}, not {answers}"
    caller.other("clear")
    assert isinstance(caller.other("stats"), dict), "after close, stats must still answer numbers"


def _check_bounded(caller: _Caller) -> None:
    keys, stored = _names(_PUTS), []
    for first in range(0, _PUTS, 8):
        stored += caller.put(keys[first : first + 8])
        assert caller.count() < _MOST, f"after {first + 8} objects were put, stats()['objects'] is {caller.count()}"
        # Objects of all ages, those that were overwritten by others too: whatever is a HIT is checked by `get`.
        caller.get(keys[max(0, first - 24) : first + 8] + keys[first // 2 : first // 2 + 8])
    answers = [answer for first in range(0, _PUTS, 8) for answer in caller.get(keys[first : first + 8])]
    hits = answers.count(Fetch.HIT)
    assert hits <= caller.count(), f"{hits} objects can be read, but stats()['objects'] is {caller.count()}"
    assert hits >= _LEAST // 2, f"a store with room for {_LEAST} objects holds only {hits} after {_PUTS} were put"
    for key in _names(40, "late"):
        if caller.put([key]) == [True]:
            caller.expect([key], [True], "after put into a store that has been full")


_CHECKS = (
    _check_empty,
    _check_empty_batches,
    _check_round_trip,
    _check_put_again,
    _check_delete,
    _check_holes,
    _check_order,
    _check_lengths,
    _check_own_buffers,
    _check_region,
    _check_keys,
    _check_past_deadline,
    _check_threads,
    _check_closed,
)
