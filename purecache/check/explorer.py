"""Breadth-first exploration of every state that a world can reach."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from purecache.check.contracts import broken_contracts
from purecache.check.events import Event
from purecache.check.programs import LANES, Survey, programs_of
from purecache.check.visited import Visited
from purecache.check.worlds import World

START = -1
"""Parent of the empty cache."""


@dataclass
class Failure:
    """The shortest way to something that must not be."""

    world: str
    broken: list[str]
    """Names of the contracts, and of the laws."""
    events: list[Event]
    """From the empty cache."""

    def as_test(self) -> str:
        """A test that shows it, to be pasted into a file."""
        lines = [f"    {event.as_code()}," for event in self.events]
        return "\n".join(
            [
                "from purecache.check import WORLDS, event, follow",
                "",
                "WAY = [",
                *lines,
                "]",
                "",
                "",
                "def test_the_way_that_the_model_checker_found():",
                f"    assert follow(WORLDS[{self.world!r}], WAY) == []",
            ]
        )


@dataclass
class Explored:
    """What an exploration found."""

    world: str
    states: int = 0
    """Distinct ones."""
    events: int = 0
    """Steps that were carried out and judged."""
    depth: int = 0
    """Events on the longest of the shortest ways: of the states whose events were all carried out."""
    complete: bool = False
    """Whether there is nothing left to explore."""
    seconds: float = 0.0
    compile_seconds: float = 0.0
    failure: Failure | None = None
    per_depth: list[int] = field(default_factory=list)
    """New states at each depth."""
    happened: dict[str, int] = field(default_factory=dict)
    """Events by kind."""


Progress = Callable[[Explored, int, int], None]
"""Called with what is known so far, the states of this depth that are done, and how many there are."""


class Explorer:
    """Explores one world; `run` once."""

    def __init__(self, world: World, give_back_every: int = 1) -> None:
        """`give_back_every`: of how many new states one is drained, which takes longer than all the rest."""
        self.programs, self._every = programs_of(world), give_back_every
        self._visited = Visited()
        self._parents, self._ways = [np.array([START])], [np.array([START], np.int32)]
        """Per block of states: the number of the state that each was reached from first, and by which event."""
        self._offsets = np.cumsum([0, *(len(kind.parameters) for kind in self.programs.kinds)])
        self.found = Explored(world.name)

    def run(
        self,
        most_states: int | None = None,
        most_seconds: float | None = None,
        most_depth: int | None = None,
        progress: Progress | None = None,
        compiling: Callable[[int, int, str], None] | None = None,
    ) -> Explored:
        """Explore until nothing is new, a contract is broken, or a bound is reached (after the states at hand)."""
        begun = time.monotonic()
        self.programs.compile_all(compiling)
        self.found.compile_seconds = time.monotonic() - begun
        start = self.programs.packing.start[None]
        mark = self._fingerprint_of_start()
        self._visited.add(mark)
        frontier, first, found = start, 0, self.found
        found.states, found.per_depth = 1, [1]
        begun = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            while len(frontier) and found.failure is None:
                if most_depth is not None and found.depth >= most_depth:
                    break
                new: list[np.ndarray] = []
                bounded = False
                for at in range(0, len(frontier), LANES):
                    new.append(self._expand(pool, frontier[at : at + LANES], first + at))
                    found.seconds = time.monotonic() - begun
                    if progress is not None:
                        progress(found, min(at + LANES, len(frontier)), len(frontier))
                    bounded = (most_states is not None and found.states >= most_states) or (
                        most_seconds is not None and found.seconds >= most_seconds
                    )
                    if found.failure is not None or bounded:
                        break
                if bounded or found.failure is not None:
                    return found
                first += len(frontier)
                frontier = np.concatenate(new)
                found.per_depth.append(len(frontier))
                found.depth += 1
        found.complete = not len(frontier)
        return found

    def _fingerprint_of_start(self) -> np.ndarray:
        """uint64[1]."""
        packed = np.repeat(self.programs.packing.start[None], LANES, axis=0)
        survey, _ = self.programs.survey(packed)
        return _joined(np.asarray(survey.marks[0]))[:1]

    def _expand(self, pool: ThreadPoolExecutor, states: np.ndarray, first: int) -> np.ndarray:
        """Carry out all that can happen in up to LANES states; returns the new ones, packed."""
        padded = _padded(states)
        survey, enabled = self.programs.survey(padded)
        batches = list(self._batches(states, [np.asarray(each) for each in enabled]))
        results = pool.map(lambda batch: self._carried_out(batch, survey), batches)
        marks, packed, parents, ways = [], [], [], []
        for (kind, lanes, rows), (mark, after, verdicts) in zip(batches, results, strict=True):
            name = self.programs.kinds[kind].name
            self.found.happened[name] = self.found.happened.get(name, 0) + len(lanes)
            self.found.events += len(lanes)
            if verdicts.any() and self.found.failure is None:
                worst = int(np.flatnonzero(verdicts)[0])
                way = [*self._way_to(first + int(lanes[worst])), int(self._offsets[kind] + rows[worst])]
                self._fail(broken_contracts(int(verdicts[worst])), way)
            chosen = _first_of_each(mark)
            chosen = chosen[self._visited.are_new(mark[chosen])]
            marks.append(mark[chosen])
            packed.append(after[chosen])
            parents.append(first + lanes[chosen])
            ways.append(self._offsets[kind] + rows[chosen])
        parts = [np.concatenate(each) for each in (marks, packed, parents, ways)]
        return self._remember(parts, pool)

    def _batches(self, states: np.ndarray, enabled: list[np.ndarray]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(kind, lanes, rows of its parameters) of up to LANES events each."""
        for kind, possible in enumerate(enabled):
            lanes, rows = np.nonzero(possible[: len(states)])
            for at in range(0, len(lanes), LANES):
                yield kind, lanes[at : at + LANES], rows[at : at + LANES]

    def _carried_out(self, batch: Any, survey: Survey) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        kind, lanes, rows = batch
        parameters = self.programs.kinds[kind].parameters[rows]
        stepped = self.programs.step(kind, survey, _padded(lanes.astype(np.int32)), _padded(parameters))
        number = len(lanes)
        marks = _joined(np.asarray(stepped.fingerprints)[:number])
        return marks, np.asarray(stepped.packed)[:number], np.asarray(stepped.verdicts)[:number]

    def _remember(self, parts: list[np.ndarray], pool: ThreadPoolExecutor) -> np.ndarray:
        """Add what is new, once each, and drain it. parts: fingerprints, packed states, parents and ways."""
        marks, packed, parents, ways = parts
        chosen = _first_of_each(marks)
        self._visited.add(marks[chosen])
        order = np.sort(chosen)  # as they were found, so that a run is the same every time
        packed, parents, ways = packed[order], parents[order], ways[order]
        self._parents.append(parents)
        self._ways.append(ways.astype(np.int32))
        self.found.states += len(order)
        drained = np.arange(-(self.found.states - len(order)) % self._every, len(packed), self._every)
        self._give_back(packed, drained, pool)
        return packed

    def _give_back(self, packed: np.ndarray, chosen: np.ndarray, pool: ThreadPoolExecutor) -> None:
        """See that everything can be given back from chosen ones of the newest states."""
        drain = self.programs.give_back
        pieces = [chosen[at : at + LANES] for at in range(0, len(chosen), LANES)]
        verdicts = pool.map(lambda piece: np.asarray(drain(_padded(packed[piece])))[: len(piece)], pieces)
        for piece, verdict in zip(pieces, verdicts, strict=True):
            if verdict.any() and self.found.failure is None:
                at = int(np.flatnonzero(verdict)[0])
                place = self.found.states - len(packed) + int(piece[at])
                self._fail(broken_contracts(int(verdict[at])), self._way_to(place))

    def _way_to(self, state: int) -> list[int]:
        """Numbers of the events that lead to a state."""
        parents, ways = np.concatenate(self._parents), np.concatenate(self._ways)
        way: list[int] = []
        while parents[state] != START:
            way.append(int(ways[state]))
            state = int(parents[state])
        return way[::-1]

    def _fail(self, broken: list[str], way: list[int]) -> None:
        self.found.failure = Failure(self.found.world, broken, [self.event(number) for number in way])

    def event(self, number: int) -> Event:
        """The event with a number, as `happened` and ways count them."""
        kind = int(np.searchsorted(self._offsets, number, side="right")) - 1
        row = self.programs.kinds[kind].parameters[number - self._offsets[kind]]
        named = self.programs.kinds[kind]
        return Event(named.name, tuple(zip(named.fields, row.tolist(), strict=True)))


def _padded(array: np.ndarray) -> np.ndarray:
    """LANES rows: the last one repeated."""
    return np.concatenate([array, np.repeat(array[-1:], LANES - len(array), axis=0)]) if len(array) < LANES else array


def _joined(words: np.ndarray) -> np.ndarray:
    """uint64[n] of uint32[n, 2]."""
    return (words[:, 0].astype(np.uint64) << np.uint64(32)) | words[:, 1].astype(np.uint64)


def _first_of_each(marks: np.ndarray) -> np.ndarray:
    """Where each distinct value stands first, in the order of the values."""
    return np.unique(marks, return_index=True)[1]
