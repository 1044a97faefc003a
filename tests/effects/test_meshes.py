"""Pools spread over eight devices, in a process that has set a mesh, as engines do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pool_samples import FORMS


@pytest.fixture(scope="module", params=["explicit", "auto"])
def found(request):
    """What the worker found."""
    worker = Path(__file__).with_name("mesh_worker.py")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
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


@pytest.mark.parametrize("form", FORMS)
def test_pages_with_spread_heads_stay_on_their_devices(found, form):
    small, large = found["heads"][form]
    for each in (small, large):
        assert each["ok"] == [True] * 6
        assert each["equal"]
        assert each["placed"]
        assert each["collectives"] == []
        assert not any(each["pool_sized"])
    assert small["temp"] == large["temp"]


def test_kernels_copy_the_part_of_every_device(found):
    assert found["kernels"]["ok"] == [True] * 6
    assert found["kernels"]["equal"]
    assert found["kernels"]["placed"]
    assert found["kernels"]["collectives"] == []


def test_pages_move_to_pools_that_are_spread_otherwise(found):
    assert found["between"] == [True, True]


def test_the_control_plane_is_compiled_apart_from_the_mesh(found):
    assert found["control"] == {"length": 6, "violations": [], "new": 1}
