"""What a device pool looks like, and the host arrays that mirror its pages.

A pool is any pytree of `jax.Array` in which every leaf has a page axis: one stacked array, one array per layer, K and V
fused or apart, MHA or MLA shapes. A page of the pool is the slice at one page id of every leaf.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from purecache.effects.transfers import PoolGoneError
from purecache.meshes import automatic, no_mesh

HostMemory = Literal["pinned_host", "unpinned_host"]

_EXACT_ON_CPU = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True)
class Leaf:
    """One array of the pool."""

    name: str
    """Path of the leaf in the pytree, for messages."""
    axis: int
    """Its page axis, >= 0."""
    shape: tuple[int, ...]
    """Shape with all device pages."""
    dtype: np.dtype
    """Dtype on the device."""
    carrier: np.dtype
    """Dtype on the host: `dtype`, or an unsigned integer of the same width where the backend rewrites `dtype`."""
    sharding: Sharding
    """Where the device array lives."""
    host_sharding: NamedSharding
    """The same spec in host memory."""

    def with_pages(self, pages: int) -> tuple[int, ...]:
        """The leaf's shape with `pages` entries on the page axis."""
        return (*self.shape[: self.axis], pages, *self.shape[self.axis + 1 :])

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in this leaf."""
        return math.prod(self.with_pages(1)) * self.dtype.itemsize


@dataclass(frozen=True)
class PoolLayout:
    """Structure, shapes and placement of a pool; fixed for the life of an interpreter."""

    treedef: Any
    """Structure of the pytree."""
    leaves: tuple[Leaf, ...]
    """One per array, in flattening order."""
    platform: str
    """What `jax.Device.platform` calls the backend of the pool."""
    shards: tuple[str, ...] = ()
    """Axes of the mesh that the page axis of every leaf is spread over, if each rank's pages are on one shard of it:
    copies of a rank then stay within a shard. Elsewhere () and the compiler moves what has to be moved."""

    @property
    def on_cpu(self) -> bool:
        """Whether the pool lives on the CPU backend."""
        return self.platform == "cpu"

    @property
    def shard_count(self) -> int:
        """Shards of the page axis; 1 without `shards`."""
        mesh = self.leaves[0].host_sharding.mesh
        return math.prod(mesh.shape[name] for name in self.shards)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all leaves."""
        return sum(leaf.page_bytes for leaf in self.leaves)

    def flatten(self, pool: Any) -> tuple[jax.Array, ...]:
        """The arrays of `pool`, checked against the layout. NumPy arrays are copied to the device, never aliased.

        Raises ValueError for another structure, shape, dtype or placement, PoolGoneError for a deleted array.
        """
        flat, treedef = jax.tree.flatten(pool)
        if treedef != self.treedef:
            raise ValueError(f"the pool has structure {treedef}, expected {self.treedef}")
        return tuple(_checked(array, leaf) for array, leaf in zip(flat, self.leaves, strict=True))


def describe(
    pool: Any, page_axis: Any, pages: int, ranks: int = 1, memory_kind: HostMemory = "pinned_host"
) -> PoolLayout:
    """The layout of `pool`: arrays whose axis `page_axis` (an int, or a pytree prefix of ints) holds >= `pages` pages,
    those of `ranks` ranks. `memory_kind` is that of the host pages.

    Raises ValueError for an empty pool, a leaf without that axis or with too few pages, and dtypes below one byte.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(pool)
    if not flat:
        raise ValueError("the pool has no arrays: give a pytree of jax.Array with a page axis in each")
    try:
        axes = jax.tree.leaves(jax.tree.broadcast(page_axis, pool))
    except ValueError as error:
        raise ValueError(f"page_axis is neither an int nor a pytree of ints shaped like the pool: {error}") from error
    leaves = tuple(
        _leaf(f"pool{jax.tree_util.keystr(path)}", array, axis, pages, memory_kind)
        for (path, array), axis in zip(flat, axes, strict=True)
    )
    platforms = {device.platform for leaf in leaves for device in leaf.sharding.device_set}
    if len(platforms) > 1:
        raise ValueError(f"the pool is spread over the backends {sorted(platforms)}: place all of it on one")
    return PoolLayout(treedef, leaves, platforms.pop(), _shards(leaves, pages, ranks))


def _shards(leaves: Sequence[Leaf], pages: int, ranks: int) -> tuple[str, ...]:
    """See `PoolLayout.shards`."""
    found = {(leaf.host_sharding.mesh, spread_over(leaf.host_sharding, leaf.axis)) for leaf in leaves}
    if len(found) != 1 or any(leaf.shape[leaf.axis] != pages for leaf in leaves):
        return ()
    mesh, names = found.pop()
    count = math.prod(mesh.shape[name] for name in names)
    return names if count > 1 and ranks % count == 0 else ()


def spread_over(sharding: NamedSharding, axis: int) -> tuple[str, ...]:
    """Axes of the mesh that an array's axis is spread over."""
    names = sharding.spec[axis] if axis < len(sharding.spec) else None
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def zero_host_pool(layout: PoolLayout, pages: int) -> tuple[jax.Array, ...]:
    """One zeroed array of `pages` slots per leaf, in host memory, with the leaf's carrier dtype."""
    # Made by a compiled program with a NamedSharding: an array made from NumPy memory is copied by the first donating
    # program, and one with a SingleDeviceSharding is typed as device memory inside jit.
    shardings = tuple(leaf.host_sharding for leaf in layout.leaves)
    shapes = [(leaf.with_pages(pages), leaf.carrier) for leaf in layout.leaves]
    with no_mesh():
        make = jax.jit(lambda: tuple(jnp.zeros(shape, dtype) for shape, dtype in shapes), out_shardings=shardings)
        return jax.block_until_ready(make())  # a lack of memory shows here, and not in the first copy


