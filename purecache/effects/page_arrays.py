"""Copies of pages between a pool and arrays of their own, as pure functions of arrays. How many is static.

A page is one array per group of equal leaves, which lie side by side along the page axis.
`split_pages` and `join_pages` move between memory spaces as well. `gather_pages` and `scatter_pages` stay on device,
for an asynchronous `device_put` before or after them; they take a batch at once, which accelerators do in one kernel.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from purecache.effects.copies import (
    Arrays,
    Space,
    from_carrier,
    is_pinned,
    read_page,
    to_carrier,
    weighted,
    write_page,
)
from purecache.effects.pools import Leaf

Groups = Sequence[Sequence[int]]


def groups_of(leaves: Sequence[Leaf]) -> tuple[tuple[int, ...], ...]:
    """Indices of the leaves that can share one array per page: same page shape, dtype, page axis and placement."""
    found: dict[object, list[int]] = {}
    for index, leaf in enumerate(leaves):
        found.setdefault((leaf.with_pages(1), leaf.carrier, leaf.axis, leaf.host_sharding), []).append(index)
    return tuple(tuple(group) for group in found.values())


def split_pages(
    device: Arrays, source: jax.Array, leaves: Sequence[Leaf], groups: Groups
) -> tuple[tuple[Arrays, ...], jax.Array]:
    """Copy device pages `source` (int32[n], n static) into fresh host arrays: n pages of one array per group.

    Returns the pages and an int32[] of the same program.
    """
    pages = []
    for k in range(source.shape[0]):
        blocks = [
            to_carrier(read_page(array, leaf.axis, source[k]), leaf) for array, leaf in zip(device, leaves, strict=True)
        ]
        joined = [_join([blocks[index] for index in group], leaves[group[0]].axis) for group in groups]
        pages.append(tuple(jax.device_put(b, Space.Host) if is_pinned(leaves[0]) else b for b in joined))
    return tuple(pages), weighted(source[0])


def join_pages(
    device: Arrays, pages: tuple[Arrays, ...], target: jax.Array, leaves: Sequence[Leaf], groups: Groups
) -> tuple[Arrays, jax.Array]:
    """Copy host pages made by `split_pages` into device pages `target` (int32[n], n static).

    Returns the new device arrays (donate the old ones) and an int32[] of the same program.
    """
    arrays = list(device)
    for k, page in enumerate(pages):
        for group, block in zip(groups, page, strict=True):
            whole = jax.device_put(block, Space.Device) if is_pinned(leaves[0]) else block
            for position, index in enumerate(group):
                leaf = leaves[index]
                part = whole if len(group) == 1 else lax.slice_in_dim(whole, position, position + 1, axis=leaf.axis)
                arrays[index] = write_page(arrays[index], from_carrier(part, leaf), leaf.axis, target[k])
    return tuple(arrays), weighted(target[0])


def gather_pages(
    device: Arrays, source: jax.Array, leaves: Sequence[Leaf], groups: Groups
) -> tuple[tuple[Arrays, ...], jax.Array]:
    """As `split_pages`, but the pages stay on device, and each leaf is read by one gather."""
    rows = [
        to_carrier(jnp.take(array, source, axis=leaf.axis, mode="clip"), leaf)
        for array, leaf in zip(device, leaves, strict=True)
    ]
    pages = []
    for k in range(source.shape[0]):
        blocks = [lax.slice_in_dim(row, k, k + 1, axis=leaf.axis) for row, leaf in zip(rows, leaves, strict=True)]
        pages.append(tuple(_join([blocks[index] for index in group], leaves[group[0]].axis) for group in groups))
    return tuple(pages), weighted(source[0])


def scatter_pages(
    device: Arrays, pages: tuple[Arrays, ...], target: jax.Array, leaves: Sequence[Leaf], groups: Groups
) -> tuple[Arrays, jax.Array]:
    """As `join_pages`, for pages that are on device, and each leaf is written by one scatter."""
    arrays = list(device)
    for place, group in enumerate(groups):
        for position, index in enumerate(group):
            leaf, array = leaves[index], arrays[index]
            parts = [lax.slice_in_dim(page[place], position, position + 1, axis=leaf.axis) for page in pages]
            where = (*[slice(None)] * leaf.axis, target)
            rows = from_carrier(_join(parts, leaf.axis), leaf)
            arrays[index] = array.at[where].set(rows, mode="drop", unique_indices=True)
    return tuple(arrays), weighted(target[0])


def _join(blocks: Sequence[jax.Array], axis: int) -> jax.Array:
    return blocks[0] if len(blocks) == 1 else lax.concatenate(blocks, axis)
