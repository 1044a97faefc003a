"""The books of a local store: which slot holds which object, kept in LMDB so that processes share them and none tears.

A slot is in one of four states: never used (its number is not below `fresh`), free, pending (an owner writes into it),
or indexed (it holds an object). Every change of state is one transaction; a killed process leaves pending slots behind
at worst, which anyone may free once the flock on the file of their owner is free.
"""

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import struct
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

VERSION = 1
OWNER_BYTES = 8
_ENTRY = struct.Struct("<QQQQ")
_NUMBER = struct.Struct(">Q")  # big-endian, so that LMDB's order is that of the numbers
_FACTS = struct.Struct("<QQQQ")
_TABLES = ("index", "lru", "free", "pending", "facts")
_OF_THE_SYSTEM = (lmdb.ReadonlyError, lmdb.DiskError, lmdb.LockError, lmdb.MemoryError, lmdb.ReadersFullError)
"""Errors at opening that a new index would meet as well, like those that LMDB has no class for."""


class IndexUnusable(Exception):
    """The index is not one, or of another version, or its numbers don't add up: only a new one helps."""


class Entry(NamedTuple):
    """Where an object lies. The sequence number is new with every publishing, so that a slot used anew is noticed."""

    slot: int
    nbytes: int
    sequence: int
    clock: int


class Reservation(NamedTuple):
    """A slot that its owner may write into."""

    slot: int
    sequence: int


class Plan(NamedTuple):
    """What `Index.reserve` did: per key, that it is there, where to write it, or (None) that there is no room."""

    answers: list[Reservation | bool | None]
    evicted: int


class Books:
    """The state of all slots within one write transaction; `save` before it ends."""

    def __init__(self, txn: Any, tables: dict[str, Any]) -> None:
        self.txn = txn
        self.tables = tables
        _, self.slots, self.clock, self.fresh = _FACTS.unpack(txn.get(b"facts", db=tables["facts"]))

    def save(self) -> None:
        """Write the counters back."""
        self.txn.put(b"facts", _FACTS.pack(VERSION, self.slots, self.clock, self.fresh), db=self.tables["facts"])

    def entry(self, key: bytes) -> Entry | None:
        """The entry of a key."""
        return _entry(self.txn, self.tables, key)

    def write(self, key: bytes, slot: int, nbytes: int, sequence: int) -> None:
        """Make a key the most recently used one, in a slot that is accounted to nothing else."""
        self.clock += 1
        self.txn.put(key, _ENTRY.pack(slot, nbytes, sequence, self.clock), db=self.tables["index"])
        self.txn.put(_NUMBER.pack(self.clock), key, db=self.tables["lru"], append=True)

    def touch(self, key: bytes) -> bool:
        """Make a key the most recently used one; False if it is not there."""
        entry = self.entry(key)
        if entry is None:
            return False
        self.txn.delete(_NUMBER.pack(entry.clock), db=self.tables["lru"])
        self.write(key, entry.slot, entry.nbytes, entry.sequence)
        return True

    def remove(self, key: bytes) -> int | None:
        """Take a key out of the index; its slot is then accounted to nothing."""
        entry = self.entry(key)
        if entry is None:
            return None
        self.txn.delete(key, db=self.tables["index"])
        self.txn.delete(_NUMBER.pack(entry.clock), db=self.tables["lru"])
        return entry.slot

    def free(self, slot: int) -> None:
        """Account a slot to the free ones."""
        self.txn.put(_NUMBER.pack(slot), b"", db=self.tables["free"])

    def take(self) -> int | None:
        """Any slot that is free or was never used."""
        first = _first(self.txn, self.tables["free"])
        if first is not None:
            self.txn.delete(first[0], db=self.tables["free"])
            return _NUMBER.unpack(first[0])[0]
        if self.fresh < self.slots:
            self.fresh += 1
            return self.fresh - 1
        return None

    def evict(self, keep: frozenset[bytes]) -> int | None:
        """The slot of the least recently used object, now forgotten; None if it is one of `keep`."""
        oldest = _first(self.txn, self.tables["lru"])
        return None if oldest is None or oldest[1] in keep else self.remove(oldest[1])

    def reserve(self, slot: int, owner: bytes) -> Reservation:
        """Account a slot to its writer."""
        self.clock += 1
        self.txn.put(_NUMBER.pack(slot), _NUMBER.pack(self.clock) + owner, db=self.tables["pending"])
        return Reservation(slot, self.clock)

    def end(self, reservation: Reservation, owner: bytes) -> bool:
        """End a reservation; False if it is over already: then the slot is someone else's."""
        slot = _NUMBER.pack(reservation.slot)
        held = self.txn.get(slot, db=self.tables["pending"]) == _NUMBER.pack(reservation.sequence) + owner
        return held and self.txn.delete(slot, db=self.tables["pending"])


