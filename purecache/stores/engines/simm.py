"""A store in SiMM (scitix), a pool of memory of several machines that is reached by RDMA.

The client moves bytes from and to registered memory. It tells a server how long the registered *region* is, not how
long the buffer is: an object that is longer than its buffer would be written over what lies behind. Therefore every
object passes through memory of our own here, in which each buffer is a region of its own; that is one copy.
"""

import contextlib
import importlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from purecache.stores.engines.lanes import LONG, Lane, LaneStore
from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.options import host_of, parse_flag, take_options

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

_PORT = 30001
_OUR_KEY = 200
_MISSING = -4003
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


class SimmStore(LaneStore["_Lane"]):
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
        self._prefix = prefix
        flags = {
            "clnt_use_k8s": str(k8s).lower(),
            "cm_primary_node_ip": host,
            "cm_rpc_inter_port": str(port),  # cm_primary_node_port is of no use to a client
            "clnt_thread_pool_size": str(threads),
            "clnt_sync_req_timeout_ms": str(request_ms),
        }
        _set_flags(flags if log_file is None else {**flags, "clnt_log_file": log_file})
        self._putting = threading.Lock()
        self._client: Any = kv.Store()
        with contextlib.ExitStack() as stack:
            made: list[_Lane] = []
            for _ in range(lanes):
                made.append(_Lane(batch, object_bytes))
                stack.callback(made[-1].close)
            self._resources = stack.pop_all()
        super().__init__("SiMM", made, object_bytes, least_bytes=1)

    def _let_go(self, lanes: "list[_Lane]") -> None:
        self._resources.close()
        self._client = None  # it goes on living with the process

    def _read(self, lane: "_Lane", keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Fetch]:
        """Where SiMM doesn't say whether it failed or has no such object, it is asked again."""
        views = [lane.view(slot, buffer.nbytes) for slot, buffer in enumerate(buffers)]
        names = [self._prefix + key for key in keys]
        results = self._numbers(lambda: self._client.mget(names, views), len(keys))
        answers = [Fetch.FAILED] * len(keys)
        unsure: list[int] = []
        for slot, (buffer, result) in enumerate(zip(buffers, results, strict=True)):
            if result is not None and result == buffer.nbytes:
                buffer[:] = lane.memory(slot, result)
                answers[slot] = Fetch.HIT
            elif result is None or result < 0:
                unsure.append(slot)
        for slot, presence in zip(unsure, self._ask([keys[slot] for slot in unsure]), strict=True):
            if presence is Presence.NO:
                answers[slot] = Fetch.MISSING
        return answers

    def _write(self, lane: "_Lane", keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """What is there is not written again: SiMM would remove it first."""
        # One thread at a time: between asking and writing, another one must not write the same key.
        left = deadline - time.monotonic()
        if left <= 0 or not self._putting.acquire(timeout=min(left, LONG)):
            return [False] * len(keys)
        try:
            answers = [presence is Presence.YES for presence in self._ask(keys)]
            missing = [i for i, is_there in enumerate(answers) if not is_there]
            written = self._write_missing(lane, [keys[i] for i in missing], [buffers[i] for i in missing])
            for i, is_there in zip(missing, written, strict=True):
                answers[i] = is_there
            return answers
        finally:
            self._putting.release()

    def _write_missing(self, lane: "_Lane", keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        if not keys:
            return []
        for slot, buffer in enumerate(buffers):
            lane.memory(slot, buffer.nbytes)[:] = buffer
        views = [lane.view(slot, buffer.nbytes) for slot, buffer in enumerate(buffers)]
        names = [self._prefix + key for key in keys]
        results = self._numbers(lambda: self._client.mput(names, views), len(keys))
        return [result == 0 for result in results]

    def _remove(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """One request after the other: there is none for many."""
        answers = [False] * len(keys)
        for i, key in enumerate(keys):
            if time.monotonic() >= deadline:
                break
            answers[i] = self._call(lambda key=key: self._client.delete(self._prefix + key)) in (0, _MISSING)
        return answers

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


class _Lane(Lane):
    """Buffers for objects, each registered for itself."""

    def __init__(self, slots: int, nbytes: int) -> None:
        super().__init__(slots, nbytes)
        self._regions: list[Any] = []
        for address in self.addresses:
            region = kv.register_mr(_Memory(address, nbytes))
            if region is None:
                self.close()
                raise OSError("the client of SiMM can't register memory: is there an RDMA device?")
            self._regions.append(region)

    def view(self, slot: int, nbytes: int) -> Any:
        """The first bytes of a buffer, as the client wants them."""
        return kv.BlockView.from_buffer(self.addresses[slot], nbytes, self._regions[slot])

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
