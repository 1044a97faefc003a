"""The kernels, interpreted on CPU: the bytes they move, in both ways a DMA can be late, and what they refuse."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # where the interpreter leaves its findings
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from purecache.effects import kernels
from purecache.effects.kernel_meshes import join_on_every_device, on_every_device, split_on_every_device
from purecache.effects.kernels import dma_join, dma_pages, dma_split
from purecache.effects.page_arrays import gather_pages, groups_of, scatter_pages
from purecache.effects.pools import describe

PAGES, STAGED = 7, 5
SHAPES = {
    "one leaf": ({"kv": (2, 3)}, 0),
    "K and V apart": ({"k": (2, 3), "v": (2, 3)}, 0),
    "pages second": ({"k": (2, 3), "v": (2, 3)}, 1),
    "pages last": ({"k": (2, 3)}, -1),
    "axes and sizes that differ": ({"k": (3, 2), "v": (4,), "w": (2, 2, 2)}, {"k": 1, "v": 0, "w": 2}),
}
"""Name -> (shapes of a page, page axis)."""


def arrays(name, pages, dtype, seed):
    """NumPy arrays with `pages` pages of random bits that no arithmetic leaves as they are."""
    shapes, axis = SHAPES[name]
    axes = axis if isinstance(axis, dict) else dict.fromkeys(shapes, axis)
    generator = np.random.default_rng(seed)

    def leaf(shape, axis):
        axis %= len(shape) + 1
        full = (*shape[:axis], pages, *shape[axis:])
        return generator.integers(0, 256, (*full, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]

    return tuple(leaf(shapes[key], axes[key]) for key in sorted(shapes))


def layout_of(name, dtype="int32"):
    shapes, axis = SHAPES[name]
    pool = dict(zip(sorted(shapes), arrays(name, PAGES, dtype, 0), strict=True))
    return describe(pool, axis, PAGES)


def device(given):
    return tuple(jnp.array(array, copy=True) for array in given)


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.ascontiguousarray(other).view(np.uint8))


def moved(out, given, source, target, layout):
    """The pages by NumPy."""
    out = [array.copy() for array in out]
    for old, new, leaf in zip(given, out, layout.leaves, strict=True):
        np.moveaxis(new, leaf.axis, 0)[target] = np.moveaxis(old, leaf.axis, 0)[source]
    return out


def padded(ids, size=STAGED):
    return np.array([*ids, *[0] * (size - len(ids))], np.int32)


@pytest.fixture
def late(request):
    """Parameters of an interpreter that runs DMAs at once, or as late as may be; afterwards no race was found."""
    pltpu.reset_tpu_interpret_mode_state()
    yield pltpu.InterpretParams(dma_execution_mode=request.param, detect_races=True)
    assert not races_found()


def races_found():
    return interpret_pallas_call.races is not None and interpret_pallas_call.races.races_found


BOTH_WAYS = pytest.mark.parametrize("late", ["eager", "on_wait"], indirect=True)
IDS = {0: ([], []), 1: ([6], [2]), 3: ([5, 0, 3], [4, 1, 0]), 5: ([1, 6, 2, 0, 4], [3, 2, 0, 4, 1])}
"""How many pages -> their ids in the pool, and in staging."""


NAMES = [(name, "int32") for name in SHAPES] + [("axes and sizes that differ", "uint8"), ("one leaf", "float32")]
"""Shapes and dtypes that are tried."""


@pytest.mark.parametrize(("name", "dtype"), NAMES)
def test_pages_reach_their_place_and_nothing_else_changes(name, dtype):
    layout = layout_of(name, dtype)
    pool, staging = arrays(name, PAGES, dtype, 1), arrays(name, STAGED, dtype, 2)
    copy = jax.jit(partial(dma_pages, leaves=layout.leaves, in_flight=3, interpret=True))
    for count, (source, target) in IDS.items():
        ids = padded(source), padded(target)
        found, token = copy(device(staging), device(pool), *ids, np.int32(count))
        same(found, moved(staging, pool, source, target, layout))
        assert token == count
        found, token = copy(device(pool), device(staging), *ids[::-1], np.int32(count))
        same(found, moved(pool, staging, target, source, layout))
        assert token == count


@BOTH_WAYS
@pytest.mark.parametrize("in_flight", [1, 4, 16])
@pytest.mark.parametrize("name", ["K and V apart", "axes and sizes that differ"])
def test_however_late_the_bytes_are_they_are_there_in_the_end(name, in_flight, late):
    layout = layout_of(name)
    pool, staging = arrays(name, PAGES, "int32", 1), arrays(name, STAGED, "int32", 2)
    copy = jax.jit(partial(dma_pages, leaves=layout.leaves, in_flight=in_flight, interpret=late))
    for count, (source, target) in IDS.items():
        found, token = copy(device(pool), device(staging), padded(target), padded(source), np.int32(count))
        same(found, moved(pool, staging, target, source, layout))
        assert token == count


@BOTH_WAYS
@pytest.mark.parametrize("in_flight", [1, 3, 16])
def test_pages_apart_go_there_and_back(in_flight, late):
    name = "K and V apart"
    layout = layout_of(name)
    groups = groups_of(layout.leaves)
    assert groups == ((0, 1),)
    pool, other = arrays(name, PAGES, "int32", 1), arrays(name, PAGES, "int32", 2)
    options = {"leaves": layout.leaves, "groups": groups, "in_flight": in_flight, "interpret": late}
    source, target = np.array([5, 0, 3], np.int32), np.array([2, 6, 1], np.int32)
    pages, token = dma_split(device(pool), source, **options)
    assert token == 3
    for page, id_ in zip(pages, source, strict=True):
        same(page, [np.concatenate([array[id_ : id_ + 1] for array in pool])])
    found, token = dma_join(device(other), pages, target, **options)
    same(found, moved(other, pool, source, target, layout))
    assert token == 3


@pytest.mark.parametrize("name", ["pages second", "pages last", "axes and sizes that differ"])
def test_pages_apart_are_those_of_the_plain_programs(name):
    layout = layout_of(name)
    options = {"leaves": layout.leaves, "groups": groups_of(layout.leaves)}
    pool, ids = arrays(name, PAGES, "int32", 1), np.array([4, 0, 6], np.int32)
    pages, _ = jax.jit(partial(dma_split, **options, interpret=True))(device(pool), ids)
    expected, _ = jax.jit(partial(gather_pages, **options))(device(pool), ids)
    for page, wanted in zip(pages, expected, strict=True):
        same(page, [np.asarray(block) for block in wanted])
    ids = ids[::-1].copy()
    found, _ = jax.jit(partial(dma_join, **options, interpret=True))(device(pool), pages, ids)
    wanted, _ = jax.jit(partial(scatter_pages, **options))(device(pool), expected, ids)
    same(found, [np.asarray(array) for array in wanted])


@pytest.mark.parametrize("drain", ["_drain", "_drain_static"])
def test_a_kernel_that_does_not_wait_for_its_last_copies_is_caught(monkeypatch, drain):
    """By wrong bytes where DMAs run late, and by a race where they run at once."""
    name = "K and V apart"
    layout = layout_of(name)
    pool, staging = arrays(name, PAGES, "int32", 1), arrays(name, STAGED, "int32", 2)
    monkeypatch.setattr(kernels, drain, lambda *_: None)
    source, target = IDS[5]

    def run(mode):
        late = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
        options = {"leaves": layout.leaves, "in_flight": 4, "interpret": late}
        if drain == "_drain":
            return dma_pages(device(pool), device(staging), padded(target), padded(source), np.int32(5), **options)[0]
        pages = tuple((jnp.stack([array[id_] for array in staging]),) for id_ in target)
        return dma_join(device(pool), pages, padded(source), groups=((0, 1),), **options)[0]

    pltpu.reset_tpu_interpret_mode_state()
    try:
        found = run("on_wait")
        with pytest.raises(AssertionError):
            same(found, moved(pool, staging, target, source, layout))
        pltpu.reset_tpu_interpret_mode_state()
        jax.block_until_ready(run("eager"))
        assert races_found()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_what_does_not_go_together_is_refused():
    layout = layout_of("K and V apart")
    pool, staging = device(arrays("K and V apart", PAGES, "int32", 1)), device(arrays("one leaf", STAGED, "int32", 2))
    ids, one = padded([1], 1), np.int32(1)
    leaves, groups = layout.leaves, ((0, 1),)
    with pytest.raises(ValueError, match=r"\['v'\].*cannot copy"):
        dma_pages(pool, (pool[0], staging[0][:, :1]), ids, ids, one, leaves)
    with pytest.raises(ValueError, match="in_flight is 0"):
        dma_pages(pool, pool, ids, ids, one, leaves, in_flight=0)
    with pytest.raises(ValueError, match=r"int32.*to or from uint32"):
        dma_split((pool[0], pool[1].view(jnp.uint32)), ids, leaves, groups)
    carried = [replace(leaf, carrier=np.dtype("uint32")) for leaf in leaves]
    with pytest.raises(ValueError, match="uint32 on host"):
        dma_split(pool, ids, carried, groups)
    with pytest.raises(ValueError, match="no ids"):
        dma_split(pool, ids[:0], leaves, groups)
    with pytest.raises(ValueError, match="not all of 2 leaves"):
        dma_split(pool, ids, leaves, ((0,),))
    with pytest.raises(ValueError, match="do not fit"):
        dma_join(pool, ((pool[0][:1],),), ids, leaves, groups)


def test_pages_spread_over_devices_need_ranks_of_their_own():
    layout = layout_of("K and V apart")
    leaves = []
    for leaf in layout.leaves:
        mesh = leaf.host_sharding.mesh
        placed = replace(leaf, host_sharding=leaf.host_sharding.update(spec=PartitionSpec(mesh.axis_names[0])))
        leaves.append(placed)
    spread = replace(layout, leaves=tuple(leaves))
    with pytest.raises(ValueError, match="page axis spread"):
        on_every_device(lambda *_: None, spread, PAGES, PAGES)
    with pytest.raises(ValueError, match="page axis spread"):
        split_on_every_device(lambda *_: None, spread, ((0, 1),))


@pytest.fixture(scope="module")
def found():
    """What a process with eight devices found."""
    worker = Path(__file__).with_name("kernel_mesh_worker.py")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    answer = subprocess.run([sys.executable, worker], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["heads", "ranks", "apart"])
def test_every_device_copies_its_part(found, name):
    assert found[name]["equal"]
    assert found[name]["placed"]


@pytest.mark.parametrize("name", ["heads", "ranks", "apart"])
def test_devices_do_not_talk_to_each_other(found, name):
    assert found[name]["collectives"] == []


def test_the_search_for_collectives_finds_some(found):
    assert found["plain"]["collectives"]


def test_tokens_count_the_pages_of_each_shard(found):
    assert found["heads"]["token"] == 3
    assert found["ranks"]["token"] == [0, 3]
    assert found["apart"]["token"] == 3


@pytest.mark.parametrize("copy", ["scatter", "split", "join"])
def test_kernels_can_be_exported_for_a_tpu(copy):
    """Lowered by Pallas for the platform, without its compiler: one custom call, whose outputs alias the pool."""
    pool = {name: jax.ShapeDtypeStruct((PAGES, 16, 256), np.int32) for name in ("k", "v")}
    layout = describe(jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), pool), 0, PAGES)
    groups, given = groups_of(layout.leaves), tuple(pool.values())
    ids, count = jax.ShapeDtypeStruct((2,), np.int32), jax.ShapeDtypeStruct((), np.int32)
    staged = tuple(jax.ShapeDtypeStruct((2, 16, 256), np.int32) for _ in pool)
    pages = ((jax.ShapeDtypeStruct((2, 16, 256), np.int32),),) * 2
    shared = {"leaves": layout.leaves, "groups": groups}
    if copy == "scatter":
        function = on_every_device(partial(dma_pages, leaves=layout.leaves), layout, 2, PAGES)
        arguments = (given, staged, ids, ids, count)
    elif copy == "split":
        function, arguments = split_on_every_device(partial(dma_split, **shared), layout, groups), (given, ids)
    else:
        function, arguments = join_on_every_device(partial(dma_join, **shared), layout, groups), (given, pages, ids)
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(*arguments)
    text = exported.mlir_module()
    assert exported.platforms == ("tpu",)
    assert text.count("@tpu_custom_call") == 1
    assert ("output_operand_alias" in text) == (copy != "split")
