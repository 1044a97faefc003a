"""Run by `test_kernels` in a process with eight devices: two ranks of pages, with heads over four devices each."""

import json
import re
from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from purecache.effects.kernel_meshes import join_on_every_device, on_every_device, split_on_every_device
from purecache.effects.kernels import dma_join, dma_pages, dma_split
from purecache.effects.page_arrays import groups_of
from purecache.effects.pools import describe

RANKS, PAGES, STAGED, SHAPE = 2, 6, 4, (2, 4, 3)
COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
MESH = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
HEADS = NamedSharding(MESH, PartitionSpec(None, None, "tensor", None))
BOTH = NamedSharding(MESH, PartitionSpec("data", None, "tensor", None))


def random(pages, seed):
    bits = np.random.default_rng(seed).integers(0, 2**32, (2, pages, *SHAPE), np.uint32)
    return list(bits)


def placed(arrays, sharding):
    return tuple(jax.device_put(array, sharding) for array in arrays)


def compile_(function, donate, *given):
    compiled = jax.jit(function, donate_argnums=donate).lower(*given).compile()
    return compiled, sorted(set(COLLECTIVE.findall(compiled.as_text())))


def is_placed(arrays, sharding):
    return all(array.sharding.is_equivalent_to(sharding, array.ndim) for array in arrays)


def copied(sharding, ranks, source, target):
    """Pages of a pool in staging, by `dma_pages`; ids are those of the whole arrays."""
    pool, staging = random(ranks * PAGES, 1), random(ranks * STAGED, 2)
    layout = describe(placed(pool, sharding), 0, ranks * PAGES, ranks)
    copy = on_every_device(
        partial(dma_pages, leaves=layout.leaves, in_flight=3, interpret=True), layout, ranks * PAGES, ranks * STAGED
    )
    ids = [np.array([*each, 0], np.int32) for each in (source, target)]
    given = (placed(staging, sharding), placed(pool, sharding), *ids, np.int32(len(source)))
    compiled, collectives = compile_(copy, 0, *given)
    found, token = compiled(*given)
    expected = [array.copy() for array in staging]
    for new, old in zip(expected, pool, strict=True):
        new[target] = old[source]
    return {
        "equal": all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True)),
        "placed": is_placed(found, sharding),
        "collectives": collectives,
        "token": np.asarray(token).tolist(),
    }


def apart():
    """Pages of one pool as arrays of their own, and from there into another one."""
    pool, other = random(PAGES, 1), random(PAGES, 2)
    layout = describe(placed(pool, HEADS), 0, PAGES)
    groups = groups_of(layout.leaves)
    options = {"leaves": layout.leaves, "groups": groups, "in_flight": 3, "interpret": True}
    split = split_on_every_device(partial(dma_split, **options), layout, groups)
    join = join_on_every_device(partial(dma_join, **options), layout, groups)
    source, target = np.array([4, 0, 5], np.int32), np.array([1, 2, 0], np.int32)
    given = (placed(pool, HEADS), source)
    compiled, talk = compile_(split, (), *given)
    pages, token = compiled(*given)
    given = (placed(other, HEADS), pages, target)
    compiled, more = compile_(join, 0, *given)
    found, _ = compiled(*given)
    for new, old in zip(other, pool, strict=True):
        new[target] = old[source]
    blocks = [block for page in pages for block in page]
    wanted = [np.stack([array[page] for array in pool]) for page in source]
    return {
        "equal": all(np.array_equal(one, two) for one, two in zip((*blocks, *found), (*wanted, *other), strict=True)),
        "placed": is_placed((*blocks, *found), HEADS),
        "collectives": talk + more,
        "token": int(token),
    }


def plain():
    """A gather by ids of the whole pool, for comparison: the compiler has the shards exchange pages."""
    pool, ids = jax.device_put(random(RANKS * PAGES, 1)[0], BOTH), np.array([1, 7], np.int32)
    return {"collectives": compile_(lambda pool, ids: pool[ids], (), pool, ids)[1]}


def main():
    first = PAGES, STAGED  # ids of the second rank start here
    print(
        json.dumps(
            {
                "heads": copied(HEADS, 1, [5, 0, 2], [1, 3, 0]),
                "ranks": copied(BOTH, RANKS, [first[0] + k for k in (5, 0, 2)], [first[1] + k for k in (1, 3, 0)]),
                "apart": apart(),
                "plain": plain(),
            }
        )
    )


if __name__ == "__main__":
    main()
