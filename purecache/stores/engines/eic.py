"""A store in EIC (Elastic Instant Cache of Volcengine), by its Python client.

The client doesn't say how long an object is that it has read. Therefore every object is stored with the trailer of
`stores/envelope.py` behind it, which says so, and passes through memory of our own, which is registered once.
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

from purecache.stores.envelope import TRAILER, is_intact, seal
from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.options import take_options
from purecache.stores.staging import StagingRing

try:
    eic: Any = importlib.import_module("eic")  # by name: this very module has the name of the package
except ImportError as _error:
    raise ImportError(f"no client of EIC ({_error}); it comes with Volcengine's images") from None
for _name in ("Client", "InitOption", "IOBuffers", "StringVector", "StatusCode", "MemoryInfo"):
    if not hasattr(eic, _name):
        raise ImportError(f"the package eic that is installed is not the client of EIC: it has no {_name}")

KNOWN = 1 << 18
"""Keys that a process remembers to have put, for `clear` and `stats`."""

_EXISTS_AT_ONCE = 256
_CLEAR_SECONDS = 600.0
_LONG = 1e6
_MISSING = re.compile(r"NOT_?(FOUND|EXIST)|NO_SUCH|NO_?EXIST", re.IGNORECASE)
_LOG = logging.getLogger(__name__)


def open_url(address: str, object_bytes: int, options: Mapping[str, Any]) -> Store:
    """The store of `eic://endpoint?instance=...`, for the registry. Options: see `EicStore`.

    Raises ValueError for what it doesn't understand.
    """
    endpoint = address.partition("://")[2].rstrip("/")
    if not endpoint or "@" in endpoint or "/" in endpoint:
        raise ValueError("eic: write the endpoint and nothing else, as in eic://host:port?instance=...")
    known = {"instance": str, "namespace": str, "batch": int, "lanes": int, "transport": int, "ttl": int}
    more = {"missing": str, "log_dir": str, "log_level": int, "flag_file": str, "interfaces": str}
    settings = take_options(address, options, {**known, **more})
    try:
        return EicStore(endpoint, object_bytes, **settings)
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None


class EicStore(Store):
    """Objects of up to `object_bytes` in the EIC service at `endpoint`, in a namespace of an instance.

    `instance` is the id that the service knows you by; it is told in no error. `lanes` calls run at once, each in steps
    of up to `batch` objects. `transport` is a number of `eic.TransportType`; `ttl` are the seconds that objects live
    (-1: until they are evicted). `missing` are the names of the status codes of an object that is not there, with
    commas between; without it, names with NOT_FOUND, NOT_EXIST and the like are taken. `log_dir`, `log_level`,
    `flag_file` and `interfaces` (local network interfaces) go to the client as they are.

    Raises ValueError for impossible settings, and OSError where the client can't be initialized.
    """

    def __init__(
        self,
        endpoint: str,
        object_bytes: int,
        *,
        instance: str = "",
        namespace: str = "",
        batch: int = 32,
        lanes: int = 2,
        transport: int = 3,
        ttl: int = -1,
        missing: str = "",
        log_dir: str | None = None,
        log_level: int | None = None,
        flag_file: str | None = None,
        interfaces: str | None = None,
    ) -> None:
        if not instance:
            raise ValueError("say which instance: give its id as the option instance")
        if min(object_bytes, batch, lanes) < 1 or ttl == 0 or ttl < -1:
            raise ValueError("object_bytes, batch and lanes must be at least 1, ttl at least 1 or -1")
        self._missing = _codes_of(missing)
        self._object_bytes, self._namespace, self._ttl = object_bytes, namespace, ttl
        self._known: dict[str, None] = {}
        self._overflow = False
        self._lock = threading.Lock()
        self._closed = False
        option = eic.InitOption()
        option.transport_type = eic.TransportType(transport)
        if log_level is not None:
            option.log_level = eic.LogLevel(log_level)
        given = {"log_dir": log_dir, "flag_file": flag_file, "multi_net_local_interface_names": interfaces}
        for name, value in given.items():
            if value is not None:
                setattr(option, name, value)
        self._client: Any = eic.Client()
        code = self._client.init(instance, endpoint, option)
        if code != 0:
            raise OSError(f"the client of EIC could not be initialized for {endpoint}: code {code}")
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self._number = lanes
        self._is_registered = True
        for _ in range(lanes):
            lane = _Lane(self._client, batch, object_bytes)
            self._is_registered &= lane.is_registered
            self._lanes.put(lane)

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
        """See `Store.get`."""
        answers = [Fetch.FAILED] * len(keys)
        fits = [i for i, buffer in enumerate(_paired(keys, buffers)) if buffer.nbytes <= self._object_bytes]
        with self._lane(deadline) as lane:
            for part in lane.parts(fits) if lane else ():
                if lane and time.monotonic() < deadline:
                    self._get(lane, part, keys, buffers, answers)
        self._forget(key for key, answer in zip(keys, answers, strict=True) if answer is Fetch.MISSING)
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. Writes also what is there, so that a damaged object is healed."""
        fits = [buffer.nbytes <= self._object_bytes for buffer in _paired(keys, buffers)]
        first: dict[str, int] = {}
        for i, key in enumerate(keys):
            if fits[i]:
                first.setdefault(key, i)
        done: dict[str, bool] = {}
        with self._lane(deadline) as lane:
            for part in lane.parts(list(first.values())) if lane else ():
                if lane and time.monotonic() < deadline:
                    done.update(self._put(lane, part, keys, buffers))
        self._remember(key for key, is_there in done.items() if is_there)
        return [fit and done.get(key, False) for key, fit in zip(keys, fits, strict=True)]

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`."""
        answers = [False] * len(keys)
        with self._lane(deadline) as lane:
            for first in range(0, len(keys) if lane else 0, _EXISTS_AT_ONCE):
                part = keys[first : first + _EXISTS_AT_ONCE]
                if time.monotonic() < deadline:
                    answers[first : first + len(part)] = self._delete(part)
        self._forget(key for key, answer in zip(keys, answers, strict=True) if answer)
        return answers

    def clear(self) -> None:
        """Remove what this process has put: EIC can't list. Logs a warning where some of it may be left."""
        with self._lock:
            keys, whole = list(self._known), not self._overflow
            self._overflow = False
        if not self._closed and not (all(self.delete(keys, time.monotonic() + _CLEAR_SECONDS)) and whole):
            _LOG.warning("could not remove all objects from EIC")

    def stats(self) -> dict[str, int]:
        """`objects`: those that this process has put and has not found missing; -1 after more than `KNOWN` of them.

        `registered`: 1 if the client has registered our memory, 0 if it copies instead.
        """
        with self._lock:
            objects = -1 if self._overflow else len(self._known)
        return {"objects": objects, "registered": int(self._is_registered)}

    def close(self) -> None:
        """See `Store.close`. Waits for calls in other threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        lanes = [self._lanes.get() for _ in range(self._number)]  # a call that runs gives it back
        # The client goes before the memory that it has registered.
        self._client = None
        lanes.clear()

    def _get(
        self, lane: "_Lane", part: list[int], keys: Sequence[str], buffers: Sequence[memoryview], answers: list[Fetch]
    ) -> None:
        memories = [lane.memory(slot, buffers[i].nbytes) for slot, i in enumerate(part)]
        for memory in memories:  # so that what was read before can't pass for what was not read now
            memory[-TRAILER:] = bytes(TRAILER)
        option = eic.GetOption()
        option.ns = self._namespace
        names, values = _names(keys[i] for i in part), lane.values(memories)
        result = self._call(lambda: self._client.mget(names, option, values))
        status, outcome = (result[0], result[2]) if isinstance(result, tuple) and len(result) == 3 else (None, None)
        for i, memory, is_there in zip(part, memories, self._verdicts(status, outcome, len(part)), strict=True):
            if is_there is False:
                answers[i] = Fetch.MISSING
            elif is_there and is_intact(keys[i], memory):
                buffers[i][:] = memory[:-TRAILER]
                answers[i] = Fetch.HIT

    def _put(
        self, lane: "_Lane", part: list[int], keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> dict[str, bool]:
        memories = [lane.memory(slot, buffers[i].nbytes) for slot, i in enumerate(part)]
        for i, memory in zip(part, memories, strict=True):
            memory[:-TRAILER] = buffers[i]
            seal(keys[i], memory)
        option = eic.SetOption()
        option.ns = self._namespace
        option.ttl_second = self._ttl
        names, values = _names(keys[i] for i in part), lane.values(memories)
        status, outcome = _pair(self._call(lambda: self._client.mset(names, values, option)))
        verdicts = self._verdicts(status, outcome, len(part))
        return {keys[i]: verdict is True for i, verdict in zip(part, verdicts, strict=True)}

    def _delete(self, keys: Sequence[str]) -> list[bool]:
        option = eic.DelOption()
        option.ns = self._namespace
        status, outcome = _pair(self._call(lambda: self._client.mdel(_names(keys), option)))
        gone = [verdict is True for verdict in self._verdicts(status, outcome, len(keys))]
        unsure = [i for i, is_gone in enumerate(gone) if not is_gone]
        for i, presence in zip(unsure, self._ask([keys[i] for i in unsure]), strict=True):
            gone[i] = presence is Presence.NO
        return gone

    def _ask(self, keys: Sequence[str]) -> list[Presence]:
        if not keys:
            return []
        option = eic.ExistOption()
        option.ns = self._namespace
        status, outcome = _pair(self._call(lambda: self._client.mexist(_names(keys), option)))
        known = {True: Presence.YES, False: Presence.NO, None: Presence.UNKNOWN}
        return [known[verdict] for verdict in self._verdicts(status, outcome, len(keys))]

    def _verdicts(self, status: Any, outcome: Any, count: int) -> list[bool | None]:
        """Per key: success, or (False) that it is not there, or (None) anything else.

        The status of a call says nothing of a key. A client whose codes of absence are not known is believed that what
        failed in a call that went through is not there.
        """
        through = status is not None and status in (eic.StatusCode.SUCCESS, eic.StatusCode.PARTIAL_FAILED)
        codes = list(getattr(outcome, "status_codes", ()))
        if not codes and status == eic.StatusCode.SUCCESS:
            return [True] * count
        if len(codes) != count:
            return [None] * count
        verdicts: list[bool | None] = []
        for code in codes:
            if code == eic.StatusCode.SUCCESS:
                verdicts.append(True if through else None)
            elif self._missing:
                verdicts.append(False if code in self._missing else None)
            else:
                verdicts.append(False if through else None)
        return verdicts

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            _LOG.debug("a call of the client of EIC failed: %s", type(error).__name__)
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


class _Lane:
    """`slots` buffers for an object of up to `nbytes` and its trailer, registered as one region if that works."""

    def __init__(self, client: Any, slots: int, nbytes: int) -> None:
        self._ring = StagingRing(slots, nbytes)
        self._slots = self._ring.acquire(slots) or []
        self._addresses = [self._ring.page(slot).ctypes.data for slot in self._slots]
        information = eic.MemoryInfo()
        # What other users of the client say of memory of the host, too: there is no other word for it in public code.
        information.type = eic.MemoryType.MEMORY_CUDA
        information.cuda_id = 0
        region = eic.IOBuffers()
        region.append(min(self._addresses), self._ring.region.nbytes, True)
        self.is_registered = client.register_memory(region, information) is True
        """Otherwise buffers must not be said to be registered: the client would look for them in vain."""

    def parts(self, indexes: list[int]) -> list[list[int]]:
        """As many at a time as there are buffers."""
        step = len(self._slots)
        return [indexes[first : first + step] for first in range(0, len(indexes), step)]

    def memory(self, slot: int, nbytes: int) -> memoryview:
        """Room for an object of `nbytes` and its trailer."""
        return self._ring.sealed(self._slots[slot])[: nbytes + TRAILER]

    def values(self, memories: Sequence[memoryview]) -> Any:
        """The first buffers, as the client wants them."""
        values = eic.IOBuffers()
        for address, memory in zip(self._addresses, memories, strict=False):
            values.append(address, memory.nbytes, self.is_registered)
        return values


def _paired(keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[memoryview]:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers")
    return buffers


def _names(keys: Iterable[str]) -> Any:
    names = eic.StringVector()
    for key in keys:
        names.append(key)
    return names


def _pair(result: Any) -> tuple[Any, Any]:
    return result if isinstance(result, tuple) and len(result) == 2 else (None, None)


def _codes_of(missing: str) -> list[Any]:
    """The status codes of these names, or of all whose names sound like absence."""
    members: dict[str, Any] = dict(getattr(eic.StatusCode, "__members__", {}))
    wanted = [name.strip() for name in missing.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in members]
    if unknown:
        raise ValueError(f"missing: there is no status code {', '.join(unknown)}; there are {', '.join(members)}")
    return [code for name, code in members.items() if (name in wanted if wanted else _MISSING.search(name))]
