"""Copies of pages between a pool and slots in host memory, as pure functions of arrays.

Every copy is a dynamic slice, a move between memory spaces and a dynamic update slice. Gather and scatter would stage
the whole batch, and neither is supported on pinned host memory by every backend.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from purecache.effects.pools import Leaf, PoolLayout

Arrays = tuple[jax.Array, ...]
Space = jax.memory.Space

# XLA:CPU runs a program of fewer than 1000 floating or integer operations (as counted at compile time, a loop body
# once) in the calling thread, however many bytes it moves. This many extra ones make it run in a worker thread.
_ASYNC_OPERATIONS = 2053


def copy_to_slots(
    host: Arrays, device: Arrays, source: jax.Array, target: jax.Array, count: jax.Array, leaves: Sequence[Leaf]
) -> tuple[Arrays, jax.Array]:
    """Copy device pages `source[:count]` into host slots `target[:count]`.

    host, device: one array per leaf; source, target: int32[batch]; count: int32[] <= batch. Ids must be in range.
    Returns the new host arrays (donate the old ones) and an int32[] that is ready when the bytes are there.
    """

    def body(k: jax.Array, carry: tuple[Arrays, jax.Array]) -> tuple[Arrays, jax.Array]:
        slots, done = carry
        blocks = (read_page(array, leaf.axis, _at(source, k)) for array, leaf in zip(device, leaves, strict=True))
        moved = [to_host(block, leaf) for block, leaf in zip(blocks, leaves, strict=True)]
        return _write_all(slots, moved, leaves, _at(target, k)), done + np.int32(1)

    slots, done = lax.fori_loop(np.int32(0), count, body, (host, jnp.zeros((), jnp.int32)))
    return slots, weighted(done)


def copy_from_slots(
    device: Arrays, host: Arrays, source: jax.Array, target: jax.Array, count: jax.Array, leaves: Sequence[Leaf]
) -> tuple[Arrays, jax.Array]:
    """Copy host slots `source[:count]` into device pages `target[:count]`.

    Shapes as in `copy_to_slots`. Returns the new device arrays (donate the old ones) and an int32[] ready with them.
    """

    def body(k: jax.Array, carry: tuple[Arrays, jax.Array]) -> tuple[Arrays, jax.Array]:
        pages, done = carry
        blocks = (read_page(array, leaf.axis, _at(source, k)) for array, leaf in zip(host, leaves, strict=True))
        moved = [to_device(block, leaf) for block, leaf in zip(blocks, leaves, strict=True)]
        return _write_all(pages, moved, leaves, _at(target, k)), done + np.int32(1)

    pages, done = lax.fori_loop(np.int32(0), count, body, (device, jnp.zeros((), jnp.int32)))
    return pages, weighted(done)


def copy_in_pool(device: Arrays, source: jax.Array, target: jax.Array, leaves: Sequence[Leaf]) -> tuple[jax.Array, ...]:
    """Copy device page `source` to page `target` (int32[]) of the same arrays, which are donated."""
    return tuple(
        write_page(array, read_page(array, leaf.axis, source), leaf.axis, target)
        for array, leaf in zip(device, leaves, strict=True)
    )


def copy_in_shard(layout: PoolLayout) -> Callable[[Arrays, jax.Array, jax.Array], Arrays]:
    """`copy_in_pool` for arrays whose page axis is spread over devices: the shard that has the pages copies them."""
    mesh, names = layout.leaves[0].host_sharding.mesh, layout.shards
    specs = tuple(leaf.host_sharding.spec for leaf in layout.leaves)
    pages = layout.leaves[0].shape[layout.leaves[0].axis] // layout.shard_count

    def local(device: Arrays, source: jax.Array, target: jax.Array) -> Arrays:
        first = lax.axis_index(names) * pages
        mine = (source >= first) & (source < first + pages)
        # On the other shards a page is copied onto itself.
        source, target = (jnp.where(mine, page - first, 0) for page in (source, target))
        return copy_in_pool(device, source, target, layout.leaves)

    in_specs = (specs, PartitionSpec(), PartitionSpec())
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)


def within_shards(
    copy: Callable[..., tuple[Arrays, jax.Array]], layout: PoolLayout, read: int, written: int
) -> Callable[..., tuple[Arrays, jax.Array]]:
    """`copy_to_slots` or `copy_from_slots` for arrays whose page axis is spread over devices, without moving pages
    between them: every device copies the pages that it has, and all pages of a call are on one shard.

    read, written: pages of the arrays on either side, over all shards. A program for the whole arrays would gather
    all of them on every device. The second result has one entry per shard.
    """
    mesh, names = layout.leaves[0].host_sharding.mesh, layout.shards
    specs = tuple(leaf.host_sharding.spec for leaf in layout.leaves)

    def local(out: Arrays, given: Arrays, source: jax.Array, target: jax.Array, count: jax.Array) -> Any:
        shard = lax.axis_index(names)
        from_, to = (ids - shard * (pages // layout.shard_count) for ids, pages in ((source, read), (target, written)))
        mine = (from_[0] >= 0) & (from_[0] < read // layout.shard_count)
        arrays, done = copy(out, given, from_, to, jnp.where(mine, count, 0))
        return arrays, done[None]

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, specs, PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=(specs, PartitionSpec(names)),
        check_vma=False,
    )


def to_host(block: jax.Array, leaf: Leaf) -> jax.Array:
    """A block of a leaf on its way to host memory."""
    # As integers on the device side: arithmetic on a host block would be handed to the host processor by some backends.
    carried = to_carrier(block, leaf)
    return jax.device_put(carried, Space.Host) if is_pinned(leaf) else carried


def to_device(block: jax.Array, leaf: Leaf) -> jax.Array:
    """The other way."""
    return from_carrier(jax.device_put(block, Space.Device) if is_pinned(leaf) else block, leaf)


def is_pinned(leaf: Leaf) -> bool:
    """Whether host pages have a type of their own in programs: those in unpinned memory have the type of the device."""
    return leaf.host_sharding.memory_kind == "pinned_host"


def to_carrier(block: jax.Array, leaf: Leaf) -> jax.Array:
    """The bits of a block in the dtype of host memory."""
    return block if leaf.carrier == leaf.dtype else lax.bitcast_convert_type(block, leaf.carrier)


def from_carrier(block: jax.Array, leaf: Leaf) -> jax.Array:
    """The bits of a block in the dtype of the device."""
    return block if leaf.carrier == leaf.dtype else lax.bitcast_convert_type(block, leaf.dtype)


def read_page(array: jax.Array, axis: int, page: jax.Array) -> jax.Array:
    """A page of an array; its axis stays, with one entry."""
    return lax.dynamic_slice_in_dim(array, page, 1, axis, allow_negative_indices=False)


def write_page(array: jax.Array, block: jax.Array, axis: int, page: jax.Array) -> jax.Array:
    """The array with `block` as a page."""
    return lax.dynamic_update_slice_in_dim(array, block, page, axis, allow_negative_indices=False)


def weighted(value: jax.Array) -> jax.Array:
    """`value` (int32[]), computed with enough operations for the program to be dispatched asynchronously."""
    spread = lax.broadcasted_iota(jnp.int32, (_ASYNC_OPERATIONS,), 0)
    return jnp.max(jnp.minimum(spread, jnp.broadcast_to(value, spread.shape)))


def _at(ids: jax.Array, k: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(ids, k, keepdims=False, allow_negative_indices=False)


def _write_all(arrays: Arrays, blocks: Sequence[jax.Array], leaves: Sequence[Leaf], page: jax.Array) -> Arrays:
    return tuple(write_page(a, b, leaf.axis, page) for a, b, leaf in zip(arrays, blocks, leaves, strict=True))
