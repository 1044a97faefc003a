"""The kernels for pools that are spread over the devices of a mesh: every device copies the part that it has."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from purecache.effects.copies import within_shards
from purecache.effects.kernels import Arrays
from purecache.effects.pools import PoolLayout


def on_every_device(
    function: Callable[..., tuple[Arrays, jax.Array]], layout: PoolLayout, read: int, written: int
) -> Callable[..., tuple[Arrays, jax.Array]]:
    """`dma_pages` (all but its five arrays bound) for arrays spread over the devices of a mesh as `layout` says.

    read, written: pages of the arrays on either side, over all shards. Every device copies its part of the pages;
    nothing moves between devices. Where the page axis is spread this is `within_shards`, with its rules for ids and
    its second result; elsewhere the ids are global and the second result is an int32[].
    Raises ValueError if the leaves are on several meshes, or have page axes spread in a way that needs other devices.
    """
    if layout.shards:
        return within_shards(function, layout, read, written)
    specs, ids = _specs(layout), PartitionSpec()
    return _sharded(function, layout, (specs, specs, ids, ids, ids), (specs, ids))


def split_on_every_device(
    function: Callable[..., tuple[tuple[Arrays, ...], jax.Array]], layout: PoolLayout, groups: Sequence[Sequence[int]]
) -> Callable[..., tuple[tuple[Arrays, ...], jax.Array]]:
    """`dma_split` (all but its two arrays bound) for leaves spread over devices, but not along their page axis.

    Raises ValueError as `on_every_device` does, and if a page axis is spread: a page is then on one of the devices
    only. `copies.split_pages` is for that.
    """
    specs, page = _specs(layout), _page_specs(layout, groups)

    def split(device: Arrays, source: jax.Array) -> Any:
        out = ((page,) * len(source), PartitionSpec())
        return _sharded(function, layout, (specs, PartitionSpec()), out)(device, source)

    return split


def join_on_every_device(
    function: Callable[..., tuple[Arrays, jax.Array]], layout: PoolLayout, groups: Sequence[Sequence[int]]
) -> Callable[..., tuple[Arrays, jax.Array]]:
    """`dma_join` (all but its three arrays bound), as `split_on_every_device`."""
    specs, page = _specs(layout), _page_specs(layout, groups)

    def join(device: Arrays, pages: tuple[Arrays, ...], target: jax.Array) -> Any:
        given = (specs, (page,) * len(pages), PartitionSpec())
        return _sharded(function, layout, given, (specs, PartitionSpec()))(device, pages, target)

    return join


def _specs(layout: PoolLayout) -> tuple[PartitionSpec, ...]:
    """Where the leaves of pools with whole page axes are."""
    for leaf in layout.leaves:
        spec = leaf.host_sharding.spec
        if leaf.axis < len(spec) and spec[leaf.axis] is not None:
            raise ValueError(f"{leaf.name} has its page axis spread over {spec[leaf.axis]}: this needs other devices")
        if leaf.host_sharding.mesh != layout.leaves[0].host_sharding.mesh:
            raise ValueError(f"{leaf.name} is on another mesh than {layout.leaves[0].name}")
    return tuple(leaf.host_sharding.spec for leaf in layout.leaves)


def _page_specs(layout: PoolLayout, groups: Sequence[Sequence[int]]) -> tuple[PartitionSpec, ...]:
    return tuple(layout.leaves[group[0]].host_sharding.spec for group in groups)


def _sharded(function: Callable[..., Any], layout: PoolLayout, given: Any, results: Any) -> Callable[..., Any]:
    # On one device too: the mesh tells the compiler of kernels what device that is, whatever the default device.
    # The second result is the same on every device, which the types of a kernel do not say.
    mesh = layout.leaves[0].host_sharding.mesh
    return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=results, check_vma=False)
