"""A store in SiMM (scitix), a pool of memory of several machines that is reached by RDMA.

The client moves bytes from and to registered memory. It tells a server how long the registered *region* is, not how
long the buffer is: an object that is longer than its buffer would be written over what lies behind. Therefore every
object passes through memory of our own here, in which each buffer is a region of its own; that is one copy.
"""

import contextlib
import importlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.options import host_of, parse_flag, take_options
from purecache.stores.staging import StagingRing

try:
    kv: Any = importlib.import_module("simm.kv")  # by name: this very module has the name of the package
except ImportError as _error:
    raise ImportError(f"no client of SiMM ({_error}); `simm` in the package index is another project") from None
for _name in ("Store", "BlockView", "register_mr", "deregister_mr", "set_flag"):
    if not hasattr(kv, _name):
        raise ImportError(f"the package simm that is installed is not the client of SiMM: simm.kv has no {_name}")

MOST_BYTES = (64 << 20) - (20 << 10)
"""Bytes of the largest object that SiMM takes: 64 MiB - 20 KiB."""
MOST_KEY = 256
"""Bytes of the longest key that SiMM takes."""
KNOWN = 1 << 18
"""Keys that a process remembers to have put, for `clear` and `stats`."""

_PORT = 30001
_OUR_KEY = 200
_MISSING = -4003
_EXISTS_AT_ONCE = 256
_LONG = 1e6
_CLEAR_SECONDS = 600.0
_LONG = 1e6
_PREFIX = re.compile(r"[A-Za-z0-9._/:-]*")
_LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()
_flags: dict[str, str] = {}


def open_url(address: str, object_bytes: int, options: Mapping[str, Any]) -> Store:
    """The store of `simm://manager:port`, for the registry. Options: see `SimmStore`.

    Raises ValueError for what it doesn't understand.
    """
    host, port = host_of(address, _PORT)
    parts = urlsplit(address)
    if parts.username is not None or parts.path not in ("", "/") or parts.fragment:
        raise ValueError(f"{parts.scheme}: write only host and port, as in {parts.scheme}://host:{_PORT}")
    known = {"prefix": str, "batch": int, "lanes": int, "threads": int, "request_ms": int, "log_file": str}
    settings = take_options(address, options, {**known, "k8s": parse_flag})
    try:
        return SimmStore(host, port, object_bytes, **settings)
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None


