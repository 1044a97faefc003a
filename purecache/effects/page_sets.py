"""Given pages of a pool as arrays of their own: on host, for a request that is put aside, or on another mesh.

This has nothing to do with the tree or its tiers: who calls it says which pages, and what becomes of them. Elsewhere
`pages_to_host` and `pages_from_host` are called get_cpu_copy and load_cpu_copy, `pages_to_pool` transfer_kv_cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from purecache.effects.copies import from_carrier, to_carrier
from purecache.effects.host_memory import checked_memory
from purecache.effects.pools import HostMemory, Leaf, PoolLayout, describe, spread_over
from purecache.effects.programs import ProgramTable, shape_of


@dataclass(frozen=True, eq=False)
class PageSet:
    """Copies of pages of a pool, in host memory."""

    arrays: tuple[jax.Array, ...]
    """One per leaf, with `room` >= `count` entries on its page axis, in integers of the same width where the backend
    would change bits otherwise."""
    count: int
    """Pages."""
    layout: PoolLayout
    """Of the pool that they come from."""

    @property
    def is_ready(self) -> bool:
        """Whether all bytes are on host; until then the copy goes on by itself."""
        arrays: tuple[Any, ...] = self.arrays
        return all(array.is_ready() for array in arrays)


def pages_to_host(
    pool: Any,
    pages: np.ndarray,
    *,
    page_axis: Any = 0,
    host_memory: HostMemory = "pinned_host",
    force_unpinned: bool = False,
) -> PageSet:
    """Copy `pages` (int32[n], ids over all ranks) of a pool to host. Does not wait: see `PageSet.is_ready`.

    The pool may be donated at once. host_memory, force_unpinned: see `checked_memory`. Raises ValueError for a pool,
    ids or a kind of memory that don't fit.
    """
    layout, ids = _checked(pool, pages, page_axis, host_memory)
    checked_memory(layout, True, host_memory, force_unpinned)
    rows = _gathered(layout, pool, ids)
    places = [_whole(leaf, leaf.host_sharding, host_memory) for leaf in layout.leaves]
    return PageSet(tuple(jax.device_put(list(rows), places)), len(ids), layout)


def pages_from_host(pool: Any, copy: PageSet, pages: np.ndarray, *, page_axis: Any = 0) -> Any:
    """Write the copies into `pages` (int32[n], distinct) of a pool, which is donated; returns the new pool.

    The pool may have another number of pages, or be placed otherwise, than the one that the copies come from. Raises
    ValueError for pages of another shape or dtype, and for ids that don't fit; the pool is as it was then.
    """
    layout, ids = _checked(pool, pages, page_axis, "pinned_host")
    if len(ids) != copy.count:
        raise ValueError(f"{len(ids)} pages are to be written, but {copy.count} were copied")
    return _scattered(layout, pool, copy.layout, copy.arrays, ids)


def pages_to_pool(pool: Any, pages: np.ndarray, other: Any, others: np.ndarray, *, page_axis: Any = 0) -> Any:
    """Copy `pages` (int32[n]) of a pool to pages `others` (int32[n], distinct) of another, which is donated.

    The pools may be on other devices, or spread over them in another way. Returns the new `other`. Raises as
    `pages_from_host`.
    """
    layout, ids = _checked(pool, pages, page_axis, "pinned_host")
    target, written = _checked(other, others, page_axis, "pinned_host")
    if len(ids) != len(written):
        raise ValueError(f"{len(ids)} pages are to be copied to {len(written)} pages")
    return _scattered(target, other, layout, _gathered(layout, pool, ids), written)


def _gathered(layout: PoolLayout, pool: Any, ids: np.ndarray) -> tuple[jax.Array, ...]:
    room = _room(len(ids))
    padded = np.zeros(room, np.int32)
    padded[: len(ids)] = ids
    table = ProgramTable(layout, set(), "page sets")
    return table.get("gather", room, partial(_lower_gather, layout, room)).compiled(layout.flatten(pool), padded)


def _scattered(layout: PoolLayout, pool: Any, source: PoolLayout, rows: Sequence[jax.Array], ids: np.ndarray) -> Any:
    if len(layout.leaves) != len(source.leaves):
        raise ValueError(f"the pool has {len(layout.leaves)} arrays, but those to be written have {len(source.leaves)}")
    for leaf, other in zip(layout.leaves, source.leaves, strict=True):
        if (leaf.with_pages(1), leaf.dtype) != (other.with_pages(1), other.dtype):
            raise ValueError(
                f"pages of {leaf.name} are {leaf.dtype}{list(leaf.with_pages(1))}, but those to be written"
                f" {other.dtype}{list(other.with_pages(1))}"
            )
    if len(np.unique(ids)) != len(ids):
        raise ValueError("a page is to be written twice")
    room = rows[0].shape[layout.leaves[0].axis]
    # What is behind the last page goes nowhere: every id is another one, and none of them exists.
    padded = np.arange(room, dtype=np.int32) + np.int32(max(leaf.shape[leaf.axis] for leaf in layout.leaves))
    padded[: len(ids)] = ids
    places = [_whole(leaf, leaf.host_sharding, None) for leaf in layout.leaves]
    moved = tuple(jax.device_put(list(_carried(rows, source, layout)), places))
    table = ProgramTable(layout, set(), "page sets")
    program = table.get("scatter", room, partial(_lower_scatter, layout, room))
    return jax.tree.unflatten(layout.treedef, program.compiled(layout.flatten(pool), moved, padded))


def _carried(rows: Sequence[jax.Array], source: PoolLayout, target: PoolLayout) -> list[jax.Array]:
    """The rows in the carrier dtypes of the target: backends differ in them."""
    return [
        row if old.carrier == new.carrier else jax.lax.bitcast_convert_type(row, new.carrier)
        for row, old, new in zip(rows, source.leaves, target.leaves, strict=True)
    ]


def _lower_gather(layout: PoolLayout, room: int) -> Any:
    def gather(device: tuple[jax.Array, ...], ids: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_rows(array, ids, leaf) for array, leaf in zip(device, layout.leaves, strict=True))

    out = tuple(_whole(leaf, leaf.host_sharding, None) for leaf in layout.leaves)
    return jax.jit(gather, out_shardings=out).lower(_pool_shapes(layout), shape_of((room,), np.int32))


def _rows(array: jax.Array, ids: jax.Array, leaf: Leaf) -> jax.Array:
    """Pages of one array, in the dtype of host memory."""
    names = spread_over(leaf.host_sharding, leaf.axis)
    if not names:
        return to_carrier(jnp.take(array, ids, axis=leaf.axis, mode="clip"), leaf)

    # The compiler's own program adds up what the shards have, in the dtype of the pool: that changes NaN payloads.
    def local(array: jax.Array, ids: jax.Array) -> jax.Array:
        mine = ids - jax.lax.axis_index(names) * array.shape[leaf.axis]
        here = (mine >= 0) & (mine < array.shape[leaf.axis])
        rows = as_bits(jnp.take(array, mine, axis=leaf.axis, mode="clip"))
        shape = [len(ids) if axis == leaf.axis else 1 for axis in range(rows.ndim)]
        return jax.lax.psum(jnp.where(here.reshape(shape), rows, 0), names)

    specs, out = (leaf.host_sharding.spec, PartitionSpec()), _whole(leaf, leaf.host_sharding, None).spec
    bits = jax.shard_map(local, mesh=leaf.host_sharding.mesh, in_specs=specs, out_specs=out, check_vma=False)(
        array, ids
    )
    return bits.astype(bool) if leaf.carrier.kind == "b" else jax.lax.bitcast_convert_type(bits, leaf.carrier)


def as_bits(array: jax.Array) -> jax.Array:
    """The same bits as unsigned integers."""
    width = np.dtype(f"uint{8 * array.dtype.itemsize}")
    return array.astype(width) if array.dtype == bool else jax.lax.bitcast_convert_type(array, width)


def _lower_scatter(layout: PoolLayout, room: int) -> Any:
    def scatter(device: tuple[jax.Array, ...], rows: tuple[jax.Array, ...], ids: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            array.at[(*[slice(None)] * leaf.axis, ids)].set(from_carrier(row, leaf), mode="drop", unique_indices=True)
            for array, row, leaf in zip(device, rows, layout.leaves, strict=True)
        )

    rows = tuple(
        shape_of(leaf.with_pages(room), leaf.carrier, _whole(leaf, leaf.host_sharding, None)) for leaf in layout.leaves
    )
    out = tuple(leaf.sharding for leaf in layout.leaves)
    lowered = jax.jit(scatter, donate_argnums=0, out_shardings=out)
    return lowered.lower(_pool_shapes(layout), rows, shape_of((room,), np.int32))


def _pool_shapes(layout: PoolLayout) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(shape_of(leaf.shape, leaf.dtype, leaf.sharding) for leaf in layout.leaves)


def _whole(leaf: Leaf, like: NamedSharding, memory: HostMemory | None) -> NamedSharding:
    """The placement of pages of a leaf: as `like`, but every device has its part of all of them."""
    spec = [None if axis == leaf.axis else name for axis, name in enumerate(like.spec)]
    return NamedSharding(like.mesh, PartitionSpec(*spec), memory_kind=memory or "device")


def _room(count: int) -> int:
    """The next power of two: few programs serve all numbers of pages."""
    return 1 << max(0, math.ceil(math.log2(max(count, 1))))


def _checked(pool: Any, pages: np.ndarray, page_axis: Any, memory: HostMemory) -> tuple[PoolLayout, np.ndarray]:
    layout, ids = describe(pool, page_axis, 1, memory_kind=memory), np.asarray(pages)
    least = min(leaf.shape[leaf.axis] for leaf in layout.leaves)
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"pages must be a list of one or more integers, not {ids.dtype}{list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= least:
        raise ValueError(f"pages are {ids.min()} to {ids.max()}, but the pool has 0 to {least - 1}")
    return layout, ids.astype(np.int32)
