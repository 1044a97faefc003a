"""Host pages as bytes: what goes to storage and what comes from there.

The arrays of L2 are never viewed from NumPy: one live view makes every donated write copy the whole pool. Pages are
copied into a small pool of their own instead, by the programs that also serve the device pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purecache.effects.host_tier import Arrays, HostTier
from purecache.effects.pools import PoolLayout


@dataclass(frozen=True, eq=False)
class Part:
    """One dispatched copy into host pages."""

    where: np.ndarray
    """Positions among the pages of the call."""
    pages: np.ndarray
    token: Any
    epoch: int
    """Of the tier, at dispatch."""

    @property
    def ready(self) -> bool:
        """Whether it has ended, well or not."""
        try:
            return self.token.is_ready()
        except Exception:
            return True


class StagedPages:
    """Reads and writes pages of one host tier, at most `batch` per dispatched copy."""

    def __init__(self, layout: PoolLayout, tier: HostTier, batch: int) -> None:
        self._layout, self._tier, self._batch = layout, tier, batch
        shapes = [(leaf.with_pages(batch), leaf.dtype) for leaf in layout.leaves]
        shardings = tuple(leaf.sharding for leaf in layout.leaves)
        self._empty = jax.jit(lambda: tuple(jnp.zeros(*shape) for shape in shapes), out_shardings=shardings)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: those of its leaves one after the other."""
        return self._layout.page_bytes

    def has(self, pages: np.ndarray) -> np.ndarray:
        """bool[n]: which host pages hold what they should, as far as is known."""
        return self._tier.valid[pages]

    def warm(self) -> None:
        """Compile the copies of both directions."""
        self._tier.prepare(self._empty())

    def read(self, pages: np.ndarray) -> list[tuple[np.ndarray, Arrays]]:
        """Dispatch the copy of host pages (global ids); returns parts: positions in `pages`, and arrays for `bytes_of`.

        May raise anything; then nothing was read.
        """
        parts, first = [], 0
        for size in self._cut(len(pages)):
            where = np.arange(first, first + size)
            target = np.arange(size, dtype=np.int32)
            parts.append((where, self._tier.load_back(self._empty(), pages[where], target)))
            first += size
        return parts

    def bytes_of(self, arrays: Arrays, place: int, out: np.ndarray) -> None:
        """Write the bytes of page `place` of a part that is ready into uint8[page_bytes]. Raises if its copy failed."""
        start = 0
        for array, leaf in zip(arrays, self._layout.leaves, strict=True):
            page = np.ascontiguousarray(np.moveaxis(np.asarray(array), leaf.axis, 0)[place])
            out[start : start + leaf.page_bytes] = page.reshape(-1).view(np.uint8)
            start += leaf.page_bytes

    def write(self, pages: np.ndarray, rows: Sequence[np.ndarray]) -> list[Part]:
        """Dispatch the copy of uint8[page_bytes] rows into host pages (global ids); returns parts for `landed`.

        The rows are copied before this returns. May raise anything; then no page holds what it should.
        """
        parts, first = [], 0
        for size in self._cut(len(pages)):
            where = np.arange(first, first + size)
            arrays = self._arrays_of([rows[row] for row in where.tolist()])
            source = np.arange(size, dtype=np.int32)
            token = self._tier.backup(arrays, source, pages[where])
            parts.append(Part(where, pages[where], token, self._tier.epoch))
            first += size
        return parts

    def landed(self, part: Part) -> bool:
        """Whether the pages of a part hold its bytes now. Waits for the copy: ask when `part.ready`."""
        try:
            part.token.block_until_ready()  # raises what the copy raised while it ran
        except Exception:
            self._tier.broken(part.epoch)
            self._tier.valid[part.pages] = False
            return False
        return part.epoch == self._tier.epoch

    def _cut(self, count: int) -> list[int]:
        full, rest = divmod(count, self._batch)
        batches = [self._batch] * full + [rest] * (rest > 0)
        return [size for batch in batches for size in self._tier.sizes(batch)]

    def _arrays_of(self, rows: list[np.ndarray]) -> Arrays:
        arrays, start = [], 0
        for leaf in self._layout.leaves:
            # Fresh memory, which nobody writes again: the CPU backend may alias what it is given.
            block = np.empty((self._batch, *leaf.shape[: leaf.axis], *leaf.shape[leaf.axis + 1 :]), leaf.dtype)
            content = block.reshape(self._batch, -1).view(np.uint8)
            for place, row in enumerate(rows):
                content[place] = row[start : start + leaf.page_bytes]
            arrays.append(jax.device_put(np.ascontiguousarray(np.moveaxis(block, 0, leaf.axis)), leaf.sharding))
            start += leaf.page_bytes
        return tuple(arrays)
