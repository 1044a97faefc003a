"""The embedded store: a directory with one data file of equal slots and an index, which several processes may share.

The data file is allocated once, so that the store can't grow and the disk can't become full under it. Readers take no
lock. A kill costs nothing but what was being written; a loss of power costs what the system had not yet written, which
the trailers of the pages tell. The directory must be on a local file system: neither flock nor LMDB is for NFS.
A forked child can neither use a store that its parent has open nor open it once more: start processes by spawn.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import re
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from purecache.stores.directories import refuse_plants, warn_of_others
from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.local_index import Entry, Index, IndexUnusable, Owners, Reservation
from purecache.stores.local_pages import BLOCK, Pages

_FORMAT = 1
_FILES = ("setup.lock", "meta.json", "meta.json.new", "pages", "pages.new")
_INDEX = re.compile("index-[0-9a-f]{8}")
_META_BYTES = 1 << 16
_LOG = logging.getLogger(__name__)


class LocalStoreError(RuntimeError):
    """A store can't be opened; the text says what to do."""


class LocalStore(Store):
    """Objects of up to `object_bytes` in `capacity_bytes // slot` slots; the least recently used ones make room.

    A slot is `object_bytes` rounded up to 4 KiB. With `direct`, pages pass by the page cache of the system where the
    file system can do that; buffers aligned to 4 KiB are then written and read without a copy.
    """

    def __init__(
        self, directory: str | os.PathLike[str], object_bytes: int, capacity_bytes: int, direct: bool = False
    ) -> None:
        """Open the store in `directory`, or make one. Raises ValueError for sizes and LocalStoreError."""
        if object_bytes < 1:
            raise ValueError(f"object_bytes must be positive, not {object_bytes}")
        self._object_bytes = object_bytes
        self._slot_bytes = -(-object_bytes // BLOCK) * BLOCK
        self._slots = capacity_bytes // self._slot_bytes
        if self._slots < 1:
            raise ValueError(
                f"capacity_bytes={capacity_bytes} has no room for one object of {object_bytes} bytes, "
                f"which takes {self._slot_bytes}"
            )
        self._process = os.getpid()
        self._idle = threading.Condition()
        self._busy = 0
        self._closed = False
        self._touched: dict[bytes, None] = {}
        self._unused: list[Reservation] = []
        self._numbers = {"evictions": 0, "reclaimed": 0, "failures": 0}
        try:
            with contextlib.ExitStack() as stack:
                self._open(Path(directory), direct, stack)
                self._resources = stack.pop_all()
        except (OSError, lmdb.Error) as error:
            raise LocalStoreError(_advice(Path(directory), error, self._slots * self._slot_bytes)) from error

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`. Asking is no use: it does not keep an object."""
        answers = [Presence.UNKNOWN] * len(keys)
        self._attempt(partial(self._exists, keys, deadline, answers))
        return answers

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`. An object that is evicted while it is read is MISSING."""
        answers = [Fetch.FAILED] * len(keys)
        self._attempt(partial(self._get, keys, buffers, deadline, answers))
        return answers

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`. Of a batch with more objects than slots, the rest is False."""
        answers = [False] * len(keys)
        self._attempt(partial(self._put, keys, buffers, deadline, answers))
        return answers

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`."""
        answers = [False] * len(keys)
        self._attempt(partial(self._delete, keys, deadline, answers))
        return answers

    def clear(self) -> None:
        """See `Store.clear`. A failure is counted in `stats`."""
        self._attempt(self._index.clear)

    def stats(self) -> dict[str, int]:
        """`objects`, `pending`, `free` and `slots` of the directory; `bytes` used by the first two, and `capacity`.

        Of this handle: `evictions`, slots `reclaimed` of dead processes, and calls with `failures`.
        """
        counts = {"objects": 0, "pending": 0, "free": 0, "slots": self._slots}
        self._attempt(lambda: counts.update(self._index.counts()))
        used = (counts["objects"] + counts["pending"]) * self._slot_bytes
        return counts | {"bytes": used, "capacity": self._slots * self._slot_bytes} | self._numbers

    def close(self) -> None:
        """See `Store.close`. Waits for calls in other threads."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._busy == 0)
        if os.getpid() != self._process:
            return  # all of it is the parent's
        if self._touched or self._unused:
            with contextlib.suppress(OSError, lmdb.Error, IndexUnusable, OverflowError, struct.error):
                self._index.note(self._take_touched(), self._unused)
        self._resources.close()

    def _open(self, directory: Path, direct: bool, stack: contextlib.ExitStack) -> None:
        owners = directory / "owners"
        owners.mkdir(mode=0o700, parents=True, exist_ok=True)
        warn_of_others(directory)
        indexes = list(directory.glob("index-*"))
        refuse_plants((), (owners, *indexes))
        refuse_plants([directory / name for name in _FILES], ())
        refuse_plants([index / name for index in indexes for name in ("data.mdb", "lock.mdb")], ())
        with _locked(directory / "setup.lock"):
            self._owners = Owners(owners)
            stack.callback(self._owners.close)
            self._owners.sweep()
            meta = _read_meta(directory)
            if meta is None:
                self._refuse_foreign(directory)
                meta = self._make(directory)
            wanted = {"format": _FORMAT, "object_bytes": self._object_bytes, "slots": self._slots}
            if any(meta.get(name) != value for name, value in wanted.items()):
                raise LocalStoreError(_mismatch(directory, meta, wanted))
            if _size(directory / "pages") != self._slots * self._slot_bytes:
                meta = self._make(directory)
            try:
                self._index = Index(directory / meta["index"], self._slots, self._owners.id)
            except (IndexUnusable, FileNotFoundError) as error:
                _LOG.warning("the index of %s is unusable (%s): starting with an empty one", directory, error)
                meta = self._renew_index(directory)
                self._index = Index(directory / meta["index"], self._slots, self._owners.id)
            stack.callback(self._index.close)
            self._open_pages(directory / "pages", direct, stack)
            self._reclaim(self._index.owners(self._slots + 1))

    # Who moves the bytes in another way overrides the next three; `nixl_slab` does.

    def _open_pages(self, path: Path, direct: bool, stack: contextlib.ExitStack) -> None:
        """Open the data file until `stack` is closed. Raises OSError."""
        self._pages = Pages(path, self._slots, self._slot_bytes, direct, stack)

    def _read_slots(self, slots: Sequence[int], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """Fill each buffer from its slot; which were filled. One that can't be read fails alone."""
        answers = [False] * len(slots)
        for place, (slot, buffer) in enumerate(zip(slots, buffers, strict=True)):
            with contextlib.suppress(OSError):
                answers[place] = time.monotonic() < deadline and self._pages.read(slot, buffer)
        return answers

    def _write_slots(self, slots: Sequence[int], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """Write each buffer to its slot; which were written whole. No write goes on after the answer."""
        answers = [False] * len(slots)
        for place, (slot, buffer) in enumerate(zip(slots, buffers, strict=True)):
            with contextlib.suppress(OSError):
                if time.monotonic() < deadline:
                    self._pages.write(slot, buffer)
                    answers[place] = True
        return answers

    def _refuse_foreign(self, directory: Path) -> None:
        ours = {"owners", "setup.lock", "pages", "pages.new", "meta.json", "meta.json.new", "lost+found"}
        foreign = [name for name in os.listdir(directory) if name not in ours and not name.startswith("index-")]
        if foreign:
            raise LocalStoreError(f"{directory} is no store, and has other files ({foreign[0]}): give an empty one")
        if self._owners.others():
            raise LocalStoreError(f"{directory} has lost its meta.json while it is in use: close the store everywhere")

    def _make(self, directory: Path) -> dict[str, Any]:
        """Allocate the data file, then name an index for it; a kill in between is made good by the next who opens."""
        new = directory / "pages.new"
        try:
            with open(new, "wb", opener=partial(os.open, mode=0o600)) as file:
                os.posix_fallocate(file.fileno(), 0, self._slots * self._slot_bytes)
            os.replace(new, directory / "pages")
        except OSError:
            new.unlink(missing_ok=True)
            raise
        return self._renew_index(directory)

    def _renew_index(self, directory: Path) -> dict[str, Any]:
        """Go on with an index under a new name: whoever has the old one open notices that it is gone."""
        name = f"index-{secrets.token_hex(4)}"
        (directory / name).mkdir(mode=0o700)
        meta = {"format": _FORMAT, "object_bytes": self._object_bytes, "slots": self._slots, "index": name}
        new = directory / "meta.json.new"
        with open(new, "w", opener=partial(os.open, mode=0o600)) as file:
            json.dump(meta, file)
        os.replace(new, directory / "meta.json")
        for old in directory.glob("index-*"):
            if old.name != name:
                for file in (old / "data.mdb", old / "lock.mdb"):
                    file.unlink(missing_ok=True)
                old.rmdir()
        return meta

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do `work` unless the store is closed; what goes wrong is counted, and the answers prepared stand."""
        with self._idle:
            if self._closed:
                return
            self._busy += 1
        try:
            if os.getpid() != self._process:
                raise OSError("a store does not work in a forked process: start processes by spawn")
            if not self._index.is_current():
                raise OSError("the index was deleted or replaced: close the store and open it again")
            work()
        except (OSError, lmdb.Error, IndexUnusable, OverflowError, struct.error) as error:  # the last: a damaged index
            level = logging.DEBUG if self._numbers["failures"] else logging.WARNING
            self._count("failures", 1)
            _LOG.log(level, "a local store failed (more of it at level DEBUG): %s", error)
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def _exists(self, keys: Sequence[str], deadline: float, answers: list[Presence]) -> None:
        if time.monotonic() < deadline:
            entries = self._index.look_up(_encoded(keys))
            answers[:] = [Presence.NO if entry is None else Presence.YES for entry in entries]

    def _get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float, answers: list[Fetch]) -> None:
        names = _encoded(keys)
        entries = self._index.look_up(names)
        places, slots = list[int](), list[int]()
        for place, (entry, buffer) in enumerate(zip(entries, buffers, strict=True)):
            if entry is None:
                answers[place] = Fetch.MISSING
            elif entry.nbytes == buffer.nbytes:
                places.append(place)
                slots.append(entry.slot)
        read = self._read_slots(slots, [buffers[place] for place in places], deadline)
        self._confirm(names, entries, list(itertools.compress(places, read)), answers)

    def _confirm(
        self, names: list[bytes], entries: list[Entry | None], filled: list[int], answers: list[Fetch]
    ) -> None:
        """A slot is overwritten only after its entry is gone: what stands there still was whole when it was read."""
        now = self._index.look_up([names[place] for place in filled])
        for place, entry in zip(filled, now, strict=True):
            before = entries[place]
            is_same = before is not None and entry is not None and before[:3] == entry[:3]
            answers[place] = Fetch.HIT if is_same else Fetch.MISSING
        with self._idle:
            for place in filled:
                if answers[place] == Fetch.HIT:
                    self._touched.pop(names[place], None)
                    self._touched[names[place]] = None
            while len(self._touched) > self._slots:  # some are not there any more
                del self._touched[next(iter(self._touched))]

    def _put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float, answers: list[bool]) -> None:
        names = _encoded(keys)
        sizes = [buffer.nbytes for _, buffer in zip(names, buffers, strict=True)]
        wanted = [place for place, size in enumerate(sizes) if size <= self._object_bytes]
        if time.monotonic() >= deadline or not wanted:
            return
        there = self._index.look_up([names[place] for place in wanted])
        if None not in there:  # no need to write anything
            for place in wanted:
                answers[place] = True
            with self._idle:
                for place in wanted:
                    self._touched.pop(names[place], None)
                    self._touched[names[place]] = None
            return
        self._reclaim(self._index.owners(there.count(None)))
        with self._idle:
            unused = tuple(self._unused)
        plan = self._index.reserve([names[place] for place in wanted], self._take_touched(), unused)
        with self._idle:
            self._unused = [slot for slot in self._unused if slot not in unused]
        self._count("evictions", plan.evicted)
        places: list[tuple[int, Reservation]] = []
        for place, answer in zip(wanted, plan.answers, strict=True):
            answers[place] = answer is True
            if isinstance(answer, Reservation):
                places.append((place, answer))
        self._write(names, buffers, places, deadline, answers)

    def _write(
        self,
        names: list[bytes],
        buffers: Sequence[memoryview],
        places: list[tuple[int, Reservation]],
        deadline: float,
        answers: list[bool],
    ) -> None:
        """Fill slots and publish them. Whatever happens, they are ours no longer, or noted to be given back."""
        try:
            slots = [reservation.slot for _, reservation in places]
            whole = self._write_slots(slots, [buffers[place] for place, _ in places], deadline)
            written = dict(itertools.compress(places, whole))
            done = [(names[place], buffers[place].nbytes, slot) for place, slot in written.items()]
            unused = [slot for place, slot in places if place not in written]
            published = self._index.publish(done, unused)
        except BaseException:
            with self._idle:
                self._unused += [slot for _, slot in places]  # a reservation that is over is not given back twice
            raise
        for place, answer in zip(written, published, strict=True):
            answers[place] = answer

    def _delete(self, keys: Sequence[str], deadline: float, answers: list[bool]) -> None:
        if time.monotonic() < deadline:
            names = _encoded(keys)
            if any(self._index.look_up(names)):
                self._index.delete(names)
            answers[:] = [True] * len(keys)

    def _reclaim(self, owners: set[bytes]) -> None:
        dead = self._owners.dead(owners)
        if dead:
            self._count("reclaimed", self._index.reclaim(dead))

    def _take_touched(self) -> list[bytes]:
        with self._idle:
            touched, self._touched = self._touched, {}
            return list(touched)

    def _count(self, name: str, number: int) -> None:
        with self._idle:
            self._numbers[name] += number


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode("ascii") for key in keys]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time makes, opens or repairs a store."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _read_meta(directory: Path) -> dict[str, Any] | None:
    try:
        with (directory / "meta.json").open("rb") as file:
            meta = json.loads(file.read(_META_BYTES))
    except (FileNotFoundError, ValueError):
        return None
    return meta if isinstance(meta, dict) and _INDEX.fullmatch(str(meta.get("index", ""))) else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _mismatch(directory: Path, meta: dict[str, Any], wanted: dict[str, int]) -> str:
    found = {name: meta.get(name) for name in wanted}
    return (
        f"the store in {directory} was made with {found}, not with {wanted}: open it with these sizes, "
        "give another directory, or delete this one"
    )


def _advice(directory: Path, error: Exception, size: int) -> str:
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, lmdb.DiskError):
        return f"the disk of {directory} has no room for a store of {size} bytes: make room, or lower capacity_bytes"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS) or isinstance(error, lmdb.ReadonlyError):
        return f"no permission to read and write the store in {directory} ({error}): give another directory"
    return f"can't open the store in {directory}: {error}"
