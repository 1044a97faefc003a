"""Runs of traces against independent simulators, and what holds of every run.

All caches here have one layout (see `purecache.traces.withheld`), so that they share their programs.
"""

import itertools
import json
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from purecache.capacity import MODELS, Accelerator, Fleet
from purecache.state import CacheConfig
from purecache.state.laws import violations
from purecache.traces.engine import Engine
from purecache.traces.hardware import Hardware
from purecache.traces.hot import hot_stretches
from purecache.traces.meter import Meter
from purecache.traces.outcome import FORMAT, LINKS, SOURCES, read_outcome
from purecache.traces.run import Schedule, run_trace
from purecache.traces.setting import RunSetting
from purecache.traces.withheld import roomy, withheld_state
from purecache.workloads import BLOCK, Request, Trace, generated, paged

HARDWARE = Hardware(MODELS["Llama-3.1-8B"], Accelerator("", 1e15), 50e9, 5e9, decode_seconds=0.005)
REQUESTS = [replace(each, tokens=len(each.blocks) * BLOCK + 1) for each in generated(160, seed=5)]
"""All blocks are full, and one token more is computed: then all blocks count, as in the simulators below."""
TRACE = paged(Trace("generated", BLOCK, REQUESTS))
ENDLESS = TRACE.distinct + TRACE.largest


