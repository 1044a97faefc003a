"""Which page of the data file of an `hf3fs` store holds which object, and the head by which a page says it itself.

The order of a write is always: reserve a page, write it, confirm it. A reserved page belongs to nobody else, and no
reader is sent to it. An index may still be wrong: after a crash it may be older than the data, so that a key leads to
a page that another object has now. Therefore every page begins with a head that has its key, length and checksum.
"""

import abc
import contextlib
import hashlib
import json
import logging
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from purecache.stores.interface import Presence

_HEAD = struct.Struct("<8sQ16s16s")
_SUM = struct.Struct("<Q8x")
_MAGIC = b"pchf3fs1"
HEAD = _HEAD.size + _SUM.size
"""Bytes in front of an object in its page: 64."""
_FORMAT = 1
_LINE = 256
_LOG = logging.getLogger(__name__)


def write_head(page: memoryview, key: str) -> None:
    """Write the head of a page whose object stands behind it already, up to the end of `page`."""
    content = page[HEAD:]
    head = _HEAD.pack(_MAGIC, content.nbytes, xxhash.xxh3_128_digest(content), _digest(key))
    page[:HEAD] = head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def check_head(page: memoryview, key: str) -> bool | None:
    """True: `page` is exactly the object of `key`. None: its object has another length. False: it is anything else."""
    head, content = bytes(page[: _HEAD.size]), page[HEAD:]
    magic, nbytes, checksum, digest = _HEAD.unpack(head)
    is_whole = _SUM.unpack(page[_HEAD.size : HEAD]) == (xxhash.xxh3_64_intdigest(head),)
    if not is_whole or magic != _MAGIC or digest != _digest(key):
        return False
    return None if nbytes != content.nbytes else checksum == xxhash.xxh3_128_digest(content)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


class PageIndex(abc.ABC):
    """The index, wherever it is kept. Methods raise OSError where it can't be asked; any thread may call them.

    `deadline` is on the clock of `time.monotonic`.
    """

    @abc.abstractmethod
    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """Whether each key has a page. No use of it: it keeps nothing from eviction."""

    @abc.abstractmethod
    def find(self, keys: Sequence[str], deadline: float) -> list[int | None]:
        """The page of each key, now among the most recently used ones."""

    @abc.abstractmethod
    def reserve(self, keys: Sequence[str], deadline: float) -> list[int | bool]:
        """For each of different keys: True (it is there), a page to write it to, or False (there is no room)."""

    @abc.abstractmethod
    def confirm(self, written: Sequence[tuple[str, int]], unused: Sequence[int], deadline: float) -> list[bool]:
        """Make written pages known, and give unused ones back. Whether each key has a page with its object now."""

    @abc.abstractmethod
    def forget(self, keys: Sequence[str], deadline: float) -> None:
        """Remove keys; their pages are free."""

    @abc.abstractmethod
    def drop(self, key: str, page: int, deadline: float) -> None:
        """Remove a key if it still leads to this page, which has something else."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Remove all keys."""

    @abc.abstractmethod
    def counts(self) -> dict[str, int]:
        """`objects`, as far as known here, and other numbers."""

    @abc.abstractmethod
    def close(self) -> None:
        """Save what is to be kept, and let go of connections."""


