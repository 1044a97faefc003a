"""The store in an S3 server with NIXL moving the bytes: its OBJ plug-in. All else goes through obstore."""

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import obstore

from purecache.stores.engines.nixl_agent import Agent, address_of
from purecache.stores.interface import Fetch, Store
from purecache.stores.objects import ObjectStore
from purecache.stores.options import parse_flag, take_options

_BLOCK = 4096
_NAP = 3e-4
_CLOSE_SECONDS = 1.0


def open_url(address: str, object_bytes: int, options: Mapping[str, Any]) -> Store:
    """The store of `nixl+s3://bucket/path?endpoint=http://host:port&region=...`, for the registry. Raises ValueError.

    Options: see `NixlObjectStore`; `access_key_env`, `secret_key_env` and `session_token_env` are names of environment
    variables that have the values.
    """
    parts = urlsplit(address)
    if not parts.netloc or "@" in parts.netloc or parts.fragment:
        raise ValueError(f"{address}: say which bucket, as in {parts.scheme}://bucket/path")
    secrets = ("access_key", "secret_key", "session_token")
    known: dict[str, Any] = {"endpoint": str, "region": str, "virtual_hosted": parse_flag, "concurrency": int}
    known |= {name: str for secret in secrets for name in (secret, f"{secret}_env")}
    settings = take_options(address, options, known)
    for secret in secrets:
        variable = settings.pop(f"{secret}_env", None)
        if variable is not None:
            if secret in settings:
                raise ValueError(f"{address}: give {secret} or {secret}_env, not both")
            if variable not in os.environ:
                raise ValueError(f"{address}: there is no environment variable {variable} ({secret}_env)")
            settings[secret] = os.environ[variable]
    try:
        return NixlObjectStore(parts.netloc, unquote(parts.path), object_bytes=object_bytes, **settings)
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None


