"""The page copies as pure functions of arrays; they know nothing of queues, tiers or compilation.

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
        blocks = (_read(array, leaf.axis, _at(source, k)) for array, leaf in zip(device, leaves, strict=True))
        moved = [_to_host(block, leaf) for block, leaf in zip(blocks, leaves, strict=True)]
        return _write_all(slots, moved, leaves, _at(target, k)), done + np.int32(1)

    slots, done = lax.fori_loop(np.int32(0), count, body, (host, jnp.zeros((), jnp.int32)))
    return slots, _weighted(done)


def copy_from_slots(
    device: Arrays, host: Arrays, source: jax.Array, target: jax.Array, count: jax.Array, leaves: Sequence[Leaf]
) -> tuple[Arrays, jax.Array]:
    """Copy host slots `source[:count]` into device pages `target[:count]`.

    Shapes as in `copy_to_slots`. Returns the new device arrays (donate the old ones) and an int32[] ready with them.
    """

    def body(k: jax.Array, carry: tuple[Arrays, jax.Array]) -> tuple[Arrays, jax.Array]:
        pages, done = carry
        blocks = (_read(array, leaf.axis, _at(source, k)) for array, leaf in zip(host, leaves, strict=True))
        moved = [_to_device(block, leaf) for block, leaf in zip(blocks, leaves, strict=True)]
        return _write_all(pages, moved, leaves, _at(target, k)), done + np.int32(1)

    pages, done = lax.fori_loop(np.int32(0), count, body, (device, jnp.zeros((), jnp.int32)))
    return pages, _weighted(done)


def copy_in_pool(device: Arrays, source: jax.Array, target: jax.Array, leaves: Sequence[Leaf]) -> tuple[jax.Array, ...]:
    """Copy device page `source` to page `target` (int32[]) of the same arrays, which are donated."""
    return tuple(
        _write(array, _read(array, leaf.axis, source), leaf.axis, target)
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


def split_pages(
    device: Arrays, source: jax.Array, leaves: Sequence[Leaf], groups: Sequence[Sequence[int]]
) -> tuple[tuple[Arrays, ...], jax.Array]:
    """Copy device pages `source` (int32[n], n static) into fresh host arrays: n pages of one array per group.

    The leaves of a group are joined along their page axis, so that a page is one array wherever the leaves allow it.
    Returns the pages and an int32[] of the same program.
    """
    pages = []
    for k in range(source.shape[0]):
        blocks = [
            _to_carrier(_read(array, leaf.axis, source[k]), leaf) for array, leaf in zip(device, leaves, strict=True)
        ]
        joined = [_join([blocks[index] for index in group], leaves[group[0]].axis) for group in groups]
        pages.append(tuple(jax.device_put(block, Space.Host) for block in joined))
    return tuple(pages), _weighted(source[0])


def join_pages(
    device: Arrays,
    pages: tuple[Arrays, ...],
    target: jax.Array,
    leaves: Sequence[Leaf],
    groups: Sequence[Sequence[int]],
) -> tuple[Arrays, jax.Array]:
    """Copy host pages made by `split_pages` into device pages `target` (int32[n], n static).

    Returns the new device arrays (donate the old ones) and an int32[] of the same program.
    """
    arrays = list(device)
    for k, page in enumerate(pages):
        for group, block in zip(groups, page, strict=True):
            whole = jax.device_put(block, Space.Device)
            for position, index in enumerate(group):
                leaf = leaves[index]
                part = whole if len(group) == 1 else lax.slice_in_dim(whole, position, position + 1, axis=leaf.axis)
                arrays[index] = _write(arrays[index], _from_carrier(part, leaf), leaf.axis, target[k])
    return tuple(arrays), _weighted(target[0])


def groups_of(leaves: Sequence[Leaf]) -> tuple[tuple[int, ...], ...]:
    """Indices of the leaves that can share one host array per page: same page shape, dtype, page axis and placement."""
    found: dict[object, list[int]] = {}
    for index, leaf in enumerate(leaves):
        found.setdefault((leaf.with_pages(1), leaf.carrier, leaf.axis, leaf.host_sharding), []).append(index)
    return tuple(tuple(group) for group in found.values())


def _at(ids: jax.Array, k: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(ids, k, keepdims=False, allow_negative_indices=False)


def _read(array: jax.Array, axis: int, page: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, page, 1, axis, allow_negative_indices=False)


def _write(array: jax.Array, block: jax.Array, axis: int, page: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, block, page, axis, allow_negative_indices=False)


def _write_all(arrays: Arrays, blocks: Sequence[jax.Array], leaves: Sequence[Leaf], page: jax.Array) -> Arrays:
    return tuple(_write(a, b, leaf.axis, page) for a, b, leaf in zip(arrays, blocks, leaves, strict=True))


def _to_host(block: jax.Array, leaf: Leaf) -> jax.Array:
    return jax.device_put(_to_carrier(block, leaf), Space.Host)


def _to_device(block: jax.Array, leaf: Leaf) -> jax.Array:
    return _from_carrier(jax.device_put(block, Space.Device), leaf)


def _to_carrier(block: jax.Array, leaf: Leaf) -> jax.Array:
    # On the device side: arithmetic on a host block would be handed to the host processor by some backends.
    return block if leaf.carrier == leaf.dtype else lax.bitcast_convert_type(block, leaf.carrier)


def _from_carrier(block: jax.Array, leaf: Leaf) -> jax.Array:
    return block if leaf.carrier == leaf.dtype else lax.bitcast_convert_type(block, leaf.dtype)


def _join(blocks: Sequence[jax.Array], axis: int) -> jax.Array:
    return blocks[0] if len(blocks) == 1 else lax.concatenate(blocks, axis)


def _weighted(value: jax.Array) -> jax.Array:
    """`value` (int32[]), computed with enough operations for the program to be dispatched asynchronously."""
    spread = lax.broadcasted_iota(jnp.int32, (_ASYNC_OPERATIONS,), 0)
    return jnp.max(jnp.minimum(spread, jnp.broadcast_to(value, spread.shape)))
