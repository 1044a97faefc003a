"""Which files a file store has: how they are found on disk, their order of use, and how many bytes they may take."""

import errno
import os
import re
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from purecache.stores.envelope import MAGIC, TRAILER, VERSION, key_digest

SUFFIX = ".page"
"""Ends the name of an object's file, behind its key."""
TEMPORARY = ".tmp-"
"""Begins the name of a file that is being written."""
TEMPORARY_SECONDS = 900.0
"""A temporary file of this age is nobody's: what opens the store next removes it."""

KEY = re.compile(r"[A-Za-z0-9._-]{1,200}")
_FAN = re.compile(r"[0-9a-f]{2}")
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
# Neither a link nor a pipe in the place of a file may lead or hold us elsewhere.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_HEAD = struct.Struct("<8sIIQ16x16s")
TOUCH_SECONDS = 60.0
"""A file's time is set again by a hit at most this often."""


class Entry(NamedTuple):
    """One known file."""

    size: int
    """Its length in bytes."""
    touched: float
    """When its time on disk was last set by this process (`time.monotonic`), or -inf."""
    checked: bool
    """Whether it was read, or written by this process, or ends as it should."""


class FileQuota:
    """The index of one process: keys in order of use, their sizes, and the room that running writes have reserved.

    `remove(key)` deletes a file and says whether it is gone. It is called without the lock of the index, so that no
    reader waits for the file system. All methods may be called from several threads.
    """

    def __init__(self, directory: str, capacity: int, min_free: int, remove: Callable[[str], bool]) -> None:
        self.capacity = capacity
        self._directory = directory
        self._min_free = min_free
        self._remove = remove
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self._used = 0
        self._reserved = 0
        self._evictions = 0
        self._lock = threading.Lock()
        self._evicting = threading.Lock()  # one evicts at a time, so that two writers don't both make the same room

    def find(self, key: str) -> Entry | None:
        """What is known of a key; for `drop`, which must not drop what was written since."""
        with self._lock:
            return self._entries.get(key)

    def record(self, key: str, size: int, touched: float = -float("inf")) -> None:
        """A good file is there: the most recently used one now."""
        with self._lock:
            self._set(key, Entry(size, touched, True))
            self._entries.move_to_end(key)

    def adopt(self, key: str, size: int, checked: bool = False) -> None:
        """A file was seen that another process may have written: count it, unless it is known. Not a use."""
        with self._lock:
            known = self._entries.get(key)
            if known is None or known.size != size:
                self._set(key, Entry(size, -float("inf"), checked))
            elif checked and not known.checked:
                self._entries[key] = known._replace(checked=True)

    def use(self, keys: Collection[str]) -> None:
        """Keys of one batch were used. The first counts as the most recent: the head of a prefix is worth most."""
        with self._lock:
            for key in reversed(list(keys)):
                if key in self._entries:
                    self._entries.move_to_end(key)

    def touch_is_due(self, key: str) -> bool:
        """Whether the file's time should be set again; notes that it is."""
        now = time.monotonic()
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or now - entry.touched < TOUCH_SECONDS:
                return False
            self._entries[key] = entry._replace(touched=now)
            return True

    def drop(self, key: str, entry: Entry | None) -> None:
        """The file is gone; `entry` is what `find` said before that was seen."""
        with self._lock:
            if entry is not None and self._entries.get(key) is entry:
                del self._entries[key]
                self._used -= entry.size

    def reserve(self, size: int, keep: Collection[str], deadline: float) -> bool:
        """Room for a file of `size` bytes, for which others but those in `keep` may go. Then `release` when written."""
        if size > self.capacity:
            return False
        with self._evicting:
            while True:
                with self._lock:
                    if self._used + self._reserved + size <= self.capacity:
                        self._reserved += size
                        break
                if self._evict_one(keep, deadline) is None:
                    return False
            if self._has_free_space(size, keep, deadline):
                return True
        self.release(size)
        return False

    def resize(self, capacity: int, deadline: float) -> None:
        """Allow so many bytes from now on, and remove what is too much until `deadline`; writes remove the rest.

        Raises ValueError for a capacity below 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity_bytes must be at least 1, not {capacity}")
        self.capacity = capacity
        with self._lock:
            excess = self._used + self._reserved - capacity
        self.evict(excess, (), deadline)

    def release(self, size: int) -> None:
        """The reserved room was used (and recorded), or isn't needed."""
        with self._lock:
            self._reserved -= size

    def evict(self, size: int, keep: Collection[str], deadline: float) -> bool:
        """Remove files of at least `size` bytes together; whether that was possible."""
        with self._evicting:
            return self._evict(size, keep, deadline)

    def numbers(self) -> dict[str, int]:
        """`objects`, `bytes`, `capacity`, `evictions`."""
        with self._lock:
            return {
                "objects": len(self._entries),
                "bytes": self._used,
                "capacity": self.capacity,
                "evictions": self._evictions,
            }

    def _set(self, key: str, entry: Entry) -> None:
        old = self._entries.get(key)
        self._used += entry.size - (old.size if old else 0)
        self._entries[key] = entry

    def _has_free_space(self, size: int, keep: Collection[str], deadline: float) -> bool:
        """Whether the file system keeps its minimum of free bytes; evicts what lacks, but never more than that."""
        if self._min_free == 0:
            return True  # a full disk is noticed by the write; no round trip to a file server for every object
        lack = self._min_free + size - self._free_bytes()
        if lack <= 0:
            return True
        return self._evict(lack, keep, deadline) and self._free_bytes() >= self._min_free + size

    def _free_bytes(self) -> int:
        try:
            numbers = os.statvfs(self._directory)
        except OSError:
            return 0
        return numbers.f_bavail * numbers.f_frsize

    def _evict(self, size: int, keep: Collection[str], deadline: float) -> bool:
        while size > 0:
            evicted = self._evict_one(keep, deadline)
            if evicted is None:
                return False
            size -= evicted
        return True

    def _evict_one(self, keep: Collection[str], deadline: float) -> int | None:
        """Bytes that the removed file took, or None: there is none, it can't be removed, or it is too late."""
        if time.monotonic() >= deadline:
            return None
        with self._lock:
            key = next((key for key in self._entries if key not in keep), None)
            if key is None:
                return None
            entry = self._entries.pop(key)
            self._used -= entry.size
        if self._remove(key):
            with self._lock:
                self._evictions += 1
            return entry.size
        self.record(key, entry.size)  # still there, and counted; as the newest one, so that others are tried first
        return None


