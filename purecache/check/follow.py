"""Following one way through a world, event by event."""

from collections.abc import Iterable

import jax
import numpy as np

from purecache.check.contracts import broken_contracts
from purecache.check.events import Event
from purecache.check.programs import LANES, Programs, programs_of
from purecache.check.worlds import World
from purecache.state import CacheState
from purecache.state.laws import violations


def follow(world: World, events: Iterable[Event]) -> list[str]:
    """Carry out events from the empty cache; returns what the first bad step breaks, none if all are good.

    The answer names contracts, and each law that the state breaks. Raises ValueError for an event that the world does
    not know, or that cannot happen then.
    """
    programs = programs_of(world)
    state = programs.packing.start
    for number, event in enumerate(events, 1):
        state, broken = _one(programs, state, event, number)
        if broken:
            return broken
    return []


def state_after(world: World, events: Iterable[Event]) -> CacheState:
    """The state that events lead to, in NumPy, with clock and counters as the checker keeps them."""
    programs = programs_of(world)
    state = programs.packing.start
    for number, event in enumerate(events, 1):
        state, _ = _one(programs, state, event, number)
    return _unpacked(programs, state)


def _one(programs: Programs, state: np.ndarray, event: Event, number: int) -> tuple[np.ndarray, list[str]]:
    kinds = {kind.name: place for place, kind in enumerate(programs.kinds)}
    if event.kind not in kinds:
        raise ValueError(f"event {number}: this world has no {event.kind}, only {sorted(kinds)}")
    kind = programs.kinds[kinds[event.kind]]
    given = dict(event.values)
    if set(given) != set(kind.fields):
        raise ValueError(f"event {number}: {event.kind} has the parameters {list(kind.fields)}, got {sorted(given)}")
    row = np.array([given[field] for field in kind.fields], np.int32)
    places = np.flatnonzero((kind.parameters == row).all(axis=1))
    packed = np.repeat(state[None], LANES, axis=0)
    survey, enabled = programs.survey(packed)
    if not len(places) or not np.asarray(enabled[kinds[event.kind]])[0, places[0]]:
        raise ValueError(f"event {number}: {event} cannot happen then")
    lanes, rows = np.zeros(LANES, np.int32), np.repeat(row[None], LANES, axis=0)
    stepped = programs.step(kinds[event.kind], survey, lanes, rows)
    after = np.asarray(stepped.packed)
    broken = broken_contracts(int(np.asarray(stepped.verdicts)[0]))
    broken += violations(_unpacked(programs, after[0]))
    if not broken:
        broken = broken_contracts(int(np.asarray(programs.give_back(after))[0]))
    return after[0], broken


def _unpacked(programs: Programs, packed: np.ndarray) -> CacheState:
    return jax.tree.map(np.asarray, programs.packing.unpack(jax.numpy.asarray(packed), programs.settings))
