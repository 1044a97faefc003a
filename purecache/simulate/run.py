"""One run of a plan, and how it ended."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from purecache.simulate.fate import Fate, Fault, Finding
from purecache.simulate.operations import Workload
from purecache.simulate.plan import Plan
from purecache.simulate.process import Process
from purecache.simulate.profiles import PROFILES
from purecache.simulate.store import SimulatedStore

CHECK_EVERY = 200
"""Events between two checks of all laws."""


@dataclass(frozen=True)
class Failure:
    """What a run found."""

    kind: str
    """Which check failed: the kind of a `Finding`, or the type of what was raised."""
    message: str
    event: int
    operation: int
    """Place in the plan, or how many were carried out before the end."""
    at_end: bool
    """Whether it was found after all operations."""
    trace: tuple[str, ...]
    """The last calls."""
    details: str
    """Where it was raised."""


@dataclass(frozen=True)
class Outcome:
    """How a run went."""

    plan: Plan
    events: int
    seconds: float
    injected: Counter[str] = field(default_factory=Counter)
    """How often each fault happened."""
    seen: Counter[str] = field(default_factory=Counter)
    """What else happened, such as pages served from each tier."""
    failure: Failure | None = None


def run(plan: Plan, check_every: int = CHECK_EVERY, drained: bool = True) -> Outcome:
    """Carry out a plan. Never raises for what a cache does: that is a failure.

    check_every: events between two checks of all laws; the bytes are checked at every use. drained: at the end, end all
    requests and transfers, and check that nothing is left; else only the laws are checked then.
    """
    begun = time.perf_counter()
    fate = Fate(Fault(each) for each in plan.faults)
    store = SimulatedStore(fate, PROFILES[plan.profile].objects)
    place, ended, failure = 0, False, None
    try:
        workload = Workload([Process(plan, fate, store, number) for number in range(plan.processes)], plan.seed)
        checked = 0
        for name, seed in plan.operations:
            process = workload.act(name, seed)
            if fate.events - checked >= check_every:
                checked = fate.events
                process.check_laws()
            place += 1
            if fate.events >= plan.events:
                break
        ended = True
        workload.end(drained)
    except Exception as error:
        failure = _failure(error, fate, place, ended)
    fate.seen["ticks"] = fate.now
    return Outcome(plan, fate.events, time.perf_counter() - begun, fate.injected, fate.seen, failure)


def _failure(error: Exception, fate: Fate, place: int, ended: bool) -> Failure:
    kind = error.kind if isinstance(error, Finding) else type(error).__name__
    details = "".join(traceback.format_exception(error)[-6:])
    calls = tuple(
        f"event {event}, process {process}: {name}{arguments} {options}"
        for event, process, name, arguments, options in fate.trace
    )
    return Failure(kind, str(error), fate.events, place, ended, calls, details)
