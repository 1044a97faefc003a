"""A store over AIBrix's KV cache manager (`aibrix-kvcache`): pages in RocksDB, or as files on a shared file system."""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.options import take_options

BACKENDS = ("ROCKSDB", "SHFS")
"""What AIBrix can keep pages in without hardware of its own; the others of it have never been tried here."""
CHUNK = 32
"""Most objects of one call into AIBrix: as many as it works on at once. Between the calls the deadline is looked at."""
TTL_SECONDS = 7 * 24 * 3600
"""Age at which RocksDB may drop an object, unless told otherwise. AIBrix's own default is 10 minutes."""

_IMPORTING = {"AIBRIX_KV_CACHE_OL_TOKEN_VALIDATION_ENABLED": "0"}
_FIXED = {
    "L1_CACHE_ENABLED": "0",  # a cache in memory above it would hide what is stored
    "DEVICE": "cpu:0",  # plain `cpu` means pinned memory, which needs CUDA
    "BLOCK_SIZE": "-1",
    "MAX_SEQ_LEN": "-1",
    "META_SERVICE_BACKEND": "",
    "L2_CACHE_OP_BATCH": str(CHUNK),
    "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS": "0",  # a put is over when it returns
    # AIBrix reuses the memory of a read that it gave up while a thread may still write into it: it must not give up.
    "L2_CACHE_PER_TOKEN_TIMEOUT_MS": "600000",
}
_LENGTH = struct.Struct("<QQ")  # bytes of the object, and their complement
_ONES = 2**64 - 1
_ESTIMATE = "rocksdb.estimate-num-keys"
_LOG = logging.getLogger(__name__)
_ENVIRONMENT = threading.Lock()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the process for a while: AIBrix can be configured in no other way."""
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


_POLICY = asyncio.get_event_loop_policy()
with _environment(_IMPORTING):
    import aibrix_kvcache  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
# AIBrix makes uvloop the event loop of the whole process when it is imported, which is not ours to decide.
asyncio.set_event_loop_policy(_POLICY)


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
            found = _scan(manager, _unique(keys), deadline) if manager else {}
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
                    self._get_chunk(manager, chunk, wanted, buffers, answers, deadline)
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
                    found = _scan(manager, chunk, deadline)
                    done |= {name for name in chunk if found[name] is Presence.YES}
                    missing = [name for name in chunk if found[name] is Presence.NO]
                    done |= self._put_all(manager, missing, contents, deadline)
        return [_name(key) in done and buffer.nbytes <= self._size for key, buffer in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`. AIBrix calls every delete a success, so that it is asked again what is there."""
        names, gone = _unique(keys), set[str]()
        with self._write(deadline) as manager:
            if manager:
                # RocksDB's count of objects takes a delete of what isn't there for one less.
                there = [name for name, found in _scan(manager, names, deadline).items() if found is Presence.YES]
                for name in there:
                    if time.monotonic() < deadline:
                        _value(manager.delete, None, _blocks([name]))
                found = _scan(manager, names, deadline)
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
        block = -(-(_LENGTH.size + self._size) // 16) * 16
        settings = {
            "L2_CACHE_BACKEND": self._backend,
            "L2_CACHE_NAMESPACE": self._namespace,
            f"{self._backend}_ROOT": str(self._root),
            "ROCKSDB_TTL_S": str(self._ttl),
            **_FIXED,
        }
        spec = aibrix_kvcache.KVCacheBlockSpec(
            block_ntokens=1,
            block_dtype=torch.uint8,
            block_layout=aibrix_kvcache.KVCacheBlockLayout.NCLD,
            tensor_spec=aibrix_kvcache.KVCacheTensorSpec(heads=[0], layers=[0], head_size=block // 2),
        )
        config = aibrix_kvcache.KVCacheConfig(
            block_spec=spec,
            model_spec=aibrix_kvcache.ModelSpec(max_model_len=CHUNK, max_num_batched_tokens=CHUNK),
        )
        with _environment({f"AIBRIX_KV_CACHE_OL_{name}": value for name, value in settings.items()}):
            return aibrix_kvcache.BaseKVCacheManager(config)

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

    def _get_chunk(
        self,
        manager: Any,
        names: list[str],
        wanted: Mapping[str, list[int]],
        buffers: Sequence[memoryview],
        answers: list[Fetch],
        deadline: float,
    ) -> None:
        """Answer for some objects: which there are, and then those that follow one another together."""
        found = _scan(manager, names, deadline)
        for name in names:
            if found[name] is Presence.NO:
                for index in wanted[name]:
                    answers[index] = Fetch.MISSING
        runs = [[name for name in names if found[name] is Presence.YES]]
        while runs and time.monotonic() < deadline:
            run = runs.pop()
            if not run:
                continue
            damaged: list[str] = []
            with _acquired(manager, run) as (tensors, unreadable):
                # A partial answer is no prefix: AIBrix counts hits behind a hole where it reads several at once.
                if len(tensors) == len(run):
                    for name, tensor in zip(run, tensors, strict=True):
                        length = _length(tensor)
                        damaged += [name] if length is None else []
                        for index in wanted[name]:
                            answers[index] = _copy_out(tensor, length, buffers[index])
                elif len(run) > 1:
                    runs += [run[len(run) // 2 :], run[: len(run) // 2]]
                elif unreadable:
                    damaged = run
            for name in damaged:  # or a put would find it there, for ever
                _value(manager.delete, None, _blocks([name]))

    def _put_all(self, manager: Any, names: list[str], contents: Mapping[str, memoryview], deadline: float) -> set[str]:
        """Write objects; of several where one failed it isn't known which, so that they are tried one by one."""
        if not names or time.monotonic() >= deadline:
            return set()
        if _put(manager, names, [contents[name] for name in names]):
            return set(names)
        if len(names) == 1:
            return set()
        return set().union(*(self._put_all(manager, [name], contents, deadline) for name in names))


def _name(key: str) -> str:
    """What AIBrix gets for a key: a file name is twice as long as that, and 255 characters are the most."""
    return hashlib.sha256(key.encode()).hexdigest()


def _unique(keys: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(map(_name, keys)))


def _chunks(names: list[str], size: int) -> Iterator[list[str]]:
    return (names[first : first + size] for first in range(0, len(names), size))


def _blocks(names: list[str]) -> Any:
    return aibrix_kvcache.BlockHashes(names, 1)


def _value(call: Any, *arguments: Any) -> Any:
    """What a call answers; None where it found nothing, failed or raised."""
    try:
        status = call(*arguments)
        return status.value if status.is_ok() is True else None
    except Exception as error:
        _LOG.debug("AIBrix raised %r", error)
        return None


@contextlib.contextmanager
def _acquired(manager: Any, names: list[str]) -> Iterator[tuple[list[Any], bool]]:
    """The blocks of objects, as many of them as came, and whether AIBrix said that there is none of the first one."""
    handle, tensors, missing = None, [], False
    try:
        status = manager.acquire(None, _blocks(names))
        missing = status.is_not_found() is True
        if status.is_ok() is True:
            count, handle = status.value
            tensors = list(handle.to_tensors())[:count]
    except Exception as error:
        _LOG.debug("AIBrix raised %r", error)
    try:
        yield tensors, missing
    finally:
        if handle is not None:
            handle.release()


def _scan(manager: Any, names: list[str], deadline: float) -> dict[str, Presence]:
    """Which objects there are. AIBrix tells how many of the first ones there are: ask again behind each hole.

    All are asked for at first; behind a hole one, and then twice as many each time, so that a long run of missing
    objects costs one look-up for each.
    """
    found = dict.fromkeys(names, Presence.UNKNOWN)
    first, size = 0, len(names)
    while first < len(names) and time.monotonic() < deadline:
        asked = names[first : first + size]
        try:
            status = manager.exists(None, _blocks(asked))
            count = status.value if status.is_ok() is True else 0 if status.is_not_found() is True else None
        except Exception as error:
            _LOG.debug("AIBrix raised %r", error)
            count = None
        known = type(count) is int and 0 <= count <= len(asked)
        there = count if known and count else 0
        found.update(dict.fromkeys(asked[:there], Presence.YES))
        if there < len(asked):
            found[asked[there]] = Presence.NO if known else Presence.UNKNOWN
        first, size = (first + there, size * 2) if there == len(asked) else (first + there + 1, 1)
    return found


def _put(manager: Any, names: list[str], contents: list[memoryview]) -> bool:
    """Write objects as one batch; whether all of them are there now."""
    blocks = _blocks(names)
    handle = _value(manager.allocate_for, None, blocks)
    if handle is None:
        return False
    if len(handle) != len(names):
        handle.release()
        return False
    for tensor, content in zip(handle.to_tensors(), contents, strict=True):
        block = tensor.reshape(-1).numpy()
        end = _LENGTH.size + content.nbytes
        block[: _LENGTH.size] = np.frombuffer(_LENGTH.pack(content.nbytes, content.nbytes ^ _ONES), np.uint8)
        block[_LENGTH.size : end] = np.frombuffer(content, np.uint8)
        block[end:] = 0
    try:
        status = manager.put(None, blocks, handle)  # releases the handle, unless it raises
        return status.is_ok() is True and status.value == len(names)
    except Exception as error:  # SHFS raises AttributeError where a file can't be written
        _LOG.debug("AIBrix raised %r", error)
        with contextlib.suppress(ValueError):  # released already
            handle.release()
        return False


def _length(tensor: Any) -> int | None:
    """Bytes of the object in a block; None where that is not what was written."""
    block = tensor.reshape(-1).numpy()
    length, complement = _LENGTH.unpack(block[: _LENGTH.size].tobytes())
    return length if length ^ complement == _ONES and length <= block.size - _LENGTH.size else None


def _copy_out(tensor: Any, length: int | None, buffer: memoryview) -> Fetch:
    if length is None or length != buffer.nbytes:
        return Fetch.FAILED
    np.frombuffer(buffer, np.uint8)[:] = tensor.reshape(-1).numpy()[_LENGTH.size : _LENGTH.size + length]
    return Fetch.HIT


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
