"""Rings of USRBIO: requests to read and write pages of a file on 3FS, and what becomes of those that are late.

A request that is late may still move bytes: its memory, and the page it writes, are not used again before its end has
been seen. Results come in any order; each says by a number which request it ends.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from hf3fs_fuse import io as usrbio  # pyright: ignore[reportMissingImports]

from purecache.stores.engines.hf3fs_index import HEAD, check_head, write_head
from purecache.stores.interface import Fetch

_DRAIN_SECONDS = 1.0
_LONG = 1e6
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Transfer:
    """One object on its way. `answer` is HIT for what was read or written whole."""

    key: str
    buffer: memoryview
    page: int = -1
    answer: Fetch = Fetch.FAILED
    is_short: bool = False
    is_wrong: bool = False
    is_late: bool = False
    """Its caller has been answered: its buffer is out of bounds."""


class Ring:
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
        self._flying: dict[int, tuple[Transfer, int]] = {}
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

    def run(self, transfers: Sequence[Transfer], deadline: float) -> None:
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

    def _start(self, transfer: Transfer) -> bool:
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

    def _land(self, transfer: Transfer, slot: int, result: int) -> None:
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
