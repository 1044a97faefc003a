"""Runs of sglang-jax's Engine for the tests: each in a process of its own, each at most once per session."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("engine_runs.py")
SECONDS = 900.0
"""Longest time that a run may take: most of it is compiling, on whatever machine this is."""


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`engine(cache="radix", rounds=..., ...)`: the answer of a run, see `engine_runs`."""
    import tiny_model

    folder = tmp_path_factory.mktemp("sglang-jax")
    model = tiny_model.write_model(folder / "model")
    # Runs compile the same programs: the later ones read them.
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs"), "PYTHONUNBUFFERED": "1"}
    environment.pop("JAX_PLATFORMS", None)
    answers: dict[str, dict[str, Any]] = {}

    def run(**request: Any) -> dict[str, Any]:
        text = json.dumps({"model": str(model)} | request, sort_keys=True)
        if text not in answers:
            answers[text] = perform(text, environment)
        return answers[text]

    return run


def perform(request: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run the script once; fails the test with the end of its output if the Engine dies."""
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, input=request, capture_output=True, text=True, env=environment, timeout=SECONDS)
    if done.returncode != 0 or not done.stdout:
        pytest.fail(f"the Engine ended with {done.returncode}:\n{done.stderr[-6000:]}", pytrace=False)
    return json.loads(done.stdout)
