"""L2 as separate arrays per page: memory grows with the pages held and goes back when they are dropped."""

import ctypes
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from purecache.effects.host_tier import Arrays
from purecache.effects.kernel_meshes import join_on_every_device, split_on_every_device
from purecache.effects.kernels import dma_join, dma_split
from purecache.effects.page_arrays import gather_pages, groups_of, join_pages, scatter_pages, split_pages
from purecache.effects.pools import PoolLayout
from purecache.effects.programs import Program, ProgramTable, shape_of
from purecache.effects.table import Route

_COPIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "unrolled": (split_pages, join_pages),
    "fused": (gather_pages, scatter_pages),
    "dma": (dma_split, dma_join),
}
"""The programs of a route: from the pool to pages, and back."""

# The allocator keeps freed pages for the next ones, which is what makes a full cache fast. They go back to the system
# once the pages held fall this far below their highest number: 64 MiB take about ten milliseconds to hand back.
_SLACK_BYTES = 64 << 20

# Copies are unrolled: most leaves of pages in a program. XLA:CPU takes 40 to 130 ms to compile one, a TPU kernel 4 ms.
_UNROLLED_COPIES, _UNROLLED_ON_DEVICES = 16, 512


class Landed:
    """Stands for arrays on their way: ready when all of them are there."""

    def __init__(self, pages: Sequence[Arrays]) -> None:
        self._arrays: list[Any] = [array for page in pages for array in page]

    def is_ready(self) -> bool:
        """Whether `block_until_ready` returns at once. Raises what made a copy fail."""
        return all(array.is_ready() for array in self._arrays)

    def block_until_ready(self) -> None:
        """Wait for the arrays. Raises what made a copy fail."""
        jax.block_until_ready(self._arrays)