class Index:
    """The books of one store directory for one owner. Methods raise lmdb.Error; several threads at once are fine."""

    def __init__(self, directory: Path, slots: int, owner: bytes) -> None:
        """Open the index, or make one if `directory` is empty. Raises IndexUnusable, OSError, lmdb.Error."""
        self._file = directory / "data.mdb"
        self._owner = owner
        self._shared = _acquire(directory, slots)
        self._environment = self._shared.environment
        self._tables = self._shared.tables
        self._environment.reader_check()

    def is_current(self) -> bool:
        """Whether other processes that open the directory use this index too: nobody deleted or replaced it."""
        return _identity(self._file) == self._shared.identity

    def look_up(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """The entries of keys, at one moment."""
        with self._reading() as txn:
            return [_entry(txn, self._tables, key) for key in keys]

    def reserve(self, keys: Sequence[bytes], touched: Iterable[bytes], unused: Iterable[Reservation]) -> Plan:
        """A slot for each key that is not there, by evictions if need be; notes first what was read and not used."""
        with self._writing() as books:
            self._note(books, touched, unused)
            present = [books.touch(key) for key in keys]
            there = frozenset(key for key, is_there in zip(keys, present, strict=True) if is_there)
            answers: list[Reservation | bool | None] = []
            evicted = 0
            for is_there in present:
                slot = None if is_there else books.take()
                if slot is None and not is_there:
                    slot = books.evict(there)
                    evicted += slot is not None
                answers.append(True if is_there else None if slot is None else books.reserve(slot, self._owner))
        return Plan(answers, evicted)

    def publish(self, written: Sequence[tuple[bytes, int, Reservation]], unused: Iterable[Reservation]) -> list[bool]:
        """Make objects (key, bytes, slot) readable, and give slots back. False: the reservation was taken away."""
        answers = []
        with self._writing() as books:
            for key, nbytes, reservation in written:
                held = books.end(reservation, self._owner)
                there = books.entry(key) is not None
                if held and there:  # another writer was faster, and a key has but one content
                    books.free(reservation.slot)
                elif held:
                    books.write(key, reservation.slot, nbytes, reservation.sequence)
                answers.append(held or there)
            self._note(books, (), unused)
        return answers

    def note(self, touched: Iterable[bytes], unused: Iterable[Reservation]) -> None:
        """Make keys the most recently used ones, in their order, and give slots back."""
        with self._writing() as books:
            self._note(books, touched, unused)

    def delete(self, keys: Iterable[bytes]) -> None:
        """Forget objects."""
        with self._writing() as books:
            for key in keys:
                slot = books.remove(key)
                if slot is not None:
                    books.free(slot)

    def clear(self) -> None:
        """Forget all objects. What is being written stays reserved, and is published later."""
        with self._writing() as books:
            entries = [_ENTRY.unpack(value) for value in books.txn.cursor(self._tables["index"]).iternext(False, True)]
            for entry in entries:
                books.free(entry[0])
            books.txn.drop(self._tables["index"], delete=False)
            books.txn.drop(self._tables["lru"], delete=False)

    def owners(self, wanted: int) -> set[bytes]:
        """If fewer than `wanted` slots are free: other owners that hold some. (Ask whether they live.)"""
        with self._reading() as txn:
            if _counts(txn, self._tables)["free"] >= wanted:
                return set()
            values = txn.cursor(self._tables["pending"]).iternext(False, True)
            return {bytes(value[_NUMBER.size :]) for value in values} - {self._owner}

    def reclaim(self, dead: set[bytes]) -> int:
        """Free what dead owners had reserved; how many slots that were."""
        self._environment.reader_check()
        with self._writing() as books:
            pending = list(books.txn.cursor(self._tables["pending"]).iternext(True, True))
            slots = [slot for slot, value in pending if value[_NUMBER.size :] in dead]
            for slot in slots:
                books.txn.delete(slot, db=self._tables["pending"])
                books.txn.put(slot, b"", db=self._tables["free"])
        return len(slots)

    def counts(self) -> dict[str, int]:
        """Slots by state: `objects`, `pending` and `free` (the never used ones included); their sum is `slots`."""
        with self._reading() as txn:
            return _counts(txn, self._tables)

    def close(self) -> None:
        """Let go of the environment. The caller has ended all other calls."""
        _release(self._shared)

    def _note(self, books: Books, touched: Iterable[bytes], unused: Iterable[Reservation]) -> None:
        for key in touched:
            books.touch(key)
        for reservation in unused:
            if books.end(reservation, self._owner):
                books.free(reservation.slot)

    @contextlib.contextmanager
    def _writing(self) -> Any:
        with self._environment.begin(write=True) as txn:
            books = Books(txn, self._tables)
            yield books
            books.save()

    def _reading(self) -> Any:
        try:
            return self._environment.begin()
        except lmdb.ReadersFullError:  # killed readers keep their places until someone checks
            self._environment.reader_check()
            return self._environment.begin()


class Owners:
    """Files with the flock of whoever has a store open: how to tell a slow writer from a dead one."""

    def __init__(self, directory: Path) -> None:
        """Create and lock a file of our own. The caller keeps others from sweeping meanwhile. Raises OSError."""
        self.id = secrets.token_bytes(OWNER_BYTES)
        self._directory = directory
        self._file = os.open(self._path(self.id), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        _OPEN.add(self._file)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def dead(self, owners: Iterable[bytes]) -> set[bytes]:
        """Which of these owners are gone. One that can't be asked counts as alive."""
        return {owner for owner in owners if owner != self.id and self._is_dead(owner)}

    def sweep(self) -> None:
        """Delete the files of owners that are gone: who has none is dead too. Only while nobody can create one."""
        names = [name for name in os.listdir(self._directory) if _OWNER.fullmatch(name)]
        for owner in self.dead(bytes.fromhex(name) for name in names):
            self._path(owner).unlink(missing_ok=True)

    def others(self) -> bool:
        """Whether anyone else has the store open."""
        return any(_OWNER.fullmatch(name) and name != self.id.hex() for name in os.listdir(self._directory))

    def close(self) -> None:
        """Give up our own file."""
        with contextlib.suppress(OSError):
            self._path(self.id).unlink(missing_ok=True)
        _OPEN.discard(self._file)
        os.close(self._file)

    def _path(self, owner: bytes) -> Path:
        return self._directory / owner.hex()

    def _is_dead(self, owner: bytes) -> bool:
        try:
            file = os.open(self._path(owner), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who ask don't take each other for the owner
            return True
        except OSError:
            return False
        finally:
            os.close(file)


_OWNER = re.compile(f"[0-9a-f]{{{2 * OWNER_BYTES}}}")
_OPEN: set[int] = set()


class _Shared:
    """LMDB must not open a directory twice in a process, so that all stores of a process share one environment."""

    def __init__(self, name: str, directory: Path, slots: int) -> None:
        self.name = name
        self.slots = slots
        self.users = 0
        self.process = os.getpid()
        is_new = not (directory / "data.mdb").exists()
        if is_new and (not directory.exists() or os.listdir(directory)):
            raise IndexUnusable("its files were deleted")
        self.environment = lmdb.open(
            str(directory),
            # Entries of up to 300 bytes, half filled pages, copies on write: 4 KiB a slot is plenty, and it costs
            # nothing until it is used.
            map_size=(64 << 20) + 4096 * slots,
            metasync=False,  # a power loss takes the last transaction back, no more
            readahead=False,
            mode=0o600,
            max_dbs=len(_TABLES),
            max_readers=1024,
            max_spare_txns=8,
        )
        try:
            self._restore_length(directory / "data.mdb")
            self.tables = {name: self.environment.open_db(name.encode(), create=is_new) for name in _TABLES}
            if is_new:
                facts = _FACTS.pack(VERSION, slots, 0, 0)
                with self.environment.begin(write=True) as txn:
                    txn.put(b"facts", facts, db=self.tables["facts"])
            with self.environment.begin() as txn:
                _check(txn, self.tables, slots)
            self.identity = _identity(directory / "data.mdb")
        except BaseException:
            self.environment.close()
            raise

    def _restore_length(self, file: Path) -> None:
        """Touching a page behind the end of the file would kill the process; a page of zeros is an error of LMDB."""
        with self.environment.begin(write=True):  # nobody lengthens the file now
            wanted = (self.environment.info()["last_pgno"] + 1) * self.environment.stat()["psize"]
            if wanted > self.environment.info()["map_size"]:
                raise IndexUnusable(f"it claims to have {wanted} bytes")
            if file.stat().st_size < wanted:
                os.truncate(file, wanted)


_SHARED: dict[str, _Shared] = {}
_LOCK = threading.Lock()


def _acquire(directory: Path, slots: int) -> _Shared:
    name = os.path.realpath(directory)
    with _LOCK:
        shared = _SHARED.get(name)
        if shared is None:
            try:
                shared = _SHARED[name] = _Shared(name, directory, slots)
            except (lmdb.Error, OverflowError, struct.error) as error:
                if type(error) is lmdb.Error or isinstance(error, _OF_THE_SYSTEM):
                    raise
                raise IndexUnusable(str(error)) from error
        elif shared.process != os.getpid():
            raise OSError("a forked process can't open a store that its parent has open: start processes by spawn")
        elif shared.identity != _identity(directory / "data.mdb"):
            raise IndexUnusable("its files were deleted or replaced")
        shared.users += 1
        return shared


def _release(shared: _Shared) -> None:
    with _LOCK:
        shared.users -= 1
        if shared.users == 0:
            del _SHARED[shared.name]
            shared.environment.close()


def _let_go_after_fork() -> None:
    """In a forked child: do nothing to what is the parent's, and don't keep it alive."""
    for file in _OPEN:  # a copy would hold the lock of a parent that is dead
        with contextlib.suppress(OSError):
            os.close(file)
    _OPEN.clear()
    for shared in _SHARED.values():  # never to be freed: that would clear the parent's place in the table of readers
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(shared.environment))


os.register_at_fork(after_in_child=_let_go_after_fork)


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _check(txn: Any, tables: dict[str, Any], slots: int) -> None:
    version, noted, _, fresh = _facts(txn, tables)
    counts = _counts(txn, tables)
    total = counts["objects"] + counts["free"] + counts["pending"]
    if (version, noted, total, txn.stat(tables["lru"])["entries"]) != (VERSION, slots, slots, counts["objects"]):
        raise IndexUnusable(f"version {version}, {noted} slots, {fresh} used, in the tables {counts}")


def _counts(txn: Any, tables: dict[str, Any]) -> dict[str, int]:
    objects, free, pending = (txn.stat(tables[name])["entries"] for name in ("index", "free", "pending"))
    _, slots, _, fresh = _facts(txn, tables)
    return {"objects": objects, "pending": pending, "free": free + slots - fresh, "slots": slots}


def _facts(txn: Any, tables: dict[str, Any]) -> tuple[int, int, int, int]:
    value = txn.get(b"facts", db=tables["facts"])
    if value is None or len(value) != _FACTS.size:
        raise IndexUnusable("its first record is missing")
    version, slots, clock, fresh = _FACTS.unpack(value)
    return version, slots, clock, fresh


def _entry(txn: Any, tables: dict[str, Any], key: bytes) -> Entry | None:
    value = txn.get(key, db=tables["index"])
    if value is None:
        return None
    if len(value) != _ENTRY.size:
        raise IndexUnusable(f"the entry of {key!r} has {len(value)} bytes")
    return Entry(*_ENTRY.unpack(value))


def _first(txn: Any, table: Any) -> tuple[bytes, bytes] | None:
    with txn.cursor(table) as cursor:
        return cursor.item() if cursor.first() else None
