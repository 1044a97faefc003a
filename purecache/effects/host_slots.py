"""L2 as one preallocated pinned array with slots per leaf of the device pool."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from purecache.effects.copies import copy_from_slots, copy_to_slots, within_shards
from purecache.effects.host_tier import Arrays
from purecache.effects.kernel_meshes import on_every_device
from purecache.effects.kernels import ANY, HOST, dma_pages
from purecache.effects.pools import PoolLayout, any_deleted, zero_host_pool
from purecache.effects.programs import Program, ProgramTable, shape_of
from purecache.effects.table import Route

_COPIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "loop": (copy_to_slots, copy_from_slots),
    "host_dma": (
        partial(dma_pages, space_out=HOST, space_in=ANY),
        partial(dma_pages, space_out=ANY, space_in=HOST),
    ),
}
"""The programs of a route: from the pool to slots, and back."""


class HostSlots:
    """`pages` slots; a batch of up to `batch_pages` copies is one program with a traced count, in place."""

    staged = False

    def __init__(self, layout: PoolLayout, pages: int, batch_pages: int, route: Route, staging_pages: int) -> None:
        self.epoch = 0
        self.valid = np.zeros(pages, bool)
        self._layout = layout
        self._batch = batch_pages
        # A pool of one page cannot be told from its page.
        counts = [(leaf, count) for leaf in layout.leaves for count in (pages, leaf.shape[leaf.axis]) if count > 1]
        sizes = {math.prod(leaf.with_pages(count)) for leaf, count in counts}
        self._table = ProgramTable(layout, sizes, "slots", route.programs, pages)
        self._copies = _COPIES[route.programs]
        self._kernels = route.programs == "host_dma"
        self._slots: Arrays | None = zero_host_pool(layout, pages)

    def sizes(self, count: int) -> list[int]:
        """Full batches and a rest."""
        full, rest = divmod(count, self._batch)
        return [self._batch] * full + ([rest] if rest else [])

    def backup(self, device: Arrays, source: np.ndarray, target: np.ndarray) -> jax.Array:
        """See `HostTier.backup`. A failure that took the slots along loses all pages; the next call makes new ones."""
        program = self._program(True, device)
        if self._slots is None:
            self._slots = zero_host_pool(self._layout, len(self.valid))
        self.valid[target] = False
        slots = self._slots
        try:
            self._slots, token = program.compiled(slots, device, *self._plan(source, target))
        except Exception:
            if any_deleted(slots):
                self.broken(self.epoch)
            raise
        self.valid[target] = True
        return token

    def fetch(self, source: np.ndarray) -> np.ndarray:
        """See `HostTier.fetch`."""
        return source

    def commit(self, device: Arrays, fetched: np.ndarray, target: np.ndarray) -> Arrays:
        """See `HostTier.commit`."""
        program = self._program(False, device)
        pages, _ = program.compiled(device, self.slots, *self._plan(fetched, target))
        return pages

    def broken(self, epoch: int) -> None:
        """All slots are one donated chain: what failed in it took every page along, the finished ones too."""
        if epoch == self.epoch:
            self.epoch += 1
            self._slots = None  # made anew by the next backup, so that a lack of memory then is a failed backup
            self.valid[:] = False

    @property
    def slots(self) -> Arrays:
        """The arrays of all slots, one per leaf. Raises RuntimeError between their loss and the next backup."""
        if self._slots is None:
            raise RuntimeError("the host pages were lost in a failed backup")
        return self._slots

    def drop(self, pages: np.ndarray) -> None:
        """Slots have no memory of their own to return."""

    def reset(self) -> None:
        """The slots stay; nothing in them counts any more."""
        self.valid[:] = False

    def warm(self, progress: Callable[[int, int, str], None] | None) -> None:
        """Compile both programs."""
        for done, backup in enumerate((True, False), 1):
            program = self._program(backup, self._layout.leaves)
            if progress is not None:
                progress(done, 2, program.name)

    def prepare(self, device: Arrays) -> None:
        """See `HostTier.prepare`."""
        for backup in (True, False):
            self._program(backup, device)

    def programs(self) -> list[dict[str, Any]]:
        """At most two entries for the pool, and two per size of a pool of staged pages."""
        return self._table.report()

    def _plan(self, source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.int32]:
        # Fresh memory for every call: the program may still be waiting for its inputs when the next one is prepared.
        padded = np.zeros((2, self._batch), np.int32)
        padded[0, : len(source)] = source
        padded[1, : len(target)] = target
        return padded[0], padded[1], np.int32(len(source))

    def _program(self, backup: bool, device: Sequence[Any]) -> Program:
        name = "backup to slots" if backup else "load back from slots"
        shapes = [tuple(array.shape) for array in device]
        if shapes != [leaf.shape for leaf in self._layout.leaves]:
            name += f", staged {shapes[0][self._layout.leaves[0].axis]}"
        return self._table.get(name, self._batch, partial(self._lower, backup, shapes))

    def _lower(self, backup: bool, shapes: Sequence[tuple[int, ...]]) -> Any:
        leaves = self._layout.leaves
        host = tuple(shape_of(leaf.with_pages(len(self.valid)), leaf.carrier, leaf.host_sharding) for leaf in leaves)
        device = tuple(shape_of(shape, leaf.dtype, leaf.sharding) for shape, leaf in zip(shapes, leaves, strict=True))
        ids, count = shape_of((self._batch,), np.int32), shape_of((), np.int32)
        written, read = (host, device) if backup else (device, host)
        function: Callable[..., Any] = partial(self._copies[not backup], leaves=leaves)
        pages = (shapes[0][leaves[0].axis], len(self.valid))
        if self._kernels or self._layout.shards:
            spread = on_every_device if self._kernels else within_shards
            function = spread(function, self._layout, *(pages if backup else pages[::-1]))
        out = (tuple(leaf.host_sharding if backup else leaf.sharding for leaf in leaves), None)
        return jax.jit(function, donate_argnums=0, out_shardings=out).lower(written, read, ids, ids, count)
