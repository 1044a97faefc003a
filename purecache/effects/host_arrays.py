"""L2 as separate pinned arrays per page: memory grows with the pages held and goes back when they are dropped."""

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from purecache.effects.copies import groups_of, join_pages, split_pages
from purecache.effects.host_tier import Arrays
from purecache.effects.pools import PoolLayout
from purecache.effects.programs import Program, ProgramTable, shape_of

# The allocator keeps freed pages for the next ones, which is what makes a full cache fast. They go back to the system
# once the pages held fall this far below their highest number: 64 MiB take about ten milliseconds to hand back.
_SLACK_BYTES = 64 << 20

# Copies are unrolled, and XLA:CPU takes 40 to 130 ms to compile one (a leaf of a page): most of them in one program.
_UNROLLED_COPIES = 16


class HostArrays:
    """Up to `pages` pages, each one array per group of equal leaves; one unrolled program per power of two."""

    def __init__(self, layout: PoolLayout, pages: int, batch_pages: int) -> None:
        self.epoch = 0
        self.valid = np.zeros(pages, bool)
        self._layout = layout
        most = max(1, min(batch_pages, _UNROLLED_COPIES // len(layout.leaves)))
        self._variants = [1 << bit for bit in range(most.bit_length())]
        self._groups = groups_of(layout.leaves)
        sizes = {math.prod(leaf.shape) for leaf in layout.leaves}
        # A pool of as many pages as there are arrays in a group cannot be told from one joined page.
        sizes -= {math.prod(layout.leaves[group[0]].with_pages(len(group))) for group in self._groups}
        sizes -= {math.prod(leaf.with_pages(1)) for leaf in layout.leaves}
        self._table = ProgramTable(layout.leaves, layout.on_cpu, sizes, "arrays")
        self._pages: list[Arrays | None] = [None] * pages
        self._peak = 0  # most pages held since memory was last handed back
        self._held = 0

    def sizes(self, count: int) -> list[int]:
        """Largest powers of two first, so that no program copies a page that nobody asked for."""
        full, rest = divmod(count, self._variants[-1])
        return [self._variants[-1]] * full + [size for size in reversed(self._variants) if rest & size]

    def backup(self, device: Arrays, source: np.ndarray, target: np.ndarray) -> jax.Array:
        """See `HostTier.backup`. Nothing is donated: a failure leaves every other page as it was."""
        program = self._program(len(source), True, device)
        self._forget(target)
        pages, token = program.compiled(device, np.array(source, np.int32))
        for page, arrays in zip(target.tolist(), pages, strict=True):
            self._pages[page] = arrays
        self._held += len(target)
        self._peak = max(self._peak, self._held)
        self.valid[target] = True
        return token

    def load_back(self, device: Arrays, source: np.ndarray, target: np.ndarray) -> Arrays:
        """See `HostTier.load_back`."""
        program = self._program(len(source), False, device)
        pages = tuple(self._pages[page] for page in source.tolist())
        arrays, _ = program.compiled(device, pages, np.array(target, np.int32))
        return arrays

    def broken(self, epoch: int) -> None:
        """Every backup has arrays of its own: the others are not concerned."""

    def drop(self, pages: np.ndarray) -> None:
        """Forget the arrays. An unfinished copy keeps the memory it needs until it is done."""
        self._forget(pages)
        if (self._peak - self._held) * self._layout.page_bytes >= _SLACK_BYTES:
            self._hand_back()

    def reset(self) -> None:
        """Forget all arrays and hand their memory back."""
        self._forget(np.arange(len(self._pages)))
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
        firsts = [leaves[group[0]] for group in groups]
        page = tuple(
            shape_of(leaf.with_pages(len(group)), leaf.carrier, leaf.host_sharding)
            for leaf, group in zip(firsts, groups, strict=True)
        )
        if backup:
            out = ((tuple(leaf.host_sharding for leaf in firsts),) * size, None)
            return jax.jit(partial(split_pages, leaves=leaves, groups=groups), out_shardings=out).lower(device, ids)
        out = (tuple(leaf.sharding for leaf in leaves), None)
        function = partial(join_pages, leaves=leaves, groups=groups)
        return jax.jit(function, donate_argnums=0, out_shardings=out).lower(device, (page,) * size, ids)


def _find_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim, where the process has it: freed pages otherwise stay with the process."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


_trim = _find_trim()
