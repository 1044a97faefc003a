"""`purecache check`: explore small worlds of the cache exhaustively."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import jax

from purecache.check.explorer import Explored, Explorer, Failure
from purecache.check.mutants import MUTANTS
from purecache.check.programs import programs_of
from purecache.check.worlds import WORLDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the checker to a parser."""
    parser.add_argument("worlds", nargs="*", metavar="WORLD", help="see --list (default: least); or all")
    parser.add_argument("--list", action="store_true", help="print the worlds and mutants")
    parser.add_argument("--states", type=int, help="stop after so many distinct states per world")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds per world, without compiling")
    parser.add_argument("--depth", type=int, help="stop at states that take so many events")
    parser.add_argument(
        "--give-back-every",
        type=int,
        default=1,
        metavar="N",
        help="drain one of N new states, which is most of the work (default 1: every state)",
    )
    parser.add_argument("--events", nargs="+", default=[], metavar="NAME", help="let only these kinds happen")
    parser.add_argument("--mutants", nargs="*", metavar="NAME", help="see that known faults are found (default: all)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per world or mutant")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(options: argparse.Namespace) -> int:
    """Check. Returns 0, 1 when something is broken or a mutant was not found, 2 for unknown names."""
    if options.list:
        print("\n".join(f"{world.name:20} {world.about}" for world in WORLDS.values()))
        print("\nmutants\n" + "\n".join(f"{m.name:22} {m.about} (in {m.world})" for m in MUTANTS))
        return 0
    # The control plane of the checker: the CPU, and calls that end where they were made.
    jax.config.update("jax_platforms", "cpu")
    if options.mutants is not None:
        return _find_mutants(options)
    names = list(WORLDS) if options.worlds == ["all"] else options.worlds or ["least"]
    if unknown := set(names) - set(WORLDS):
        print(f"purecache check: no world named {sorted(unknown)}; --list shows them", file=sys.stderr)
        return 2
    if _misses_events(names, options):
        return 2
    bad = False
    for name in names:
        found = explore(name, options)
        bad |= found.failure is not None
        print(as_json(found) if options.json else _summary(found), flush=True)
    return int(bad)


def _misses_events(names: list[str], options: argparse.Namespace) -> bool:
    """Whether a world lacks an event that was asked for, which is said then."""
    for name in names if options.events else []:
        known = {kind.name for kind in programs_of(WORLDS[name]).kinds}
        if unknown := set(options.events) - known:
            print(f"purecache check: {name} has no events named {sorted(unknown)}: {sorted(known)}", file=sys.stderr)
            return True
    return False


def explore(name: str, options: argparse.Namespace) -> Explored:
    """Explore one world within the bounds of the flags."""
    explorer = Explorer(replace(WORLDS[name], events=tuple(options.events)), options.give_back_every)
    with _progress(name, options.quiet) as (compiling, exploring):
        return explorer.run(options.states, options.seconds, options.depth, exploring, compiling)


def _find_mutants(options: argparse.Namespace) -> int:
    names = options.mutants or [mutant.name for mutant in MUTANTS]
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        print(f"purecache check: no mutant named {sorted(unknown)}; --list shows them", file=sys.stderr)
        return 2
    if _misses_events([mutant.world for mutant in MUTANTS if mutant.name in names], options):
        return 2
    missed = 0
    for mutant in MUTANTS:
        if mutant.name not in names:
            continue
        with mutant.applied():
            found = explore(mutant.world, options)
        missed += found.failure is None
        if options.json:
            print(json.dumps({"mutant": mutant.name} | json.loads(as_json(found))), flush=True)
            continue
        failure = found.failure
        answer = f"found after {len(failure.events)} events: {failure.broken[0]}" if failure else "NOT FOUND"
        print(f"{mutant.name:22} {answer} ({found.states:,} states, {found.seconds:.0f} s)", flush=True)
    return int(missed > 0)


def as_json(found: Explored) -> str:
    """One line of JSON: the fields of `Explored`, events of a failure as text, and its test."""
    row: dict[str, Any] = asdict(found)
    if found.failure is not None:
        row["failure"] = {
            "broken": found.failure.broken,
            "events": [str(event) for event in found.failure.events],
            "test": found.failure.as_test(),
        }
    return json.dumps(row)


def _summary(found: Explored) -> str:
    extent = "complete" if found.complete else f"all states up to {found.depth - 1} events, and some beyond"
    if found.failure is not None:
        extent = "stopped at a failure"
    rate = found.states / found.seconds if found.seconds else 0.0
    lines = [
        f"{found.world}: {found.states:,} distinct states, {found.events:,} events, {extent}.",
        f"  {found.depth} events deep; {found.seconds:.0f} s, {rate:,.0f} states/s; "
        f"compiled in {found.compile_seconds:.0f} s",
    ]
    return "\n".join([*lines, *(_told(found.failure) if found.failure else ["  nothing is broken"])])


def _told(failure: Failure) -> list[str]:
    ways = [f"    {number}. {event}" for number, event in enumerate(failure.events, 1)]
    broken = [f"  BROKEN: {name}" for name in failure.broken]
    return [*broken, f"  the shortest way, {len(failure.events)} events:", *ways, "", failure.as_test()]


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[tuple[Any, Any]]:
    """Two functions that show progress on standard error: of compiling, and of exploring."""
    if quiet or importlib.util.find_spec("tqdm") is None:
        yield None, None
        return
    from tqdm import tqdm  # optional dependency

    with tqdm(unit=" states", desc=f"{name}: compiling", file=sys.stderr) as bar:

        def compiling(done: int, total: int, program: str) -> None:
            bar.set_postfix_str(f"{done} of {total}: {program}")

        def exploring(found: Explored, done: int, number: int) -> None:
            bar.set_description_str(name)
            bar.n = found.states
            bar.set_postfix_str(f"depth {found.depth}: {done:,} of {number:,}; {found.events:,} events")

        yield compiling, exploring
