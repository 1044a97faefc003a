"""`purecache simulate`: run seeds, tell what was injected and found, and shrink what failed."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from purecache.simulate.fate import ALL, Fault
from purecache.simulate.plan import Plan, make_plan
from purecache.simulate.profiles import PROFILES
from purecache.simulate.report import as_test, explained, summary, table
from purecache.simulate.run import CHECK_EVERY, Outcome
from purecache.simulate.run import run as run_plan
from purecache.simulate.shrink import shrink

SHORT = 100
"""Operations below which all laws are checked after every event."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the simulator to a parser."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="first seed (default 0)")
    parser.add_argument("--seeds", type=int, default=20, metavar="COUNT", help="how many seeds (default 20)")
    parser.add_argument("--events", type=int, default=5000, metavar="N", help="events per seed (default 5000)")
    parser.add_argument(
        "--faults",
        default="all",
        metavar="LIST",
        help=f"all, none, or names with commas: {', '.join(Fault)} (default all)",
    )
    parser.add_argument("--processes", type=int, default=2, metavar="K", help="caches on one store (default 2)")
    parser.add_argument("--profile", choices=list(PROFILES), help="shape of the caches (default: drawn per seed)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="seeds at once (default: cores)"
    )
    parser.add_argument(
        "--shrink", type=float, default=60.0, metavar="SECONDS", help="to shrink a failure; 0: don't (default 60)"
    )
    parser.add_argument("--replay-plan", metavar="FILE", help="run a plan that was saved, instead of seeds")
    parser.add_argument("--save", metavar="FILE", help="where to save the shrunk plan of the first failure")
    parser.add_argument("--json", action="store_true", help="print the totals and failures as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(options: argparse.Namespace) -> int:
    """Run what the flags say; 0 if nothing was found, 1 for a failure, 2 for flags that make no sense."""
    try:
        faults = parse_faults(options.faults)
        plans = _plans(options, faults)
    except (ValueError, TypeError, KeyError, OSError) as error:
        print(f"purecache simulate: {error}", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    outcomes = []
    with _runner(options.jobs if len(plans) > 1 else 1) as each:
        for outcome in _watched(each(plans), len(plans), quiet=options.quiet or options.json):
            outcomes.append(outcome)
            if outcome.failure is not None and not options.json:
                print(explained(outcome), flush=True)
    if options.replay_plan:
        faults = frozenset(Fault(name) for plan in plans for name in plan.faults)
    totals = summary(outcomes, faults, time.perf_counter() - begun)
    first = next((outcome for outcome in outcomes if outcome.failure is not None), None)
    small = shrink(first, options.shrink) if first is not None and options.shrink > 0 else first
    if small is not None and options.save:
        Path(options.save).write_text(small.plan.to_json() + "\n")
    _tell(totals, small, as_json=options.json)
    return 1 if totals["failed"] else 0


def parse_faults(text: str) -> frozenset[Fault]:
    """The faults that a flag names. Raises ValueError for an unknown one."""
    if text in ("all", "none"):
        return ALL if text == "all" else frozenset()
    return frozenset(Fault(name.strip()) for name in text.split(",") if name.strip())


def _plans(options: argparse.Namespace, faults: frozenset[Fault]) -> list[Plan]:
    if options.replay_plan:
        return [Plan.from_json(Path(options.replay_plan).read_text())]
    if min(options.seeds, options.events, options.processes, options.jobs) < 1:
        raise ValueError("--seeds, --events, --processes and --jobs must be at least 1")
    seeds = range(options.seed, options.seed + options.seeds)
    return [make_plan(seed, options.events, faults, options.processes, options.profile) for seed in seeds]


def _one(plan: Plan) -> Outcome:
    """Run a plan in a process of its own; what went well need not be sent back in full."""
    outcome = run_plan(plan, check_every=1 if len(plan.operations) < SHORT else CHECK_EVERY)
    return outcome if outcome.failure is not None else replace(outcome, plan=plan.only(()))


@contextlib.contextmanager
def _runner(jobs: int) -> Iterator[Callable[[Sequence[Plan]], Iterator[Outcome]]]:
    """Something like `map` for runs: here, or in so many processes."""
    if jobs == 1:
        yield lambda plans: map(_one, plans)
        return
    # JAX has threads, so a process of it must not be forked.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda plans: pool.map(_one, plans)


def _watched(outcomes: Iterator[Outcome], number: int, quiet: bool) -> Iterator[Outcome]:
    """The same, with a bar on standard error where there is one to be had."""
    if quiet or importlib.util.find_spec("tqdm") is None:
        yield from outcomes
        return
    from tqdm import tqdm

    events, begun = 0, time.perf_counter()
    with tqdm(total=number, unit="seed", file=sys.stderr) as bar:
        for outcome in outcomes:
            events += outcome.events
            bar.set_postfix_str(f"{events:,} events, {events / (time.perf_counter() - begun):,.0f}/s")
            bar.update()
            yield outcome


def _tell(totals: dict[str, object], small: Outcome | None, as_json: bool) -> None:
    failure = small.failure if small is not None else None
    if as_json:
        found = None
        if small is not None and failure is not None:
            found = {
                "seed": small.plan.seed,
                "kind": failure.kind,
                "message": failure.message,
                "event": failure.event,
                "plan": json.loads(small.plan.to_json()),
            }
        print(json.dumps(totals | {"failure": found}))
        return
    if small is not None and failure is not None:
        print(f"\nshrunk to {len(small.plan.operations)} operations:\n")
        print(explained(small), as_test(small), sep="\n")
    print(table(totals))
