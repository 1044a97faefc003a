"""A share of what `purecache simulate` runs: nothing is found, everything was injected, and a run is repeatable."""

from collections import Counter

import pytest

from purecache.simulate import ALL, Fault, Plan, make_plan, run

pytestmark = pytest.mark.xdist_group("hybrid-tree")  # its programs are compiled once


@pytest.mark.parametrize(("profile", "seeds", "events"), [("small", 16, 5000), ("hybrid", 8, 3000)])
def test_nothing_is_found_under_all_faults(profile, seeds, events):
    injected, seen = Counter(), Counter()
    for seed in range(seeds):
        outcome = run(make_plan(seed, events, ALL, 2, profile))
        assert outcome.failure is None, (seed, outcome.failure)
        assert outcome.events >= events
        injected.update(outcome.injected)
        seen.update(outcome.seen)
    assert {fault for fault in Fault if injected[fault]} == set(Fault)
    # It is worth something only if every tier serves pages.
    assert min(seen[name] for name in ("pages_hit", "pages_loaded", "tokens_prefetched", "preempted", "resets")) > 0


@pytest.mark.parametrize("profile", ["small", "hybrid"])
def test_nothing_is_found_and_nothing_injected_without_faults(profile):
    for seed in range(100, 104):
        outcome = run(make_plan(seed, 2000, (), 2, profile))
        assert outcome.failure is None, (seed, outcome.failure)
        assert not outcome.injected


def test_a_plan_does_the_same_again_also_after_a_way_through_a_file():
    plan = make_plan(7, 1500, ALL, 3, "small")
    again = Plan.from_json(plan.to_json())
    assert again == plan
    first, second = run(plan), run(again)
    assert (first.events, first.injected, first.seen) == (second.events, second.injected, second.seen)


def test_a_longer_run_of_a_seed_begins_like_a_shorter_one():
    assert make_plan(3, 500).operations == make_plan(3, 900).operations[:1000]


@pytest.mark.parametrize("fault", list(Fault))
def test_only_what_is_asked_for_is_injected(fault):
    injected = Counter()
    for seed in range(2):
        injected.update(run(make_plan(seed, 1500, [fault], 2, "small")).injected)
    assert set(injected) == {fault}
