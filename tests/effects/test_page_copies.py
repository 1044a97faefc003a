"""Copies are exact to the bit in every layout and dtype, and the compiled programs stay in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pool_samples import FORMS, LAYOUTS, backup, load_back, pages_of, random_pool, run

from purecache.effects import Interpreter
from purecache.effects.programs import pool_sized_instructions

DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
    "int32",
    "int8",
    "uint16",
    "bool",
)


def round_trip(pool, page_axis, form):
    """Device pages 0 .. 6 go to host pages, in mixed order, and come back as device pages 9 .. 15, in batches of 3."""
    before = pages_of(pool, page_axis)
    plane = Interpreter(pool, host_pages=9, device_pages=16, page_axis=page_axis, **FORMS[form], batch_pages=3)
    order = np.array([3, 0, 6, 1, 5, 2, 4])
    assert run(plane, backup(order, order + 2)) == [True] * 7
    assert run(plane, load_back(np.arange(7) + 2, np.arange(7) + 9)) == [True] * 7
    expected = before.copy()
    expected[9:16] = before[:7]
    np.testing.assert_array_equal(pages_of(plane.pool, page_axis), expected)
    return plane


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name, form):
    shapes, page_axis = LAYOUTS[name]
    round_trip(random_pool(shapes, page_axis, 16, jnp.bfloat16), page_axis, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_bit_by_bit(dtype, form):
    round_trip(random_pool({"k": (4, 8), "v": (4, 8)}, 0, 16, dtype), 0, form)


@pytest.mark.parametrize("form", FORMS)
def test_leaves_of_different_dtypes(form):
    keys = random_pool((4, 8), 0, 16, "int8")
    scales = random_pool((4, 1), 0, 16, jnp.bfloat16, seed=1)
    round_trip({"keys": keys, "scales": scales}, 0, form)


def reports(dtype, form, device_pages, host_pages):
    pool = random_pool({"k": (8, 32), "v": (8, 32)}, 0, device_pages, dtype)
    plane = Interpreter(pool, host_pages=host_pages, device_pages=device_pages, **FORMS[form], batch_pages=4)
    plane.warm()
    return plane.programs(), plane.page_bytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "int32", "int8", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_programs_are_in_place_at_every_capacity(dtype, form):
    small, page_bytes = reports(dtype, form, 32, 48)
    large, _ = reports(dtype, form, 512, 768)
    assert [r["name"] for r in small] == [r["name"] for r in large]
    for few, many in zip(small, large, strict=True):
        assert few["pool_sized"] == many["pool_sized"] == []
        assert few["temp_bytes"] == many["temp_bytes"]
        pages = {"backup to slots": 768, "backup to arrays": 0}.get(many["name"], 512)
        assert many["aliased_bytes"] == pages * page_bytes


@pytest.mark.parametrize("form", FORMS)
def test_programs_are_large_enough_to_leave_the_calling_thread(form):
    # XLA:CPU runs programs below 1000 operations in the thread that calls them.
    assert all(report["flops"] >= 1000 for report in reports("float32", form, 8, 8)[0])


def test_a_pool_sized_conversion_is_found():
    # What XLA:CPU makes of a bf16 pool by default: the whole of it goes through f32 in every call.
    def write(pool, page, index):
        return jax.lax.dynamic_update_slice_in_dim(pool, page, index, 0)

    pool, page = jnp.zeros((64, 128), jnp.bfloat16), jnp.zeros((1, 128), jnp.bfloat16)
    text = jax.jit(write, donate_argnums=0).lower(pool, page, np.int32(3)).compile().as_text()
    assert "convert" in pool_sized_instructions(text, {64 * 128})


def test_a_pool_sized_copy_is_found():
    pool, page = jnp.zeros((64, 128)), jnp.zeros((1, 128))
    not_donated = jax.jit(lambda pool, page: jax.lax.dynamic_update_slice_in_dim(pool, page, 3, 0))
    assert "copy" in pool_sized_instructions(not_donated.lower(pool, page).compile().as_text(), {64 * 128})


def test_a_program_that_is_not_in_place_is_reported(monkeypatch):
    monkeypatch.setattr("purecache.effects.programs._compiler_options", lambda leaves: None)
    plane = Interpreter(random_pool((8, 32), 0, 64, jnp.bfloat16), host_pages=16, device_pages=64)
    with pytest.warns(RuntimeWarning, match="unsigned integer dtype"):
        plane.warm()
    assert any(report["pool_sized"] for report in plane.programs())


@pytest.mark.parametrize(("form", "most"), [("slots", 2), ("arrays", 8), ("staged", 8)])
def test_the_number_of_programs_is_bounded(form, most):
    plane = Interpreter(random_pool((4,), 0, 40, "int32"), host_pages=40, device_pages=40, **FORMS[form], batch_pages=8)
    for count in (1, 2, 3, 5, 8, 13, 31, 40):
        assert run(plane, backup(np.arange(count), np.arange(count))) == [True] * count
        assert run(plane, load_back(np.arange(count), np.arange(count))) == [True] * count
    used = plane.programs()
    seen = []
    plane.warm(lambda done, total, name: seen.append((done, total, name)))
    assert len(used) == len(plane.programs()) == most
    assert [done for done, _, _ in seen] == list(range(1, most + 1))
    assert {total for _, total, _ in seen} == {most}
