"""A store of one plain file per object, for shared file systems such as NFS, and for looking into it."""

import contextlib
import errno
import itertools
import os
import stat
import time
from collections.abc import Sequence, Set

from purecache.stores.directories import is_own_directory, warn_of_others
from purecache.stores.envelope import TRAILER
from purecache.stores.files_quota import (
    GONE,
    KEY,
    READ_FLAGS,
    SUFFIX,
    TEMPORARY,
    TEMPORARY_SECONDS,
    FileQuota,
    ends_well,
    fan_of,
    fill,
    is_temporary,
    key_of,
    sweep,
    unlink,
    walk,
)
from purecache.stores.interface import Fetch, Presence, Store

_FULL = (errno.ENOSPC, errno.EDQUOT)
RESIZE_SECONDS = 1.0
"""How long `resize` removes files."""
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class FileStore(Store):
    """Files `<directory>/<2 hex>/<2 hex>/<key>.page`, each an object with its trailer, readable by the owner only.

    At most `capacity_bytes` of file contents together; the least recently used go first. A put that would leave less
    than `min_free_bytes` on the file system evicts first, and is refused where that doesn't help. Recency survives a
    restart about to the minute (as the time of the files). Nothing is synced: after a power failure a file may hold
    zeros, which its checksum tells.

    Several processes and machines may share a directory. Each keeps the capacity for what it has written, read or found
    at its start, so that all together may take more for a while: set `min_free_bytes` then. A call into a file system
    that hangs can't be broken off; deadlines are kept between objects.

    Raises ValueError for sizes that make no sense and OSError where the directory can't be made or written to. Opening
    reads the last 64 bytes of every file.
    """

    def __init__(self, directory: str | os.PathLike[str], capacity_bytes: int, min_free_bytes: int = 0) -> None:
        if capacity_bytes <= TRAILER:
            raise ValueError(f"capacity_bytes must be above {TRAILER}, not {capacity_bytes}")
        if min_free_bytes < 0:
            raise ValueError(f"min_free_bytes must not be negative, but is {min_free_bytes}")
        self._directory = os.path.abspath(os.fspath(directory))
        self._writer = f"{TEMPORARY}{os.urandom(8).hex()}"
        self._counter = itertools.count()
        self._quota = FileQuota(self._directory, capacity_bytes, min_free_bytes, self._remove)
        self._bad = self._swept = 0
        self._closed = False
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            now = self._file_system_time()
        except OSError as error:
            text = f"{error.strerror}; a file store needs a directory it can write to"
            raise OSError(error.errno, text, self._directory) from error
        warn_of_others(self._directory)
        self._scan(now)

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`. Asks the file system, so that it sees what others wrote and removed."""
        return [Presence.UNKNOWN if self._is_over(deadline) else self._look(key) for key in keys]

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`."""
        answers = [
            Fetch.FAILED if self._is_over(deadline) else self._read(key, buffer)
            for key, buffer in zip(keys, buffers, strict=True)
        ]
        self._quota.use([key for key, answer in zip(keys, answers, strict=True) if answer == Fetch.HIT])
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. A put evicts nothing that its own batch names."""
        batch = frozenset(keys)
        answers = [
            not self._is_over(deadline) and self._write(key, buffer, batch, deadline)
            for key, buffer in zip(keys, buffers, strict=True)
        ]
        self._quota.use([key for key, answer in zip(keys, answers, strict=True) if answer])
        return answers

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`."""
        return [not self._is_over(deadline) and self._forget(key) for key in keys]

    def clear(self) -> None:
        """Remove all objects in the directory, also those of other processes and the bad ones; other files stay."""
        for fan, entry in walk(self._directory):
            key = key_of(fan, entry.name)
            if key is not None:
                self._forget(key)
            elif is_temporary(entry.name):
                unlink(entry.path)

    def resize(self, capacity_bytes: int) -> bool:
        """See `Store.resize`: for this process; what is too much goes within a second, the rest with the next writes.

        Raises ValueError for a capacity below 1.
        """
        self._quota.resize(capacity_bytes, time.monotonic() + RESIZE_SECONDS)
        return True

    def stats(self) -> dict[str, int]:
        """`objects`, `bytes`, `capacity`, `evictions`; found at the start: `bad_files`, and `swept_files` (removed)."""
        return {**self._quota.numbers(), "bad_files": self._bad, "swept_files": self._swept}

    def close(self) -> None:
        """See `Store.close`. The files stay."""
        self._closed = True

    def _is_over(self, deadline: float) -> bool:
        return self._closed or time.monotonic() >= deadline

    def _path(self, key: str) -> str:
        if KEY.fullmatch(key) is None:
            raise ValueError(f"not a key: {key!r}; it has 1 to 200 letters, digits, '.', '_' and '-'")
        top, below = fan_of(key)
        return f"{self._directory}/{top}/{below}/{key}{SUFFIX}"

    def _leads_out(self, path: str) -> bool:
        """Whether a link in the place of a directory leads elsewhere: nothing there is ours."""
        below = os.path.dirname(path)
        return not is_own_directory(os.path.dirname(below), below)

    def _look(self, key: str) -> Presence:
        entry, path = self._quota.find(key), self._path(key)
        if self._leads_out(path):
            return Presence.NO
        try:
            status = os.lstat(path)
        except OSError as error:
            if error.errno not in GONE:
                return Presence.UNKNOWN
            self._quota.drop(key, entry)
            return Presence.NO
        if not stat.S_ISREG(status.st_mode):
            return Presence.NO
        self._quota.adopt(key, status.st_size)
        return Presence.YES

    def _read(self, key: str, buffer: memoryview) -> Fetch:
        entry, path = self._quota.find(key), self._path(key)
        if self._leads_out(path):
            return Fetch.MISSING
        try:
            descriptor = os.open(path, READ_FLAGS)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    return Fetch.MISSING
                whole = status.st_size == buffer.nbytes and fill(descriptor, buffer, 0)
                self._quota.adopt(key, status.st_size, checked=whole)
                if not whole:
                    return Fetch.FAILED
                self._touch(key, descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in GONE:
                return Fetch.FAILED
            self._quota.drop(key, entry)
            return Fetch.MISSING
        return Fetch.HIT

    def _touch(self, key: str, descriptor: int) -> None:
        if self._quota.touch_is_due(key):
            with contextlib.suppress(OSError):  # the file of another owner, say: its age is only a hint
                os.utime(descriptor)  # now, on the clock of the file system

    def _write(self, key: str, buffer: memoryview, batch: Set[str], deadline: float) -> bool:
        size, path = buffer.nbytes, self._path(key)
        if self._leads_out(path):
            return False
        if self._is_present(key, path, size):
            self._quota.adopt(key, size, checked=True)
            return True
        if not self._quota.reserve(size, batch, deadline):
            return False
        try:
            problem = self._publish(path, buffer)
            if problem in _FULL and self._quota.evict(size, batch, deadline):
                problem = self._publish(path, buffer)
            if problem == 0:
                self._quota.record(key, size, time.monotonic())
        finally:
            self._quota.release(size)
        return problem == 0

    def _is_present(self, key: str, path: str, size: int) -> bool:
        """Whether a file of the right length is there; one not checked yet must also end as an object of this key."""
        known = self._quota.find(key)
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                return False
            return (known is not None and known.checked) or ends_well(path, key) is not None
        except OSError:
            return False

    def _publish(self, path: str, buffer: memoryview) -> int:
        """Write a whole file and give it its name; 0, or the error number, with nothing left behind."""
        temporary = os.path.join(os.path.dirname(path), f"{self._writer}-{next(self._counter)}")
        try:
            descriptor = _create(temporary)
        except OSError as error:
            return error.errno or errno.EIO
        try:
            try:
                _write_all(descriptor, buffer)
            finally:
                os.close(descriptor)  # a file server may tell only here that it is full
            os.replace(temporary, path)
        except OSError as error:
            unlink(temporary)
            return error.errno or errno.EIO
        except BaseException:
            unlink(temporary)
            raise
        return 0

    def _forget(self, key: str) -> bool:
        entry = self._quota.find(key)
        gone = self._remove(key)
        if gone:
            self._quota.drop(key, entry)
        return gone

    def _remove(self, key: str) -> bool:
        path = self._path(key)
        return self._leads_out(path) or unlink(path)

    def _file_system_time(self) -> float:
        """What the file system takes for now: a file server has its own clock. Also tries that we can write."""
        probe = os.path.join(self._directory, f"{self._writer}-{next(self._counter)}")
        descriptor = os.open(probe, _WRITE, 0o600)
        try:
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
            unlink(probe)

    def _scan(self, now: float) -> None:
        """Find all objects, oldest first, and sweep what writers left behind; whatever is odd is counted and left."""
        found: list[tuple[float, str, int]] = []
        for fan, entry in walk(self._directory):
            if is_temporary(entry.name):
                self._swept += sweep(entry, now - TEMPORARY_SECONDS)
                continue
            key = key_of(fan, entry.name)
            try:
                status = None if key is None else ends_well(entry.path, key)
            except OSError as error:
                self._bad += error.errno not in GONE  # another process may remove it at any time
                continue
            if key is None or status is None:
                self._bad += 1
            else:
                found.append((status.st_mtime, key, status.st_size))
        for _, key, size in sorted(found):
            self._quota.record(key, size)
        if self._quota.reserve(0, (), float("inf")):  # a smaller capacity than last time
            self._quota.release(0)


def _create(temporary: str) -> int:
    """A descriptor of a new file, whose two directories are made where they lack."""
    try:
        return os.open(temporary, _WRITE, 0o600)
    except FileNotFoundError:
        parent = os.path.dirname(temporary)
        for directory in (os.path.dirname(parent), parent):
            try:
                os.mkdir(directory, 0o700)
            except FileExistsError:
                continue
        return os.open(temporary, _WRITE, 0o600)


def _write_all(descriptor: int, buffer: memoryview) -> None:
    buffer = buffer.cast("B")
    while buffer:
        buffer = buffer[os.write(descriptor, buffer) :]
