"""Giving host pages up, in both forms of L2, and what that does to the memory of the process."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from pool_samples import FORMS, backup, load_back, run, simple

from purecache.effects import Interpreter


def test_dropped_slots_keep_their_bytes():
    plane = simple(host_form="slots")
    assert run(plane, backup([1], [1])) == [True]
    plane.drop_host(np.array([1]), 0)
    assert run(plane, load_back([1], [5])) == [True]


def test_dropped_arrays_are_gone():
    plane = simple(host_form="arrays")
    assert run(plane, backup([1, 2], [1, 2])) == [True, True]
    plane.drop_host(np.array([1, 7]), 0)
    assert run(plane, load_back([1, 2], [5, 6])) == [False, True]


def test_drop_names_the_pages_of_its_rank():
    plane = simple(8, ranks=2, host_pages=3, host_form="arrays")
    for rank in (0, 1):
        assert run(plane, backup([0], [1], rank=rank)) == [True]
    plane.drop_host(np.array([1]), 1)
    assert run(plane, load_back([1], [2], rank=0)) == [True]
    assert run(plane, load_back([1], [2], rank=1)) == [False]
    with pytest.raises(ValueError, match="host page id 3 is out of range"):
        plane.drop_host(np.array([3]), 0)
    with pytest.raises(ValueError, match="rank 2 is out of range"):
        plane.drop_host(np.array([0]), 2)


@pytest.mark.parametrize("form", FORMS)
def test_reset_forgets_transfers_and_pages(form):
    plane = simple(**FORMS[form])
    before = np.array(plane.pool)
    plane.start(backup([1], [1]))
    plane.reset()
    assert plane.in_flight == 0
    assert plane.drain() == []
    assert run(plane, load_back([1], [5])) == [False]
    np.testing.assert_array_equal(np.array(plane.pool), before)
    assert run(plane, backup([1], [1])) == [True]
    assert run(plane, load_back([1], [5])) == [True]


def resident():
    """Bytes of the process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def hold_and_drop(page_kib, end):
    """Fill L2 with arrays, give them up, and assert that the process got smaller."""
    held = 160 << 20
    pages = held // (page_kib << 10)
    pool = jnp.ones((16, page_kib << 8), jnp.float32)
    plane = Interpreter(pool, host_pages=pages, device_pages=16, host_form="arrays", batch_pages=16)
    plane.warm()
    gc.collect()
    plane.reset()
    empty = resident()
    for first in range(0, pages, 16):
        plane.start(backup(np.arange(16), np.arange(first, first + 16)))
        plane.drain()
    assert resident() - empty > 0.9 * held
    if end == "reset":
        plane.reset()
    else:
        plane.drop_host(np.arange(0, pages, 2), 0)
        assert resident() - empty < 0.7 * held
        plane.drop_host(np.arange(1, pages, 2), 0)
    assert resident() - empty < 0.25 * held
    assert run(plane, load_back([0], [0])) == [False]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the process's resident size from /proc")
@pytest.mark.parametrize("end", ["drop", "reset"])
@pytest.mark.parametrize("page_kib", [64, 1024])
def test_memory_of_dropped_arrays_goes_back(page_kib, end):
    """In a process of its own: what other tests leave behind would be measured too."""
    subprocess.run([sys.executable, __file__, str(page_kib), end], check=True)


if __name__ == "__main__":
    hold_and_drop(int(sys.argv[1]), sys.argv[2])
