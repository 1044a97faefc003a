"""Which leaves the compiled copies of pages work on in place on a TPU, and what to do about the others.

XLA:TPU keeps an array in tiles of its two most minor axes: 128 lanes by up to 8 rows (32 for one-byte dtypes that fill
them). It is free to choose which axes these are, and takes those that need least padding, not always the last two. A
pool whose pages lie across tiles is copied whole in every call, or the program does not compile at all. The same rule
was found for v5e, v6e and tpu7x with libtpu 0.0.52; `tests/effects/test_tpu_compile.py` holds it against the compiler.
"""

import math

import numpy as np

from purecache.effects.pools import Leaf

LANES = 128
TILE_BYTES = 4096
"""A kernel finds a page in host memory only if tiles have this size."""


def copies_whole_pool(leaf: Leaf, programs: str) -> str | None:
    """Why `programs` cannot copy pages of `leaf` on a TPU without copying all of it, and what to do; None if they can.

    programs: "loop" or "unrolled" (slices and update-slices), "fused" (gather and scatter) or "dma" (kernels). What
    counts is the part of the leaf that one device has. Where a program would not compile there is a reason too.
    Raises ValueError for other programs.
    """
    shape = local_shape(leaf)
    reason = _reason(shape, leaf.dtype, leaf.axis, programs)
    if reason is None:
        return None
    better = folded(shape, leaf.dtype, leaf.axis)
    advice = "pad the page to a multiple of 128 numbers" if better is None else f"allocate it as {_show(better, leaf)}"
    return f"{leaf.name}, {leaf.dtype}{list(shape)} on a device: {reason}; {advice}"


def host_dma_fits(leaf: Leaf) -> bool:
    """Whether a kernel can copy pages of `leaf` between device memory and pinned host memory."""
    shape, size = local_shape(leaf), leaf.dtype.itemsize
    if leaf.carrier != leaf.dtype or not _pages_are_tiles(shape, size, leaf.axis):
        return False
    rows = tile_rows(shape[-2], size)
    # Rows of one tile of a four-byte dtype are taken for one long row, which is not addressed by tiles.
    return rows * LANES * size == TILE_BYTES and (size == 1 or shape[-1] > LANES)


def folded(shape: tuple[int, ...], dtype: np.dtype, page_axis: int) -> tuple[int, ...] | None:
    """A shape for the same numbers that all programs copy in place: what is in a page folded into its last two axes.

    Axes before the page axis stay, unless the page has too few numbers behind it; then the pages come first. None if
    no fold of a page fills its tiles.
    """
    size, pages = np.dtype(dtype).itemsize, shape[page_axis]
    inner, whole = math.prod(shape[page_axis + 1 :]), math.prod(shape) // pages
    for lead, numbers in ((shape[:page_axis], inner), ((), whole)):
        for lanes in (2 * LANES, LANES) if size == 4 else (LANES,):  # see `host_dma_fits`
            for rows in (16, 8, 4, 2, 1):
                found = (*lead, pages, rows, numbers // rows)
                axis = len(lead)
                if numbers % (rows * lanes) == 0 and all(_reason(found, dtype, axis, each) is None for each in _ALL):
                    return found
    return None


def local_shape(leaf: Leaf) -> tuple[int, ...]:
    """The part of the leaf that one device has."""
    return tuple(leaf.sharding.shard_shape(leaf.shape))


def tile_axes(shape: tuple[int, ...], size: int) -> tuple[int, int]:
    """The axes that XLA:TPU puts in the lanes and in the rows of tiles, for a dtype of `size` bytes and >= 2 axes.

    The pair that needs least padding; among equals the last axis in the lanes, then the last one in the rows.
    """

    def padded(pair: tuple[int, int]) -> int:
        lanes, rows = (shape[axis] for axis in pair)
        unit = tile_rows(rows, size)
        return math.prod(shape) // (lanes * rows) * (-lanes // LANES * LANES) * (-rows // unit * unit)

    axes = range(len(shape) - 1, -1, -1)
    return min(((lanes, rows) for lanes in axes for rows in axes if lanes != rows), key=padded)


def tile_rows(rows: int, size: int) -> int:
    """Rows of a tile for an axis of that length: 8, fewer for short axes, 32 for whole tiles of a one-byte dtype."""
    if size == 1 and rows % 32 == 0:
        return 32
    least = max(1, 4 // size)  # a lane has 32 bits
    return max(least, min(8, 1 << (rows - 1).bit_length()))


_ALL = ("loop", "unrolled", "fused", "dma")


def _reason(shape: tuple[int, ...], dtype: np.dtype, axis: int, programs: str) -> str | None:
    if programs not in _ALL:
        raise ValueError(f"programs is {programs!r}: one of {_ALL}")
    if len(shape) < 2:
        return "it has no axis but that of the pages"
    size = np.dtype(dtype).itemsize
    lanes, rows = tile_axes(shape, size)
    if axis == lanes:
        return "XLA:TPU keeps pages side by side in the lanes of its tiles, so every copy turns the whole pool around"
    if programs == "fused":
        dropped = 1 in shape[:axis] + shape[axis + 1 :] and tile_rows(shape[rows], size) < 8
        return "XLA:TPU drops axes of length 1 to scatter, and then its tiles are other ones" if dropped else None
    if axis == rows:
        return "XLA:TPU keeps several pages in one tile"
    if programs == "dma" and not _pages_are_tiles(shape, size, axis):
        return (
            "XLA:TPU does not keep its last two axes in tiles, as kernels do, so the whole pool is brought into order"
        )
    if programs == "loop" and size == 1 and tile_rows(shape[rows], size) == 32:
        return "XLA:TPU brings a pool with tiles of 32 rows into tiles of 8 for host memory, all of it"
    return None


def _pages_are_tiles(shape: tuple[int, ...], size: int, axis: int) -> bool:
    """Whether the tiles are those of the last two axes, as in kernels, and hold one page each."""
    last = len(shape) - 1
    return axis < last - 1 and tile_axes(shape, size) == (last, last - 1)


def _show(shape: tuple[int, ...], leaf: Leaf) -> str:
    pages = leaf.axis if len(shape) > 3 or leaf.axis == 0 else 0
    return "[" + ", ".join("pages" if axis == pages else str(size) for axis, size in enumerate(shape)) + "]"
