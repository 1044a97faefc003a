"""A store that does whatever stores do, shared by all processes of a run, and a guard without threads."""

from collections.abc import Sequence
from typing import Any

from purecache.simulate.fate import Fate, Fault
from purecache.stores import guard
from purecache.stores.interface import Fetch, Presence, Store

FOREVER = (15, 90)
"""Ticks after which a call that hangs returns after all, long after its deadline."""


class SimulatedStore(Store):
    """Objects in a dict, at most `capacity` of them; the oldest are evicted. Reads and writes fail and lie by seed."""

    def __init__(self, fate: Fate, capacity: int) -> None:
        self.fate, self.capacity = fate, capacity
        self.objects: dict[str, bytes] = {}
        self.evictions = 0

    def _flags(self, number: int) -> list[bool]:
        """Which keys of a call go well. Raises OSError where the store is out of order."""
        fate = self.fate
        if fate.strikes(Fault.FAIL, 0.02):
            raise OSError("the store is out of order")
        if fate.strikes(Fault.FAIL, 0.03):
            return [False] * number
        return [fate.coin() for _ in range(number)] if fate.strikes(Fault.PARTIAL, 0.08) else [True] * number

    def _malformed(self, answers: list[Any]) -> list[Any]:
        """An answer that breaks the rules, at times."""
        if self.fate.strikes(Fault.CORRUPT, 0.01):
            return answers[:-1] if self.fate.coin() else [int(answer) for answer in answers]
        return answers

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`."""
        answers = [
            (Presence.YES if key in self.objects or self.fate.strikes(Fault.CORRUPT, 0.01) else Presence.NO)
            if good
            else Presence.UNKNOWN
            for key, good in zip(keys, self._flags(len(keys)), strict=True)
        ]
        return self._malformed(answers)

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`."""
        good = self._flags(len(keys))
        return self._malformed([self.read(*each) for each in zip(keys, buffers, good, strict=True)])

    def read(self, key: str, buffer: memoryview, good: bool) -> Fetch:
        """Read one object."""
        found, fate = self.objects.get(key), self.fate
        if found is None:
            return Fetch.MISSING
        if not good or len(found) != len(buffer):
            buffer[:] = b"\xdd" * len(buffer)
            return Fetch.FAILED
        if fate.strikes(Fault.CORRUPT, 0.1):
            return self._wrong(buffer, found)
        buffer[:] = found
        return Fetch.HIT

    def _wrong(self, buffer: memoryview, found: bytes) -> Fetch:
        """Say HIT of bytes that are not those of the object: a checksum, a length or a name can notice."""
        fate, way = self.fate, self.fate.below(4)
        if way == 0:
            changed = bytearray(found)
            changed[fate.below(len(changed))] ^= 1 << fate.below(8)
            buffer[:] = changed
        elif way == 1:
            buffer[: len(found) // 2] = found[: len(found) // 2]
        elif way == 2:
            others = [each for each in self.objects.values() if each != found and len(each) == len(found)]
            buffer[:] = others[fate.below(len(others))] if others else bytes(len(found))
        return Fetch.HIT

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`."""
        good = self._flags(len(keys))
        return self._malformed([self.write(*each) for each in zip(keys, buffers, good, strict=True)])

    def write(self, key: str, buffer: memoryview, good: bool) -> bool:
        """Write one object."""
        if not good:
            return False
        content = bytes(buffer)
        if self.fate.strikes(Fault.CORRUPT, 0.02):
            content = b"" if self.fate.coin() else content[: len(content) // 2]
        if not content:
            return True  # it says so, but nothing is there
        self.objects.pop(key, None)
        while len(self.objects) >= self.capacity:
            self.objects.pop(next(iter(self.objects)))
            self.evictions += 1
        self.objects[key] = content
        return True

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`."""
        for key, good in zip(keys, flags := self._flags(len(keys)), strict=True):
            if good:
                self.objects.pop(key, None)
        return flags

    def clear(self) -> None:
        """See `Store.clear`."""
        self.objects.clear()

    def stats(self) -> dict[str, int]:
        """`objects` and `evictions`."""
        return {"objects": len(self.objects), "evictions": self.evictions}

    def close(self) -> None:
        """The store outlives every process."""


class SimulatedGuard(guard.Guard):
    """The guard as it is, but its calls are carried out by `poll`, after so many ticks as the seed says."""

    def __init__(self, store: Store, fate: Fate, workers: int, queue: int, timeout: float) -> None:
        self._fate = fate
        self._calls: list[tuple[int, guard._Call]] = []
        """Calls under way, with the tick at which they return."""
        super().__init__(store, workers, queue, timeout, clock=fate.seconds)

    def _hire(self) -> None:
        """There are no threads."""

    def poll(self) -> list[guard.Done]:
        """See `Guard.poll`."""
        fate = self._fate
        while self._waiting and sum(not call.late for _, call in self._calls) < self._workers:
            due = fate.now + fate.delay()
            if fate.strikes(Fault.NEVER, 0.01):
                due = fate.now + FOREVER[0] + fate.below(FOREVER[1] - FOREVER[0])
            if self._calls and not fate.strikes(Fault.REORDER, 0.3):
                due = max(due, *(each for each, call in self._calls if not call.late), 0)
            self._calls.append((due, self._begin()))
        due_now = [each for each in self._calls if each[0] <= fate.now]
        self._calls = [each for each in self._calls if each[0] > fate.now]
        for _, call in due_now:
            self._end(call, guard._perform(self._store, call))
        done = super().poll()
        if done and fate.strikes(Fault.DUPLICATE, 0.02):
            done.append(done[0])
        fate.events += len(done)
        return done

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._calls or self._waiting)

    def release(self) -> None:
        """Calls that hang return with the next poll."""
        self._calls = [(self._fate.now, call) for _, call in self._calls]

    def close(self, seconds: float = 5.0) -> bool:
        """Drop what waits. Nothing is under way in a thread."""
        self._drop_waiting()
        return not self._running
