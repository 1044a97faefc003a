"""A store in one big file on 3FS (DeepSeek's file system), read and written past FUSE by USRBIO.

USRBIO takes requests through rings, and moves bytes between the file and shared memory of its own, so that every page
is copied once more here. A request that is late may still move bytes: its memory, and the page it writes, are not used
again before its end has been seen. Results come in any order; each says by a number which request it ends.
"""

import contextlib
import fcntl
import itertools
import json
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from hf3fs_fuse import io as usrbio  # pyright: ignore[reportMissingImports]

from purecache.stores.directories import refuse_plants
from purecache.stores.engines.hf3fs_index import HEAD, LocalIndex, PageIndex, check_head, write_head
from purecache.stores.engines.hf3fs_metadata_server import MetadataServerIndex
from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.options import capacity_of, directory_of, parse_size, take_options

ALIGNMENT = 4096
"""Bytes that every page of the file begins at a multiple of."""

_DRAIN_SECONDS = 1.0
_FILES = ("owner.lock", "geometry.json", "pages.bin", "index.json", "index.json.new")
_FORMAT = 1
_LONG = 1e6
_LOG = logging.getLogger(__name__)


def open_url(address: str, object_bytes: int, options: Mapping[str, Any]) -> Store:
    """The store of `hf3fs:///mount/path?capacity=...`, for the registry. Options: see `Hf3fsStore`.

    Raises ValueError for what it doesn't understand.
    """
    known = {"capacity": parse_size, "entries": int, "rings": int, "block": parse_size, "numa": int}
    settings = take_options(address, options, {**known, "metadata": str, "rank": int, "namespace": str})
    directory, capacity = directory_of(address), capacity_of(address, settings, object_bytes)
    del settings["capacity"]
    try:
        return Hf3fsStore(directory, object_bytes, capacity, **settings)
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None


