from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from purecache.cli import main
from purecache.demo.command import add_arguments
from purecache.demo.report import Report, Run, table
from purecache.demo.scheduler import Request
from purecache.demo.stages import open_stage
from purecache.demo.tokenizer import ByteTokenizer
from purecache.demo.weights import DemoError
from tests.demo.gemma_files import write_gemma


def stage_of(*flags):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return open_stage(parser.parse_args(["--model", "hybrid", *flags]), lambda text: None)


def test_the_sample_has_three_pools_and_a_small_one_for_windows():
    stage = stage_of("--page-size", "8", "--states", "7")
    assert stage.sizes["window_device_pages"] * 4 == stage.sizes["kv_device_pages"] == 512
    assert (stage.sizes["state_device_pages"], stage.sizes["state_host_pages"]) == (7, 28)
    assert stage.plain().pages == 512


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--store", "local:///tmp/x"], "no storage tier for hybrid models"),
        (["--snapshot", "24"], "multiple of the page size, 16, not 24"),
        (["--window-tokens", "128"], "raise --window-tokens"),
        (["--states", "4"], "raise --states"),
    ],
)
def test_flags_that_do_not_fit_a_hybrid_model_are_refused(flags, message):
    with pytest.raises(DemoError, match=message):
        stage_of(*flags).plain()


def test_bytes_are_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("a\u00e9").tolist() == [97, 195, 169]
    assert tokenizer.decode([97, 195, 169, 255]) == "a\u00e9\\xff"
    assert tokenizer.message("user", "hi").tolist() == list(b"user: hi\n")


def finished(digest):
    return Request("a", np.zeros(4, np.int32), 2, [1], computed=4, digest=digest)


def report(cold, warm):
    runs = (Run([finished(digest)], 1.0) for digest in (cold, warm))
    return Report(*runs, to_host=0, to_device=0, settings={}, counters={})


def test_states_are_compared_bit_for_bit():
    assert "bit for bit" in table(report(b"x", b"x"))
    assert report(b"x", b"x").proven
    assert "DIFFERENT STATES with and without the cache: a" in table(report(b"x", b"y"))
    assert not report(b"x", b"y").proven
    assert "bit for bit" not in table(report(b"", b""))


@pytest.fixture
def recording(tmp_path):
    """Two sessions of three calls each; every call goes on from the one before it, and all begin alike."""
    source = np.random.default_rng(0)
    opening, calls = source.integers(100, 350, 40), []
    for session in range(2):
        prompt = opening
        for _ in range(3):
            prompt = np.concatenate([prompt, source.integers(100, 350, 15)])
            calls.append((session, prompt))
    path = tmp_path / "recorded.npz"
    np.savez(
        path,
        tokens=np.concatenate([prompt for _, prompt in calls]).astype(np.int32),
        offsets=np.cumsum([0, *(len(prompt) for _, prompt in calls)]),
        session=np.array([f"s{session}" for session, _ in calls]),
    )
    return str(path)


def test_the_demo_proves_equal_answers_with_a_gemma_file(tmp_path, recording, capsys):
    path = write_gemma(tmp_path / "tiny.gguf", layers=3, window=10)
    flags = (
        "--page-size 4 --chunk 8 --batch 2 --context 128 --answer-tokens 5 --snapshot 16 "
        "--device-tokens 96 --host-tokens 400 --window-tokens 48"
    )
    asked = ["demo", "--quiet", "--json", "-", "--model", str(path), "--tokens", recording, *flags.split()]
    assert main(asked) == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert "Proof: all 6 answers" in printed.err
    assert content["totals"]["l1_tokens"] > 0
    assert content["totals"]["l2_tokens"] > 0
    assert content["settings"]["window_device_pages"] == 12
    assert "state_device_pages" not in content["settings"]
    assert content["counters"]["evicted_device_pages"] > 0
