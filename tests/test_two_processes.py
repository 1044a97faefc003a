"""Two JAX processes with a cache that they share: their states are the same after every tick."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT = 300
"""Seconds until the processes count as hanging. Most of what they take is compiling."""
FORMS = ("slots", "staged")


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.fixture(scope="module")
def found():
    """What each of two processes found."""
    here, port = Path(__file__).parent, str(free_port())
    paths = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    # The second process can't read what the first one compiled, so it is compiled with less care.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "XLA_FLAGS": flags}
    worker = [sys.executable, str(here / "effects" / "two_processes.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    running = [subprocess.Popen([*worker, str(process), port], **pipes) for process in range(2)]
    try:
        answers = [process.communicate(timeout=TIMEOUT) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors for _, errors in answers)
    return [json.loads(out.splitlines()[-1]) for out, _ in answers]


def test_there_are_two_processes(found):
    assert [(each["processes"], each["devices"]) for each in found] == [(2, 2)] * 2


@pytest.mark.parametrize("form", FORMS)
def test_states_are_equal_after_every_tick(found, form):
    one, other = (each[form] for each in found)
    assert one["digests"] == other["digests"]
    assert len(set(one["digests"])) > 30
    assert one["hits"] == other["hits"] > 0
    assert (one["in_flight"], other["in_flight"]) == (0, 0)


@pytest.mark.parametrize("form", FORMS)
def test_laws_hold_and_pages_are_right(found, form):
    for each in found:
        assert each[form]["broken"] == []
        assert each[form]["wrong"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_transfers_differed(found, form):
    one, other = (each[form]["counters"] for each in found)
    # What is staged is given up in both processes.
    assert other["pages_failed"] > one["pages_failed"]
    assert one["pages_failed_elsewhere"] > 0
    assert one["agreements"] == other["agreements"]
    assert one["pages_loaded_back"] > 0


@pytest.mark.parametrize("form", FORMS)
def test_what_fails_in_one_process_is_a_miss_in_both(found, form):
    for each in found:
        here = each[f"failures, {form}"]
        assert here["found"] == [["backup", 0, 0, False, 0], ["load back", 4, 4, True, 0]]
        assert here["broken"] == []
    one, other = (each[f"failures, {form}"]["digests"] for each in found)
    assert one == other


@pytest.mark.parametrize("form", FORMS)
def test_a_pool_that_is_spread_over_the_processes(found, form):
    for one, other, loaded in zip(*(each[f"sharded, {form}"] for each in found), (5, 0), strict=True):
        assert one["digests"] == other["digests"]
        for each in (one, other):
            assert each["hit"] == 10
            assert each["loaded"] == loaded
            assert each["broken"] == []
    # The shard of the first process has what did not fail in it; but no page of the tree is there.
    equal = [[each["equal"] for each in here[f"sharded, {form}"]] for here in found]
    assert equal == [[True, False], [True, True]]


def test_a_reset_with_transfers_in_flight(found):
    one, other = (each["reset"] for each in found)
    assert one == other
    assert one["before"] > 0
    assert one["broken"] == []


def test_processes_that_were_given_something_else_are_told_so(found):
    assert [each["diverged"] for each in found] == [True, True]
