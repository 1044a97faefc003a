"""Run by `test_meshes` in a process with eight devices: a pool spread over ranks and heads, with a mesh that is set."""

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pool_samples import FORMS, backup, load_back, run

from purecache import CacheConfig, Interpreter, PrefixCache
from purecache.effects import host_arrays
from purecache.effects.page_sets import pages_to_pool

RANKS, LAYERS, SHAPE = 2, 2, (3, 4, 8)
SPEC = PartitionSpec("data", None, "tensor", None)
HEADS = PartitionSpec(None, None, "tensor", None)
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def pool_of(pages, sharding, seed=0, dtype=jnp.bfloat16):
    bits = np.random.default_rng(seed).integers(0, 2**16, (LAYERS, RANKS * pages, *SHAPE), np.uint16)
    return [jax.device_put(layer.view(dtype), sharding) for layer in bits]


def as_bits(pool):
    return np.stack([np.asarray(layer).view(np.uint16) for layer in pool])


def copies(pages, sharding, owner_sharding):
    """What came back of pages of rank 1, and the temporary memory of the two programs."""
    pool = pool_of(pages, sharding)
    before = as_bits(pool)
    plane = Interpreter(pool, host_pages=6, device_pages=pages, ranks=RANKS)
    there = run(plane, backup([1, 3, 4], [5, 0, 2], rank=1))
    plane.pool = pool_of(pages, sharding, seed=1)
    back = run(plane, load_back([0, 2, 5], [2, 1, 0], rank=1))
    after, other = as_bits(plane.pool), as_bits(pool_of(pages, sharding, seed=1))
    expected = other.copy()
    expected[:, pages + np.array([2, 1, 0])] = before[:, pages + np.array([3, 4, 1])]
    return {
        "ok": there + back,
        "equal": bool((after == expected).all()),
        "placed": all(layer.sharding == owner_sharding for layer in plane.pool),
        "temp": [program["temp_bytes"] for program in plane.programs()],
    }


def within(pages, sharding):
    """Whether a page of rank 1 is copied to another one, and the temporary memory of that."""
    pool = pool_of(pages, sharding)
    expected = as_bits(pool)
    plane = Interpreter(pool, host_pages=6, device_pages=pages, ranks=RANKS)
    expected[:, pages + 5] = expected[:, pages + 2]
    done = plane.copy(2, 5, rank=1)
    return {
        "equal": done and bool((as_bits(plane.pool) == expected).all()),
        "placed": all(layer.sharding == sharding for layer in plane.pool),
        "temp": [program["temp_bytes"] for program in plane.programs()],
    }


def heads(pages, mesh, spec, dtype=jnp.bfloat16, **options):
    """Pages of a pool whose heads alone are spread, to host and back, and what its programs say to other devices."""
    sharding = NamedSharding(mesh, spec)
    pool = pool_of(pages, sharding, dtype=dtype)
    before = as_bits(pool)
    plane = Interpreter(pool, host_pages=6, device_pages=RANKS * pages, **options)
    there = run(plane, backup([1, 3, 4], [5, 0, 2]))
    plane.pool = pool_of(pages, sharding, seed=1, dtype=dtype)
    back = run(plane, load_back([0, 2, 5], [2, 1, 0]))
    after, expected = as_bits(plane.pool), as_bits(pool_of(pages, sharding, seed=1, dtype=dtype))
    expected[:, [2, 1, 0]] = before[:, [3, 4, 1]]
    programs = plane._tier._table._programs.values()
    return {
        "ok": there + back,
        "equal": bool((after == expected).all()),
        "placed": all(layer.sharding == sharding for layer in plane.pool),
        "temp": [program["temp_bytes"] for program in plane.programs()],
        "collectives": sorted(
            {name for program in programs for name in COLLECTIVES if name in program.compiled.as_text()}
        ),
        "pool_sized": [program["pool_sized"] for program in plane.programs()],
    }


def with_kernels(mesh, spec):
    """`heads` with the kernels of a TPU, interpreted."""
    own = host_arrays._COPIES["fused"]
    host_arrays._COPIES["fused"] = tuple(partial(copy, interpret=True) for copy in host_arrays._COPIES["dma"])
    kernels = host_arrays.HostArrays.__init__

    def init(self, *arguments):
        kernels(self, *arguments)
        self._kernels = True

    host_arrays.HostArrays.__init__ = init
    try:
        return heads(12, mesh, spec, np.uint16, copies="fused", batch_pages=2)
    finally:
        host_arrays._COPIES["fused"], host_arrays.HostArrays.__init__ = own, kernels


def between(mesh):
    """Pages from a pool spread over ranks and heads to one whose heads alone are spread, and to one device."""
    source = pool_of(8, NamedSharding(mesh, SPEC))
    bits, found = as_bits(source), []
    one = NamedSharding(jax.make_mesh((1,), ("only",), devices=jax.devices()[:1]), PartitionSpec())
    for sharding in (NamedSharding(mesh, PartitionSpec(None, None, "tensor")), one):
        target = pool_of(4, sharding, seed=1)
        expected = as_bits(target)
        expected[:, [7, 0]] = bits[:, [3, 12]]
        with jax.set_mesh(None):
            new = pages_to_pool(source, np.array([3, 12]), target, np.array([7, 0]))
        found.append(bool((as_bits(new) == expected).all()) and all(layer.sharding == sharding for layer in new))
    return found


def staged(sharding):
    """Whether pages of both ranks come out of host memory as they were put in as bytes."""
    plane = Interpreter(pool_of(8, sharding), host_pages=6, device_pages=8, ranks=RANKS)
    access = plane.staged(2)
    rows = np.random.default_rng(5).integers(0, 256, (5, plane.page_bytes), np.uint8)
    pages = np.array([1, 7, 0, 11, 9])
    landed = [access.landed(part) for part in access.write(pages, [[row] for row in rows])]
    found = np.zeros_like(rows)
    for where, arrays, first in access.read(pages):
        for place, position in enumerate(where.tolist(), first):
            access.bytes_of(arrays, place, [found[position]])
    return {
        "landed": landed,
        "equal": bool((found == rows).all()),
        "sizes": [row["temp_bytes"] for row in plane.programs()],
    }


def control():
    """A cache under the mesh that is set, and again without it: nothing is compiled twice."""
    cache = PrefixCache(CacheConfig(page_size=2, device_pages=8))
    tokens = np.arange(6, dtype=np.int32)
    cache.insert(tokens, cache.allocate(3))
    before = len(cache.programs())
    with jax.set_mesh(None):
        cache.insert(tokens, cache.match(tokens).device_pages)
    return {
        "length": cache.match(tokens).length,
        "violations": cache.violations(),
        "new": len(cache.programs()) - before,
    }


def main():
    kind = AxisType.Explicit if sys.argv[1] == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))
    sharding = NamedSharding(mesh, SPEC)
    jax.set_mesh(mesh)
    print(
        json.dumps(
            {
                "small": copies(8, sharding, sharding),
                "large": copies(64, sharding, sharding),
                "within": [within(8, sharding), within(64, sharding)],
                "staged": staged(sharding),
                "heads": {
                    name: [heads(pages, mesh, HEADS, **options) for pages in (8, 64)] for name, options in FORMS.items()
                },
                "kernels": with_kernels(mesh, HEADS),
                "between": between(mesh),
                "control": control(),
            }
        )
    )


if __name__ == "__main__":
    main()
