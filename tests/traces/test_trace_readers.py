"""Readers of recorded workloads: one small file per format, mistakes, and the published files where they are."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from purecache.workloads import Trace, generated, paged, read_trace

TRACES = Path(os.environ.get("PURECACHE_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
SESSION = {
    "id": "one",
    "block_size": 64,
    "requests": [
        {"t": 0.0, "type": "n", "in": 200, "out": 9, "h": [1, 3, 7, 1]},
        {"t": 5.0, "type": "subagent", "requests": [{"t": 1.0, "type": "n", "in": 64, "out": 1, "h": [1, 1]}]},
        {"t": 2.0, "type": "s", "in": 130, "out": 2, "h": [1, 2, 9, 1]},
    ],
}
FILES = {
    "mooncake": [{"timestamp": 1500, "input_length": 900, "output_length": 7, "hash_ids": [0, 5]}],
    "qwen": [
        {"chat_id": 1, "timestamp": 61.5, "input_length": 40, "output_length": 7, "turn": 1, "hash_ids": [3, 4, 9]}
    ],
    "tokens": [{"prompt_token_ids": [5, 6, 7], "output_tokens": [8, 9], "timestamp": 2.5, "scope": "a"}],
    "kv-cache-tester": [SESSION],
}


def written(path, rows):
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_format_is_recognised(tmp_path, form, ending):
    trace = read_trace(written(tmp_path / f"trace.{ending}", FILES[form]))
    assert trace.form == form
    assert trace.block == {"mooncake": 512, "qwen": 16, "tokens": 1, "kv-cache-tester": 64}[form]


def test_what_is_read(tmp_path):
    first = {name: read_trace(written(tmp_path / name, rows)).requests[0] for name, rows in FILES.items()}
    assert (first["mooncake"].time, first["mooncake"].tokens, list(first["mooncake"].blocks)) == (1.5, 900, [0, 5])
    assert (first["qwen"].time, first["qwen"].output) == (61.5, 7)
    assert list(first["qwen"].whole(16)) == [3, 4]
    tokens = first["tokens"]
    assert (tokens.tokens, tokens.output, list(tokens.blocks), tokens.scope) == (3, 2, [5, 6, 7, 8, 9], "a")


def test_a_session_and_its_agents_share_their_ids(tmp_path):
    path = written(tmp_path / "trace", [SESSION, SESSION | {"id": "two"}])
    requests = read_trace(path, spread=100, seed=3).requests
    assert [each.time for each in requests] == sorted(each.time for each in requests)
    one = [each for each in requests if each.scope == "one"]
    assert [list(each.blocks) for each in one] == [[1, 2, 3, 7], [1, 2, 9], [1]]
    begin = one[0].time
    assert [round(each.time - begin, 6) for each in one] == [0, 2, 6]
    assert read_trace(path, spread=100, seed=4).requests[0].time != requests[0].time
    pages = paged(read_trace(path))
    assert pages.distinct == 2 * 3, "1, 2 and 3 of each: the last blocks of 200 and of 130 tokens are not full"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "line 1: no request of a format that is known"),
        ([{"hello": 1}], "line 1: no request of a format that is known"),
        ([FILES["mooncake"][0], {"input_length": 5}], "line 2: not a request"),
        ([FILES["tokens"][0], {"tokens": ["a"]}], "line 2: not a request"),
        ([SESSION, {"id": "two", "requests": [{"t": 0, "in": 5, "out": 5, "h": [1]}]}], "line 2: not a request"),
    ],
)
def test_mistakes_are_told(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        read_trace(written(tmp_path / "trace", rows))


def test_an_unknown_format_and_sizes_that_do_not_fit(tmp_path):
    path = written(tmp_path / "trace", FILES["mooncake"])
    with pytest.raises(ValueError, match="unknown format 'csv'"):
        read_trace(path, "csv")
    with pytest.raises(ValueError, match="one must divide the other"):
        paged(read_trace(path), 100)
    with pytest.raises(ValueError, match="needs a request"):
        paged(Trace("mooncake", 512, []))


def test_a_generated_trace_is_the_same_every_time():
    one, two = list(generated(50, seed=4)), list(generated(50, seed=4))
    assert one == two
    assert [each.time for each in one] == sorted(each.time for each in one)


@pytest.mark.skipif(not TRACES.is_dir(), reason="no traces here: set PURECACHE_TRACES to a folder with mooncake/")
@pytest.mark.parametrize(
    ("name", "requests", "distinct"), [("conversation", 12_031, 182_790), ("synthetic", 3_993, 43_924)]
)
def test_published_files(name, requests, distinct):
    trace = read_trace(TRACES / "mooncake" / f"{name}_trace.jsonl")
    assert (trace.form, len(trace.requests)) == ("mooncake", requests)
    assert len({each for request in trace.requests for each in request.blocks}) == distinct
    assert np.all(np.diff(paged(trace).times) >= 0)