def walk(directory: str) -> Iterator[tuple[tuple[str, str], os.DirEntry[str]]]:
    """Everything in the directories of objects (and temporary files above), with the two names that lead to it.

    A file where a directory should be is left out, and so is what can't be read.
    """
    for top in _entries(directory):
        if is_temporary(top.name):
            yield ("", ""), top
        elif _is_fan(top):
            for below in _entries(top.path):
                if _is_fan(below):
                    for entry in _entries(below.path):
                        yield (top.name, below.name), entry


def _is_fan(entry: os.DirEntry[str]) -> bool:
    """Whether this is one of the directories of objects. A link to one is not."""
    return _FAN.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def fan_of(key: str) -> tuple[str, str]:
    """The two directories, one in the other, that a key's file is in: two hex digits each."""
    digest = key_digest(key)[:2].hex()
    return digest[:2], digest[2:]


def key_of(fan: tuple[str, str], name: str) -> str | None:
    """The key of an object's file, or None where it isn't one, or stands where nobody would look for it."""
    key = name.removesuffix(SUFFIX)
    return key if key != name and KEY.fullmatch(key) and fan_of(key) == fan else None


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    """What is in a directory; nothing where that can't be read, or is none."""
    try:
        with os.scandir(path) as entries:
            yield from entries
    except OSError:
        return


def ends_well(path: str, key: str) -> os.stat_result | None:
    """The status of a file that ends with a trailer of `key` and its own length. Raises OSError."""
    descriptor = os.open(path, READ_FLAGS)
    try:
        status = os.fstat(descriptor)
        trailer = memoryview(bytearray(TRAILER))
        start = status.st_size - TRAILER
        if not stat.S_ISREG(status.st_mode) or start < 0 or not fill(descriptor, trailer, start):
            return None
    finally:
        os.close(descriptor)
    magic, version, _, length, owner = _HEAD.unpack_from(trailer)
    return status if (magic, version, length, owner) == (MAGIC, VERSION, start, key_digest(key)) else None


def fill(descriptor: int, buffer: memoryview, offset: int) -> bool:
    """Read until the buffer is full; False where the file ends before."""
    buffer = buffer.cast("B")
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True


def is_temporary(name: str) -> bool:
    """Whether a file is being written, or was. A key may begin in the same way, but its file ends as an object's."""
    return name.startswith(TEMPORARY) and not name.endswith(SUFFIX)


def sweep(entry: os.DirEntry[str], before: float) -> bool:
    """Whether a temporary file was so old that it is gone now."""
    try:
        return entry.stat(follow_symlinks=False).st_mtime < before and unlink(entry.path)
    except OSError:
        return False


def unlink(path: str) -> bool:
    """Whether there is no such file now. A directory in its place is no file."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        return True
    except OSError as error:
        return error.errno in GONE
    return True
