"""What XLA:TPU makes of the page copies, for every generation of TPU and without one: nothing is run here.

libtpu compiles for a described topology. That shows that a program compiles, that the arrays it writes are updated in
place, how much memory it needs beside them, and that no device talks to another; not that it runs, or how fast.
"""

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from purecache.effects.copies import copy_from_slots, copy_to_slots
from purecache.effects.kernel_meshes import join_on_every_device, on_every_device, split_on_every_device
from purecache.effects.kernels import ANY, HOST, dma_join, dma_pages, dma_split
from purecache.effects.page_arrays import gather_pages, groups_of, join_pages, scatter_pages, split_pages
from purecache.effects.pools import Leaf, PoolLayout
from purecache.effects.programs import pool_sized_instructions
from purecache.effects.tpu_shapes import host_dma_fits
from purecache.meshes import no_mesh

# There is no metadata server to ask, and several processes may compile at the same time.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

TOPOLOGIES = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
"""Generation -> a topology of eight devices."""
BATCH, SLOTS = 8, 2
"""Pages of a batch; host slots per device page."""
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


class Refused(Exception):
    """The compiler did not take a program; what it said."""


LIBTPU = Path(__file__).parents[1] / ".cache" / "libtpu" / "libtpu" / "libtpu.so"
"""Where `make` puts the library: not where JAX looks by itself, or every program would first search for a TPU."""


def available() -> bool:
    """Whether libtpu is there to compile with."""
    if LIBTPU.exists():
        os.environ.setdefault("TPU_LIBRARY_PATH", str(LIBTPU))
    return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None


@dataclass(frozen=True)
class Pool:
    """A pool to compile for: `leaves` arrays alike, of as many pages as give an array `size` bytes."""

    dtype: Any
    page: tuple[int, ...]
    """Shape of a page in an array, over all devices."""
    axis: int = 0
    """Where the page axis is inserted."""
    leaves: int = 2
    spec: tuple[Any, ...] = ()
    """Axes of the mesh that the axes of the array are spread over."""
    mesh: dict[str, int] = field(default_factory=lambda: {"x": 1})
    """Its axes; "data" is for ranks."""
    size: int = 1 << 29
    """More than the fast memory of a device holds, where XLA would put a small pool as a whole."""

    @property
    def pages(self) -> int:
        """Pages of an array: a power of two."""
        wanted = self.size // (math.prod(self.page) * np.dtype(self.dtype).itemsize)
        return max(4096, 1 << max(0, wanted.bit_length() - 1))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an array."""
        return (*self.page[: self.axis], self.pages, *self.page[self.axis :])

    def layout(self, generation: str) -> PoolLayout:
        """The pool on devices of that generation."""
        count = math.prod(self.mesh.values())
        devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation]).devices[:count]
        mesh = Mesh(np.array(devices).reshape(tuple(self.mesh.values())), tuple(self.mesh))
        placed = NamedSharding(mesh, PartitionSpec(*self.spec))
        on_host, dtype = placed.with_memory_kind("pinned_host"), np.dtype(self.dtype)
        leaves = [Leaf(f"leaf {k}", self.axis, self.shape, dtype, dtype, placed, on_host) for k in range(self.leaves)]
        shards = ("data",) if "data" in self.spec[self.axis : self.axis + 1] else ()
        return PoolLayout(jax.tree.structure([0] * self.leaves), tuple(leaves), "tpu", shards)


def row(name: str, pool: Pool, generation: str) -> dict[str, Any]:
    """Compile one program, and say what became of it.

    aliased, written, temp and pool are bytes on one device: memory of inputs that outputs share, of the pool or slots
    that the program writes, of temporary arrays on device and host, and of an array of the pool. Raises Refused if the
    compiler does not take the program.
    """
    layout = pool.layout(generation)
    function, given, out, donated = PROGRAMS[name](layout)
    with no_mesh(), _not_kept():
        jitted = jax.jit(function, donate_argnums=0 if donated else (), out_shardings=out)
        lowered = jitted.lower(*given)
        try:
            compiled = lowered.compile()
        except Exception as error:  # XLA and Mosaic have classes of their own for this
            raise Refused(str(error)) from error
    memory: Any = compiled.memory_analysis()
    text = _text(compiled)
    sizes = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in layout.leaves]
    written = [x.sharding.shard_shape(x.shape) for x in given[0]] if donated else []
    return {
        "program": name,
        "generation": generation,
        "devices": math.prod(pool.mesh.values()),
        "dtype": np.dtype(pool.dtype).name,
        "page": [*pool.page[: pool.axis], "pages", *pool.page[pool.axis :]],
        "aliased": memory.alias_size_in_bytes + memory.host_alias_size_in_bytes,
        "written": sum(math.prod(shape) for shape in written) * np.dtype(pool.dtype).itemsize,
        "temp": memory.temp_size_in_bytes + memory.host_temp_size_in_bytes,
        "pool": sizes[0] * np.dtype(pool.dtype).itemsize,
        "collectives": sorted(set(_COLLECTIVE.findall(text))),
        "readable": text != "unreadable",
        "pool_sized": list(pool_sized_instructions(text, {size * scale for size in sizes for scale in (1, SLOTS)})),
    }


@contextmanager
def _not_kept() -> Iterator[None]:
    """Inside, the compilation cache on disk takes nothing in: it cannot give back what is for a described topology."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _text(compiled: Any) -> str:
    """The optimised program, or a line that says that there is none to read.

    libtpu 0.0.52 cannot print some programs for tpu7x, those with copies of a whole pool: it fails a check of its own.
    """
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return "unreadable"