class NixlObjectStore(ObjectStore):
    """An `ObjectStore` of S3 (same names of objects, same answers) whose get and put go through NIXL.

    Objects have at most `object_bytes`, and up to `concurrency` are on their way at once, each in a buffer of our own.
    NIXL can't call a transfer back and may take half a minute to give one up; such a buffer is used again when the
    transfer has ended, and the caller's is left alone. NIXL knows nothing of lengths: a get asks obstore first.

    Without `access_key` and `secret_key`, both libraries look where those of AWS do. `virtual_hosted`: the bucket is
    part of the host's name. Raises ValueError for impossible settings and OSError where NIXL can't load the plug-in.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        object_bytes: int,
        endpoint: str | None = None,
        region: str = "us-east-1",
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        virtual_hosted: bool = False,
        concurrency: int = 16,
    ) -> None:
        if object_bytes < 1 or concurrency < 1:
            raise ValueError("object_bytes and concurrency must be positive")
        if (access_key is None) != (secret_key is None):
            raise ValueError("give both access_key and secret_key, or neither")
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError("endpoint must begin with http:// or https://")
        secrets = {"access_key_id": access_key, "secret_access_key": secret_key, "token": session_token}
        config: dict[str, Any] = {name: value for name, value in secrets.items() if value is not None}
        if endpoint is not None:
            config["endpoint"] = endpoint
        super().__init__(
            f"s3://{bucket}",
            prefix,
            region=region,
            virtual_hosted_style_request=str(virtual_hosted).lower(),
            **config,
        )
        parameters = {"bucket": bucket, "region": region, "use_virtual_addressing": str(virtual_hosted).lower()}
        if endpoint is not None:
            parameters |= {"endpoint_override": endpoint, "scheme": endpoint.partition(":")[0]}
        ours = {"access_key": access_key, "secret_key": secret_key, "session_token": session_token}
        parameters |= {name: value for name, value in ours.items() if value is not None}
        try:
            self._courier = _Courier(object_bytes, concurrency, parameters)
        except OSError:
            super().close()
            raise

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`. An object that is replaced meanwhile by one of another length may be a HIT."""
        views = [buffer.cast("B") for _, buffer in zip(keys, buffers, strict=True)]
        answers = self._batch(len(keys), lambda i: self._has_length(keys[i], len(views[i])), Fetch.FAILED, deadline)
        wanted = [i for i, answer in enumerate(answers) if answer is Fetch.HIT]
        names = [self._name(keys[i]) for i in wanted]
        moved = self._courier.carry("READ", names, [views[i] for i in wanted], deadline)
        for i, whole in zip(wanted, moved, strict=True):
            answers[i] = Fetch.HIT if whole else Fetch.FAILED
        self._count(
            hits=answers.count(Fetch.HIT), misses=answers.count(Fetch.MISSING), failures=answers.count(Fetch.FAILED)
        )
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. Writes also what is there. One that was given up at the deadline may still arrive."""
        views = [buffer.cast("B") for _, buffer in zip(keys, buffers, strict=True)]
        answers = self._courier.carry("WRITE", [self._name(key) for key in keys], views, deadline)
        self._count(puts=answers.count(True), refused=answers.count(False))
        return answers

    def stats(self) -> dict[str, int]:
        """As `ObjectStore.stats`; and `late`: transfers that were given up and have not ended yet."""
        return {**super().stats(), "late": self._courier.late()}

    def close(self) -> None:
        """See `Store.close`. Waits up to 1 s for transfers; what runs on keeps its memory until the process ends."""
        super().close()
        self._courier.close()

    async def _has_length(self, key: str, nbytes: int) -> Fetch:
        try:
            found = await obstore.head_async(self._store, self._name(key))
        except FileNotFoundError:
            return Fetch.MISSING
        return Fetch.HIT if found["size"] == nbytes else Fetch.FAILED


class _Transfer(NamedTuple):
    """One object on its way, by way of a slot of our memory."""

    place: int
    slot: int
    registered: Any
    handle: Any


class _Courier:
    """Moves objects between buffers and an S3 server, by way of memory that NIXL knows."""

    def __init__(self, object_bytes: int, slots: int, parameters: Mapping[str, str]) -> None:
        self._object_bytes = object_bytes
        self._stride = -(-object_bytes // _BLOCK) * _BLOCK
        self._memory = memoryview(mmap.mmap(-1, slots * self._stride))
        self._address = address_of(self._memory)
        self._agent = Agent("OBJ", parameters)
        self._agent.register("DRAM", self._address, self._memory.nbytes)
        self._lock = threading.Lock()
        self._sweeping = threading.Lock()
        self._free = list(range(slots))[::-1]
        self._late: list[_Transfer] = []
        self._numbers = 0
        self._calls = 0
        self._kept = False
        self._closed = False

    def carry(self, operation: str, names: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """`READ` or `WRITE` objects; which were moved whole by the deadline. No buffer is used afterwards."""
        answers = [False] * len(names)
        waiting = deque(i for i, each in enumerate(buffers) if 0 < len(each) <= self._object_bytes)
        running: list[_Transfer] = []
        with self._lock:
            self._calls += 1
        try:
            while (waiting or running) and not self._closed and time.monotonic() < deadline:
                self._sweep()
                while waiting and (slot := self._take()) is not None:
                    self._start(operation, waiting.popleft(), slot, names, buffers, running)
                if not self._finish(operation, buffers, running, answers):
                    time.sleep(min(_NAP, max(deadline - time.monotonic(), 0.0)))
        finally:
            with self._lock:
                self._late += running
                self._calls -= 1
                if self._late and not self._kept:
                    # Or the end of the process would free what NIXL's threads use, or wait for them.
                    self._kept = True
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        return answers

    def late(self) -> int:
        """Transfers that nobody waits for any more."""
        self._sweep()
        with self._lock:
            return len(self._late)

    def close(self) -> None:
        """Let go of NIXL, unless something still runs in a second: then it and its memory stay."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        until = time.monotonic() + _CLOSE_SECONDS
        while (self._calls or self.late()) and time.monotonic() < until:
            time.sleep(_NAP)
        if not self._calls and not self.late():
            self._agent.close()
            if self._kept:
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))

    def _take(self) -> int | None:
        with self._lock:
            return self._free.pop() if self._free else None

    def _start(
        self,
        operation: str,
        index: int,
        slot: int,
        names: Sequence[str],
        buffers: Sequence[memoryview],
        running: list[_Transfer],
    ) -> None:
        size = len(buffers[index])
        if operation == "WRITE":
            self._slot(slot, size)[:] = buffers[index]
        with self._lock:
            self._numbers += 1
            number = self._numbers
        registered = None
        try:
            registered = self._agent.register("OBJ", 0, size, number, names[index])
            handle = self._agent.start(operation, self._address + slot * self._stride, size, "OBJ", 0, number)
            running.append(_Transfer(index, slot, registered, handle))
        except OSError:
            self._give_back(slot, registered)

    def _finish(
        self, operation: str, buffers: Sequence[memoryview], running: list[_Transfer], answers: list[bool]
    ) -> bool:
        """Take the transfers that have ended out of `running`; whether there were any."""
        before = len(running)
        for each in list(running):
            whole = self._outcome(each)
            if whole is None:
                continue
            running.remove(each)
            if whole and operation == "READ":
                buffers[each.place][:] = self._slot(each.slot, len(buffers[each.place]))
            answers[each.place] = whole
            self._give_back(each.slot, each.registered)
        return len(running) < before

    def _sweep(self) -> None:
        """Have the slots back whose late transfers have ended."""
        with self._sweeping:
            for each in list(self._late):
                if self._outcome(each) is not None:
                    with self._lock:
                        self._late.remove(each)
                    self._give_back(each.slot, each.registered)

    def _outcome(self, transfer: _Transfer) -> bool | None:
        """Whether it is whole; None: it runs."""
        try:
            return True if self._agent.has_ended(transfer.handle) else None
        except OSError:
            return False

    def _give_back(self, slot: int, registered: Any) -> None:
        if registered is not None:
            with contextlib.suppress(OSError):
                self._agent.deregister(registered)
        with self._lock:
            self._free.append(slot)

    def _slot(self, slot: int, size: int) -> memoryview:
        return self._memory[slot * self._stride : slot * self._stride + size]
