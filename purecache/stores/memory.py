"""A store in the memory of this process, for tests and small set-ups."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence, Set

from purecache.stores.interface import Fetch, Presence, Store


class MemoryStore(Store):
    """Objects as bytes in a dict, at most `capacity_bytes` of them together; the least recently used ones go first.

    Within a batch the first key counts as the most recently used one: what comes first in a prefix is worth most. A put
    never evicts what its own batch names; what doesn't fit then is refused. Raises ValueError for a capacity below 1.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes must be at least 1, not {capacity_bytes}")
        self._capacity = capacity_bytes
        self._objects: OrderedDict[str, bytes] = OrderedDict()  # least recently used first
        self._used = 0
        self._evictions = 0
        self._closed = False
        self._lock = threading.Lock()

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`. Doesn't count as a use."""
        with self._lock:
            if self._closed or time.monotonic() >= deadline:
                return [Presence.UNKNOWN] * len(keys)
            return [Presence.YES if key in self._objects else Presence.NO for key in keys]

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`."""
        answers = [self._read(key, buffer, deadline) for key, buffer in zip(keys, buffers, strict=True)]
        self._touch([key for key, answer in zip(keys, answers, strict=True) if answer == Fetch.HIT])
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`."""
        batch = frozenset(keys)
        answers = [self._write(key, buffer, batch, deadline) for key, buffer in zip(keys, buffers, strict=True)]
        self._touch([key for key, answer in zip(keys, answers, strict=True) if answer])
        return answers

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`."""
        with self._lock:
            if self._closed or time.monotonic() >= deadline:
                return [False] * len(keys)
            for key in keys:
                self._forget(key)
        return [True] * len(keys)

    def clear(self) -> None:
        """See `Store.clear`."""
        with self._lock:
            self._objects.clear()
            self._used = 0

    def resize(self, capacity_bytes: int) -> bool:
        """See `Store.resize`: what is too much goes at once. Raises ValueError for a capacity below 1."""
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes must be at least 1, not {capacity_bytes}")
        with self._lock:
            self._capacity = capacity_bytes
            self._make_room("", 0, frozenset())
        return True

    def stats(self) -> dict[str, int]:
        """`objects`, `bytes`, `capacity` (bytes) and `evictions` (objects so far)."""
        with self._lock:
            return {
                "objects": len(self._objects),
                "bytes": self._used,
                "capacity": self._capacity,
                "evictions": self._evictions,
            }

    def close(self) -> None:
        """See `Store.close`. The objects are gone with it."""
        with self._lock:
            self._closed = True
            self._objects.clear()
            self._used = 0

    def _read(self, key: str, buffer: memoryview, deadline: float) -> Fetch:
        with self._lock:
            if self._closed or time.monotonic() >= deadline:
                return Fetch.FAILED
            found = self._objects.get(key)
        if found is None:
            return Fetch.MISSING
        if len(found) != buffer.nbytes:
            return Fetch.FAILED
        buffer[:] = found  # outside the lock: bytes never change
        return Fetch.HIT

    def _write(self, key: str, buffer: memoryview, batch: Set[str], deadline: float) -> bool:
        size = buffer.nbytes
        with self._lock:
            if self._closed or time.monotonic() >= deadline or size > self._capacity:
                return False
            present = self._objects.get(key)
            if present is not None and len(present) == size:
                return True
        try:
            copy = bytes(buffer)
        except MemoryError:
            return False
        with self._lock:
            if self._closed or not self._make_room(key, size, batch):
                return False
            self._forget(key)
            self._objects[key] = copy
            self._used += size
            return True

    def _make_room(self, key: str, size: int, batch: Set[str]) -> bool:
        """Evict until `size` bytes fit in place of what `key` has now."""
        size -= len(self._objects.get(key, b""))
        while self._used + size > self._capacity:
            victim = next((other for other in self._objects if other not in batch), None)
            if victim is None:
                return False
            self._forget(victim)
            self._evictions += 1
        return True

    def _forget(self, key: str) -> None:
        self._used -= len(self._objects.pop(key, b""))

    def _touch(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in reversed(keys):
                if key in self._objects:
                    self._objects.move_to_end(key)
