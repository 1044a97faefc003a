"""Kinds of host memory, and what happens when there is too little of it."""

import jax.numpy as jnp
import numpy as np
import pytest
from pool_samples import FORMS, backup, load_back, random_pool, run

from purecache.effects import Interpreter
from purecache.effects.host_memory import HostMemoryError, fitting_host_pages, locked_memory_limit


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_every_bit_survives_in_both_kinds_of_memory(form, dtype, kind):
    pool = random_pool((4, 8), 0, 8, dtype)
    bits = np.array(pool).view(np.uint8).copy()
    plane = Interpreter(
        pool, host_pages=4, device_pages=8, host_memory=kind, force_unpinned=dtype == "bfloat16", **FORMS[form]
    )
    assert run(plane, backup([0, 1, 2], [3, 1, 0])) == [True] * 3
    assert run(plane, load_back([3, 1, 0], [5, 6, 7])) == [True] * 3
    assert (np.array(plane.pool).view(np.uint8)[5:8] == bits[0:3]).all()
    assert all(array.sharding.memory_kind == kind for array in host_arrays(plane))


def host_arrays(plane):
    tier = plane._tier
    return tier._slots if hasattr(tier, "_slots") else [a for page in tier._pages if page for a in page]


def test_bfloat16_in_unpinned_memory_has_to_be_forced():
    with pytest.raises(ValueError, match="force_unpinned=True"):
        Interpreter(jnp.zeros((8, 4), jnp.bfloat16), host_pages=4, device_pages=8, host_memory="unpinned_host")


def test_another_kind_of_memory_is_refused():
    with pytest.raises(ValueError, match="'pinned_host' or 'unpinned_host'"):
        Interpreter(jnp.zeros((8, 4)), host_pages=4, device_pages=8, host_memory="device")


class Machine:
    """Has host memory for so many pages."""

    def __init__(self, room):
        self.room, self.asked = room, []

    def __call__(self, layout, pages):
        self.asked.append(pages)
        if pages > self.room:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_a_smaller_second_tier_comes_with_a_warning():
    machine = Machine(room=30)
    with pytest.warns(RuntimeWarning, match="L2 has 12 pages instead of 50"):
        found = fitting_host_pages(jnp.zeros((8, 4)), 50, device_pages=4, ranks=2, allocate=machine)
    assert found == 12
    assert machine.asked == [100, 50, 24]


def test_all_pages_that_fit_are_kept_without_a_word(recwarn):
    assert fitting_host_pages(jnp.zeros((8, 4)), 50, device_pages=8, allocate=Machine(room=50)) == 50
    assert not recwarn.list


def test_no_memory_at_all_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr("purecache.effects.host_memory.locked_memory_limit", lambda: 8 << 20)
    with pytest.raises(HostMemoryError, match=r"may lock 8 MiB \(ulimit -l\); raise it with"):
        fitting_host_pages(jnp.zeros((8, 4)), 50, device_pages=8, allocate=Machine(room=0))


def test_a_failed_allocation_of_slots_names_the_limit(monkeypatch):
    def none(layout, pages):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr("purecache.effects.host_slots.zero_host_pool", none)
    with pytest.raises(HostMemoryError, match=r"400 host pages of 16 bytes .* could not be allocated"):
        Interpreter(jnp.zeros((8, 4)), host_pages=400, device_pages=8)


def test_the_limit_is_read_from_the_system():
    limit = locked_memory_limit()
    assert limit is None or limit >= 0
