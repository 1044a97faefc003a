"""A failing plan made small: operations are taken away as long as the same check fails (delta debugging)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

from purecache.simulate.plan import Operation, Plan
from purecache.simulate.run import CHECK_EVERY, Failure, Outcome, run

NEVER = 1 << 60
SHORT = 8
"""Operations that are left out together, before it is worth while to try them one by one."""
NARROW = 400
"""Events before a failure in which all laws are checked after every event, to find where it begins."""


def shrink(outcome: Outcome, seconds: float = 60.0) -> Outcome:
    """The shortest failing run that was found within so many seconds.

    Where a run breaks a law before the check that failed, it is cut there, and that law is what the shorter runs must
    break.
    """
    if outcome.failure is None:
        return outcome
    search = _Search(outcome, time.perf_counter() + seconds)
    search.find_the_beginning()
    search.shorten()
    return search.best


class _Search:
    """The shortest failing run so far."""

    def __init__(self, outcome: Outcome, until: float) -> None:
        assert outcome.failure is not None
        self.best, self._until = outcome, until
        self._kind = outcome.failure.kind
        self._drained = outcome.failure.at_end
        self._every = CHECK_EVERY if self._drained else NEVER
        self._keep(outcome, outcome.failure)

    @property
    def _time_is_up(self) -> bool:
        return time.perf_counter() >= self._until

    def _keep(self, outcome: Outcome, failure: Failure) -> None:
        operations = outcome.plan.operations[: failure.operation + (not failure.at_end)]
        self.best = replace(outcome, plan=outcome.plan.only(operations))

    def _try(self, plan: Plan) -> bool:
        """Whether a plan fails in the same way; then it is the best one. Not once the time is up."""
        if self._time_is_up:
            return False
        found = run(plan, self._every, self._drained)
        if found.failure is None or found.failure.kind != self._kind:
            return False
        self._keep(found, found.failure)
        return True

    def find_the_beginning(self) -> None:
        """Check laws more often, so that the run ends where the first one breaks."""
        plan = self.best.plan
        for every in (20, 1) if len(plan.operations) > NARROW else (1,):
            if self._time_is_up:
                return
            found = run(plan, every, self._drained)
            if found.failure is None or found.failure.kind != "laws":
                return
            self._kind, self._every, self._drained = "laws", NEVER, False
            self._keep(found, found.failure)

    def shorten(self) -> None:
        """Leave out what other processes do, then long stretches, faults and names of operations, then short ones."""
        processes = self.best.plan.processes
        for process in range(processes):
            self._try_only(lambda each, wanted=process: _process_of(each, processes) == wanted)
        self._passes(len(self.best.plan.operations) // 2, SHORT)
        for fault in self.best.plan.faults:
            plan = self.best.plan
            self._try(replace(plan, faults=tuple(each for each in plan.faults if each != fault)))
        for name in sorted({name for name, _ in self.best.plan.operations}):
            self._try_only(lambda each, unwanted=name: each[0] != unwanted)
        self._passes(SHORT, 1)

    def _try_only(self, wanted: Callable[[Operation], bool]) -> None:
        self._try(self.best.plan.only(filter(wanted, self.best.plan.operations)))

    def _passes(self, size: int, last: int) -> None:
        """Leave out stretches of `size` operations, then shorter ones; those of one until that helps no more."""
        while size >= last and not self._time_is_up:
            smaller = self._pass(size)
            if size > 1 or not smaller:
                size //= 2

    def _pass(self, size: int) -> bool:
        """Try to leave out every stretch of `size` operations, from the end; whether one was left out."""
        smaller, end = False, len(self.best.plan.operations)
        while end > 0 and not self._time_is_up:
            operations = self.best.plan.operations
            end = min(end, len(operations))
            start = max(0, end - size)
            smaller |= self._try(self.best.plan.only(operations[:start] + operations[end:]))
            end = start
        return smaller


def _process_of(operation: Operation, processes: int) -> int:
    return int(random.Random(operation[1]).random() * processes)
