"""The page copies and the rule for shapes of pools, held against the real compiler for TPUs. Nothing is run."""

import math

import numpy as np
import pytest

from benchmarks import compiled
from benchmarks.compiled import Pool, Refused
from purecache.effects.tpu_shapes import copies_whole_pool, folded, host_dma_fits

pytestmark = pytest.mark.skipif(not compiled.available(), reason="libtpu, which compiles for TPUs, is not installed")

GENERATIONS = tuple(compiled.TOPOLOGIES)
KERNELS = [name for name in compiled.PROGRAMS if name.startswith(("dma", "host_dma"))]
LOOPS = [name for name in compiled.PROGRAMS if name.startswith("loop")]
PAGES_APART = [name for name in compiled.PROGRAMS if name.startswith(("unrolled", "fused"))]

BF16 = Pool("bfloat16", (16, 2048))
INT32 = Pool("int32", (16, 2048))
FP8 = Pool("float8_e4m3fn", (16, 2048))
LAYERS = Pool("bfloat16", (4, 16, 8, 128), axis=1)
FIVE = Pool("int32", (3, 8, 256), leaves=5)
HEADS = Pool("bfloat16", (16, 8, 2, 128), spec=(None, None, "tensor"), mesh={"tensor": 8}, size=1 << 32)
RANKS = Pool("int32", (16, 2048), spec=("data", None, "tensor"), mesh={"data": 2, "tensor": 4}, size=1 << 32)

IN_PLACE = {
    "one device": (BF16, (*LOOPS, *KERNELS[:4]), GENERATIONS),
    "without kernels": (BF16, PAGES_APART, ("tpu7x",)),
    "host dma": (INT32, KERNELS[4:], GENERATIONS),
    "one byte": (FP8, (*LOOPS, *KERNELS[:2]), ("v6e",)),
    "layers first": (LAYERS, (*LOOPS, *KERNELS[:2]), ("v5e",)),
    "five leaves": (FIVE, KERNELS[2:], ("v5e",)),
    "heads over eight": (HEADS, (*LOOPS, *KERNELS[:4]), GENERATIONS),
    "two ranks, heads over four": (RANKS, (*LOOPS, *KERNELS[2:]), GENERATIONS),
}
"""Name -> (pool, programs, generations)."""
COPIES = [(pool, name, each) for pool, names, where in IN_PLACE.values() for name in names for each in where]
COPY_NAMES = [
    f"{title}-{name}-{each}" for title, (_, names, where) in IN_PLACE.items() for name in names for each in where
]


@pytest.mark.parametrize(("pool", "name", "generation"), COPIES, ids=COPY_NAMES)
def test_copies_are_in_place_and_stay_on_their_device(pool, name, generation):
    row = compiled.row(name, pool, generation)
    page = math.prod(pool.page) * np.dtype(pool.dtype).itemsize * pool.leaves
    assert row["readable"]
    assert row["aliased"] >= row["written"]
    assert row["written"] > 0 or name.endswith("to pages")
    assert row["temp"] <= (0 if name in KERNELS else 3 * compiled.BATCH * page)
    assert row["collectives"] == []
    assert row["pool_sized"] == []


def test_the_checks_see_a_copy_of_the_pool():
    """What the test above would say of a pool that the compiler turns around."""
    row = compiled.row("dma: pages to pool", Pool("bfloat16", (16, 8, 64)), "v5e")
    assert row["temp"] >= row["pool"]
    assert row["pool_sized"]


def test_the_checks_see_collectives():
    """A program for the whole arrays, where each shard should copy its own pages."""
    pool = RANKS.layout("v5e")
    row = compiled.row("fused: pool to pages", RANKS, "v5e")
    assert pool.shards == ("data",)
    assert row["collectives"]


