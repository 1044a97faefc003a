"""`purecache report`: a run, trace or recording as one page to look at."""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from purecache.replay.format import MAGIC, Unusable
from purecache.replay.progress import progress_bar
from purecache.replay.recording import Recording
from purecache.report.model import FORMAT, Report, ReportError, from_json, read_json, to_json
from purecache.report.page import page_of
from purecache.report.replayed import SAMPLES, report_of_recording
from purecache.report.traced import report_of_outcome
from purecache.traces.outcome import FORMAT as TRACE_FORMAT

DONE, UNUSABLE = 0, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of report to a parser."""
    parser.add_argument(
        "file", metavar="FILE", help="a recording, what `purecache trace --json` wrote, or what a Sampler saved"
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="the page (default: beside FILE, as .html)")
    parser.add_argument("--json", metavar="FILE", help="also write what the page shows as JSON")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, metavar="N", help=f"of a recording, about (default {SAMPLES})"
    )
    parser.add_argument("--title", metavar="TEXT", help="instead of the name of the file")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(options: argparse.Namespace) -> int:
    """Write the page. Returns 0, or 2 when the file or a flag is unusable."""
    try:
        if options.samples < 1:
            raise ReportError("--samples must be at least 1")
        report = read(options.file, samples=options.samples, title=options.title, quiet=options.quiet)
        target = Path(options.output or f"{options.file}.html")
        if target.exists() and target.samefile(options.file):
            raise ReportError("the page would overwrite what it is made of")
        target.write_text(page_of(report), encoding="utf-8")
        if options.json:
            Path(options.json).write_text(to_json(report), encoding="utf-8")
    except (Unusable, ReportError, OSError) as problem:
        print(f"purecache report: {options.file}: {problem}", file=sys.stderr)
        return UNUSABLE
    print(f"{target}: {target.stat().st_size >> 10} KiB")
    return DONE


def read(path: str, *, samples: int = SAMPLES, title: str | None = None, quiet: bool = True) -> Report:
    """The report of a file of any of the three kinds. Raises OSError, Unusable or ReportError."""
    made = {
        "command": shlex.join(["purecache", "report", Path(path).name]),
        "purecache": importlib.metadata.version("purecache"),
    }
    with open(path, "rb") as file:
        begins = file.read(len(MAGIC))
    if begins[:-1] == MAGIC[:-1]:  # the last byte is the version, which the recording judges
        with Recording(path) as recording, progress_bar(len(recording), quiet, "report") as progress:
            report = report_of_recording(recording, samples=samples, made=made, progress=progress)
    else:
        content = read_json(path)
        form = content.get("format") if isinstance(content, dict) else None
        if form == TRACE_FORMAT:
            report = report_of_outcome(content, made=made)
        elif form == FORMAT:
            report = from_json(content)
            report = replace(report, made=made | report.made)
        else:
            raise ReportError("this is no recording, no outcome of a trace, and nothing that a Sampler saved")
    return report if title is None else replace(report, title=title)
