"""What a command that simulates prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from purecache.simulate.fate import Fault
from purecache.simulate.run import Outcome


def summary(outcomes: Iterable[Outcome], faults: Iterable[Fault], seconds: float) -> dict[str, Any]:
    """Totals of many runs: seeds, events, events per second (of the wall clock), injected faults, what was seen."""
    all_of_them = list(outcomes)
    injected: Counter[str] = Counter({fault.value: 0 for fault in faults})
    seen: Counter[str] = Counter()
    for outcome in all_of_them:
        injected.update({str(fault): number for fault, number in outcome.injected.items()})
        seen.update(outcome.seen)
    events = sum(outcome.events for outcome in all_of_them)
    return {
        "seeds": len(all_of_them),
        "failed": [outcome.plan.seed for outcome in all_of_them if outcome.failure is not None],
        "events": events,
        "seconds": round(seconds, 1),
        "events_per_second": round(events / max(seconds, 1e-9)),
        "injected": dict(sorted(injected.items())),
        "seen": dict(sorted(seen.items())),
    }


def table(totals: dict[str, Any]) -> str:
    """The totals for people."""
    lines = [
        f"{totals['seeds']} seeds, {totals['events']:,} events in {totals['seconds']} s"
        f" ({totals['events_per_second']:,} per second), {len(totals['failed'])} failed",
        "injected: " + (", ".join(f"{name} {number:,}" for name, number in totals["injected"].items()) or "nothing"),
        "seen: " + ", ".join(f"{name} {number:,}" for name, number in totals["seen"].items()),
    ]
    nothing = [name for name, number in totals["injected"].items() if not number]
    if nothing:
        lines.append("never injected: " + ", ".join(nothing) + " (run more events)")
    return "\n".join(lines)


def explained(outcome: Outcome) -> str:
    """A failure for people."""
    failure = outcome.failure
    if failure is None:
        return f"seed {outcome.plan.seed}: nothing found in {outcome.events:,} events"
    lines = [
        f"seed {outcome.plan.seed} failed at event {failure.event}, in operation {failure.operation}: {failure.kind}",
        f"  {failure.message}",
        "the last calls:",
        *(f"  {call}" for call in failure.trace),
        failure.details,
    ]
    return "\n".join(lines)


def as_test(outcome: Outcome) -> str:
    """A test that fails as this run does, ready to be pasted into a file of tests."""
    name = outcome.failure.kind if outcome.failure else "nothing"
    return "\n".join(
        [
            "from purecache.simulate import Plan, run",
            "",
            f'PLAN = """{outcome.plan.to_json()}"""',
            "",
            "",
            f"def test_seed_{outcome.plan.seed}_{name.lower()}():",
            "    assert run(Plan.from_json(PLAN), check_every=1).failure is None",
            "",
        ]
    )
