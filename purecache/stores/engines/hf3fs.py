"""A store in one big file on 3FS (DeepSeek's file system), read and written past FUSE by USRBIO.

USRBIO takes requests through rings (hf3fs_rings.py), and moves bytes between the file and shared memory of its own, so
that every page is copied once more here. An index says which page is whose (hf3fs_index.py, hf3fs_metadata_server.py).
"""

import contextlib
import fcntl
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf3fs_fuse import io as usrbio  # pyright: ignore[reportMissingImports]

from purecache.stores.directories import refuse_plants
from purecache.stores.engines.entrance import Entrance
from purecache.stores.engines.hf3fs_index import HEAD, LocalIndex, PageIndex
from purecache.stores.engines.hf3fs_metadata_server import MetadataServerIndex
from purecache.stores.engines.hf3fs_rings import Ring, Transfer
from purecache.stores.interface import Fetch, Presence, Store
from purecache.stores.options import capacity_of, directory_of, parse_size, take_options

ALIGNMENT = 4096
"""Bytes that every page of the file begins at a multiple of."""

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
        self._entrance = Entrance()
        self._lock = threading.Lock()
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
            self._rings: dict[bool, queue.SimpleQueue[Ring]] = {True: queue.SimpleQueue(), False: queue.SimpleQueue()}
            for for_read in (True, False) * rings:
                ring = Ring(mount, file, for_read, entries, self._page_bytes, block, numa)
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
        transfers = [Transfer(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
        with self._call(deadline) as may:
            if may and keys:
                self._get(keys, transfers, deadline)
        return [transfer.answer for transfer in transfers]

    def put(self, keys: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """See `Store.put`."""
        first: dict[str, Transfer] = {}
        for key, buffer in zip(keys, buffers, strict=True):
            if buffer.nbytes <= self._object_bytes:
                first.setdefault(key, Transfer(key, buffer))
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
        if self._entrance.close():
            self._entrance.wait()
            self._resources.close()

    @contextlib.contextmanager
    def _call(self, deadline: float, level: int = logging.DEBUG) -> Iterator[bool]:
        """Around every call: whether it may begin. What can't be asked is logged, and the answers prepared stand."""
        with self._entrance.entered() as entered:
            try:
                yield entered and time.monotonic() < deadline
            except OSError as error:
                _LOG.log(level, "a call of an hf3fs store failed: %s", error)

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._numbers[name] += number

    def _get(self, keys: Sequence[str], transfers: Sequence[Transfer], deadline: float) -> None:
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

    def _put(self, first: dict[str, Transfer], answers: dict[str, bool], deadline: float) -> None:
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

    def _transfer(self, begun: Sequence[Transfer], for_read: bool, deadline: float) -> list[int]:
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
