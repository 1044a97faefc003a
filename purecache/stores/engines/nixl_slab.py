"""The local store with NIXL moving the bytes: its POSIX plug-in on one preallocated file, a slot per page."""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from purecache.stores.engines.nixl_agent import Agent, address_of
from purecache.stores.interface import Store
from purecache.stores.local import LocalStore
from purecache.stores.local_pages import BLOCK
from purecache.stores.options import capacity_of, directory_of, parse_flag, parse_size, take_options

ENGINES = {"aio": "use_aio", "uring": "use_uring"}
"""How the POSIX plug-in talks to the system: libaio or io_uring.

Its third way, posix_aio, is left out: it tells a transfer of the error of another one, while the memory of the first is
still written to.
"""

_GROUP_PAGES = 64
_GROUP_BYTES = 16 << 20
_LONG = 1e6


def open_url(address: str, object_bytes: int, options: Mapping[str, Any]) -> Store:
    """The store of `nixl:///dir?capacity=20GiB&engine=aio&direct=true`, for the registry. Raises ValueError."""
    directory = directory_of(address)
    settings = take_options(address, options, {"capacity": parse_size, "engine": _engine, "direct": parse_flag})
    capacity = capacity_of(address, settings, object_bytes)
    settings.pop("capacity")
    return NixlSlabStore(directory, object_bytes, capacity, **settings)


class NixlSlabStore(LocalStore):
    """A `LocalStore` (same files, index, eviction and errors) whose pages go through NIXL, many at once.

    With `direct` they pass by the page cache where the file system can do that. Parts of a region that was given to
    `register` are then read and written in place, if they are aligned to 4 KiB, but for what is behind their last whole
    4 KiB; other buffers take a copy in registered memory. One batch at a time is moved. No group of pages (up to 64, up
    to 16 MiB) is begun after the deadline; what is begun is waited for, since NIXL can't call it back.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        object_bytes: int,
        capacity_bytes: int,
        *,
        engine: str = "aio",
        direct: bool = True,
    ) -> None:
        """Open the store in `directory`, or make one. Raises ValueError for sizes and LocalStoreError."""
        self._engine = _engine(engine)
        super().__init__(directory, object_bytes, capacity_bytes, direct)

    def register(self, region: memoryview) -> None:
        """See `Store.register`. Memory that NIXL refuses is used through copies."""
        self._attempt(lambda: self._slab.register(region))

    def _open_pages(self, path: Path, direct: bool, stack: contextlib.ExitStack) -> None:
        self._slab = _Slab(path, self._slots, self._slot_bytes, self._engine, direct, stack)

    def _read_slots(self, slots: Sequence[int], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        return self._slab.move("READ", slots, buffers, deadline)

    def _write_slots(self, slots: Sequence[int], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        return self._slab.move("WRITE", slots, buffers, deadline)


class _Part(NamedTuple):
    """A transfer: bytes at an address and their offset in the file."""

    address: int
    nbytes: int
    offset: int


class _Slab:
    """The data file and the memory that NIXL knows."""

    def __init__(
        self, path: Path, slots: int, slot_bytes: int, engine: str, direct: bool, stack: contextlib.ExitStack
    ) -> None:
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._direct = direct
        self._file = self._open(path)
        stack.callback(os.close, self._file)
        self._agent = Agent("POSIX", {name: str(each == engine).lower() for each, name in ENGINES.items()})
        stack.callback(self._agent.close)
        self._group = max(1, min(_GROUP_PAGES, slots, _GROUP_BYTES // slot_bytes))
        self._regions: list[tuple[int, int, memoryview]] = []
        self._scratch = memoryview(mmap.mmap(-1, self._group * slot_bytes))
        self._scratch_address = address_of(self._scratch)
        self._agent.register("FILE", 0, slots * slot_bytes, self._file)
        self._agent.register("DRAM", self._scratch_address, self._scratch.nbytes)
        self._turn = threading.Lock()

    def register(self, region: memoryview) -> None:
        """Have transfers use this memory itself, which is kept alive. Raises OSError."""
        address, region = address_of(region), region.cast("B")
        with self._turn:
            if not self._is_known(address, region.nbytes):
                self._agent.register("DRAM", address, region.nbytes)
                self._regions.append((address, region.nbytes, region))

    def move(self, operation: str, slots: Sequence[int], buffers: Sequence[memoryview], deadline: float) -> list[bool]:
        """`READ` or `WRITE` pages; which of them were moved whole. None is on its way any more when it returns."""
        answers = [False] * len(slots)
        for first in range(0, len(slots), self._group):
            some = slice(first, first + self._group)
            left = deadline - time.monotonic()
            if left <= 0 or not self._turn.acquire(timeout=min(left, _LONG)):
                break
            try:
                answers[some] = self._move(operation, slots[some], [buffer.cast("B") for buffer in buffers[some]])
            finally:
                self._turn.release()
        return answers

    def _move(self, operation: str, slots: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        in_place = [self._in_place(buffer) for buffer in buffers]
        answers = [slot < self._slots for slot in slots]  # a damaged index may name others, and the file must not grow
        started: list[tuple[int, Any]] = []
        try:
            for i, (slot, buffer) in enumerate(zip(slots, buffers, strict=True)):
                if operation == "WRITE":
                    self._copy_of(i, buffer[in_place[i] :])[:] = buffer[in_place[i] :]
                for part in self._parts(i, slot, buffer, in_place[i]) if answers[i] else ():
                    try:
                        started.append(
                            (
                                i,
                                self._agent.start(
                                    operation, part.address, part.nbytes, "FILE", part.offset, self._file
                                ),
                            )
                        )
                    except OSError:
                        answers[i] = False
        finally:  # whatever happens, memory is used until then
            for i, handle in started:
                answers[i] &= self._agent.wait(handle)
        if operation == "READ":
            for i, buffer in enumerate(buffers):
                if answers[i]:
                    buffer[in_place[i] :] = self._copy_of(i, buffer[in_place[i] :])
        return answers

    def _in_place(self, buffer: memoryview) -> int:
        """How many bytes of a buffer, from its beginning, need no copy."""
        if not buffer.nbytes or not self._is_known(address := address_of(buffer), buffer.nbytes):
            return 0
        if not self._direct:
            return buffer.nbytes
        return buffer.nbytes // BLOCK * BLOCK if address % BLOCK == 0 else 0

    def _parts(self, i: int, slot: int, buffer: memoryview, in_place: int) -> list[_Part]:
        offset, rest = slot * self._slot_bytes, buffer.nbytes - in_place
        parts = [_Part(address_of(buffer), in_place, offset)] if in_place else []
        if rest:
            whole = -(-rest // BLOCK) * BLOCK if self._direct else rest
            parts.append(_Part(self._scratch_address + i * self._slot_bytes, whole, offset + in_place))
        return parts

    def _copy_of(self, i: int, rest: memoryview) -> memoryview:
        return self._scratch[i * self._slot_bytes : i * self._slot_bytes + rest.nbytes]

    def _is_known(self, address: int, nbytes: int) -> bool:
        return any(begin <= address and address + nbytes <= begin + size for begin, size, _ in self._regions)

    def _open(self, path: Path) -> int:
        if self._direct:
            with contextlib.suppress(OSError):  # some file systems have no direct I/O
                return os.open(path, os.O_RDWR | os.O_DIRECT)
            self._direct = False
        return os.open(path, os.O_RDWR)


def _engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"no engine {name!r}; there are {', '.join(ENGINES)}")
    return name