def _arrays(layout: PoolLayout, scale: int = 1, *, host: bool = False, pages: int | None = None) -> tuple[Any, ...]:
    """Arrays like the pool's, with `pages` pages (of each shard) or `scale` times as many."""
    return tuple(
        jax.ShapeDtypeStruct(
            leaf.with_pages(scale * leaf.shape[leaf.axis] if pages is None else pages * layout.shard_count),
            leaf.dtype,
            sharding=leaf.host_sharding if host else leaf.sharding,
        )
        for leaf in layout.leaves
    )


def _ids() -> Any:
    return jax.ShapeDtypeStruct((BATCH,), jnp.int32)


def _placed(arrays: Sequence[Any]) -> Any:
    return tuple(array.sharding for array in arrays), None


def _pages(copy: Callable[..., Any], out: str, given: str, layout: PoolLayout) -> Any:
    """A program of the contract of `copy_to_slots`, between "pool", "slots" and "staging"."""
    make = {"pool": {}, "slots": {"scale": SLOTS, "host": True}, "staging": {"pages": BATCH}}
    arrays = [_arrays(layout, **make[kind]) for kind in (out, given)]
    written, read = (each[0].shape[layout.leaves[0].axis] for each in arrays)
    function = on_every_device(partial(copy, leaves=layout.leaves), layout, read, written)
    return function, (*arrays, _ids(), _ids(), jax.ShapeDtypeStruct((), jnp.int32)), _placed(arrays[0]), True


def _apart(copy: Callable[..., Any], back: bool, host: bool, kernel: bool, layout: PoolLayout) -> Any:
    """A program of the contract of `split_pages` or, `back`, of `join_pages`; its pages on host or device."""
    groups = groups_of(layout.leaves)
    function = partial(copy, leaves=layout.leaves, groups=groups)
    if kernel:
        function = (join_on_every_device if back else split_on_every_device)(function, layout, groups)
    page = tuple(
        jax.ShapeDtypeStruct(
            layout.leaves[group[0]].with_pages(len(group)),
            layout.leaves[group[0]].dtype,
            sharding=layout.leaves[group[0]].host_sharding if host else layout.leaves[group[0]].sharding,
        )
        for group in groups
    )
    pool = _arrays(layout)
    if back:
        return function, (pool, (page,) * BATCH, _ids()), _placed(pool), True
    return function, (pool, _ids()), ((_placed(page)[0],) * BATCH, None), False


