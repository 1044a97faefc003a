"""Pools spread over devices, in a process that has set a mesh, as engines do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module", params=["explicit", "auto"])
def found(request):
    """What the worker found."""
    worker = Path(__file__).with_name("mesh_worker.py")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    answer = subprocess.run(
        [sys.executable, worker, request.param], env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def test_pages_of_a_rank_go_to_host_and_back_where_they_belong(found):
    for pages in ("small", "large"):
        assert found[pages]["ok"] == [True] * 6
        assert found[pages]["equal"]
        assert found[pages]["placed"]


def test_copies_need_no_memory_that_grows_with_the_pool(found):
    assert found["small"]["temp"] == found["large"]["temp"]


def test_a_page_is_copied_within_its_shard(found):
    small, large = found["within"]
    assert [each["equal"] for each in (small, large)] == [True, True]
    assert [each["placed"] for each in (small, large)] == [True, True]
    assert small["temp"] == large["temp"]


def test_bytes_reach_the_host_pages_of_every_rank(found):
    assert found["staged"]["landed"] == [True] * len(found["staged"]["landed"])
    assert found["staged"]["equal"]


def test_the_control_plane_is_compiled_apart_from_the_mesh(found):
    assert found["control"] == {"length": 6, "violations": [], "new": 1}