def found_by_request(outcome):
    """[requests, 3] pages: a short trace has a row of the series per request."""
    assert [row.requests for row in outcome.series] == list(range(1, len(TRACE) + 1))
    return np.array([[row.hits[name] // BLOCK for name in SOURCES[:3]] for row in outcome.series])


def lru(capacity):
    """Pages that each request finds in a list of `capacity` pages, used last at its end."""
    kept, found = OrderedDict(), []
    for request in REQUESTS:
        hits = list(itertools.takewhile(kept.__contains__, request.blocks))
        found.append(len(hits))
        for block in reversed(request.blocks):  # the front of a prompt counts as used last
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return found


@pytest.mark.parametrize("capacity", [60, 100, ENDLESS])
def test_device_alone_finds_what_a_plain_lru_finds(capacity):
    outcome = run_trace(TRACE, RunSetting(HARDWARE, capacity))
    expected = lru(capacity)
    assert found_by_request(outcome)[:, 0].tolist() == expected
    assert 0 < sum(expected) < TRACE.prompt_pages.sum()
    assert outcome.hits["device"].rate == sum(expected) * BLOCK / TRACE.tokens.sum()


@pytest.mark.parametrize("capacity", [60, 100, 140])
def test_device_alone_finds_what_kvcache_simulator_finds(capacity):
    """The simulator of KVCache.AI (PyPI). It counts the second half of the requests, once the cache is full."""
    plan = pytest.importorskip("kvcache_sim.plan", reason="needs kvcache-simulator")
    policies = pytest.importorskip("kvcache_sim.policies")
    trace = pytest.importorskip("kvcache_sim.trace")
    rows = [{"input_length": len(each.blocks) * BLOCK, "hash_ids": list(each.blocks)} for each in REQUESTS]
    lines = [json.dumps(row | {"timestamp": 0, "output_length": 1}) for row in rows]
    read = trace.parse_trace_lines(lines, block_size=BLOCK)
    theirs = policies.simulate_policy(plan.build_execution_plan(read), "lru", capacity)
    half = found_by_request(run_trace(TRACE, RunSetting(HARDWARE, capacity)))[len(REQUESTS) // 2 :, 0]
    assert theirs.measurementMode == "fixed_window"
    assert theirs.hitTokens == half.sum() * BLOCK
    assert theirs.totalTokens == sum(len(each.blocks) * BLOCK for each in REQUESTS[len(REQUESTS) // 2 :])


def test_device_and_host_find_what_the_model_of_a_fleet_finds():
    outcome = run_trace(TRACE, RunSetting(HARDWARE, 60, 150))
    hits = Fleet(1, 60 * BLOCK, 150 * BLOCK, 0).run(REQUESTS)
    assert (outcome.hits["device"].tokens, outcome.hits["host"].tokens) == (hits.device, hits.host)
    assert min(hits.device, hits.host) > 0
    assert outcome.moved["load_back"].pages * BLOCK == hits.host


def test_below_an_endless_disk_nothing_is_computed_twice():
    outcome = run_trace(TRACE, RunSetting(HARDWARE, 60, 100, ENDLESS))
    assert sum(outcome.hits[name].pages for name in SOURCES[:3]) == sum(lru(ENDLESS))
    assert outcome.hits["disk"].pages == found_by_request(outcome)[:, 2].sum() > 0
    assert outcome.moved["prefetch"].pages >= outcome.hits["disk"].pages
    assert outcome.evicted["disk"] == 0
    less = run_trace(TRACE, RunSetting(HARDWARE, 60, 100, 200))
    assert 0 < less.hits["disk"].pages < outcome.hits["disk"].pages
    assert less.evicted["disk"] > 0
    assert run_trace(TRACE, RunSetting(HARDWARE, 60, 100, 200, prefetch="off")).hits["disk"].pages == 0


def test_a_request_that_does_not_fit_is_computed_and_leaves_nothing():
    outcome = run_trace(TRACE, RunSetting(HARDWARE, 20))
    assert outcome.refusals.too_large == (TRACE.sizes > 20).sum() > 0
    assert outcome.hits["computed"].tokens + outcome.hits["device"].tokens == TRACE.tokens.sum()


def scheduled(setting):
    """A run of requests that overlap, and its engine at the end."""
    engine = Engine(TRACE, setting)
    meter = Meter(engine)
    Schedule(engine, meter).run()
    return meter.outcome("generated"), engine


@pytest.mark.parametrize(
    ("policy", "write", "prefetch"),
    [
        ("lru", "write_through", "wait"),
        ("lfu", "write_back", "best-effort"),
        ("slru", "write_through_selective", "off"),
    ],
)
def test_requests_that_overlap(policy, write, prefetch):
    """Locks come and go, pages run short, and in the end nothing is lost: every law holds, no page is out."""
    setting = RunSetting(HARDWARE, 90, 200, 400, policy, write, prefetch, concurrent=12)
    outcome, engine = scheduled(setting)
    assert violations(engine.cache.state) == []
    pages = outcome.series[-1].pages
    for tier, capacity in (("device", 90), ("host", 200)):
        assert sum(pages[tier].values()) == capacity
        assert pages[tier]["lent"] == pages[tier]["in_flight"] == 0
    assert pages["device"]["protected"] == 0
    assert max(row.running for row in outcome.series) > 3
    assert any(row.pages["device"]["protected"] for row in outcome.series)
    assert outcome.refusals.waited > 0
    assert sum(outcome.hits[name].tokens for name in SOURCES) == TRACE.tokens.sum()
    assert sum(outcome.hits[name].pages for name in SOURCES[:3]) <= sum(lru(ENDLESS))
    assert outcome.latency.ttft_p50 <= outcome.latency.ttft_p90 <= outcome.latency.ttft_p99
    assert (outcome.moved["prefetch"].pages > 0) == (prefetch != "off")
    assert outcome == scheduled(setting)[0], "the same trace and setting give the same outcome"


def test_with_room_for_all_requests_at_once_find_the_same():
    """One prefill runs at a time, and each finds what the one before has left; but they wait for each other."""
    at_once = [replace(each, time=0.0) for each in REQUESTS[:20]]
    trace = paged(Trace("generated", BLOCK, [*at_once[:1] * 3, *at_once]))
    setting = RunSetting(HARDWARE, 1000)
    one, many = run_trace(trace, setting), run_trace(trace, replace(setting, concurrent=30))
    assert one.hits["device"].tokens == many.hits["device"].tokens > 0
    assert many.latency.queue_mean > 0 == one.latency.queue_mean


def test_times_by_hand():
    """Two requests of 1,025 tokens: the second one waits for the first prefill, and finds two pages of it."""
    trace = paged(Trace("t", BLOCK, [Request(1025, (1, 2, 3), 0.0, 10), Request(1025, (1, 2, 3), 0.0, 10)]))
    model, rate = HARDWARE.model, HARDWARE.chip.rate
    whole, rest = model.flops(1025) / rate, (model.flops(1025) - model.flops(1024)) / rate
    latency = run_trace(trace, RunSetting(HARDWARE, 50, concurrent=2)).latency
    assert latency.ttft_mean == pytest.approx((whole + whole + rest) / 2)
    assert latency.queue_mean == pytest.approx(whole / 2)
    assert latency.saved["device"] == pytest.approx(model.flops(1024) / rate)
    assert latency.prefill == pytest.approx(whole + rest)
    assert latency.prefill_without == pytest.approx(2 * whole)


def test_rows_of_the_series_add_up_to_the_totals(tmp_path):
    outcome = run_trace(TRACE, RunSetting(HARDWARE, 60, 100, 200), "a trace")
    for source in SOURCES:
        assert sum(row.hits[source] for row in outcome.series) == outcome.hits[source].tokens
    for link in LINKS:
        assert sum(row.moved[link] for row in outcome.series) == outcome.moved[link].pages
    for tier, total in outcome.evicted.items():
        assert sum(row.evicted[tier] for row in outcome.series) == total > 0
    path = tmp_path / "outcome.json"
    path.write_text(outcome.to_json())
    read = read_outcome(path)
    assert (read["format"], read["trace"]["name"], len(read["series"])) == (FORMAT, "a trace", len(TRACE))
    assert read["hits"]["host"]["tokens"] == outcome.hits["host"].tokens
    path.write_text('{"format": "another"}')
    with pytest.raises(ValueError, match="not an outcome"):
        read_outcome(path)


def test_hot_stretches_are_the_tree_of_all_prompts():
    hot = run_trace(TRACE, RunSetting(HARDWARE, 60)).hot
    named = {each.id: each for each in hot}
    for each in hot:
        above = named.get(each.parent)
        assert (each.parent == -1) == (above is None) == (each.depth == 0)
        assert above is None or (above.depth + above.tokens == each.depth and above.uses >= each.uses)
    assert sum(each.tokens * each.uses for each in hot) <= len(TRACE.ids) * BLOCK
    assert sum(each.tokens * each.uses for each in hot_stretches(TRACE, most=10_000)) == len(TRACE.ids) * BLOCK
    assert hot == run_trace(TRACE, RunSetting(HARDWARE, 60)).hot


def test_settings_that_cannot_work():
    for wrong in ({"prefetch": "never"}, {"concurrent": 0}, {"speed": 0}, {"disk_pages": 5}, {"disk_pages": -1}):
        with pytest.raises(ValueError, match=r"must be|needs host"):
            RunSetting(HARDWARE, 60, **wrong)
    with pytest.raises(ValueError, match="must be positive"):
        replace(HARDWARE, host_bandwidth=0)
    small = CacheConfig(1, 40, host_pages=9)
    with pytest.raises(ValueError, match="exceed"):
        withheld_state(replace(small, device_pages=9000), roomy(small))


@pytest.mark.parametrize("write", ["write_through", "write_back"])
@pytest.mark.parametrize("host", [0, 9])
def test_a_state_with_pages_withheld_obeys_the_laws(write, host):
    config = CacheConfig(1, 40, host_pages=host, write=write, policy="slru")
    assert violations(withheld_state(config, roomy(config))) == []