def any_deleted(arrays: Sequence[jax.Array]) -> bool:
    """Whether one of `arrays` was donated or deleted."""
    return any(array.is_deleted() for array in arrays)


def _leaf(name: str, array: Any, axis: Any, pages: int, memory_kind: str) -> Leaf:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise ValueError(f"{name} is a {type(array).__name__}, not an array")
    if isinstance(axis, bool) or not isinstance(axis, int) or not -array.ndim <= axis < array.ndim:
        raise ValueError(f"{name} has shape {array.shape}: it has no page axis {axis}; set page_axis for this leaf")
    axis %= array.ndim
    if array.shape[axis] < pages:
        raise ValueError(f"{name} has {array.shape[axis]} pages on axis {axis}, but ranks * device_pages is {pages}")
    dtype = np.dtype(array.dtype)
    if "int4" in dtype.name or "int2" in dtype.name or "float4" in dtype.name:
        raise ValueError(f"{name} has dtype {dtype}: store dtypes below one byte as uint8")
    sharding = array.sharding if isinstance(array, jax.Array) else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    on_cpu = all(device.platform == "cpu" for device in sharding.device_set)
    return Leaf(
        name, axis, tuple(array.shape), dtype, _carrier(dtype, on_cpu), sharding, _on_host(name, sharding, memory_kind)
    )


def _carrier(dtype: np.dtype, on_cpu: bool) -> np.dtype:
    # XLA:CPU computes bf16 and fp8 in f32: a write into such a pool converts the whole pool and alters NaN payloads.
    # Elsewhere the native dtype is right: a bitcast of a page could cost a change of tiling.
    if on_cpu and jnp.issubdtype(dtype, jnp.floating) and dtype not in _EXACT_ON_CPU:
        return np.dtype(f"uint{8 * dtype.itemsize}")
    return dtype


def _on_host(name: str, sharding: Sharding, memory_kind: str) -> NamedSharding:
    if isinstance(sharding, NamedSharding):
        return automatic(sharding).with_memory_kind(memory_kind)  # type: ignore[union-attr]
    if len(sharding.device_set) > 1:
        raise ValueError(f"{name} is spread over devices by a {type(sharding).__name__}: use a NamedSharding")
    mesh = Mesh(np.array(list(sharding.device_set)), ("device",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)


def _checked(array: Any, leaf: Leaf) -> jax.Array:
    if tuple(getattr(array, "shape", ())) != leaf.shape or np.dtype(getattr(array, "dtype", object)) != leaf.dtype:
        found = f"{getattr(array, 'dtype', type(array).__name__)}{list(getattr(array, 'shape', ()))}"
        raise ValueError(f"{leaf.name} is {found}, expected {leaf.dtype}{list(leaf.shape)}")
    if not isinstance(array, jax.Array):
        return jax.device_put(jnp.array(array, copy=True), leaf.sharding)
    if array.is_deleted():
        raise PoolGoneError(f"{leaf.name} was donated to another program: put in the pool that came out of it")
    if not array.sharding.is_equivalent_to(leaf.sharding, array.ndim):
        raise ValueError(f"{leaf.name} is placed as {array.sharding}, expected {leaf.sharding}")
    return array
