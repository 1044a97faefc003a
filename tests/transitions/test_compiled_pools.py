"""The compiled programs with tail pools: in place, and no memory or copy that grows with the capacity."""

import jax
import numpy as np
import pytest
from test_compiled import big_copies

from purecache.entries import entries
from purecache.programs import Program
from purecache.state import CacheConfig, Checkpoint, PoolSpec, Window, as_jax, empty_state

PAGES, SIZE = 8000, 8
CONFIG = CacheConfig(
    page_size=4,
    device_pages=PAGES,
    host_pages=2 * PAGES,
    pools=(PoolSpec("window", Window(32), PAGES, PAGES), PoolSpec("state", Checkpoint(), PAGES, PAGES)),
)
TABLE = entries(CONFIG.layout)
OTHERS = {"match_16", "match_128", "match_1024", "evict_device", "insert", "reset"}
"""Not compiled here: other sizes or parts of those that are, and the one whose work is that of the capacity."""
NAMES = [name for name in TABLE if name not in OTHERS and not name.endswith("@2")]
"""The programs of the second tail pool are those of the first with another number."""


@pytest.fixture(scope="module")
def state():
    return as_jax(empty_state(CONFIG))


@pytest.mark.parametrize("name", NAMES)
def test_every_program_updates_the_state_in_place(name, state):
    made = Program(name, TABLE[name], CONFIG.layout, SIZE, jax.eval_shape(lambda: state))
    report = made.report()
    assert report["aliased_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert not big_copies(made.compiled, state, PAGES)
    # A row of a column or an order alone would be more.
    row = min(leaf.nbytes // len(leaf) for leaf in (state.nodes, state.orders))
    assert report["temp_bytes"] < row
    entry = made.compiled.as_text()[made.compiled.as_text().index("ENTRY") :]
    assert entry.count('xla_cpu_small_call="true"') == 1


def test_programs_of_a_layout_without_tail_pools_are_as_before():
    plain = CacheConfig(page_size=4, device_pages=64, host_pages=64)
    assert not any("@" in name for name in entries(plain.layout))
    assert np.array(empty_state(plain).orders).shape[0] == 2
