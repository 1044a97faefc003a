"""The command line of purecache: one subcommand per job, each in a module of its own that is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

SUBCOMMANDS = {
    "capacity": ("purecache.capacity.command", "plan: bytes of KV, when loading beats computing, shared stores"),
    "check": ("purecache.check.command", "explore every state of small caches"),
    "demo": ("purecache.demo.command", "serve real conversations with a small language model"),
    "simulate": ("purecache.simulate.command", "run caches under seeded faults and check every byte that they serve"),
    "inspect": ("purecache.inspect.command", "look into a snapshot, or into the cache of a running process"),
    "doctor": ("purecache.doctor.command", "check this machine and measure how fast pages move on it"),
    "report": ("purecache.report.command", "one page to look at, of a run, a trace or a recording"),
    "replay": ("purecache.replay.command", "repeat a recording of a cache, compare it, look into it"),
    "size": ("purecache.sizing.command", "how large each tier should be, and which policy, for a trace"),
    "trace": ("purecache.traces.command", "a recorded workload through one cache: what it finds, moves, refuses"),
}
"""Subcommand: (module with `add_arguments(parser)` and `run(options) -> int`, one line of help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand with the given arguments (default: those of the process) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="purecache", description="A hierarchical KV cache for JAX LLM serving.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if arguments[:1] == [name]:
            # Only the subcommand in use is imported: `purecache --help` stays quick and needs no optional package.
            importlib.import_module(module).add_arguments(command)
    options = parser.parse_args(arguments)
    return importlib.import_module(SUBCOMMANDS[options.command][0]).run(options)
