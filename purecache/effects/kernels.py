"""Page copies as Pallas kernels for TPU: DMAs between arrays, several in flight, nothing staged and nothing computed.

The functions have the contracts of their twins in `copies.py` and `page_arrays.py`, so that a table of programs can
exchange them. A kernel moves bits as they are: a leaf must have its device dtype on both sides. On a TPU the page axis
must come before the last two axes, and `tpu_shapes` says which pools need a copy of all of it before the kernel starts.

Compile them through `kernel_meshes`, for one device too: their mesh tells the compiler of kernels what
device it compiles for, which otherwise is the default device of the process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from purecache.effects.pools import Leaf

Arrays = tuple[jax.Array, ...]
Interpret = bool | pltpu.InterpretParams

ANY = pl.ANY
"""Memory space of device arrays, staging included."""
HOST = pl.HOST
"""Memory space of arrays in pinned host memory; interpreters do not know it."""


def dma_pages(
    out: Arrays,
    given: Arrays,
    source: jax.Array,
    target: jax.Array,
    count: jax.Array,
    leaves: Sequence[Leaf],
    *,
    space_out: pl.MemorySpace = ANY,
    space_in: pl.MemorySpace = ANY,
    in_flight: int = 8,
    interpret: Interpret = False,
) -> tuple[Arrays, jax.Array]:
    """Copy pages `source[:count]` of the arrays `given` to pages `target[:count]` of the arrays `out`, in one kernel.

    out, given: one array per leaf, in `space_out` and `space_in`, equal but for the length of the page axis. source,
    target: int32[batch]; count: int32[] <= batch. Ids must be in range and those of `target` distinct: nothing checks
    them. in_flight: DMAs under way at a time, >= 1.
    Returns the new `out` (donate the old one) and an int32[], the count, written when the last DMA is done.
    Raises ValueError for arrays that do not go together.
    """
    _check(given, leaves, in_flight)
    _check(out, leaves, in_flight)
    number = len(leaves)
    axes = [leaf.axis for leaf in leaves]
    for old, new, leaf in zip(given, out, leaves, strict=True):
        if _page(old, leaf.axis) != _page(new, leaf.axis):
            raise ValueError(f"{leaf.name}: cannot copy pages of {old.shape} into {new.shape}")

    def kernel(source: Any, target: Any, count: Any, *refs: Any) -> None:
        # The aliased inputs are not touched: the outputs are the same memory.
        read, written, token, done = refs[number : 2 * number], refs[2 * number : 3 * number], refs[-2], refs[-1]

        def copy(page: Any, leaf: int, slot: Any) -> Any:
            old = _at(read[leaf], axes[leaf], source[page])
            return pltpu.make_async_copy(old, _at(written[leaf], axes[leaf], target[page]), done.at[slot])

        _pump(count[0], number, in_flight, copy)
        token[0] = count[0]

    *pages, token = pl.pallas_call(
        kernel,
        out_shape=(*(_like(array, space_out) for array in out), _TOKEN),
        grid_spec=_grid(3, [space_out] * number + [space_in] * number, [space_out] * number, in_flight),
        input_output_aliases={3 + index: index for index in range(number)},
        interpret=interpret,
        name="dma_pages",
    )(source, target, jnp.reshape(count, (1,)), *_stay(out, space_out, interpret), *_stay(given, space_in, interpret))
    return tuple(pages), token[0]


def dma_split(
    device: Arrays,
    source: jax.Array,
    leaves: Sequence[Leaf],
    groups: Sequence[Sequence[int]],
    *,
    in_flight: int = 8,
    interpret: Interpret = False,
) -> tuple[tuple[Arrays, ...], jax.Array]:
    """Copy device pages `source` (int32[n], n static) into fresh *device* arrays: n pages of one array per group.

    As `copies.split_pages`, but what goes to host is up to the caller. The leaves of a group stand side by side along
    their page axis; the DMAs write them there.
    Returns the pages and an int32[], n, written when the last DMA is done. Raises ValueError for arrays that do not go
    together and for n = 0.
    """
    _check(device, leaves, in_flight)
    count, number = _static(source), len(leaves)
    places = _places(leaves, groups)
    shapes = [_with_pages(device[group[0]], leaves[group[0]].axis, len(group)) for group in groups]

    def kernel(source: Any, *refs: Any) -> None:
        read, written, token, done = refs[:number], refs[number:-2], refs[-2], refs[-1]

        def copy(page: int, leaf: int, slot: int) -> Any:
            group, position = places[leaf]
            new = written[page * len(groups) + group]
            old = _at(read[leaf], leaves[leaf].axis, source[page])
            return pltpu.make_async_copy(old, _at(new, leaves[leaf].axis, position), done.at[slot])

        _pump_static(count, number, in_flight, copy)
        token[0] = np.int32(count)

    *flat, token = pl.pallas_call(
        kernel,
        out_shape=(*(_like(shape, ANY) for shape in shapes * count), _TOKEN),
        grid_spec=_grid(1, [ANY] * number, [ANY] * (count * len(groups)), in_flight),
        interpret=interpret,
        name="dma_split",
    )(source, *_stay(device, ANY, interpret))
    return tuple(tuple(flat[k : k + len(groups)]) for k in range(0, len(flat), len(groups))), token[0]


def dma_join(
    device: Arrays,
    pages: tuple[Arrays, ...],
    target: jax.Array,
    leaves: Sequence[Leaf],
    groups: Sequence[Sequence[int]],
    *,
    in_flight: int = 8,
    interpret: Interpret = False,
) -> tuple[Arrays, jax.Array]:
    """Copy pages made by `dma_split`, in *device* memory, into device pages `target` (int32[n], n static).

    As `copies.join_pages`, but the caller has brought the pages from host. Ids must be in range and distinct.
    Returns the new device arrays (donate the old ones) and an int32[], n, written when the last DMA is done. Raises
    ValueError for arrays that do not go together and for n = 0.
    """
    _check(device, leaves, in_flight)
    count, number = _static(target), len(leaves)
    places = _places(leaves, groups)
    shapes = [_with_pages(device[group[0]], leaves[group[0]].axis, len(group)) for group in groups]
    for page in pages:
        found = [(block.shape, block.dtype) for block in page]
        if len(pages) != count or found != [(shape.shape, shape.dtype) for shape in shapes]:
            raise ValueError(f"{len(pages)} pages of {found} do not fit {count} ids and {shapes}")

    def kernel(target: Any, *refs: Any) -> None:
        given, written, token, done = refs[number : -2 - number], refs[-2 - number : -2], refs[-2], refs[-1]

        def copy(page: int, leaf: int, slot: int) -> Any:
            group, position = places[leaf]
            old = _at(given[page * len(groups) + group], leaves[leaf].axis, position)
            return pltpu.make_async_copy(old, _at(written[leaf], leaves[leaf].axis, target[page]), done.at[slot])

        _pump_static(count, number, in_flight, copy)
        token[0] = np.int32(count)

    blocks = [block for page in pages for block in page]
    *arrays, token = pl.pallas_call(
        kernel,
        out_shape=(*(_like(array, ANY) for array in device), _TOKEN),
        grid_spec=_grid(1, [ANY] * (number + len(blocks)), [ANY] * number, in_flight),
        input_output_aliases={1 + index: index for index in range(number)},
        interpret=interpret,
        name="dma_join",
    )(target, *_stay(device, ANY, interpret), *_stay(blocks, ANY, interpret))
    return tuple(arrays), token[0]


_TOKEN = jax.ShapeDtypeStruct((1,), jnp.int32)


def _pump(count: jax.Array, leaves: int, in_flight: int, copy: Callable[[Any, int, Any], Any]) -> None:
    """Run `copy(page, leaf, slot)`, a DMA, for all leaves of pages 0 .. count - 1, `in_flight` at a time.

    Copy q = page * leaves + leaf has semaphore q % in_flight, and waits for the copy that had it before. Which leaf
    that one was about is known statically, and so its size.
    """

    def body(page: Any, carry: Any) -> Any:
        for leaf in range(leaves):
            slot = lax.rem(page * leaves + leaf, np.int32(in_flight))
            back, previous = divmod(leaf - in_flight, leaves)
            _wait_if(page + back >= 0, copy, page + back, previous, slot)
            copy(page, leaf, slot).start()
        return carry

    lax.fori_loop(np.int32(0), count, body, np.int32(0))
    _drain(count, leaves, in_flight, copy)


def _drain(count: jax.Array, leaves: int, in_flight: int, copy: Callable[[Any, int, Any], Any]) -> None:
    """Wait for the copies that nothing waited for: the last `in_flight`."""
    for left in range(in_flight, 0, -1):
        back, leaf = divmod(-left, leaves)
        slot = lax.rem((count + back) * leaves + leaf, np.int32(in_flight))
        _wait_if(count + back >= 0, copy, count + back, leaf, slot)


def _wait_if(there: jax.Array, copy: Callable[[Any, int, Any], Any], page: Any, leaf: int, slot: Any) -> None:
    """Wait for a copy, if it is one: otherwise its page number is negative, and its ids must not be looked up."""

    @pl.when(there)
    def _() -> None:
        copy(page, leaf, slot).wait()


def _pump_static(count: int, leaves: int, in_flight: int, copy: Callable[[int, int, int], Any]) -> None:
    """`_pump` for a count that is known."""
    copies = [(page, leaf) for page in range(count) for leaf in range(leaves)]
    for index, (page, leaf) in enumerate(copies):
        slot = index % in_flight
        if index >= in_flight:
            copy(*copies[index - in_flight], slot).wait()
        copy(page, leaf, slot).start()
    _drain_static(copies, in_flight, copy)


def _drain_static(copies: Sequence[tuple[int, int]], in_flight: int, copy: Callable[[int, int, int], Any]) -> None:
    """`_drain` for a count that is known."""
    for index in range(max(0, len(copies) - in_flight), len(copies)):
        copy(*copies[index], index % in_flight).wait()


def _at(ref: Any, axis: int, page: Any) -> Any:
    """One page of an array in a kernel."""
    return ref.at[(slice(None),) * axis + (pl.ds(page, 1),)]


def _grid(prefetched: int, given: Sequence[Any], written: Sequence[Any], in_flight: int) -> Any:
    """One step: arrays stay where they are, the token and the prefetched ids are in scalar memory."""
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=prefetched,
        grid=(1,),
        in_specs=[pl.BlockSpec(memory_space=space) for space in given],
        out_specs=[pl.BlockSpec(memory_space=space) for space in (*written, pltpu.SMEM)],
        scratch_shapes=[pltpu.SemaphoreType.DMA((in_flight,))],
    )


def _stay(arrays: Sequence[jax.Array], space: Any, interpret: Interpret) -> Sequence[jax.Array]:
    """`arrays` as inputs of a kernel. Device arrays stay in HBM: XLA would bring a small one into VMEM, all of it."""
    if space is HOST or interpret is not False:
        return arrays
    return [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in arrays]


def _like(array: Any, space: Any) -> Any:
    """An output of a kernel."""
    make = jax.ShapeDtypeStruct if space is HOST else pltpu.HBM
    return make(array.shape, array.dtype)


def _check(arrays: Arrays, leaves: Sequence[Leaf], in_flight: int) -> None:
    if in_flight < 1:
        raise ValueError(f"in_flight is {in_flight}: a copy needs a semaphore")
    for array, leaf in zip(arrays, leaves, strict=True):
        if leaf.carrier != leaf.dtype or array.dtype != leaf.dtype or array.ndim != len(leaf.shape):
            kind = f"{leaf.dtype}{list(leaf.shape)}, {leaf.carrier} on host"
            raise ValueError(f"{leaf.name} is {kind}: a kernel cannot copy it to or from {array.dtype}{array.shape}")


def _page(array: jax.Array, axis: int) -> tuple[int, ...]:
    return array.shape[:axis] + array.shape[axis + 1 :]


def _with_pages(array: jax.Array, axis: int, pages: int) -> jax.ShapeDtypeStruct:
    shape = (*array.shape[:axis], pages, *array.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, array.dtype)


def _static(ids: jax.Array) -> int:
    if not len(ids):
        raise ValueError("no ids: a kernel needs at least one page")
    return len(ids)


def _places(leaves: Sequence[Leaf], groups: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Leaf -> (its group, its position along the page axis there)."""
    places = {leaf: (group, at) for group, members in enumerate(groups) for at, leaf in enumerate(members)}
    if sorted(places) != list(range(len(leaves))):
        raise ValueError(f"groups {groups} are not all of {len(leaves)} leaves")
    return places
