"""The data file of a local store: equal slots, read and written at their offsets, past the page cache if asked for."""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

BLOCK = 4096
"""Bytes that slots are rounded up to, and that direct I/O is aligned to."""
_BOUNCE = 256 << 10


class Pages:
    """The data file."""

    def __init__(self, path: Path, slots: int, slot_bytes: int, direct: bool, stack: contextlib.ExitStack) -> None:
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._file = os.open(path, os.O_RDWR)
        stack.callback(os.close, self._file)
        self._direct: int | None = None
        self._local = threading.local()
        if direct:
            with contextlib.suppress(OSError):  # some file systems have no direct I/O
                self._direct = os.open(path, os.O_RDWR | os.O_DIRECT)
                stack.callback(os.close, self._direct)

    def read(self, slot: int, buffer: memoryview) -> bool:
        """Fill a buffer from a slot; False if the file ends before. Raises OSError."""
        offset = slot * self._slot_bytes
        if slot >= self._slots:  # of a damaged index
            return False
        buffer = buffer.cast("B")
        if self._direct is not None and self._try_direct(partial(self._read_direct, self._direct, buffer, offset)):
            return True
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file, [buffer[done:]], offset + done)
            if count == 0:
                return False
            done += count
        return True

    def write(self, slot: int, buffer: memoryview) -> None:
        """Write a buffer to a slot. Raises OSError."""
        if slot >= self._slots:  # of a damaged index, and the file must not grow
            raise OSError(errno.EIO, f"there is no slot {slot}")
        offset = slot * self._slot_bytes
        buffer = buffer.cast("B")
        if self._direct is not None and self._try_direct(partial(self._write_direct, self._direct, buffer, offset)):
            return
        done = 0
        while done < len(buffer):
            done += os.pwrite(self._file, buffer[done:], offset + done)

    def _try_direct(self, transfer: Callable[[], bool]) -> bool:
        """Whether a direct transfer was whole. If the file system refuses, there is no other attempt."""
        try:
            return transfer()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = None
            return False

    def _read_direct(self, file: int, buffer: memoryview, offset: int) -> bool:
        for start, direct, bounced in self._parts(buffer):
            bounce = self._bounce()[: -(-bounced // BLOCK) * BLOCK]
            views = [view for view in (buffer[start : start + direct], bounce) if len(view)]
            if os.preadv(file, views, offset + start) < direct + bounced:
                return False
            buffer[start + direct : start + direct + bounced] = bounce[:bounced]
        return True

    def _write_direct(self, file: int, buffer: memoryview, offset: int) -> bool:
        for start, direct, bounced in self._parts(buffer):
            bounce = self._bounce()[: -(-bounced // BLOCK) * BLOCK]
            bounce[:bounced] = buffer[start + direct : start + direct + bounced]
            views = [view for view in (buffer[start : start + direct], bounce) if len(view)]
            if os.pwritev(file, views, offset + start) < direct + bounced:
                return False
        return True

    def _parts(self, buffer: memoryview) -> Iterator[tuple[int, int, int]]:
        """Transfers: (start, bytes directly, then bytes by way of the bounce buffer). Trailers make a rest usual."""
        if _is_aligned(buffer):
            yield 0, len(buffer) // BLOCK * BLOCK, len(buffer) % BLOCK
        else:
            for start in range(0, len(buffer), _BOUNCE):
                yield start, 0, min(_BOUNCE, len(buffer) - start)

    def _bounce(self) -> memoryview:
        if not hasattr(self._local, "bounce"):
            self._local.bounce = memoryview(mmap.mmap(-1, _BOUNCE))
        return self._local.bounce


def _is_aligned(buffer: memoryview) -> bool:
    """One that can't be written to does not tell its address."""
    return not buffer.readonly and len(buffer) > 0 and ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % BLOCK == 0
