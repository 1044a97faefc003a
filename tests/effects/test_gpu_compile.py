"""The staged copies as XLA:GPU compiles them for a device that is not there: in place, without temporary memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(os.environ.get("PURECACHE_GPU_PLUGIN", Path(__file__).parents[2] / ".cache" / "gpu-plugin"))


@pytest.fixture(scope="module")
def rows():
    if not (PLUGIN / "jax_plugins").is_dir():
        pytest.skip(f"JAX's CUDA plugin (half a GB) is not in {PLUGIN}: `make test-gpu-compile` installs it")
    worker = Path(__file__).with_name("gpu_compile_worker.py")
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    answer = subprocess.run(
        [sys.executable, worker, PLUGIN], env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def test_a_batch_is_written_by_one_fusion_per_array_in_place(rows):
    found = [row for row in rows if row["program"] == "scatter"]
    assert len(found) == 4
    for row in found:
        assert row["aliased_bytes"] == row["pool_bytes"]
        assert row["fusions"] <= 4 + 1  # one per array, and the token


def test_a_batch_is_read_by_one_fusion_per_page(rows):
    found = [row for row in rows if row["program"] == "gather"]
    assert len(found) == 4
    assert all(row["fusions"] <= 8 + 1 for row in found)


def test_nothing_is_staged_copied_whole_or_sent(rows):
    for row in rows:
        assert row["temp_bytes"] == 0
        assert row["pool_sized"] == []
        assert row["collectives"] == []
