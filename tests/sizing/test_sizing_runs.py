"""The one program of a sizing: it decides as the cache that a scheduler calls, and copies nothing."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from purecache.capacity import MODELS, Accelerator
from purecache.sizing import program
from purecache.sizing.advice import advice, best_by_size, knee_of, smallest_enough
from purecache.sizing.distances import LruCurve
from purecache.sizing.sweep import Sized, seconds_of_model, sweep
from purecache.state import empty_state
from purecache.traces.hardware import Hardware
from purecache.traces.run import run_trace
from purecache.traces.setting import RunSetting
from purecache.traces.withheld import roomy
from purecache.workloads import BLOCK, Trace, generated, paged

HARDWARE = Hardware(MODELS["Llama-3.1-8B"], Accelerator("", 1e15), 50e9, 5e9)
TRACE = paged(Trace("generated", BLOCK, list(generated(160, seed=5))))
COPY = re.compile(r"= s32\[([\d,]*)\]\S* copy(?:-start)?\(")
SETTINGS = [
    RunSetting(HARDWARE, 60, 0),
    RunSetting(HARDWARE, 60, 150),
    RunSetting(HARDWARE, 100, 90, policy="slru"),
    RunSetting(HARDWARE, 60, 200, policy="lfu", write="write_back"),
    RunSetting(HARDWARE, 70, 80, policy="fifo", write="write_through_selective"),
    RunSetting(HARDWARE, 20, 100),
]


def found_by_cache(setting):
    """[requests, 2] pages on device and on host."""
    rows = run_trace(TRACE, setting).series
    assert len(rows) == len(TRACE)
    return np.array([[row.hits[tier] // BLOCK for tier in ("device", "host")] for row in rows])


@pytest.fixture(scope="module")
def made():
    return program.TraceProgram(TRACE, SETTINGS[0].config(BLOCK))


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_program_decides_as_the_cache(made, setting):
    found = np.concatenate(list(made.run(setting.config(BLOCK))))
    assert found[:, :2].tolist() == found_by_cache(setting).tolist()
    assert (found[:, 2] == 0).tolist() == (TRACE.sizes > setting.device_pages).tolist()
    assert found[:, 0].sum() > 0


def test_the_program_copies_nothing(made):
    state = jax.eval_shape(lambda: empty_state(roomy(SETTINGS[0].config(BLOCK))))
    sizes = {leaf.size for leaf in jax.tree.leaves(state) if leaf.size > 8192}
    copies = COPY.findall(made.compiled.as_text())
    assert not [each for each in copies if each and np.prod([int(n) for n in each.split(",")]) in sizes]
    memory = made.compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.size * 4 for leaf in jax.tree.leaves(state))
    assert memory.temp_size_in_bytes < 1 << 20


def test_a_sweep_of_sizes_and_policies(made):
    curve, seen = LruCurve(TRACE), []
    configs = [setting.config(BLOCK) for setting in SETTINGS]
    endless = TRACE.distinct
    swept = sweep(TRACE, HARDWARE, curve, configs, (0, endless), threads=2, progress=seen.append)
    assert seen[-1] == len(TRACE) * len(configs)
    assert swept.agree == (2, 2), "LRU with write through, of devices that hold every request"
    assert len(swept.rows) == 2 * len(configs) - 1, "no disk without host memory"
    most = curve.pages(np.array([endless]))[0] * BLOCK / TRACE.tokens.sum()
    for row in swept.rows:
        if row.disk_pages and not row.too_large:
            assert row.rate == pytest.approx(most), "an endless disk has all"
    by_trace = run_trace(TRACE, replace(SETTINGS[1], disk_pages=endless)).hits
    row = next(row for row in swept.rows if (row.host_pages, row.disk_pages) == (150, endless))
    assert row.rates["device"] == by_trace["device"].rate
    assert row.rate == pytest.approx(1 - by_trace["computed"].rate)
    assert seconds_of_model(TRACE, [(60, 150)]) > 0
    again = sweep(TRACE, HARDWARE, curve, configs, (0, endless), threads=1)
    assert again.rows == swept.rows
    assert advice(swept.rows, knee_of(np.array([1, 2]), np.array([0.1, 0.2])), 1e6)


def row(device, host, seconds, policy="lru", rate=0.1):
    return Sized(device, host, 0, policy, "write_through", {"device": rate}, {"device": seconds, "host": 0.0}, 0)


def test_the_smallest_that_is_enough_is_advised():
    rows = [row(10, 0, 50.0), row(10, 50, 96.0), row(20, 50, 97.0, "slru", 0.2), row(20, 50, 70.0), row(40, 50, 100.0)]
    assert smallest_enough(rows) == rows[1]
    assert [each.seconds for each in best_by_size(rows)] == [50, 96, 97, 100]
    words = " ".join(advice(rows[2:], knee_of(np.array([5, 10]), np.array([0.1, 0.11])), 1e9))
    assert "device 20.0 GB" in words
    assert "slru with write_through finds 0.100 of all tokens more than LRU there" in words
    assert "No configuration saves time" in advice([row(10, 0, -1.0)], knee_of(np.array([5]), np.array([0.1])), 1e9)[1]
