"""A store of one file per object, read and written by LMCache's own threads (its native file connector)."""

import hashlib
import logging
import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lmcache.lmcache_fs import LMCacheFSClient  # pyright: ignore[reportMissingImports]

from purecache.stores.engines.entrance import Entrance
from purecache.stores.interface import Fetch, Presence, Store, paired
from purecache.stores.options import directory_of, parse_flag, take_options

CHUNK = 32
"""Most objects of one call into LMCache. Between the calls the deadline is looked at."""

_MODEL = "purecache"
_TEMPORARY = "tmp"
_BLOCK = 4096
_LENGTH = struct.Struct("<QQ")  # bytes of the object, and their complement
_ONES = 2**64 - 1
_LOG = logging.getLogger(__name__)


class LmcacheFileStore(Store):
    """Files `<directory>/purecache@...@<sha256 of the key>.data`, moved by `workers` threads of LMCache.

    Without `direct` the buffers of the caller are read and written as they are. With `direct` I/O goes past the page
    cache, from and to memory of this store; a file is then a few KiB longer. Only a store that is opened in the same
    way finds what is there.

    There is no capacity here: something else must remove old files. Nothing is synced and nothing is checked but the
    length. A call into a file system that hangs can't be broken off; deadlines are kept between calls of `CHUNK`
    objects.

    Raises ValueError for `workers` below 1, OSError where the directory can't be made, and RuntimeError where LMCache
    can't use it, or where this version of it names its files in another way.
    """

    def __init__(self, directory: str | os.PathLike[str], workers: int = 4, direct: bool = False) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self._directory = os.path.abspath(os.fspath(directory))
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        self._model = f"{_MODEL}-direct" if direct else _MODEL
        self._bounce = threading.local() if direct else None
        self._client: Any = LMCacheFSClient(self._directory, workers, _TEMPORARY, direct, 0)
        self._news = threading.Condition()
        self._results: dict[int, Any] = {}
        self._listening = False
        self._entrance = Entrance()
        self._check_names()

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`."""
        answers = [Presence.UNKNOWN] * len(keys)
        for indices in self._chunks(range(len(keys)), deadline):
            done, _, found = self._call("exists", [self._name(keys[index]) for index in indices])
            if done is True and isinstance(found, list) and len(found) == len(indices):
                for index, there in zip(indices, found, strict=True):
                    answers[index] = Presence.YES if there is True else Presence.NO
        return answers

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`. The length of a file is looked at first: LMCache would fill a shorter buffer."""
        buffers = paired(keys, buffers)
        answers = [Fetch.FAILED] * len(keys)
        for indices in self._chunks(range(len(keys)), deadline):
            there: list[int] = []
            for index in indices:
                size = self._size(self._name(keys[index]))
                if size is None:
                    answers[index] = Fetch.MISSING
                elif size == self._file_bytes(buffers[index]):
                    there.append(index)
            if there:
                views = self._views([buffers[index] for index in there], fill=False)
                _, _, found = self._call("get", [self._name(keys[index]) for index in there], views)
                if isinstance(found, list) and len(found) == len(there):
                    for index, view, hit in zip(there, views, found, strict=True):
                        if hit is True:
                            answers[index] = self._copy_out(self._name(keys[index]), view, buffers[index])
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. LMCache keeps a file that is there; one of another length is removed first."""
        buffers = paired(keys, buffers)
        answers = [False] * len(keys)
        for indices in self._chunks(range(len(keys)), deadline):
            names = [self._name(keys[index]) for index in indices]
            sizes = [self._file_bytes(buffers[index]) for index in indices]
            wrong = [n for n, size in zip(names, sizes, strict=True) if self._size(n) not in (None, size)]
            if wrong:
                self._call("delete", wrong)
            missing = {}
            for name, index in zip(names, indices, strict=True):
                if self._size(name) is None:
                    missing[name] = buffers[index]
            if missing:
                self._call("set", list(missing), self._views(list(missing.values()), fill=True))
            # Files are moved to their names when they are whole; of a batch LMCache only says that all or not all went.
            for index, name, size in zip(indices, names, sizes, strict=True):
                answers[index] = self._size(name) == size
        return answers

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`. LMCache calls it a failure where there was nothing, so that this looks for itself."""
        answers = [False] * len(keys)
        for indices in self._chunks(range(len(keys)), deadline):
            names = [self._name(keys[index]) for index in indices]
            self._call("delete", names)
            for index, name in zip(indices, names, strict=True):
                answers[index] = self._size(name) is None
        return answers

    def clear(self) -> None:
        """See `Store.clear`. Removes also what writers that died have left in the directory of unfinished files."""
        if self._entrance.is_closed:
            return
        temporary = os.path.join(self._directory, _TEMPORARY)
        for path in [*self._files(), *(os.path.join(temporary, name) for name in _names_in(temporary))]:
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                _LOG.warning("could not remove %s: %s", path, error)

    def stats(self) -> dict[str, int]:
        """`objects`: files in the directory, of all processes that use it. Lists all of it."""
        return {"objects": sum(1 for _ in self._files())}

    def close(self) -> None:
        """See `Store.close`. Waits for calls under way."""
        if self._entrance.close():
            self._entrance.wait()
            self._client.close()

    def _chunks(self, indices: range, deadline: float) -> Iterator[range]:
        """Parts of a batch, as long as there is time and the store is open, which it stays until the part is done."""
        for first in range(0, len(indices), CHUNK):
            with self._entrance.entered() as entered:
                if not entered or time.monotonic() >= deadline:
                    return
                yield indices[first : first + CHUNK]

    def _call(self, what: str, names: list[str], *views: list[memoryview]) -> tuple[Any, Any, Any]:
        """Have LMCache do something and wait for it: whether all went well, what not, and the answers per key.

        It can't be given up while LMCache uses the buffers. One of the threads that wait listens for all.
        """
        submit: Callable[..., int] = getattr(self._client, f"submit_batch_{what}")
        keys = [self._key(name) for name in names]
        with self._news:  # so that the result can't come before this one waits for it
            try:
                number = submit(keys, *views)
            except Exception as error:
                _LOG.debug("LMCache refused %s: %r", what, error)
                return False, "", None
        while True:
            with self._news:
                self._news.wait_for(lambda: number in self._results or not self._listening)
                if number in self._results:
                    return self._results.pop(number)
                self._listening = True
            found = []
            try:
                select.select([self._client.event_fd()], [], [], 60)
                found = self._client.drain_completions()
            finally:
                with self._news:
                    self._results.update((done[0], tuple(done[1:4])) for done in found)
                    self._listening = False
                    self._news.notify_all()

    def _name(self, key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()

    def _key(self, name: str) -> str:
        """What LMCache takes for a key: model, rank, group and hash."""
        return f"{self._model}@00000000@0@{name}"

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, f"{self._model}@0x00000000@0@{name}.data")

    def _size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none, -1 where that can't be told."""
        try:
            return os.stat(self._path(name)).st_size
        except FileNotFoundError:
            return None
        except OSError:
            return -1

    def _file_bytes(self, buffer: memoryview) -> int:
        if self._bounce is None:
            return buffer.nbytes
        return -(-(buffer.nbytes + _LENGTH.size) // _BLOCK) * _BLOCK

    def _views(self, buffers: list[memoryview], fill: bool) -> list[memoryview]:
        """The memory that LMCache gets: the buffers, or blocks of this thread that direct I/O can use."""
        if self._bounce is None:
            return [memoryview(buffer) for buffer in buffers]
        sizes = [self._file_bytes(buffer) for buffer in buffers]
        region = getattr(self._bounce, "region", b"")
        if len(region) < sum(sizes):
            region = self._bounce.region = mmap.mmap(-1, sum(sizes))
        views, first = [], 0
        for buffer, size in zip(buffers, sizes, strict=True):
            view = memoryview(region)[first : first + size]
            if fill:
                view[: buffer.nbytes] = buffer
                view[buffer.nbytes :] = bytes(size - buffer.nbytes)
                view[-_LENGTH.size :] = _LENGTH.pack(buffer.nbytes, buffer.nbytes ^ _ONES)
            views.append(view)
            first += size
        return views

    def _copy_out(self, name: str, view: memoryview, buffer: memoryview) -> Fetch:
        if self._bounce is None:
            return Fetch.HIT
        length, complement = _LENGTH.unpack(view[-_LENGTH.size :])
        if length ^ complement != _ONES:
            self._call("delete", [name])  # damaged: a put would find it there, for ever
        if length != buffer.nbytes or length ^ complement != _ONES:
            return Fetch.FAILED
        buffer[:] = view[: buffer.nbytes]
        return Fetch.HIT

    def _files(self) -> Iterator[str]:
        start = f"{self._model}@"
        for name in _names_in(self._directory):
            if name.startswith(start) and name.endswith(".data"):
                yield os.path.join(self._directory, name)

    def _check_names(self) -> None:
        """See that files are where this store looks for them."""
        name = self._name(f"probe {os.getpid()} {time.monotonic_ns()}")
        self._call("set", [name], self._views([memoryview(bytearray(_BLOCK))], fill=True))
        there = self._size(name)
        self._call("delete", [name])
        if there is None:
            self.close()
            raise RuntimeError(f"LMCache can't write into {self._directory}, or doesn't name its files as 0.5.6 does")


def _names_in(directory: str) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            yield from (entry.name for entry in entries if not entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return


def open_url(address: str, object_bytes: int, options: Mapping[str, Any]) -> LmcacheFileStore:
    """`lmcache:///path?workers=4&direct=false`. Raises ValueError for what it doesn't understand."""
    directory = directory_of(address)
    taken = take_options(address, options, {"workers": int, "direct": parse_flag})
    if taken.get("workers", 1) < 1:
        raise ValueError(f"{address}: workers must be at least 1")
    return LmcacheFileStore(directory, **taken)
