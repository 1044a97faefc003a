"""`purecache simulate`: exit codes, totals, saved plans and tests to paste."""

import json

import pytest

from purecache.cli import main
from purecache.simulate import ALL, Fault, Plan, make_plan, run
from purecache.simulate.command import parse_faults
from purecache.simulate.plane import SimulatedPool
from purecache.simulate.report import as_test

pytestmark = pytest.mark.xdist_group("hybrid-tree")  # its programs are compiled once
SMALL = ["simulate", "--seed", "40", "--seeds", "2", "--events", "800", "--profile", "small", "--jobs", "1"]


def every_copy_fails_unnoticed(patch):
    whole = SimulatedPool._completions

    def lying(self, ended):
        for flight in ended:
            if flight.transfer.rank == 0:
                (self.host if flight.transfer.kind == 1 else self.device)[flight.target] = 0
        return whole(self, ended)

    patch.setattr(SimulatedPool, "_completions", lying)


def test_nothing_found_is_0_and_the_totals_tell_what_was_injected(capsys):
    assert main([*SMALL, "--json", "--faults", "delay,fail"]) == 0
    totals = json.loads(capsys.readouterr().out)
    assert totals["failed"] == []
    assert totals["failure"] is None
    assert totals["events"] >= 1600
    assert set(totals["injected"]) == {"delay", "fail"}
    assert min(totals["injected"].values()) > 0


def test_a_failure_is_1_with_a_test_to_paste_and_a_plan_that_fails_again(capsys, tmp_path, monkeypatch):
    every_copy_fails_unnoticed(monkeypatch)
    saved = tmp_path / "plan.json"
    assert main([*SMALL, "--quiet", "--faults", "none", "--save", str(saved)]) == 1
    printed = capsys.readouterr().out
    assert "def test_seed_40_bytes():" in printed
    assert "must hold" in printed
    assert main(["simulate", "--replay-plan", str(saved), "--quiet", "--shrink", "0"]) == 1
    plan = Plan.from_json(saved.read_text())
    assert len(plan.operations) < 40
    names: dict = {}
    exec(as_test(run(plan, check_every=1)), names)
    with pytest.raises(AssertionError):
        names["test_seed_40_bytes"]()
    monkeypatch.undo()
    assert main(["simulate", "--replay-plan", str(saved), "--quiet"]) == 0


@pytest.mark.parametrize("flags", [["--faults", "gremlins"], ["--seeds", "0"], ["--replay-plan", "/nowhere/plan.json"]])
def test_flags_that_make_no_sense_are_2(flags, capsys):
    assert main(["simulate", "--quiet", *flags]) == 2
    assert "purecache simulate:" in capsys.readouterr().err


def test_names_of_faults():
    assert parse_faults("all") == ALL
    assert parse_faults("none") == frozenset()
    assert parse_faults("never, restart") == {Fault.NEVER, Fault.RESTART}
    assert make_plan(1, 10, parse_faults("never")).faults == ("never",)
