"""What stores have in common whose client moves bytes from and to memory of ours, and can't list what it has stored.

Every call takes a lane: buffers that objects pass through, for which it waits until its deadline. The keys that were
put are remembered, as nobody else knows what there is to clear.
"""

import abc
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from purecache.stores.interface import Fetch, Presence, Store, paired
from purecache.stores.staging import StagingRing

KNOWN = 1 << 18
"""Keys that a process remembers to have put, for `clear` and `stats`."""
LONG = 1e6
"""Seconds that a lock is waited for at most: not every lock takes infinity, or any large number."""

_KEYS_AT_ONCE = 256
_CLEAR_SECONDS = 600.0
_LOG = logging.getLogger(__name__)


class Lane:
    """`slots` buffers for an object of up to `nbytes` and a trailer each, in one region. One call uses it at a time."""

    def __init__(self, slots: int, nbytes: int) -> None:
        ring = StagingRing(slots, nbytes)
        held = ring.acquire(slots) or []
        self.region = ring.region
        self.addresses: list[int] = [ring.page(slot).ctypes.data for slot in held]
        self._memories = [ring.sealed(slot) for slot in held]

    def parts(self, indexes: Sequence[int]) -> list[Sequence[int]]:
        """As many at a time as there are buffers."""
        step = len(self._memories)
        return [indexes[first : first + step] for first in range(0, len(indexes), step)]

    def memory(self, slot: int, nbytes: int) -> memoryview:
        """The first bytes of a buffer."""
        return self._memories[slot][:nbytes]


_AnyLane = TypeVar("_AnyLane", bound=Lane)
_Answer = TypeVar("_Answer", Presence, bool)


