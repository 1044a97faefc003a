"""Given pages on host and on other meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pool_samples import LAYOUTS, pages_of, random_pool

from purecache.effects.page_sets import pages_from_host, pages_to_host, pages_to_pool


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_bit_for_bit(layout, dtype):
    shapes, page_axis = LAYOUTS[layout]
    pool = random_pool(shapes, page_axis, 9, dtype)
    before = pages_of(pool, page_axis)
    copy = pages_to_host(pool, [7, 0, 3], page_axis=page_axis)
    other = random_pool(shapes, page_axis, 5, dtype, seed=1)
    kept = pages_of(other, page_axis)
    new = pages_from_host(other, copy, [4, 1, 2], page_axis=page_axis)
    after = pages_of(new, page_axis)
    np.testing.assert_array_equal(after[[4, 1, 2]], before[[7, 0, 3]])
    np.testing.assert_array_equal(after[[0, 3]], kept[[0, 3]])
    jax.block_until_ready(copy.arrays)
    assert copy.is_ready
    assert all(array.sharding.memory_kind == "pinned_host" for array in copy.arrays)


def test_bfloat16_in_unpinned_memory_has_to_be_forced():
    pool = random_pool((4,), 0, 8, "bfloat16")
    with pytest.raises(ValueError, match="force_unpinned=True"):
        pages_to_host(pool, [1], host_memory="unpinned_host")
    copy = pages_to_host(pool, [1], host_memory="unpinned_host", force_unpinned=True)
    assert copy.arrays[0].sharding.memory_kind == "unpinned_host"


def test_the_pool_may_be_donated_at_once():
    pool = jnp.arange(32, dtype=jnp.int32).reshape(8, 4)
    copy = pages_to_host(pool, [5])
    new = jax.jit(lambda p: p * 0, donate_argnums=0)(pool)
    np.testing.assert_array_equal(np.array(pages_from_host(new, copy, [0]))[0], [20, 21, 22, 23])


def test_pages_go_from_pool_to_pool():
    one, two = random_pool((4,), 0, 8, "bfloat16"), random_pool((4,), 0, 6, "bfloat16", seed=1)
    before, kept = pages_of(one, 0), pages_of(two, 0)
    after = pages_of(pages_to_pool(one, [1, 6], two, [5, 0]), 0)
    np.testing.assert_array_equal(after[[5, 0]], before[[1, 6]])
    np.testing.assert_array_equal(after[1:5], kept[1:5])
    np.testing.assert_array_equal(pages_of(one, 0), before)


@pytest.mark.parametrize(
    ("pages", "message"),
    [([0, 8], "pages are 0 to 8, but the pool has 0 to 7"), ([-1], "pages are -1"), ([], "one or more integers")],
)
def test_pages_that_there_are_not_are_refused(pages, message):
    with pytest.raises(ValueError, match=message):
        pages_to_host(jnp.zeros((8, 4)), pages)


@pytest.mark.parametrize(
    ("other", "pages", "message"),
    [
        (jnp.zeros((8, 4)), [1], "1 pages are to be written, but 2 were copied"),
        (jnp.zeros((8, 4)), [1, 1], "written twice"),
        (jnp.zeros((8, 5)), [1, 2], r"pages of pool are float32\[1, 5\], but those to be written float32\[1, 4\]"),
        (jnp.zeros((8, 4), jnp.int32), [1, 2], r"int32\[1, 4\], but those to be written float32"),
        ([jnp.zeros((8, 4))] * 2, [1, 2], "2 arrays, but those to be written have 1"),
    ],
)
def test_pages_that_do_not_fit_change_nothing(other, pages, message):
    copy = pages_to_host(jnp.ones((8, 4)), [1, 2])
    with pytest.raises(ValueError, match=message):
        pages_from_host(other, copy, pages)
    assert not any(array.is_deleted() for array in jax.tree.leaves(other))
