"""Planning: sizes and break-even by hand, the model of a fleet beside the real cache, and traces."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import new_cache

from purecache.answers import Refusal
from purecache.capacity import MODELS, Accelerator, Fleet, ModelShape, Routing, break_even
from purecache.cli import main
from purecache.state import CacheConfig
from purecache.workloads import Request, generated, mooncake

PAGE, DEVICE, HOST = 4, 12, 30
TRACES = Path(os.environ.get("PURECACHE_TRACES", Path(__file__).parents[3] / "shared" / "traces"))


def test_bytes_by_hand():
    assert MODELS["Llama-3.1-8B"].bytes_per_token() == 32 * 2 * 8 * 128 * 2 == 131072
    assert MODELS["DeepSeek-V3"].bytes_per_token(1) == 61 * 576
    assert MODELS["gpt-oss-120b"].window_bytes() == 18 * 128 * 2 * 8 * 64 * 2


@given(
    st.sampled_from(list(MODELS.values())),
    st.floats(1e8, 1e12),
    st.floats(1e12, 1e16),
    st.floats(1e-6, 1.0),
)
def test_at_the_break_both_take_equally_long(model, bandwidth, flops, latency):
    chip = Accelerator("", flops)
    tokens = break_even(model, chip, bandwidth, latency).tokens
    load = latency + tokens * model.bytes_per_token() / bandwidth
    assert load == pytest.approx(model.flops(tokens) / chip.rate, rel=1e-6)
    longer = 2 * tokens
    assert latency + longer * model.bytes_per_token() / bandwidth < model.flops(longer) / chip.rate


def test_where_nothing_breaks_even():
    linear = ModelShape("all windows", 1e9, 4, 8, 64, kv_heads=8, window_layers=4, window=8)
    assert break_even(linear, Accelerator("", 1e12), 1e9, 1.0).tokens == pytest.approx(250)
    heavy = ModelShape("more KV than work", 1.0, 4, 0, 64, kv_heads=8)
    assert break_even(heavy, Accelerator("", 1e12), 1e3, 1.0).tokens == math.inf
    for wrong in ({"bandwidth": 0}, {"bandwidth": 1, "latency": -1}, {"bandwidth": 1, "element": 0}):
        with pytest.raises(ValueError, match="must be positive"):
            break_even(linear, Accelerator("", 1e12), **wrong)


def served(cache, prompt):
    """Tokens that one call of the real cache found on device and on host. The next call finds everything settled."""
    match, receipt = cache.admit(prompt)
    pages = match.device_pages
    if match.host_length:
        load = cache.load_back(match)
        assert not isinstance(load, Refusal)
        cache.unlock(receipt)
        receipt, pages = cache.lock(match.node), np.concatenate([pages, load.pages])
    lent = cache.allocate(-(-len(prompt) // PAGE) - len(pages))
    cache.finish(prompt, np.concatenate([pages, lent]), receipt)
    cache.drain()
    return match.device_length, match.host_length


@pytest.mark.parametrize("seed", range(3))
def test_one_engine_of_the_model_finds_what_the_real_cache_finds(seed):
    """Random prompts of up to eight blocks out of two, so that they share prefixes of all lengths."""
    config = CacheConfig(PAGE, DEVICE, host_pages=HOST, load_back_threshold=1, write="write_through")
    cache, _ = new_cache(config)
    fleet, names, source = Fleet(1, DEVICE * PAGE, HOST * PAGE, 0, block=PAGE), {}, np.random.default_rng(seed)
    for _ in range(120):
        path = source.integers(0, 2, source.integers(1, 9)).tolist()
        blocks = [names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(len(path))]
        before = fleet.hits.device, fleet.hits.host
        fleet.run([Request(len(path) * PAGE, tuple(blocks))])
        found = served(cache, np.repeat(np.array(path, np.int32), PAGE))
        assert found == (fleet.hits.device - before[0], fleet.hits.host - before[1])
    assert min(fleet.hits.device, fleet.hits.host, fleet.hits.computed) > 100


def test_a_store_makes_engines_one():
    """With an endless store, hits don't depend on how many engines there are, or on which one a call goes to."""
    calls = list(generated(400, seed=3))
    shares = {
        Fleet(engines, 20_000, 60_000, None, routing).run(calls).share("device", "host", "store")
        for engines in (1, 3, 8)
        for routing in Routing
    }
    assert len(shares) == 1
    alone = [Fleet(n, 20_000, 60_000, 0).run(calls).share("device", "host", "store") for n in (1, 3, 8)]
    assert shares.pop() > alone[0] > alone[1] > alone[2] > 0


def test_routing_by_prefix_keeps_more_but_stays_even():
    calls = list(generated(400, seed=3))
    fleets = {routing: Fleet(4, 60_000, 120_000, 0, routing) for routing in Routing}
    found = {routing: fleet.run(calls).share("device", "host") for routing, fleet in fleets.items()}
    assert found[Routing.PREFIX] > found[Routing.ROUND_ROBIN]
    assert max(fleets[Routing.PREFIX]._calls) <= 1.3 * 400 / 4 + 2


def test_partly_filled_blocks_are_computed():
    fleet = Fleet(1, None, 0, 0, block=10)
    hits = fleet.run([Request(25, (1, 2, 3)), Request(25, (1, 2, 3))])
    assert (hits.device, hits.computed, hits.tokens) == (20, 30, 50)


def test_mistakes_are_told(tmp_path, capsys):
    with pytest.raises(ValueError, match="needs an engine"):
        Fleet(0, 1, 1, 1)
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 5, "hash_ids": [1]}\n{"input_length": 5}\n')
    with pytest.raises(ValueError, match="line 2: not a request"):
        list(mooncake(path))
    assert main(["capacity", "fleet", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err
    assert main(["capacity", "break-even", "--tflops", "0"]) == 2


@pytest.mark.parametrize(
    "arguments", [["bytes"], ["break-even", "--tflops", "918"], ["fleet", "--calls", "50", "--engines", "1", "2"]]
)
def test_the_command(arguments, capsys):
    assert main(["capacity", *arguments]) == 0
    table = capsys.readouterr().out.splitlines()
    assert main(["capacity", *arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(table) == 1 + len(rows)
    assert all(name in table[0] for name in rows[0])


@pytest.mark.skipif(not TRACES.is_dir(), reason="no traces here: set PURECACHE_TRACES to a folder with mooncake/")
def test_hit_rates_of_a_published_trace():
    """Without end .3736, and .0543 at a million tokens: an independent model, which counts partly filled blocks."""
    calls = list(mooncake(TRACES / "mooncake" / "conversation_trace.jsonl"))
    assert len(calls) == 12_031
    assert Fleet(1, None, 0, 0).run(calls).share("device") == pytest.approx(0.3736, abs=3e-4)
    assert Fleet(1, 1_000_000, 0, 0).run(calls).share("device") == pytest.approx(0.0543, abs=2e-3)
