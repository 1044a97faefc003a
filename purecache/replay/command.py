"""`purecache replay`: repeat a recording, compare it, look into it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from purecache.replay.digests import code_digest
from purecache.replay.format import Unusable
from purecache.replay.player import Player, Report
from purecache.replay.progress import progress_bar
from purecache.replay.recording import Recording
from purecache.replay.shell import Shell
from purecache.replay.tree import tree_as_text

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of replay to a parser."""
    parser.add_argument("file", metavar="FILE", help="what a Recorder wrote")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--at", type=int, metavar="N", help="print the tree after event N")
    what.add_argument("--laws", action="store_true", help="find the first event after which a law is broken")
    what.add_argument("--step", action="store_true", help="step forward and backward from the keyboard")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="with --laws: look after every N events, then in between"
    )
    parser.add_argument("--lines", type=int, default=400, metavar="N", help="of a tree that are printed (default 400)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is standard output")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(options: argparse.Namespace) -> int:
    """Replay a file. Returns 0, 1 when something differs or a law is broken, 2 when the file or a flag is unusable."""
    try:
        with Recording(options.file) as recording:
            _notes(recording, options.quiet)
            if options.at is not None and not 0 <= options.at <= len(recording):
                raise Unusable(f"--at: there are events 0 to {len(recording)}")
            if options.every < 1:
                raise Unusable("--every must be at least 1")
            return _work(options, recording)
    except (Unusable, OSError) as problem:
        print(f"purecache replay: {options.file}: {problem}", file=sys.stderr)
        return UNUSABLE


def _notes(recording: Recording, quiet: bool) -> None:
    """Say what may surprise."""
    if recording.damage:
        print(f"note: {recording.damage}; the {len(recording)} events before are replayed", file=sys.stderr)
    if (recording.end or {}).get("stopped"):
        print(f"note: the recording stopped early: {(recording.end or {})['stopped']}", file=sys.stderr)
    if recording.code != code_digest() and not quiet:
        print("note: recorded with other code of the transitions: differences may be intended", file=sys.stderr)


def _work(options: argparse.Namespace, recording: Recording) -> int:
    player = Player(recording)
    if options.at is not None:
        with progress_bar(options.at, options.quiet) as progress:
            for _ in range(options.at):
                player.forward()
                progress(1)
        text = tree_as_text(player.state, recording.config, hashed=recording.hashed, most_lines=options.lines)
        _print(options, text, {"at": options.at, "tree": text.splitlines()})
        return EQUAL
    if options.step:
        Shell(player).cmdloop()
        return EQUAL
    _compile(player, options.quiet)
    with progress_bar(len(recording), options.quiet) as progress:
        if options.laws:
            found = player.first_violation(options.every, progress)
            where = None if found is None else {"event": found[0], "laws": found[1]}
            _print(options, _laws_as_text(where, len(recording)), _about(recording) | {"violation": where})
            return EQUAL if found is None else DIFFERENT
        report = player.verify(progress)
    _print(options, _as_text(report, recording), _about(recording) | _as_json(report))
    return DIFFERENT if report.difference else EQUAL


def _compile(player: Player, quiet: bool) -> None:
    def told(done: int, total: int, name: str) -> None:
        if not quiet:
            print(f"compiled {done} of {total}: {name}", file=sys.stderr)

    player.compile(told)


def _print(options: argparse.Namespace, text: str, content: dict[str, Any]) -> None:
    print(text, file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json:
        written = json.dumps(content, indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(written)
        else:
            with open(options.json, "w") as file:
                file.write(written)


def _about(recording: Recording) -> dict[str, Any]:
    return {
        "recorded": len(recording),
        "tokens": "hashed" if recording.hashed else "plain",
        "closed": recording.end is not None,
        "damage": recording.damage,
        "stopped": (recording.end or {}).get("stopped"),
        "versions": recording.versions,
        "same_code": recording.code == code_digest(),
    }


def _as_json(report: Report) -> dict[str, Any]:
    fields = asdict(report) | {"by_name": dict(report.by_name)}
    return {"equal": report.difference is None} | fields


def _as_text(report: Report, recording: Recording) -> str:
    rate = report.events / report.seconds if report.seconds else 0.0
    lines = [f"{'transition':24} {'events':>9}"]
    lines += [f"{name:24} {count:9}" for name, count in report.by_name.most_common()]
    lines.append(
        f"{report.events} of {len(recording)} events in {report.seconds:.2f} s, {rate:.0f} per second,"
        f" {report.states} states compared"
    )
    if report.difference is None:
        lines.append("equal: every answer and every state")
    else:
        where = report.difference
        between = f" (states were equal until event {where.equal_until})" if where.what == "state" else ""
        lines.append(f"DIFFERENT: the {where.what} of event {where.event}{between}")
        if where.event == 0:
            lines.append("the empty cache differs already: it was recorded by another version")
    return "\n".join(lines)


def _laws_as_text(where: dict[str, Any] | None, events: int) -> str:
    if where is None:
        return f"no law is broken after any of {events} events"
    return f"after event {where['event']} laws are broken:\n" + "\n".join(f"  {law}" for law in where["laws"])
