"""`purecache trace`: a recorded workload through one cache. docs/sizing.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from purecache.traces.arguments import (
    SIZES,
    add_hardware_arguments,
    add_trace_arguments,
    hardware_of,
    pages_of,
    trace_of,
)
from purecache.traces.run import run_trace
from purecache.traces.setting import PREFETCHES, RunSetting
from purecache.traces.text import lines_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    add_trace_arguments(parser)
    parser.add_argument("--device", default="80G", metavar="SIZE", help=f"of L1 (default 80G): {SIZES}")
    parser.add_argument("--host", default="0", metavar="SIZE", help="of L2 (default: none)")
    parser.add_argument("--disk", default="0", metavar="SIZE", help="of L3 (default: none)")
    parser.add_argument("--policy", default="lru", metavar="NAME", help="which page is evicted first (default lru)")
    parser.add_argument("--write", default="write_through", metavar="NAME", help="when pages go to host")
    parser.add_argument("--prefetch", choices=PREFETCHES, default="wait", help="from disk (default wait)")
    parser.add_argument(
        "--concurrent", type=int, default=1, metavar="N", help="requests that run at once (default 1: no times)"
    )
    parser.add_argument("--speed", type=float, default=1, metavar="X", help="arrivals X times as fast (default 1)")
    parser.add_argument("--load-back", type=int, default=10, metavar="TOKENS", help="worth a load back (default 10)")
    add_hardware_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write the outcome there, with its time series; - for stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Print what was found. Returns 0, or 2 for flags and files that make no sense."""
    try:
        name, trace = trace_of(options)
        hardware = hardware_of(options)
        setting = RunSetting(
            hardware=hardware,
            device_pages=pages_of(options.device, trace, hardware),
            host_pages=pages_of(options.host, trace, hardware),
            disk_pages=pages_of(options.disk, trace, hardware),
            policy=options.policy,
            write=options.write,
            prefetch=options.prefetch,
            concurrent=options.concurrent,
            speed=options.speed,
            load_back_tokens=options.load_back,
        )
        with progress_bar(len(trace), "request", options.quiet) as progress:
            outcome = run_trace(trace, setting, name, progress)
        if options.json == "-":
            print(outcome.to_json())
            return 0
        if options.json:
            Path(options.json).write_text(outcome.to_json() + "\n")
    except (ValueError, OSError) as error:
        print(f"purecache trace: {error}", file=sys.stderr)
        return 2
    for line in lines_of(outcome):
        print(line)
    return 0


@contextmanager
def progress_bar(total: int, unit: str, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if there is tqdm; what it yields takes how much is done by now."""
    try:
        from tqdm import tqdm  # optional dependency
    except ImportError:
        yield lambda done: None
        return
    with tqdm(total=total, unit=unit, disable=quiet, file=sys.stderr) as bar:

        def show(done: int) -> None:
            bar.update(done - bar.n)

        yield show
