"""Repeats a recording: forward and backward, comparing every answer and every state with what was recorded."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from purecache.driver import control_device
from purecache.programs import Program, ProgramTable
from purecache.replay.digests import NAMES, answer_digest, state_digest
from purecache.replay.recording import Event, Recording
from purecache.state import CacheState, as_jax, empty_state
from purecache.state.laws import violations

KEPT_BYTES = 1 << 30
"""Bytes of states that a player keeps to come back to, if it may keep two at least."""
KEPT_STATES = 64
FIRST_GAP = 64
"""Events between two of them at first; it doubles when there are too many."""

Progress = Callable[[int], object]
"""Told how many events more are done."""


@dataclass(frozen=True)
class Difference:
    """Where a replay went another way than the recording."""

    event: int
    what: str
    """"answer", or "state": then it lies between the last state that was equal and this event."""
    equal_until: int
    """The last event whose state was compared and equal; -1 if none was."""


@dataclass
class Report:
    """How a replay went."""

    events: int = 0
    """Events replayed."""
    states: int = 0
    """States compared."""
    seconds: float = 0.0
    """Without compiling."""
    by_name: Counter[str] = field(default_factory=Counter)
    """Events by transition."""
    difference: Difference | None = None
    """The first one; the replay ends there."""


class Player:
    """Stands after some event of a recording. After event 0 is the empty cache."""

    def __init__(self, recording: Recording, *, kept_bytes: int = KEPT_BYTES) -> None:
        """Stand before the first event. kept_bytes: of states that are kept to go back to."""
        self.recording, self._layout = recording, recording.config.layout
        self._device = control_device()
        state = as_jax(empty_state(recording.config), self._device)
        self._leaves, self._structure = jax.tree.flatten(state)
        self._programs = ProgramTable(state, recording.smallest)
        self.at = 0
        """Events that were carried out."""
        self._answer: tuple[Program, Any] | None = None
        size = sum(leaf.nbytes for leaf in self._leaves)
        self._most_kept = min(KEPT_STATES, max(2, kept_bytes // size))
        self._gap = FIRST_GAP
        self._kept = {0: self._copied()}

    @property
    def state(self) -> CacheState:
        """The state here, as NumPy arrays of its own."""
        return jax.tree.unflatten(self._structure, self._copied())

    def array(self, name: str) -> np.ndarray:
        """A copy of one array of the state here: see `purecache.replay.digests.NAMES`."""
        return np.array(self._leaves[NAMES.index(name)])

    @property
    def event(self) -> Event | None:
        """The event that led here."""
        return self.recording[self.at] if self.at else None

    def answer(self) -> tuple[Any, Any] | None:
        """Effects and reply of that event, or None before the first."""
        if self._answer is None and self.at:
            self.goto(self.at - 1)
            self.forward()
        return None if self._answer is None else self._answer[0].answer(self._answer[1])

    def forward(self) -> bool:
        """Carry out the next event; whether its answer is the recorded one. Raises IndexError at the end."""
        event = self.recording[self.at + 1]
        program = self._programs.get(event.name, event.size)
        self._leaves, vector = program.run(self._leaves, event.command)
        program.settle()
        self.at, self._answer = event.number, (program, vector)
        self._keep()
        return answer_digest(vector) == event.digest

    def back(self) -> None:
        """Undo the last event. Raises IndexError before the first."""
        self.goto(self.at - 1)

    def goto(self, number: int) -> None:
        """Stand after event `number`: from the nearest state that was kept, or from here. Raises IndexError."""
        if not 0 <= number <= len(self.recording):
            raise IndexError(f"there are events 0 to {len(self.recording)}, not {number}")
        kept = max(each for each in self._kept if each <= number)
        if not kept <= self.at <= number:
            state = jax.tree.unflatten(self._structure, self._kept[kept])
            self._leaves = jax.tree.leaves(as_jax(state, self._device))
            self.at, self._answer = kept, None
        while self.at < number:
            self.forward()

    def is_same_state(self) -> bool | None:
        """Whether the state here is the recorded one; None if none was recorded here."""
        recorded = self.recording.state_digest(self.at)
        if recorded is None:
            return None
        return state_digest(self._leaves, self._layout, hashed=self.recording.hashed) == recorded

    def violations(self) -> list[str]:
        """The laws that the state here breaks."""
        return violations(self.state)

    def compile(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every program of the recording, two at a time. `progress(done, total, name)` after each."""
        wanted = sorted(self.recording.programs())
        with ThreadPoolExecutor(2) as pool:
            for done, (name, _) in enumerate(pool.map(lambda key: (key[0], self._programs.get(*key)), wanted), 1):
                if progress is not None:
                    progress(done, len(wanted), name)

    def verify(self, progress: Progress | None = None) -> Report:
        """Go from the beginning to the end, or to the first difference."""
        self.goto(0)
        report, equal, start = Report(), -1, time.perf_counter()
        same: bool | None = self.is_same_state()
        while True:
            report.states += same is not None
            if same is False:
                report.difference = Difference(self.at, "state", equal)
            equal = self.at if same else equal
            if report.difference or self.at == len(self.recording):
                break
            if not self.forward():
                report.difference = Difference(self.at, "answer", equal)
            report.events += 1
            report.by_name[self.recording[self.at].name] += 1
            if progress is not None:
                progress(1)
            same = None if report.difference else self.is_same_state()
        report.seconds = time.perf_counter() - start
        return report

    def first_violation(self, every: int = 1, progress: Progress | None = None) -> tuple[int, list[str]] | None:
        """The first event after which a law is broken, and the laws; None if none ever is.

        Looks after every `every` events, and then between the last good look and the first bad one. Stands there.
        """
        good = -1
        for number in [*range(0, len(self.recording), max(1, every)), len(self.recording)]:
            self.goto(number)
            if progress is not None:
                progress(number - max(good, 0))
            if self.violations():
                break
            good = number
        else:
            return None
        for number in range(good + 1, self.at + 1):
            self.goto(number)
            if broken := self.violations():
                return number, broken
        raise AssertionError("a law was broken and is not any more: the replay is not the same each time")

    def _copied(self) -> list[np.ndarray]:
        return [np.array(leaf) for leaf in self._leaves]

    def _keep(self) -> None:
        if self.at % self._gap or self.at in self._kept:
            return
        if len(self._kept) >= self._most_kept:
            self._gap *= 2
            self._kept = {at: state for at, state in self._kept.items() if at % self._gap == 0}
            if self.at % self._gap:
                return
        self._kept[self.at] = self._copied()