class LocalIndex(PageIndex):
    """The index of one process, in its memory, for a directory that no other process uses.

    It is saved to `file` by `close`, and by a thread that a confirmation starts `save_seconds` after the last one. A
    killed process loses what came later: those pages are written anew. A key of the old file that leads to a page of
    another object is found out by the head of that page.
    """

    def __init__(self, file: Path, pages: int, save_seconds: float = 30.0) -> None:
        """Load `file`, if there is one. What is damaged in it counts as absent. Raises OSError if it can't be read."""
        self._file, self._pages, self._save_seconds = file, pages, save_seconds
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._entries: OrderedDict[str, int] = OrderedDict(_load(file, pages))  # least recently used first
        taken = set(self._entries.values())
        self._free = [page for page in range(pages - 1, -1, -1) if page not in taken]  # the lowest is taken first
        self._evictions = 0
        self._ended = False
        self._saved_at = time.monotonic()

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `PageIndex.exists`."""
        with self._lock:
            return [Presence.YES if key in self._entries else Presence.NO for key in keys]

    def find(self, keys: Sequence[str], deadline: float) -> list[int | None]:
        """See `PageIndex.find`. Of a batch, the first key counts as the most recently used one."""
        with self._lock:
            self._touch(keys)
            return [self._entries.get(key) for key in keys]

    def reserve(self, keys: Sequence[str], deadline: float) -> list[int | bool]:
        """See `PageIndex.reserve`. It never evicts what its own batch names."""
        with self._lock:
            self._touch(keys)
            batch = frozenset(keys)
            return [True if key in self._entries else self._take(batch) for key in keys]

    def confirm(self, written: Sequence[tuple[str, int]], unused: Sequence[int], deadline: float) -> list[bool]:
        """See `PageIndex.confirm`."""
        with self._lock:
            for key, page in reversed(written):
                if key in self._entries:  # another thread was faster, and a key has but one content
                    self._free.append(page)
                else:
                    self._entries[key] = page
            self._free.extend(unused)
            due = time.monotonic() - self._saved_at >= self._save_seconds
            if due:
                self._saved_at = time.monotonic()
        if due:
            with contextlib.suppress(RuntimeError, MemoryError):  # no thread to be had: the next time, then
                threading.Thread(target=self._save, args=(False,), name="purecache hf3fs index", daemon=True).start()
        return [True] * len(written)

    def forget(self, keys: Sequence[str], deadline: float) -> None:
        """See `PageIndex.forget`."""
        with self._lock:
            for key in keys:
                self._remove(key)

    def drop(self, key: str, page: int, deadline: float) -> None:
        """See `PageIndex.drop`."""
        with self._lock:
            if self._entries.get(key) == page:
                self._remove(key)

    def clear(self) -> None:
        """See `PageIndex.clear`. What is being written at the moment stays reserved, and is confirmed later."""
        with self._lock:
            for key in list(self._entries):
                self._remove(key)

    def counts(self) -> dict[str, int]:
        """`objects`, `free` and `pages` (of the file), and `evictions` of this process."""
        with self._lock:
            objects, free = len(self._entries), len(self._free)
        return {"objects": objects, "free": free, "pages": self._pages, "evictions": self._evictions}

    def close(self) -> None:
        """See `PageIndex.close`."""
        self._save(at_the_end=True)

    def _touch(self, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)

    def _take(self, batch: frozenset[str]) -> int | bool:
        if self._free:
            return self._free.pop()
        victim = next((key for key in self._entries if key not in batch), None)
        if victim is None:
            return False
        self._evictions += 1
        return self._entries.pop(victim)

    def _remove(self, key: str) -> None:
        page = self._entries.pop(key, None)
        if page is not None:
            self._free.append(page)

    def _save(self, at_the_end: bool) -> None:
        """Replace the file as a whole. A failure costs the index of the next process, and no more."""
        with self._saving:
            if self._ended:  # the directory may be another's by now
                return
            self._ended = at_the_end
            with self._lock:
                entries = list(self._entries.items())
            new = self._file.with_name(self._file.name + ".new")
            try:
                with open(new, "w", encoding="ascii") as file:
                    head = {"format": _FORMAT, "pages": self._pages, "entries": len(entries)}
                    file.write(json.dumps(head) + "\n")
                    # In small lines: nothing else in the process runs while one is made.
                    for first in range(0, len(entries), _LINE):
                        file.write(json.dumps(entries[first : first + _LINE]) + "\n")
                os.replace(new, self._file)
            except OSError as error:
                _LOG.warning("can't save the index %s: %s", self._file, error)
                with contextlib.suppress(OSError):
                    new.unlink()


def _load(file: Path, pages: int) -> Iterable[tuple[str, int]]:
    try:
        with open(file, "rb") as lines:
            head: Any = json.loads(lines.readline())
            entries = [entry for line in lines for entry in json.loads(line)]
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError):
        head, entries = None, []
    if head == {"format": _FORMAT, "pages": pages, "entries": len(entries)}:
        found = [(entry[0], entry[1]) for entry in entries if _is_entry(entry, pages)]
        if len(found) == len(entries) == len({key for key, _ in found}) == len({page for _, page in found}):
            return found
    _LOG.warning("the index %s is damaged or of another store: starting with an empty one", file)
    return ()


def _is_entry(entry: Any, pages: int) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and type(entry[1]) is int
        and 0 <= entry[1] < pages
    )
