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
from purecache.effects.pools import Leaf, PoolLayout
from purecache.meshes import no_mesh


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
    """Reads and writes pages of one host tier, at most `batch` per dispatched copy.

    A page is `parts` equal rows of bytes: row g holds the g-th group of heads of every leaf, one leaf after the other.
    """

    def __init__(self, layout: PoolLayout, tier: HostTier, batch: int, parts: int = 1, head_axis: int = 0) -> None:
        """`head_axis`: axis of the heads in every leaf of a page, not counting the page axis; used if parts > 1.

        Raises ValueError for leaves whose heads don't make so many equal parts.
        """
        self._layout, self._tier, self._batch = layout, tier, batch
        self._parts, self._axis = parts, head_axis
        for leaf in layout.leaves if parts > 1 else ():
            shape = (*leaf.shape[: leaf.axis], *leaf.shape[leaf.axis + 1 :])
            if not -len(shape) <= head_axis < len(shape) or shape[head_axis] % parts:
                raise ValueError(f"{leaf.name}: a page of shape {shape} has no {parts} equal parts on axis {head_axis}")
        # A batch for every shard of the pool, of which a copy uses one: pages don't move between devices.
        self._rows = batch * layout.shard_count
        self._shard_pages = len(tier.valid) // layout.shard_count
        shapes = [(leaf.with_pages(self._rows), leaf.dtype) for leaf in layout.leaves]
        shardings = tuple(leaf.sharding for leaf in layout.leaves)
        self._empty = jax.jit(lambda: tuple(jnp.zeros(*shape) for shape in shapes), out_shardings=shardings)

    @property
    def row_bytes(self) -> int:
        """Bytes of one of the rows of a page."""
        return self._layout.page_bytes // self._parts

    def has(self, pages: np.ndarray) -> np.ndarray:
        """bool[n]: which host pages hold what they should, as far as is known."""
        return self._tier.valid[pages]

    def warm(self) -> None:
        """Compile the copies of both directions."""
        self._tier.prepare(self._zeros())

    def read(self, pages: np.ndarray) -> list[tuple[np.ndarray, Arrays, int]]:
        """Dispatch the copy of host pages (global ids); returns parts: positions in `pages`, and for `bytes_of` the
        arrays and the place of the first one in them.

        May raise anything; then nothing was read.
        """
        parts = []
        for where, first in self._cut(pages):
            target = np.arange(first, first + len(where), dtype=np.int32)
            parts.append((where, self._tier.commit(self._zeros(), self._tier.fetch(pages[where]), target), first))
        return parts

    def bytes_of(self, arrays: Arrays, place: int, rows: Sequence[np.ndarray]) -> None:
        """Write the page at `place` of a part that is ready into its rows, uint8[row_bytes]. Raises if its copy
        failed."""
        start = 0
        for array, leaf in zip(arrays, self._layout.leaves, strict=True):
            start = self._each_row(leaf, np.moveaxis(np.asarray(array), leaf.axis, 0)[place], rows, start, read=True)

    def write(self, pages: np.ndarray, rows: Sequence[Sequence[np.ndarray]]) -> list[Part]:
        """Dispatch the copy of the rows of each page, uint8[row_bytes], into host pages (global ids).

        Returns parts for `landed`.

        The rows are copied before this returns. May raise anything; then no page holds what it should.
        """
        parts = []
        for where, first in self._cut(pages):
            arrays = self._arrays_of([rows[row] for row in where.tolist()], first)
            source = np.arange(first, first + len(where), dtype=np.int32)
            token = self._tier.backup(arrays, source, pages[where])
            parts.append(Part(where, pages[where], token, self._tier.epoch))
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

    def _zeros(self) -> Arrays:
        with no_mesh():
            return self._empty()

    def _cut(self, pages: np.ndarray) -> list[tuple[np.ndarray, int]]:
        """Positions in `pages` for each copy, all of one shard, and the row of the staged arrays where they begin."""
        cuts, shards = [], pages // self._shard_pages
        for shard in np.unique(shards).tolist():
            inside = np.flatnonzero(shards == shard)
            for batch in np.split(inside, range(self._batch, len(inside), self._batch)):
                ends = np.cumsum(self._tier.sizes(len(batch)))[:-1]
                cuts += [(where, shard * self._batch) for where in np.split(batch, ends)]
        return cuts

    def _each_row(self, leaf: Leaf, page: np.ndarray, rows: Sequence[np.ndarray], start: int, read: bool) -> int:
        """Copy between the page of a leaf and its place in the rows; returns where the next leaf begins."""
        size = leaf.page_bytes // self._parts
        pieces = [page] if self._parts == 1 else np.split(page, self._parts, axis=self._axis)
        for piece, row in zip(pieces, rows, strict=True):
            inside = row[start : start + size].view(leaf.dtype).reshape(piece.shape)
            if read:
                inside[...] = piece
            else:
                piece[...] = inside
        return start + size

    def _arrays_of(self, rows: Sequence[Sequence[np.ndarray]], first: int) -> Arrays:
        arrays, start = [], 0
        for leaf in self._layout.leaves:
            # Fresh memory, which nobody writes again: the CPU backend may alias what it is given.
            block = np.empty((self._rows, *leaf.shape[: leaf.axis], *leaf.shape[leaf.axis + 1 :]), leaf.dtype)
            after = start
            for place, page in enumerate(rows, first):
                after = self._each_row(leaf, block[place], page, start, read=False)
            arrays.append(jax.device_put(np.ascontiguousarray(np.moveaxis(block, 0, leaf.axis)), leaf.sharding))
            start = after
        return tuple(arrays)
