"""A store over AIBrix's KV cache manager (`aibrix-kvcache`): pages in RocksDB, or as files on a shared file system."""

import contextlib
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from purecache.stores.engines.aibrix_blocks import HEAD, get_all, put_all, remove, scan
from purecache.stores.engines.aibrix_manager import CHUNK, open_manager
from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.options import take_options

BACKENDS = ("ROCKSDB", "SHFS")
"""What AIBrix can keep pages in without hardware of its own; the others of it have never been tried here."""
TTL_SECONDS = 7 * 24 * 3600
"""Age at which RocksDB may drop an object, unless told otherwise. AIBrix's own default is 10 minutes."""

_ESTIMATE = "rocksdb.estimate-num-keys"
_LOG = logging.getLogger(__name__)


class AibrixStore(Store):
    """Objects of up to `object_bytes` bytes under `root`, one block of AIBrix each: a length, the object, and zeros.

    `backend` is ROCKSDB (one process at a time) or SHFS (files, for several processes and machines). With RocksDB an
    object older than `ttl_seconds` may go at some compaction; there is no other bound, and none at all with SHFS.

    AIBrix answers for prefixes: this asks again behind every hole, and takes no answer that isn't whole. It tells no
    failed look-up from a missing object. A call into a file system that hangs can't be broken off; deadlines are kept
    between calls of `CHUNK` objects. Puts and deletes of one store run one after another.

    Raises ValueError for another backend and for sizes that make no sense, OSError where `root` can't be made, and
    what AIBrix raises where it can't open it (RuntimeError or Exception of RocksDB, when another process has it).
    """

    def __init__(
        self, root: str | os.PathLike[str], object_bytes: int, backend: str = "ROCKSDB", ttl_seconds: int = TTL_SECONDS
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"the backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
        if object_bytes < 1 or ttl_seconds < 1:
            raise ValueError(f"object_bytes and ttl_seconds must be at least 1, not {object_bytes} and {ttl_seconds}")
        self._root, self._backend, self._size, self._ttl = Path(root).absolute(), backend, object_bytes, ttl_seconds
        # AIBrix's names of directories don't tell sizes of blocks apart.
        self._namespace = f"purecache{object_bytes}"
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writing = threading.Lock()  # two writers of a key would use one temporary file
        self._idle = threading.Condition()
        self._running = 0
        self._closed = False
        self._manager: Any = self._open()

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`."""
        with self._use() as manager:
            found = scan(manager, _unique(keys), deadline) if manager else {}
        return [found.get(_name(key), Presence.UNKNOWN) for key in keys]

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`. An object that is there and can't be read is removed, so that a put can replace it."""
        answers = [Fetch.FAILED] * len(keys)
        wanted: dict[str, list[int]] = {}
        for index, (key, _) in enumerate(zip(keys, buffers, strict=True)):
            wanted.setdefault(_name(key), []).append(index)
        with self._use() as manager:
            if manager:
                for chunk in _chunks(list(wanted), CHUNK):
                    get_all(manager, chunk, wanted, buffers, answers, deadline)
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. What is there is not written again."""
        contents = {
            _name(key): buffer for key, buffer in zip(keys, buffers, strict=True) if buffer.nbytes <= self._size
        }
        done: set[str] = set()
        with self._write(deadline) as manager:
            if manager:
                for chunk in _chunks(list(contents), CHUNK):
                    found = scan(manager, chunk, deadline)
                    done |= {name for name in chunk if found[name] is Presence.YES}
                    missing = [name for name in chunk if found[name] is Presence.NO]
                    done |= put_all(manager, missing, contents, deadline)
        return [_name(key) in done and buffer.nbytes <= self._size for key, buffer in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`. AIBrix calls every delete a success, so that it is asked again what is there."""
        names, gone = _unique(keys), set[str]()
        with self._write(deadline) as manager:
            if manager:
                # RocksDB's count of objects takes a delete of what isn't there for one less.
                there = [name for name, found in scan(manager, names, deadline).items() if found is Presence.YES]
                for name in there:
                    if time.monotonic() < deadline:
                        remove(manager, name)
                found = scan(manager, names, deadline)
                gone = {name for name in names if found[name] is Presence.NO}
        return [_name(key) in gone for key in keys]

    def clear(self) -> None:
        """See `Store.clear`. Waits for calls under way, removes the directory and opens it anew.

        With SHFS, what another process writes meanwhile may stay. Logs a warning where that fails; the store then
        answers failures until it is cleared again.
        """
        with self._alone():
            if self._closed:
                return
            try:
                self._shut()
                for directory in self._directories():
                    shutil.rmtree(directory)
                self._manager = self._open()
            except Exception as error:
                _LOG.warning("could not clear the store of AIBrix in %s: %s", self._root, error)

    def stats(self) -> dict[str, int]:
        """`objects`: RocksDB's own estimate, or the files that there are; -1 where that can't be told."""
        with self._use() as manager:
            if not manager:
                return {"objects": -1}
            try:
                if self._backend == "SHFS":
                    files = [path for directory in self._directories() for path in directory.glob("*/*/*")]
                    return {"objects": sum(path.suffix != ".tmp" for path in files)}
                return {"objects": int(manager._l2_cache._backend.store.property_int_value(_ESTIMATE))}
            except Exception:  # part of it is inside of AIBrix, where names may change
                return {"objects": -1}

    def close(self) -> None:
        """See `Store.close`. Waits for calls under way."""
        with self._alone():
            self._closed = True
            self._shut()

    def _open(self) -> Any:
        return open_manager(self._root, self._backend, self._namespace, HEAD + self._size, self._ttl)

    def _shut(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.close()
            except Exception as error:
                _LOG.warning("AIBrix failed to close %s: %s", self._root, error)

    def _directories(self) -> list[Path]:
        return [path for path in self._root.glob(f"{self._namespace}_*") if path.is_dir()]

    @contextlib.contextmanager
    def _use(self) -> Iterator[Any]:
        """The manager, which stays open meanwhile; None where there is none."""
        with self._idle:
            manager = self._manager
            self._running += 1
        try:
            yield manager
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    @contextlib.contextmanager
    def _write(self, deadline: float) -> Iterator[Any]:
        """The manager, for the only one that changes objects; None where it is too late."""
        if not self._writing.acquire(timeout=min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
            yield None
            return
        try:
            with self._use() as manager:
                yield manager
        finally:
            self._writing.release()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._idle:
            self._idle.wait_for(lambda: not self._running)
            yield


def _name(key: str) -> str:
    """What AIBrix gets for a key: a file name is twice as long as that, and 255 characters are the most."""
    return hashlib.sha256(key.encode()).hexdigest()


def _unique(keys: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(map(_name, keys)))


def _chunks(names: list[str], size: int) -> Iterator[list[str]]:
    return (names[first : first + size] for first in range(0, len(names), size))


def open_url(address: str, object_bytes: int, options: Mapping[str, Any]) -> AibrixStore:
    """`aibrix:?backend=ROCKSDB&root=/path&ttl=604800`. Raises ValueError for what it doesn't understand."""
    if address.strip("/") != "aibrix:":
        raise ValueError(f"{address}: the path is an option; write aibrix:?backend=ROCKSDB&root=/path")
    taken = take_options(address, options, {"backend": _backend, "root": _directory, "ttl": int})
    if "root" not in taken:
        raise ValueError(f"{address}: say where, as in aibrix:?backend=ROCKSDB&root=/path")
    if taken.get("ttl", 1) < 1:
        raise ValueError(f"{address}: ttl is a number of seconds, at least 1")
    if "ttl" in taken and taken.get("backend") == "SHFS":
        raise ValueError(f"{address}: only ROCKSDB has a ttl")
    ttl = taken.get("ttl", TTL_SECONDS)
    return AibrixStore(taken["root"], object_bytes, taken.get("backend", "ROCKSDB"), ttl)


def _backend(text: str) -> str:
    if text.upper() not in BACKENDS:
        raise ValueError(f"must be one of {', '.join(BACKENDS)}")
    return text.upper()


def _directory(text: str) -> str:
    if not os.path.isabs(text):
        raise ValueError("must be an absolute path")
    return text