class HostArrays:
    """Up to `pages` pages, each one array per group of equal leaves; one unrolled program per power of two."""

    def __init__(self, layout: PoolLayout, pages: int, batch_pages: int, route: Route, staging_pages: int) -> None:
        self.epoch = 0
        self.valid = np.zeros(pages, bool)
        self.staged = route.staged
        self._layout = layout
        self._copies = _COPIES[route.programs]
        self._kernels = route.programs == "dma"
        unrolled = _UNROLLED_COPIES if layout.on_cpu else _UNROLLED_ON_DEVICES
        most = max(1, min(batch_pages, unrolled // len(layout.leaves), staging_pages if route.staged else batch_pages))
        self._variants = [1 << bit for bit in range(most.bit_length())]
        self._groups = groups_of(layout.leaves)
        self._host, self._device = (
            tuple(getattr(layout.leaves[group[0]], side) for group in self._groups)
            for side in ("host_sharding", "sharding")
        )
        sizes = {math.prod(leaf.shape) for leaf in layout.leaves}
        # A pool of as many pages as there are in a batch, or arrays in a group, cannot be told from these.
        sizes -= {math.prod(layout.leaves[group[0]].with_pages(len(group))) for group in self._groups}
        sizes -= {math.prod(leaf.with_pages(count)) for leaf in layout.leaves for count in self._variants}
        self._table = ProgramTable(layout, sizes, "arrays", route.programs)
        self._pages: list[Arrays | None] = [None] * pages
        self._peak = 0  # most pages held since memory was last handed back
        self._held = 0
        self._leaving: deque[tuple[int, Landed]] = deque()
        self._most_leaving = staging_pages

    def sizes(self, count: int) -> list[int]:
        """Largest powers of two first, so that no program copies a page that nobody asked for."""
        full, rest = divmod(count, self._variants[-1])
        return [self._variants[-1]] * full + [size for size in reversed(self._variants) if rest & size]

    def backup(self, device: Arrays, source: np.ndarray, target: np.ndarray) -> Any:
        """See `HostTier.backup`. Nothing is donated: a failure leaves every other page as it was."""
        program = self._program(len(source), True, device)
        self._forget(target)
        if self.staged:
            self._wait_for_staging(len(source))
        pages, token = program.compiled(device, np.array(source, np.int32))
        if self.staged:
            pages = jax.device_put(list(pages), [self._host] * len(pages))
            token = Landed(pages)
            self._leaving.append((len(pages), token))
        for page, arrays in zip(target.tolist(), pages, strict=True):
            self._pages[page] = tuple(arrays)
        self._held += len(target)
        self._peak = max(self._peak, self._held)
        self.valid[target] = True
        return token

    def fetch(self, source: np.ndarray) -> tuple[Arrays, ...]:
        """See `HostTier.fetch`."""
        pages = [self._pages[page] for page in source.tolist()]
        if self.staged:
            pages = jax.device_put(pages, [self._device] * len(pages))
        return tuple(tuple(page) for page in pages)  # type: ignore[arg-type]

    def commit(self, device: Arrays, fetched: tuple[Arrays, ...], target: np.ndarray) -> Arrays:
        """See `HostTier.commit`."""
        program = self._program(len(target), False, device)
        arrays, _ = program.compiled(device, fetched, np.array(target, np.int32))
        return arrays

    def broken(self, epoch: int) -> None:
        """Every backup has arrays of its own: the others are not concerned."""

    def drop(self, pages: np.ndarray) -> None:
        """Forget the arrays. An unfinished copy keeps the memory it needs until it is done."""
        self._forget(pages)
        self._wait_for_staging(0)
        if (self._peak - self._held) * self._layout.page_bytes >= _SLACK_BYTES:
            self._hand_back()

    def reset(self) -> None:
        """Forget all arrays and hand their memory back."""
        self._forget(np.arange(len(self._pages)))
        self._leaving.clear()
        self._hand_back()

    def warm(self, progress: Callable[[int, int, str], None] | None) -> None:
        """Compile the programs of all variants."""
        jobs = [(size, backup) for size in self._variants for backup in (True, False)]
        for done, (size, backup) in enumerate(jobs, 1):
            program = self._program(size, backup, self._layout.leaves)
            if progress is not None:
                progress(done, len(jobs), f"{program.name}, {size} pages")

    def prepare(self, device: Arrays) -> None:
        """See `HostTier.prepare`."""
        for size in self._variants:
            if size <= device[0].shape[self._layout.leaves[0].axis]:
                for backup in (True, False):
                    self._program(size, backup, device)

    def programs(self) -> list[dict[str, Any]]:
        """At most two entries per power of two up to the batch size, for the pool and each of staged pages."""
        return self._table.report()

    def _wait_for_staging(self, pages: int) -> None:
        """Wait until so many more pages may be on their way to host: what they are copied to first is device memory."""
        while self._leaving:
            token = self._leaving[0][1]
            try:
                if sum(count for count, _ in self._leaving) + pages > self._most_leaving:
                    token.block_until_ready()
                elif not token.is_ready():
                    return
            except Exception:
                pass  # whoever reports that backup finds out
            self._leaving.popleft()

    def _forget(self, pages: np.ndarray) -> None:
        for page in pages.tolist():
            self._held -= self._pages[page] is not None
            self._pages[page] = None
        self.valid[pages] = False

    def _hand_back(self) -> None:
        self._peak = self._held
        if _trim is not None and self._layout.on_cpu:
            _trim(0)

    def _program(self, size: int, backup: bool, device: Sequence[Any]) -> Program:
        name = "backup to arrays" if backup else "load back from arrays"
        shapes = [tuple(array.shape) for array in device]
        if shapes != [leaf.shape for leaf in self._layout.leaves]:
            name += f", staged {shapes[0][self._layout.leaves[0].axis]}"
        return self._table.get(name, size, partial(self._lower, size, backup, shapes))

    def _lower(self, size: int, backup: bool, shapes: Sequence[tuple[int, ...]]) -> Any:
        leaves, groups = self._layout.leaves, self._groups
        device = tuple(shape_of(shape, leaf.dtype, leaf.sharding) for shape, leaf in zip(shapes, leaves, strict=True))
        ids = shape_of((size,), np.int32)
        where = self._device if self.staged else self._host
        split, join = (partial(copy, leaves=leaves, groups=groups) for copy in self._copies)
        if self._kernels:
            split, join = (
                split_on_every_device(split, self._layout, groups),
                join_on_every_device(join, self._layout, groups),
            )
        if backup:
            return jax.jit(split, out_shardings=((where,) * size, None)).lower(device, ids)
        page = tuple(
            shape_of(leaves[group[0]].with_pages(len(group)), leaves[group[0]].carrier, place)
            for group, place in zip(groups, where, strict=True)
        )
        out = (tuple(leaf.sharding for leaf in leaves), None)
        return jax.jit(join, donate_argnums=0, out_shardings=out).lower(device, (page,) * size, ids)


def _find_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim, where the process has it: freed pages otherwise stay with the process."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


_trim = _find_trim()
