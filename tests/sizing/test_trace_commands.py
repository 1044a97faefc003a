"""`purecache trace` and `purecache size` from the command line, and what they say to mistakes."""

import importlib.util
import json

import pytest

from purecache.cli import main
from purecache.traces.outcome import read_outcome

SIZES = ["--requests", "60", "--device", "50p", "--host", "120p", "--quiet"]


def test_trace_prints_and_writes_what_it_found(tmp_path, capsys):
    path = tmp_path / "outcome.json"
    assert main(["trace", *SIZES, "--disk", "300p", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    outcome = read_outcome(path)
    assert f"{outcome['hits']['host']['tokens']:,}" in text
    assert f"{outcome['moved']['store']['pages']:,}" in text
    assert main(["trace", *SIZES, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"]["host_pages"] == 120


def test_trace_reads_a_file_of_tokens(tmp_path, capsys):
    path = tmp_path / "tokens.jsonl"
    path.write_text("".join(json.dumps({"tokens": [*range(40), each]}) + "\n" for each in range(5)))
    assert main(["trace", str(path), "--page-size", "4", "--device", "1Mt", "--json", "-", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["trace"]["form"], found["hits"]["device"]["tokens"]) == ("tokens", 4 * 40)
    assert found["setting"]["device_pages"] == found["trace"]["distinct_pages"] + 11, "no more than there can be"


def test_size_prints_a_table_advice_and_a_picture(tmp_path, capsys):
    data, picture = tmp_path / "size.json", tmp_path / "size.png"
    arguments = ["size", "--requests", "60", "--device", "50p,8Mt", "--host", "0,120p", "--policy", "lru,slru"]
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    assert main([*arguments, "--disk", "0,10T", "--compare", "--quiet", "--json", str(data), *plot]) == 0
    lines, found = capsys.readouterr().out.splitlines(), json.loads(data.read_text())
    assert len(found["rows"]) == 2 * 2 + 2 * 2 * 2
    assert found["agree"] == [4, 4]
    assert found["advice"][0] in lines
    assert sum(" slru " in line for line in lines) >= 6
    assert found["seconds"]["model"]["runs"] == 4
    if plot:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", "--policy", "best"], "policy must be one of"),
        (["trace", "--write", "never"], "write must be one of"),
        (["trace", "--device", "much"], "'much' is no size"),
        (["trace", "--disk", "1T"], "a disk needs host memory"),
        (["trace", "--tflops", "0"], "must be positive"),
        (["trace", "--requests", "0"], "--requests must be positive"),
        (["trace", "/nowhere/trace.jsonl"], "No such file"),
        (["trace", "--page-size", "100"], "one must divide the other"),
        (["size", "--policy", "lru,best"], "policy must be one of"),
        (["size", "--device", "20G,,"], "'' is no size"),
        (["size", "--disk", "1T"], "a disk needs host memory"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys):
    assert main([*arguments, "--quiet"]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name))
    assert main(["size", "--plot", "x.png", "--quiet"]) == 2
    assert "purecache[plot]" in capsys.readouterr().err