PROGRAMS: dict[str, Callable[[PoolLayout], Any]] = {
    "loop: pool to slots": partial(_pages, copy_to_slots, "slots", "pool"),
    "loop: slots to pool": partial(_pages, copy_from_slots, "pool", "slots"),
    "unrolled: pool to pages": partial(_apart, split_pages, False, True, False),
    "unrolled: pages to pool": partial(_apart, join_pages, True, True, False),
    "fused: pool to pages": partial(_apart, gather_pages, False, False, False),
    "fused: pages to pool": partial(_apart, scatter_pages, True, False, False),
    "dma: pool to pages": partial(_apart, dma_split, False, False, True),
    "dma: pages to pool": partial(_apart, dma_join, True, False, True),
    "dma: pool to staging": partial(_pages, dma_pages, "staging", "pool"),
    "dma: staging to pool": partial(_pages, dma_pages, "pool", "staging"),
    "host_dma: pool to slots": partial(_pages, partial(dma_pages, space_out=HOST, space_in=ANY), "slots", "pool"),
    "host_dma: slots to pool": partial(_pages, partial(dma_pages, space_out=ANY, space_in=HOST), "pool", "slots"),
}
"""Name -> (function, arguments, shardings of the results, whether the first argument is donated) for a layout."""

POOLS = (
    Pool("bfloat16", (16, 2048)),
    Pool("bfloat16", (4, 16, 2048), axis=1),
    Pool("float8_e4m3fn", (16, 2048)),
    Pool("int32", (16, 2048)),
    Pool("bfloat16", (16, 8, 2, 128), spec=(None, None, "tensor"), mesh={"tensor": 8}, size=1 << 32),
    Pool("int32", (16, 2048), spec=(None, None, "tensor"), mesh={"tensor": 8}, size=1 << 32),
    Pool("bfloat16", (16, 2048), spec=("data", None, "tensor"), mesh={"data": 2, "tensor": 4}, size=1 << 32),
    Pool("int32", (16, 2048), spec=("data", None, "tensor"), mesh={"data": 2, "tensor": 4}, size=1 << 32),
)
"""What is compiled by default: one device, heads over eight, and two ranks with heads over four."""


def suited(pool: Pool, generation: str) -> list[str]:
    """Programs that are meant for the pool: its ranks do not share pages, and kernels reach its host pages."""
    layout = pool.layout(generation)
    names = [name for name in PROGRAMS if not layout.shards or "pages" not in name.split(": ")[1].split(" to ")]
    direct = all(host_dma_fits(leaf) for leaf in layout.leaves)
    return [name for name in names if direct or not name.startswith("host_dma")]


def rows(pools: Sequence[Pool] = POOLS) -> Iterator[dict[str, Any]]:
    """One row per generation, pool and program that is meant for it; see `row`."""
    for generation in TOPOLOGIES:
        for number, pool in enumerate(pools):
            for name in suited(pool, generation):
                yield row(name, pool, generation) | {"pool_number": number}


def report() -> list[dict[str, Any]]:
    """Print a Markdown table of one line per pool and program, and return the rows of all generations."""
    if not available():
        print("libtpu is not installed: pip install libtpu")
        return []
    found = list(rows())
    print("| program | array | devices | aliased MiB | temp KiB | collectives | pool-sized copies |")
    print("|---|---|---|---|---|---|---|")
    lines: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for each in found:
        lines.setdefault((each["pool_number"], each["program"]), {})[each["generation"]] = each
    for same in lines.values():
        first = next(iter(same.values()))
        array = first["dtype"] + "[" + ", ".join(str(size) for size in first["page"]) + "]"
        cells = (
            f"{first['program']} | {array} | {first['devices']}",
            _joined(same, lambda each: f"{each['aliased'] >> 20} of {each['written'] >> 20}"),
            _joined(same, lambda each: f"{each['temp'] >> 10}"),
            _joined(same, lambda each: f"{len(each['collectives'])}" if each["readable"] else "?"),
            _joined(same, lambda each: f"{len(each['pool_sized'])}" if each["readable"] else "?"),
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    return found


def _joined(rows_of: dict[str, dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    """What all generations have in common, or each of them in the order of TOPOLOGIES."""
    values = [cell(each) for each in rows_of.values()]
    return values[0] if len(set(values)) == 1 else " / ".join(values)


if __name__ == "__main__":
    report()
