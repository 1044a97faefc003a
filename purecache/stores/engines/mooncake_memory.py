"""Which memory Mooncake's engine may touch: what was registered with it."""

import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Work = Callable[[list[int], list[int]], list[int]]
"""Given the indices of buffers and where their bytes lie in registered memory; returns those that have been filled."""

_LOG = logging.getLogger(__name__)


class Memory:
    """Memory that is registered with the engine: regions of the caller, and an area to copy all else through.

    RDMA reaches no other memory. TCP would, but then what runs here were not what runs there.
    """

    def __init__(self, client: Any, scratch_bytes: int, most_pages: int) -> None:
        """At most `most_pages` buffers are handled at a time."""
        self._client, self._scratch_bytes, self._most = client, scratch_bytes, most_pages
        self._regions: list[tuple[int, int, memoryview]] = []
        self._scratch = memoryview(b"")
        self._scratch_lock, self._lock = threading.Lock(), threading.Lock()

    def add(self, region: memoryview) -> None:
        """Register a region. Where the engine refuses, its buffers are copied like all others; a warning is logged."""
        if not region.nbytes:
            return
        start = address_of(region)
        with self._lock:
            if self._holds(start, region.nbytes):
                return
            code = self._client.register_buffer(start, region.nbytes)
            if code == 0:
                self._regions.append((start, start + region.nbytes, region))
                return
        _LOG.warning("Mooncake refused to register %d bytes (code %s): they will be copied", region.nbytes, code)

    def move(
        self, indices: Sequence[int], buffers: Sequence[memoryview], deadline: float, work: Work, copy_first: bool
    ) -> None:
        """Let `work` handle some of the buffers. Those that don't lie in registered memory go through the scratch
        area, for one thread at a time: copied there first, or copied from there afterwards. A buffer that is empty or
        larger than the area is left out, and so is what there is no time for."""
        direct, groups = self._split(indices, buffers)
        for first in range(0, len(direct), self._most):
            part = direct[first : first + self._most]
            work([index for index, _ in part], [address for _, address in part])
        for group in groups:
            seconds = min(max(deadline - time.monotonic(), 0.0), 1e6)
            if not self._scratch_lock.acquire(timeout=seconds):
                return
            try:
                if self._make_scratch():
                    self._copied(group, buffers, work, copy_first)
            finally:
                self._scratch_lock.release()

    def _split(
        self, indices: Sequence[int], buffers: Sequence[memoryview]
    ) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """Those buffers that are registered, with addresses, and the others in groups that fit into the scratch area,
        none of more than may be moved at a time."""
        direct: list[tuple[int, int]] = []
        groups: list[list[int]] = []
        room = 0
        for index in indices:
            size = buffers[index].nbytes
            address = address_of(buffers[index]) if size else 0
            if size and self._holds(address, size):
                direct.append((index, address))
            elif 0 < size <= self._scratch_bytes:
                if size > room or len(groups[-1]) == self._most:
                    groups.append([])
                    room = self._scratch_bytes
                groups[-1].append(index)
                room -= size
        return direct, groups

    def _copied(self, indices: list[int], buffers: Sequence[memoryview], work: Work, copy_first: bool) -> None:
        slots: dict[int, memoryview] = {}
        position = 0
        for index in indices:
            size = buffers[index].nbytes
            slots[index] = self._scratch[position : position + size]
            position += size
            if copy_first:
                slots[index][:] = buffers[index]
        for index in work(indices, [address_of(slots[index]) for index in indices]):
            buffers[index][:] = slots[index]

    def _make_scratch(self) -> bool:
        """Only when it is needed: pages of the tier lie in a region."""
        if not self._scratch.nbytes:
            area = memoryview(mmap.mmap(-1, self._scratch_bytes))
            self.add(area)
            if self._holds(address_of(area), area.nbytes):
                self._scratch = area
        return bool(self._scratch.nbytes)

    def release(self) -> None:
        """Take all registrations back, before the engine is closed."""
        with self._lock:
            for start, _, _ in self._regions:
                self._client.unregister_buffer(start)
            self._regions.clear()

    def _holds(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= end for start, end, _ in self._regions)


def address_of(view: memoryview) -> int:
    """Where the bytes of a view lie. They must be in one piece, and at least one."""
    return np.frombuffer(view, np.uint8).ctypes.data
