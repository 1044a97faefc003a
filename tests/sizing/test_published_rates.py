"""Hit rates of the traces that Mooncake published, as two independent simulators have them."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from purecache.sizing.distances import LruCurve
from purecache.workloads import BLOCK, Trace, paged, read_trace

TRACES = Path(os.environ.get("PURECACHE_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason="no traces here: set PURECACHE_TRACES to a folder with mooncake/"
)
CAPACITIES = [int(tokens) // BLOCK for tokens in (1e4, 1e5, 1e6, 2e6, 3e6, 4e6, 5e6, 8e6, 1e7, 5e7, 1e8)]
KNOWN = {
    "conversation": [0.0425, 0.0427, 0.0543, 0.0865, 0.1387, 0.1783, 0.2111, 0.2663, 0.2908, 0.3707, 0.3736],
    "synthetic": [0.0018, 0.0171, 0.1451, 0.2328, 0.3151, 0.3749, 0.4283, 0.5357, 0.577, 0.6512, 0.6512],
}
"""An exact LRU written for this comparison elsewhere: share of the tokens, at these capacities."""


def with_partial_blocks(name):
    """The trace with its last blocks taken as full, as the simulators do, and the tokens that each really has."""
    trace = read_trace(TRACES / "mooncake" / f"{name}_trace.jsonl")
    full = [replace(each, tokens=len(each.blocks) * BLOCK + 1) for each in trace.requests]
    pages = paged(Trace(trace.form, BLOCK, full))
    tokens = np.full(len(pages.ids), BLOCK)
    tokens[pages.starts[1:] - 1] = [each.tokens - (len(each.blocks) - 1) * BLOCK for each in trace.requests]
    return trace, pages, tokens


@pytest.mark.parametrize("name", KNOWN)
def test_the_curve_is_that_of_an_independent_lru(name):
    _, pages, tokens = with_partial_blocks(name)
    sums, curve = np.concatenate([[0], np.cumsum(tokens)]), LruCurve(pages)
    rates = []
    for capacity in CAPACITIES:
        ends = pages.starts[:-1] + curve.by_request(capacity)
        rates.append(round((sums[ends] - sums[pages.starts[:-1]]).sum() / tokens.sum(), 4))
    assert rates == KNOWN[name]


def test_the_curve_is_that_of_kvcache_simulator():
    """To the token, over the second half of the requests. (PyPI, of KVCache.AI; its Python backend.)"""
    plan = pytest.importorskip("kvcache_sim.plan", reason="needs kvcache-simulator")
    policies = pytest.importorskip("kvcache_sim.policies")
    files = pytest.importorskip("kvcache_sim.trace")
    _, pages, tokens = with_partial_blocks("synthetic")
    theirs = plan.build_execution_plan(
        files.parse_trace_file(str(TRACES / "mooncake" / "synthetic_trace.jsonl"), block_size=BLOCK)
    )
    half, sums, curve = len(pages) // 2, np.concatenate([[0], np.cumsum(tokens)]), LruCurve(pages)
    for capacity in (2000, 15_000):
        ends = pages.starts[:-1] + curve.by_request(capacity)
        found = (sums[ends] - sums[pages.starts[:-1]])[half:].sum()
        assert policies.simulate_policy(theirs, "lru", capacity).hitTokens == found