class Lanes(Generic[_AnyLane]):
    """Lanes, one for each call that runs."""

    def __init__(self, lanes: Sequence[_AnyLane]) -> None:
        self._number = len(lanes)
        self._free: queue.SimpleQueue[_AnyLane] = queue.SimpleQueue()
        for lane in lanes:
            self._free.put(lane)
        self._closed = False
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Whether there are no more lanes to be had."""
        return self._closed

    @contextlib.contextmanager
    def taken(self, deadline: float) -> Iterator[_AnyLane | None]:
        """A lane for one call; None where they are closed or it is too late."""
        lane = None
        with contextlib.suppress(queue.Empty):
            seconds = deadline - time.monotonic()
            if not self._closed and seconds > 0:
                lane = self._free.get(timeout=min(seconds, LONG))
        try:
            yield None if self._closed else lane
        finally:
            if lane is not None:
                self._free.put(lane)

    def close(self) -> list[_AnyLane]:
        """All lanes, once the calls that use them have ended; none for all but the first one who asks."""
        with self._lock:
            if self._closed:
                return []
            self._closed = True
        return [self._free.get() for _ in range(self._number)]  # a call that runs gives it back


class KnownKeys:
    """The keys that this process has put and has not found missing, up to `KNOWN` of them."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}
        self._overflow = False
        self._lock = threading.Lock()

    def remember(self, keys: Iterable[str]) -> None:
        """Note keys that have been put."""
        with self._lock:
            for key in keys:
                if len(self._keys) < KNOWN:
                    self._keys[key] = None
                else:
                    self._overflow |= key not in self._keys

    def forget(self, keys: Iterable[str]) -> None:
        """Drop keys that are gone."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def count(self) -> int:
        """How many there are; -1 after more than `KNOWN`."""
        with self._lock:
            return -1 if self._overflow else len(self._keys)

    def to_clear(self) -> tuple[list[str], bool]:
        """The keys, and whether they are all of them. From now on they are taken for all."""
        with self._lock:
            are_all, self._overflow = not self._overflow, False
            return list(self._keys), are_all


class LaneStore(Store, Generic[_AnyLane]):
    """Objects of `least_bytes` to `object_bytes` in a `service` (its name, for logs) that are moved through `lanes`.

    An engine says how it asks, reads, writes and removes; what it says of a step is believed. No step begins after the
    deadline, and none has more objects than a lane has buffers.
    """

    def __init__(self, service: str, lanes: Sequence[_AnyLane], object_bytes: int, least_bytes: int = 0) -> None:
        self._service, self._object_bytes, self._least_bytes = service, object_bytes, least_bytes
        self._lanes = Lanes(lanes)
        self._known = KnownKeys()

    @abc.abstractmethod
    def _ask(self, keys: Sequence[str]) -> list[Presence]:
        """Whether there are such objects."""

    @abc.abstractmethod
    def _read(self, lane: _AnyLane, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Fetch]:
        """Read objects into their buffers."""

    @abc.abstractmethod
    def _write(self, lane: _AnyLane, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """Write objects, none of them twice."""

    @abc.abstractmethod
    def _remove(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """Remove objects; whether there is none now."""

    @abc.abstractmethod
    def _let_go(self, lanes: list[_AnyLane]) -> None:
        """Let go of the client and of its memory: no call runs any more."""

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`."""
        answers = self._in_steps(keys, self._ask, Presence.UNKNOWN, deadline)
        self._known.forget(key for key, answer in zip(keys, answers, strict=True) if answer is Presence.NO)
        return answers

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`."""
        answers = [Fetch.FAILED] * len(keys)
        fits = [i for i, buffer in enumerate(paired(keys, buffers)) if self._fits(buffer)]
        with self._lanes.taken(deadline) as lane:
            for part in lane.parts(fits) if lane else ():
                if lane and time.monotonic() < deadline:
                    found = self._read(lane, [keys[i] for i in part], [buffers[i] for i in part])
                    for i, answer in zip(part, found, strict=True):
                        answers[i] = answer
        self._known.forget(key for key, answer in zip(keys, answers, strict=True) if answer is Fetch.MISSING)
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`."""
        fits = [self._fits(buffer) for buffer in paired(keys, buffers)]
        first: dict[str, int] = {}
        for i, key in enumerate(keys):
            if fits[i]:
                first.setdefault(key, i)
        done: dict[str, bool] = {}
        with self._lanes.taken(deadline) as lane:
            for part in lane.parts(list(first.values())) if lane else ():
                if lane and time.monotonic() < deadline:
                    names = [keys[i] for i in part]
                    written = self._write(lane, names, [buffers[i] for i in part], deadline)
                    done.update(zip(names, written, strict=True))
        self._known.remember(key for key, is_there in done.items() if is_there)
        return [fit and done.get(key, False) for key, fit in zip(keys, fits, strict=True)]

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`."""
        answers = self._in_steps(keys, lambda part: self._remove(part, deadline), False, deadline)
        self._known.forget(key for key, answer in zip(keys, answers, strict=True) if answer)
        return answers

    def clear(self) -> None:
        """Remove what this process has put: there are no lists. Logs a warning where some of it may be left."""
        keys, are_all = self._known.to_clear()
        if not self._lanes.is_closed and not (all(self.delete(keys, time.monotonic() + _CLEAR_SECONDS)) and are_all):
            _LOG.warning("could not remove all objects from %s", self._service)

    def stats(self) -> dict[str, int]:
        """`objects`: those that this process has put and has not found missing; -1 after more than `KNOWN` of them."""
        return {"objects": self._known.count()}

    def close(self) -> None:
        """See `Store.close`. Waits for calls in other threads."""
        lanes = self._lanes.close()
        if lanes:
            self._let_go(lanes)

    def _fits(self, buffer: memoryview) -> bool:
        return self._least_bytes <= buffer.nbytes <= self._object_bytes

    def _in_steps(
        self, keys: Sequence[str], step: Callable[[Sequence[str]], list[_Answer]], failed: _Answer, deadline: float
    ) -> list[_Answer]:
        """What `step` answers for some keys at a time; `failed` where there is no time or no lane."""
        answers = [failed] * len(keys)
        with self._lanes.taken(deadline) as lane:
            for first in range(0, len(keys) if lane else 0, _KEYS_AT_ONCE):
                part = keys[first : first + _KEYS_AT_ONCE]
                if time.monotonic() < deadline:
                    answers[first : first + len(part)] = step(part)
        return answers
