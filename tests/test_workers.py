"""Tests that share compiled programs run in one worker: with releases that don't fit, xdist silently spreads them."""

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="there is one process")
def test_groups_are_known_to_the_scheduler(request):
    """pytest-xdist 3.8 tells them by the ends of names, which it can't change since pytest 9.2."""
    assert request.node.nodeid.endswith("@test_workers")