class SimmStore(Store):
    """Objects of up to `object_bytes` in the SiMM cluster whose manager is at `host` (an IP address) and `port`.

    `prefix` stands before every key, so that several users can share a cluster. `lanes` calls run at once, each in
    steps of up to `batch` objects. The client has `threads` and gives a request up after `request_ms`. With `k8s` it
    asks Kubernetes for the manager first. These settings of the client, and `log_file`, hold for the whole process: a
    second store with others is refused.

    Raises ValueError for impossible settings, and OSError where memory can't be registered. The client itself may end
    the process where it finds no RDMA device or no manager.
    """

    def __init__(
        self,
        host: str,
        port: int,
        object_bytes: int,
        *,
        prefix: str = "",
        batch: int = 16,
        lanes: int = 2,
        threads: int = 10,
        request_ms: int = 1000,
        log_file: str | None = None,
        k8s: bool = False,
    ) -> None:
        if object_bytes > MOST_BYTES:
            raise ValueError(f"SiMM takes objects of up to {MOST_BYTES} bytes, not of {object_bytes}")
        if not _PREFIX.fullmatch(prefix) or len(prefix) > MOST_KEY - _OUR_KEY:
            raise ValueError(f"prefix has at most {MOST_KEY - _OUR_KEY} characters out of letters, digits and ._/:-")
        if min(object_bytes, batch, lanes, threads, request_ms) < 1:
            raise ValueError("object_bytes, batch, lanes, threads and request_ms must be at least 1")
        self._object_bytes, self._prefix = object_bytes, prefix
        flags = {
            "clnt_use_k8s": str(k8s).lower(),
            "cm_primary_node_ip": host,
            "cm_rpc_inter_port": str(port),  # cm_primary_node_port is of no use to a client
            "clnt_thread_pool_size": str(threads),
            "clnt_sync_req_timeout_ms": str(request_ms),
        }
        _set_flags(flags if log_file is None else {**flags, "clnt_log_file": log_file})
        self._known: dict[str, None] = {}
        self._overflow = False
        self._lock = threading.Lock()
        self._putting = threading.Lock()
        self._closed = False
        self._client: Any = kv.Store()
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self._number = lanes
        with contextlib.ExitStack() as stack:
            for _ in range(lanes):
                lane = _Lane(batch, object_bytes)
                stack.callback(lane.close)
                self._lanes.put(lane)
            self._resources = stack.pop_all()

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`."""
        answers = [Presence.UNKNOWN] * len(keys)
        with self._lane(deadline) as lane:
            for first in range(0, len(keys) if lane else 0, _EXISTS_AT_ONCE):
                part = keys[first : first + _EXISTS_AT_ONCE]
                if time.monotonic() < deadline:
                    answers[first : first + len(part)] = self._ask(part)
        self._forget(key for key, answer in zip(keys, answers, strict=True) if answer is Presence.NO)
        return answers

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`. Where SiMM doesn't say whether it failed or has no such object, it is asked again."""
        answers = [Fetch.FAILED] * len(keys)
        fits = [i for i, buffer in enumerate(_paired(keys, buffers)) if 0 < buffer.nbytes <= self._object_bytes]
        with self._lane(deadline) as lane:
            for part in lane.parts(fits) if lane else ():
                if lane and time.monotonic() < deadline:
                    self._get(lane, part, keys, buffers, answers)
        self._forget(key for key, answer in zip(keys, answers, strict=True) if answer is Fetch.MISSING)
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. What is there is not written again: SiMM would remove it first."""
        fits = [0 < buffer.nbytes <= self._object_bytes for buffer in _paired(keys, buffers)]
        first: dict[str, int] = {}
        for i, key in enumerate(keys):
            if fits[i]:
                first.setdefault(key, i)
        done: dict[str, bool] = {}
        with self._lane(deadline) as lane:
            for part in lane.parts(list(first.values())) if lane else ():
                # One thread at a time: between asking and writing, another one must not write the same key.
                left = deadline - time.monotonic()
                if lane and left > 0 and self._putting.acquire(timeout=min(left, _LONG)):
                    try:
                        done.update(self._put(lane, part, keys, buffers))
                    finally:
                        self._putting.release()
        self._remember(key for key, is_there in done.items() if is_there)
        return [fit and done.get(key, False) for key, fit in zip(keys, fits, strict=True)]

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`. One request after the other: there is none for many."""
        answers = [False] * len(keys)
        with self._lane(deadline) as lane:
            for i, key in enumerate(keys if lane else ()):
                if time.monotonic() >= deadline:
                    break
                answers[i] = self._call(lambda key=key: self._client.delete(self._prefix + key)) in (0, _MISSING)
        self._forget(key for key, answer in zip(keys, answers, strict=True) if answer)
        return answers

    def clear(self) -> None:
        """Remove what this process has put: SiMM can't list. Logs a warning where some of it may be left."""
        with self._lock:
            keys, whole = list(self._known), not self._overflow
            self._overflow = False
        if not self._closed and not (all(self.delete(keys, time.monotonic() + _CLEAR_SECONDS)) and whole):
            _LOG.warning("could not remove all objects from SiMM")

    def stats(self) -> dict[str, int]:
        """`objects`: those that this process has put and has not found missing; -1 after more than `KNOWN` of them."""
        with self._lock:
            return {"objects": -1 if self._overflow else len(self._known)}

    def close(self) -> None:
        """See `Store.close`. Waits for calls in other threads. The client goes on living with the process."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for _ in range(self._number):
            self._lanes.get()  # a call that runs gives it back
        self._resources.close()
        self._client = None

    def _get(
        self, lane: "_Lane", part: list[int], keys: Sequence[str], buffers: Sequence[memoryview], answers: list[Fetch]
    ) -> None:
        views = [lane.view(slot, buffers[i].nbytes) for slot, i in enumerate(part)]
        names = [self._prefix + keys[i] for i in part]
        results = self._numbers(lambda: self._client.mget(names, views), len(part))
        unsure: list[int] = []
        for slot, (i, result) in enumerate(zip(part, results, strict=True)):
            if result is not None and result == buffers[i].nbytes:
                buffers[i][:] = lane.memory(slot, result)
                answers[i] = Fetch.HIT
            elif result is None or result < 0:
                unsure.append(i)
        found = self._ask([keys[i] for i in unsure])
        for i, presence in zip(unsure, found, strict=True):
            if presence is Presence.NO:
                answers[i] = Fetch.MISSING

    def _put(
        self, lane: "_Lane", part: list[int], keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> dict[str, bool]:
        presences = self._ask([keys[i] for i in part])
        done = {keys[i]: True for i, presence in zip(part, presences, strict=True) if presence is Presence.YES}
        part = [i for i in part if keys[i] not in done]
        if not part:
            return done
        for slot, i in enumerate(part):
            lane.memory(slot, buffers[i].nbytes)[:] = buffers[i]
        views = [lane.view(slot, buffers[i].nbytes) for slot, i in enumerate(part)]
        names = [self._prefix + keys[i] for i in part]
        results = self._numbers(lambda: self._client.mput(names, views), len(part))
        return done | {keys[i]: result == 0 for i, result in zip(part, results, strict=True)}

    def _ask(self, keys: Sequence[str]) -> list[Presence]:
        """Whether there are such objects. The method of the client takes every failure for absence.

        What it asks itself gives codes, which tell one from the other. A client without that is believed.
        """
        if not keys:
            return []
        names = [self._prefix + key for key in keys]
        ask = getattr(getattr(self._client, "_impl", None), "MExists", None)
        if ask is not None:
            codes = self._numbers(lambda: ask(names), len(names))
            known = {0: Presence.YES, _MISSING: Presence.NO}
            return [Presence.UNKNOWN if code is None else known.get(code, Presence.UNKNOWN) for code in codes]
        found = self._call(lambda: self._client.mexists(names))
        if not isinstance(found, list) or len(found) != len(names):
            return [Presence.UNKNOWN] * len(names)
        return [Presence.YES if each is True else Presence.NO if each is False else Presence.UNKNOWN for each in found]

    def _numbers(self, call: Callable[[], Any], count: int) -> list[int | None]:
        """The numbers that a call of the client answers with; None for each where it doesn't."""
        found = self._call(call)
        if not isinstance(found, list | tuple) or len(found) != count:
            return [None] * count
        return [each if type(each) is int else None for each in found]

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            _LOG.debug("a call of the client of SiMM failed: %s", error)
            return None

    @contextlib.contextmanager
    def _lane(self, deadline: float) -> Iterator["_Lane | None"]:
        """Memory for one call; None where the store is closed or it is too late."""
        lane = None
        with contextlib.suppress(queue.Empty):
            seconds = deadline - time.monotonic()
            if not self._closed and seconds > 0:
                lane = self._lanes.get(timeout=min(seconds, _LONG))
        try:
            yield None if self._closed else lane
        finally:
            if lane is not None:
                self._lanes.put(lane)

    def _remember(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                if len(self._known) < KNOWN:
                    self._known[key] = None
                else:
                    self._overflow |= key not in self._known

    def _forget(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._known.pop(key, None)


class _Memory:
    """What the client wants to know of a tensor when it registers memory."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes = address, nbytes

    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return self._nbytes

    def element_size(self) -> int:
        return 1


class _Lane:
    """`slots` buffers of `nbytes`, each registered for itself."""

    def __init__(self, slots: int, nbytes: int) -> None:
        self._ring = StagingRing(slots, nbytes)
        self._slots = self._ring.acquire(slots) or []
        self._addresses = [self._ring.page(slot).ctypes.data for slot in self._slots]
        self._regions: list[Any] = []
        for address in self._addresses:
            region = kv.register_mr(_Memory(address, nbytes))
            if region is None:
                self.close()
                raise OSError("the client of SiMM can't register memory: is there an RDMA device?")
            self._regions.append(region)

    def parts(self, indexes: list[int]) -> list[list[int]]:
        """As many at a time as there are buffers."""
        step = len(self._slots)
        return [indexes[first : first + step] for first in range(0, len(indexes), step)]

    def memory(self, slot: int, nbytes: int) -> memoryview:
        """The first bytes of a buffer."""
        return self._ring.sealed(self._slots[slot])[:nbytes]

    def view(self, slot: int, nbytes: int) -> Any:
        """The same, as the client wants it."""
        return kv.BlockView.from_buffer(self._addresses[slot], nbytes, self._regions[slot])

    def close(self) -> None:
        """Deregister all buffers. They must not be in use."""
        while self._regions:
            kv.deregister_mr(self._regions.pop())


def _set_flags(flags: dict[str, str]) -> None:
    with _LOCK:
        if _flags and _flags != flags:
            raise ValueError("this process uses SiMM with other settings: its client has but one connection")
        for name, value in flags.items():
            if kv.set_flag(name, value) is False:
                raise ValueError(f"the client of SiMM has no flag {name}, or does not take {value!r}")
        _flags.update(flags)


def _paired(keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[memoryview]:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers")
    return buffers
