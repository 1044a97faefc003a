"""The pages of a pool on their way between host memory and a store, with those of its side pools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from purecache.effects import Interpreter, Planes
from purecache.effects.staged import Part, StagedPages
from purecache.state import CacheConfig, Law, Tier
from purecache.state.pools import ANCHOR
from purecache.storage.buffers import PageBuffers
from purecache.storage.options import StorageOptions
from purecache.stores.names import HeadGroups, Naming, ObjectRecord, objects_of

Namings = Naming | Mapping[str, Naming]
"""The naming of the only pool, or one per pool that storage has, by name."""
Slot = tuple[int, ...]
"""The buffers of one page: one per plane."""


@dataclass(eq=False)
class _Plane:
    """One interpreter's host pages, and the buffers of their objects."""

    staged: StagedPages
    buffers: PageBuffers


@dataclass(frozen=True, eq=False)
class Copied:
    """One dispatched copy out of host pages."""

    plane: int
    where: np.ndarray
    """Positions among the pages of the call."""
    arrays: Any
    first: int
    """Place of the first of them in the arrays."""

    @property
    def ready(self) -> bool:
        """Whether it has ended, well or not."""
        try:
            return all(array.is_ready() for array in self.arrays)
        except Exception:
            return True


class PoolPages:
    """Pages of one pool of the control plane. A page is whole only with its side pools: they come and go with it."""

    def __init__(
        self, pool: int, planes: Mapping[str, Interpreter], naming: Mapping[str, Naming], options: StorageOptions
    ) -> None:
        """`planes`: the pool's own interpreter first, then those of its side pools, by name."""
        self.pool, self._names, self._naming = pool, tuple(planes), naming
        self._host_pages = next(iter(planes.values())).host_pages
        self.parts = len(self.objects("0" * 64))
        """Objects of one page."""
        largest = max(plane.page_bytes for plane in planes.values())
        slots = max(1, min(options.staging_pages, options.staging_bytes // largest))
        self.batch = min(options.batch_pages, slots)
        """Most pages of one request."""
        self._planes: list[_Plane] = []
        for name, plane in planes.items():
            parts = len(objects_of("0" * 64, naming, (name,)))
            staged = plane.staged(self.batch, parts, options.axis_of(name))
            self._planes.append(_Plane(staged, PageBuffers(slots, staged.row_bytes, parts)))

    def objects(self, key: str) -> tuple[str, ...]:
        """Names of the objects of a page, in the order of its buffers."""
        return objects_of(key, self._naming, self._names)

    def whole(self, answers: Sequence[bool]) -> np.ndarray:
        """bool[pages]: of which pages every object is good."""
        return np.logical_and.reduce(np.array(answers, bool).reshape(-1, self.parts), axis=1)

    # ---- buffers -------------------------------------------------------------------------------------------------

    @property
    def regions(self) -> list[memoryview]:
        """The memory of all buffers."""
        return [plane.buffers.ring.region for plane in self._planes]

    @property
    def ring(self) -> PageBuffers:
        """The buffers of the pool itself; side pools have as many."""
        return self._planes[0].buffers

    @property
    def free(self) -> int:
        """Pages for which there is a buffer."""
        return self.ring.free

    def acquire(self, number: int) -> list[Slot] | None:
        """Buffers for so many pages, or None where there are not as many."""
        if number > self.free:
            return None
        # All planes give and take together: where the first has so many, the others do.
        return list(zip(*(plane.buffers.acquire(number) or [] for plane in self._planes), strict=True))

    def release(self, slots: Sequence[Slot]) -> None:
        """Give buffers back."""
        for plane, held in zip(self._planes, zip(*slots, strict=True), strict=False):
            plane.buffers.release(held)

    def buffers(self, slots: Sequence[Slot]) -> list[memoryview]:
        """What a store reads or fills: the objects of all pages, page by page, with their trailers."""
        return [
            sealed
            for slot in slots
            for place, plane in zip(slot, self._planes, strict=True)
            for sealed in plane.buffers.objects([place])
        ]

    # ---- copies --------------------------------------------------------------------------------------------------

    def on_host(self, pages: np.ndarray, rank: int) -> np.ndarray:
        """int32[n]: pages local to a rank as the copies know them."""
        return pages + np.int32(rank * self._host_pages)

    def has(self, pages: np.ndarray) -> np.ndarray:
        """bool[n]: which host pages hold what they should in every plane, as far as is known."""
        return np.logical_and.reduce([plane.staged.has(pages) for plane in self._planes])

    def warm(self) -> None:
        """Compile the copies of both directions."""
        for plane in self._planes:
            plane.staged.warm()

    def read(self, pages: np.ndarray) -> list[Copied]:
        """Dispatch the copy of host pages. May raise anything; then nothing was read."""
        return [Copied(number, *part) for number, plane in enumerate(self._planes) for part in plane.staged.read(pages)]

    def fill(self, copies: Sequence[Copied], slots: Sequence[Slot]) -> None:
        """Put the bytes of copies that are ready into the buffers of their pages. Raises if a copy failed."""
        for copied in copies:
            plane = self._planes[copied.plane]
            for place, position in enumerate(copied.where.tolist(), copied.first):
                plane.staged.bytes_of(copied.arrays, place, plane.buffers.rows(slots[position][copied.plane]))

    def write(self, pages: np.ndarray, slots: Sequence[Slot]) -> list[tuple[int, Part]]:
        """Dispatch the copy of buffers into host pages; returns parts for `landed`, each with its plane.

        The bytes are taken before this returns. May raise anything; then no page holds what it should.
        """
        return [
            (number, part)
            for number, plane in enumerate(self._planes)
            for part in plane.staged.write(pages, [plane.buffers.rows(slot[number]) for slot in slots])
        ]

    def landed(self, parts: Sequence[tuple[int, Part]], number: int) -> np.ndarray:
        """bool[number]: which pages of a `write` hold their bytes now, in every plane. Waits for the copies."""
        ok = np.ones(number, bool)
        for plane, part in parts:
            ok[part.where] &= self._planes[plane].staged.landed(part)
        return ok


def stored_pools(
    config: CacheConfig, plane: Interpreter | Planes, naming: Namings, options: StorageOptions
) -> list[PoolPages]:
    """The pools whose pages go to storage, kv first.

    Raises ValueError where a pool has no naming of its own: what a naming says differs from pool to pool.
    """
    planes = plane.planes if isinstance(plane, Planes) else {ANCHOR: plane}
    groups: dict[int, dict[str, Interpreter]] = {0: {ANCHOR: planes[ANCHOR]}}
    for spec in config.pools:
        pool = config.pool_of(spec.name)
        leaves_host = "storage" in spec.tiers and config.layout.capacity(Tier.HOST, pool) > 0
        if leaves_host and (spec.law is not None or pool in groups):
            groups.setdefault(pool, {})[spec.name] = planes[spec.name]
    names = [name for group in groups.values() for name in group]
    named = naming if isinstance(naming, Mapping) else dict.fromkeys(names, naming)
    if (named is not naming and len(names) > 1) or not set(names) <= set(named):
        raise ValueError(f"pools differ in dtype, layers and layout: give a naming for each of {names}, by name")
    kinds = {spec.name: spec.law for spec in config.pools if spec.law is not None}
    named = {name: _of_kind(named[name], kinds[name]) if name in kinds else named[name] for name in names}
    return [PoolPages(pool, group, named, options) for pool, group in groups.items()]


def _of_kind(naming: Naming, law: Law) -> Naming:
    """The naming of a tail pool, with the kind of its law: the same bytes mean other things to another kind."""
    if isinstance(naming, HeadGroups):
        return replace(naming, record=_record_of_kind(naming.record, law))
    return _record_of_kind(naming, law) if isinstance(naming, ObjectRecord) else naming


def _record_of_kind(record: ObjectRecord, law: Law) -> ObjectRecord:
    return replace(record, layout=f"{record.layout};{type(law).__name__}")