class Hf3fsStore(Store):
    """Objects of up to `object_bytes` in `directory`, on a mounted 3FS, in a file of at most `capacity_bytes`.

    There are `rings` rings for reading and as many for writing (so many calls run at once), of `entries` requests each.
    `block` splits the shared memory of a ring into blocks of so many bytes (0: one). `numa` is the node of that memory
    (-1: any). Without `metadata`, one process owns the directory and keeps the index beside the data. With
    `metadata="http://host:port"`, machines share the file through a metadata server, under `rank` and `namespace`.

    Raises ValueError for impossible settings, a directory that is not on 3FS, is in use or was made with other sizes,
    and OSError where the file system or the metadata server fails.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        object_bytes: int,
        capacity_bytes: int,
        *,
        entries: int = 16,
        rings: int = 2,
        block: int = 0,
        numa: int = -1,
        metadata: str | None = None,
        rank: int = 0,
        namespace: str = "purecache",
    ) -> None:
        if entries < 1 or rings < 1 or block < 0 or rank < 0 or not namespace:
            raise ValueError("entries and rings must be at least 1, block and rank not negative, namespace not empty")
        self._object_bytes = object_bytes
        self._page_bytes = -(-(HEAD + object_bytes) // ALIGNMENT) * ALIGNMENT
        pages = capacity_bytes // self._page_bytes
        if pages < 1:
            raise ValueError(f"a capacity of {capacity_bytes} bytes has no room for a page of {self._page_bytes}")
        if 0 < block < self._page_bytes:
            raise ValueError(f"a block of {block} bytes has no room for a page of {self._page_bytes}")
        self._idle = threading.Condition()
        self._busy = 0
        self._closed = False
        self._numbers = {"short": 0, "wrong": 0, "late": 0}
        with contextlib.ExitStack() as stack:
            root = Path(directory)
            mount = _mount_of(root)
            root.mkdir(parents=True, exist_ok=True)
            refuse_plants([root / name for name in _FILES], ())
            if metadata is None:
                stack.enter_context(_owned(root / "owner.lock"))
            _agree(root / "geometry.json", self._page_bytes, pages, metadata is not None)
            file = stack.enter_context(_data_file(root / "pages.bin", pages * self._page_bytes))
            self._index: PageIndex = (
                LocalIndex(root / "index.json", pages)
                if metadata is None
                else MetadataServerIndex(metadata, pages, rank, namespace)
            )
            stack.callback(self._index.close)
            self._rings: dict[bool, queue.SimpleQueue[_Ring]] = {True: queue.SimpleQueue(), False: queue.SimpleQueue()}
            for for_read in (True, False) * rings:
                ring = _Ring(mount, file, for_read, entries, self._page_bytes, block, numa)
                stack.callback(ring.close)
                self._rings[for_read].put(ring)
            self._resources = stack.pop_all()

    def exists(self, keys: Sequence[str], deadline: float) -> list[Presence]:
        """See `Store.exists`. The index answers; whether the page is whole is seen when it is read."""
        answers = [Presence.UNKNOWN] * len(keys)
        with self._call(deadline) as may:
            if may and keys:
                answers = self._index.exists(keys, deadline)
        return answers

    def get(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[Fetch]:
        """See `Store.get`. A key whose page turns out to be another object's is FAILED, and is removed."""
        transfers = [_Transfer(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
        with self._call(deadline) as may:
            if may and keys:
                self._get(keys, transfers, deadline)
        return [transfer.answer for transfer in transfers]

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`."""
        first: dict[str, _Transfer] = {}
        for key, buffer in zip(keys, buffers, strict=True):
            if buffer.nbytes <= self._object_bytes:
                first.setdefault(key, _Transfer(key, buffer))
        answers = dict.fromkeys(first, False)
        with self._call(deadline) as may:
            if may and first:
                self._put(first, answers, deadline)
        fits = [buffer.nbytes <= self._object_bytes for buffer in buffers]
        return [fit and answers[key] for key, fit in zip(keys, fits, strict=True)]

    def delete(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """See `Store.delete`."""
        answers = [False] * len(keys)
        with self._call(deadline) as may:
            if may and keys:
                self._index.forget(keys, deadline)
                answers = [True] * len(keys)
        return answers

    def clear(self) -> None:
        """See `Store.clear`. With a metadata server, of all machines. Logs a warning where that fails."""
        with self._call(float("inf"), logging.WARNING) as may:
            if may:
                self._index.clear()

    def stats(self) -> dict[str, int]:
        """`objects` (those that this process knows of, with a metadata server) and other counts of the index.

        Of this process: reads and writes that were `short` or had an error, pages with something `wrong`, and requests
        that were `late`. `page_bytes`: what an object takes in the file.
        """
        return {**self._index.counts(), **self._numbers, "page_bytes": self._page_bytes}

    def close(self) -> None:
        """See `Store.close`. Waits for calls in other threads."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._busy == 0)
        self._resources.close()

    @contextlib.contextmanager
    def _call(self, deadline: float, level: int = logging.DEBUG) -> Iterator[bool]:
        """Around every call: whether it may begin. What can't be asked is logged, and the answers prepared stand."""
        with self._idle:
            may = not self._closed and time.monotonic() < deadline
            self._busy += may
        try:
            yield may
        except OSError as error:
            _LOG.log(level, "a call of an hf3fs store failed: %s", error)
        finally:
            with self._idle:
                self._busy -= may
                self._idle.notify_all()

    def _count(self, name: str, number: int) -> None:
        with self._idle:
            self._numbers[name] += number

    def _get(self, keys: Sequence[str], transfers: "Sequence[_Transfer]", deadline: float) -> None:
        # Each request keeps its own key, buffer and page, whatever holes there are in the batch.
        begun = []
        for transfer, page in zip(transfers, self._index.find(keys, deadline), strict=True):
            if page is None:
                transfer.answer = Fetch.MISSING
            elif transfer.buffer.nbytes <= self._object_bytes:
                transfer.page = page
                begun.append(transfer)
        if begun:
            self._transfer(begun, True, deadline)
        for transfer in begun:
            if transfer.is_wrong:
                self._count("wrong", 1)
                self._index.drop(transfer.key, transfer.page, deadline)

    def _put(self, first: dict[str, "_Transfer"], answers: dict[str, bool], deadline: float) -> None:
        plan = self._index.reserve(list(first), deadline)
        begun = []
        for transfer, place in zip(first.values(), plan, strict=True):
            if isinstance(place, bool):
                answers[transfer.key] = place
            else:
                transfer.page = place
                begun.append(transfer)
        if not begun:
            return
        landed = self._transfer(begun, False, deadline)
        written = [(transfer.key, transfer.page) for transfer in begun if transfer.answer is Fetch.HIT]
        # A page that is being written still is given back when that has ended.
        unused = [each.page for each in begun if each.answer is not Fetch.HIT and not each.is_late]
        # The data is there: a little more time for saying so, as the page would be lost otherwise.
        confirmed = self._index.confirm(written, unused + landed, max(deadline, time.monotonic() + 1.0))
        for (key, _), answer in zip(written, confirmed, strict=True):
            answers[key] = answer

    def _transfer(self, begun: "Sequence[_Transfer]", for_read: bool, deadline: float) -> list[int]:
        """Run requests in a ring of their own. The pages whose late writes have ended meanwhile."""
        rings = self._rings[for_read]
        try:
            ring = rings.get(timeout=min(max(deadline - time.monotonic(), 0.0), _LONG))
        except queue.Empty:
            return []
        try:
            ring.run(begun, deadline)
            landed, ring.landed = ring.landed, []
        finally:
            rings.put(ring)
        self._count("late", sum(transfer.is_late for transfer in begun))
        self._count("short", sum(transfer.is_short for transfer in begun))
        return landed


@dataclass(slots=True, eq=False)
class _Transfer:
    """One object on its way. `answer` is HIT for what was read or written whole."""

    key: str
    buffer: memoryview
    page: int = -1
    answer: Fetch = Fetch.FAILED
    is_short: bool = False
    is_wrong: bool = False
    is_late: bool = False
    """Its caller has been answered: its buffer is out of bounds."""


class _Ring:
    """A ring of one direction, with shared memory for one page per entry. One thread uses it at a time."""

    def __init__(
        self, mount: str, file: int, for_read: bool, entries: int, page_bytes: int, block: int, numa: int
    ) -> None:
        self.landed: list[int] = []
        """Pages whose late writes have ended since this was emptied."""
        self._file, self._for_read, self._page_bytes = file, for_read, page_bytes
        # No request may reach across the end of a block.
        per_block = block // page_bytes if block else entries
        self._starts = [slot // per_block * block + slot % per_block * page_bytes for slot in range(entries)]
        self._free = deque(range(entries))
        self._flying: dict[int, tuple[_Transfer, int]] = {}
        self._tickets = itertools.count()
        self._memory = SharedMemory(create=True, size=self._starts[-1] + page_bytes)
        self._bytes: Any = self._memory.buf
        try:
            self._iov = usrbio.make_iovec(self._memory, mount, block, numa)
            self._ring = usrbio.make_ioring(mount, entries, for_read, 0, numa=numa)
        except BaseException:
            self._memory.close()
            raise
        finally:
            self._memory.unlink()  # it lives as long as it is mapped; who has it mapped by now needs no name

    def run(self, transfers: Sequence[_Transfer], deadline: float) -> None:
        """Carry requests out until they have ended or it is too late. Never raises for what the file system does."""
        self._collect(0.0)
        waiting = deque(transfers)
        while waiting or any(not transfer.is_late for transfer, _ in self._flying.values()):
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not (self._free or self._flying):
                break
            started = False
            while waiting and self._free:
                started |= self._start(waiting.popleft())
            if started and not self._submit():
                break
            if self._flying and not self._collect(min(seconds, _LONG)):
                break
        for transfer, _ in self._flying.values():
            transfer.is_late = True

    def close(self) -> None:
        """Let go of the ring and its memory. Waits a second for what is late; the other side has its own mapping."""
        end = time.monotonic() + _DRAIN_SECONDS
        while self._flying and self._collect(end - time.monotonic()):
            pass
        self._flying.clear()
        del self._ring, self._iov
        self._memory.close()

    def _start(self, transfer: _Transfer) -> bool:
        slot = self._free.popleft()
        start = self._starts[slot]
        end = start + HEAD + transfer.buffer.nbytes
        with self._bytes[start:end] as memory:
            if self._for_read:
                memory[:HEAD] = bytes(HEAD)  # so that what was read before can't pass for what was not read now
            else:
                memory[HEAD:] = transfer.buffer
                write_head(memory, transfer.key)
        ticket = next(self._tickets)
        try:
            self._ring.prepare(
                self._iov[start:end], self._for_read, self._file, transfer.page * self._page_bytes, ticket
            )
        except Exception as error:
            transfer.is_short = True
            self._free.append(slot)
            _LOG.debug("USRBIO refused a request: %s", error)
            return False
        self._flying[ticket] = (transfer, slot)
        return True

    def _submit(self) -> bool:
        try:
            self._ring.submit()
        except Exception as error:  # what is prepared may be carried out nevertheless
            _LOG.debug("USRBIO could not be told of requests: %s", error)
            return False
        return True

    def _collect(self, seconds: float) -> bool:
        """Wait for at least one result, at most `seconds`; 0: take what there is. Whether there was any."""
        if not self._flying:
            return False
        wait = timedelta(seconds=max(seconds, 0.0))
        try:
            done = self._ring.wait(max_results=len(self._flying), min_results=int(seconds > 0), timeout=wait)
        except Exception as error:
            _LOG.debug("USRBIO could not be waited for: %s", error)
            return False
        for each in done:
            found = self._flying.pop(each.userdata, None)
            if found is None:
                _LOG.warning("USRBIO ended a request that was not made: %r", each.userdata)
                continue
            self._land(*found, each.result)
        return bool(done)

    def _land(self, transfer: _Transfer, slot: int, result: int) -> None:
        """Note the end of a request; only now is its memory free again."""
        self._free.append(slot)
        if transfer.is_late:
            if not self._for_read:
                self.landed.append(transfer.page)
            return
        start = self._starts[slot]
        size = HEAD + transfer.buffer.nbytes
        if result != size:
            transfer.is_short = True
        elif not self._for_read:
            transfer.answer = Fetch.HIT
        else:
            with self._bytes[start : start + size] as memory:
                verdict = check_head(memory, transfer.key)
                transfer.is_wrong = verdict is False
                if verdict:
                    transfer.buffer[:] = memory[HEAD:]
                    transfer.answer = Fetch.HIT


def _mount_of(directory: Path) -> str:
    """Where the 3FS is mounted that has `directory`, which need not be there yet."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    mount = usrbio.extract_mount_point(str(existing))
    if not mount:
        raise ValueError(f"{directory} is not on a mounted 3FS")
    return mount


@contextlib.contextmanager
def _owned(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{path.parent} is in use by another store: share it through metadata=http://host:port"
            ) from None
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def _data_file(path: Path, size: int) -> Iterator[int]:
    """The descriptor of the data file, registered. Registered ones must be deregistered before they are closed."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(file).st_size != size:
            os.ftruncate(file, size)
        usrbio.register_fd(file)
        try:
            yield file
        finally:
            usrbio.deregister_fd(file)
    finally:
        os.close(file)


def _agree(path: Path, page_bytes: int, pages: int, is_shared: bool) -> None:
    """Note down the sizes of the store, or compare them with those noted. Raises ValueError where they differ."""
    wanted = {"format": _FORMAT, "page_bytes": page_bytes, "pages": pages, "shared": is_shared}
    if not path.exists():
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(json.dumps(wanted))
        os.replace(new, path)
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if found != wanted:
        raise ValueError(f"the store in {path.parent} was made with {found}, not with {wanted}: give another directory")