# What one program of each kind makes of pools of one device. The compiler refuses some of them: that counts too.
PROBES = {
    "loop": "loop: pool to slots",
    "unrolled": "unrolled: pool to pages",
    "fused": "fused: pages to pool",
    "dma": "dma: pool to staging",
}
SHAPES = [
    Pool("bfloat16", (16, 8, 64), leaves=1),  # heads of 64
    Pool("bfloat16", (16, 576), leaves=1),  # a latent and its rotary part
    Pool("bfloat16", (16, 8, 2, 128), leaves=1),
    Pool("bfloat16", (16, 1, 2, 128), leaves=1),  # one head per device
    Pool("bfloat16", (16, 1, 128), leaves=1),
    Pool("bfloat16", (12, 3, 128), leaves=1),
    Pool("bfloat16", (128, 8, 64), leaves=1),
    Pool("bfloat16", (16, 2048), axis=1, leaves=1),  # pages beside the last axis
    Pool("bfloat16", (16, 256), axis=2, leaves=1),  # pages last
    Pool("bfloat16", (4, 16, 2048), axis=1, leaves=1),
    Pool("bfloat16", (32768,), leaves=1),
    Pool("float8_e4m3fn", (16, 8, 2, 128), leaves=1),
    Pool("float8_e4m3fn", (32, 2048), leaves=1),
    Pool("float8_e4m3fn", (16, 2048), leaves=1),
    Pool("float32", (16, 1, 2048), leaves=1),
]
ELSEWHERE = [SHAPES[k] for k in (0, 3, 11)]
"""What is tried on the other generations too."""


def shown(pool):
    return f"{np.dtype(pool.dtype).name}{list(pool.shape)}".replace(" ", "")


def whole_pool(pool, programs, generation):
    """Whether the compiler has the pool copied whole, or refuses the program."""
    try:
        row = compiled.row(PROBES[programs], pool, generation)
    except Refused as error:
        if "UNIMPLEMENTED" in str(error) or "Mosaic" in str(error):
            return True
        raise
    return row["temp"] >= row["pool"] // 2


CASES = [(pool, "v5e") for pool in SHAPES] + [(pool, each) for pool in ELSEWHERE for each in ("v6e", "tpu7x")]


@pytest.mark.parametrize(("pool", "generation"), CASES, ids=[f"{shown(pool)}-{each}" for pool, each in CASES])
def test_the_rule_for_shapes_is_what_the_compiler_does(pool, generation):
    leaf = pool.layout(generation).leaves[0]
    for programs in PROBES:
        reason = copies_whole_pool(leaf, programs)
        # For single pages it errs on the safe side: v6e and tpu7x read all of them well, and v5e some.
        if programs != "unrolled" or reason is None:
            assert whole_pool(pool, programs, generation) == (reason is not None), (programs, reason)


def test_single_pages_are_turned_around_on_v5e():
    assert whole_pool(SHAPES[0], "unrolled", "v5e")
    assert not whole_pool(SHAPES[0], "unrolled", "v6e")


FOLDED = [SHAPES[k] for k in (0, 1, 7, 12, 14)]


@pytest.mark.parametrize("pool", FOLDED, ids=shown)
def test_a_folded_pool_is_copied_in_place_by_all_programs(pool):
    shape = folded(pool.shape, np.dtype(pool.dtype), pool.axis)
    assert math.prod(shape) == math.prod(pool.shape)
    axis = len(shape) - 3
    assert shape[axis] == pool.pages
    better = Pool(pool.dtype, shape[:axis] + shape[axis + 1 :], axis, leaves=1)
    assert better.shape == shape
    assert [programs for programs in PROBES if whole_pool(better, programs, "v5e")] == []


HOST_DMA = [
    *[Pool("int32", page, leaves=1) for page in ((8, 256), (16, 8, 128), (4, 512), (24, 256))],
    *[Pool("int8", page, leaves=1) for page in ((32, 128), (16, 2048))],
    Pool("bfloat16", (32, 256), leaves=1),
    Pool("bfloat16", (16, 8, 64), leaves=1),
    Pool("float32", (4, 8, 512), axis=1, leaves=1),
    Pool("float8_e4m3fn", (64, 256), leaves=1),
    Pool("float32", (8, 256), axis=1, leaves=1),
    Pool("float32", (4096,), leaves=1),
]


@pytest.mark.parametrize("pool", HOST_DMA, ids=shown)
def test_kernels_reach_host_pages_of_the_shapes_that_the_rule_says(pool):
    fits = host_dma_fits(pool.layout("v5e").leaves[0])
    for name in ("host_dma: pool to slots", "host_dma: slots to pool")[: 2 if fits else 1]:
        if fits:
            row = compiled.row(name, pool, "v5e")
            assert row["temp"] == 0
            assert row["aliased"] >= row["written"] > 0
        else:
            with pytest.raises(Refused, match=r"LLO_CHECK|Mosaic"):
                compiled.row(name, pool, "v5e")
