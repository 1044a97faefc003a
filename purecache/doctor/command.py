"""`purecache doctor`: checks this machine, measures its paths, and says what to choose."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from purecache.doctor.machine import Finding, as_json, facts, findings
from purecache.doctor.paths import Sample, rates, recommended
from purecache.effects.pools import PoolLayout, describe
from purecache.effects.table import ROUTES, Route, routes, trouble

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the doctor to a parser."""
    sample, default = parser.add_argument_group("the pool that is measured"), Sample()
    sample.add_argument("--layers", type=int, default=default.layers, help=f"arrays (default {default.layers})")
    sample.add_argument(
        "--page-shape",
        type=_shape,
        default=default.page_shape,
        metavar="N,N,...",
        help="of a page in one array: tokens, heads of keys and values, numbers per head (default 16,16,128)",
    )
    sample.add_argument("--dtype", default=default.dtype, help=f"of the arrays (default {default.dtype})")
    sample.add_argument("--pages", type=int, default=default.pages, help=f"on device (default {default.pages})")
    sample.add_argument("--batch", type=int, default=default.batch, help=f"per transfer (default {default.batch})")
    parser.add_argument("--rounds", type=int, default=10, help="of which the best counts (default 10)")
    parser.add_argument("--no-rates", action="store_true", help="measure nothing")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; - is standard output")


def run(options: argparse.Namespace) -> int:
    """Run the doctor. Returns 0, 1 when something grave was found, 2 when the flags do not fit."""
    out = sys.stderr if options.json == "-" else sys.stdout
    try:
        sample = Sample(options.layers, options.page_shape, options.dtype, options.pages, options.batch)
        if not (0 < sample.batch <= sample.pages and min(sample.layers, options.rounds, *sample.page_shape) > 0):
            raise ValueError("--layers, --rounds and sizes must be at least 1, and --batch between 1 and --pages")
        if sample.pages < 2:
            raise ValueError("--pages must be at least 2: one half of the pool is copied to the other")
        layout = describe(sample.pool(), 0, sample.pages)
    except (ValueError, TypeError) as problem:
        print(f"purecache doctor: {problem}", file=sys.stderr)
        return 2
    found, about = findings(), facts()
    usable = routes(layout)
    print(_machine(about, sample, layout), file=out)
    print(_table(layout, usable), file=out)
    rows: list[dict[str, Any]] = []
    if not options.no_rates:
        print(
            f"\n{'path':22} {'backup':>9} {'load back':>9}  GB/s of {sample.batch} pages, best of {options.rounds}",
            file=out,
        )
        for row in rates(sample, options.rounds):
            rows.append(row)
            print(_rate(row), file=out, flush=True)
        found += [
            Finding(True, f"{row['path']} changes bits: do not use it") for row in rows if row.get("exact") is False
        ]
    choice = recommended(rows) if rows else f"{usable[0].form} by {usable[0].programs}"
    if choice is None:
        found.append(Finding(True, "no path keeps every bit here: run without L2"))
    print(_verdict(found, choice, bool(rows)), file=out)
    if options.json:
        everything = {"machine": about, "default": f"{usable[0].form} by {usable[0].programs}", "paths": rows}
        content = json.dumps(everything | {"recommended": choice, "findings": as_json(found)}, indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(content)
        else:
            Path(options.json).write_text(content)
    return 1 if any(each.grave for each in found) else 0


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _machine(about: dict[str, Any], sample: Sample, layout: PoolLayout) -> str:
    limit = about["locked_memory_limit"]
    lines = [
        f"purecache {about['purecache']}, jax {about['jax']}, jaxlib {about['jaxlib']}, Python {about['python']}",
        f"Locked memory (ulimit -l): {'no limit' if limit is None else f'{limit / GIB:.2f} GiB'}",
    ]
    for device in about["devices"]:
        memory = f", {device['bytes_limit'] / GIB:.1f} GiB" if device["bytes_limit"] else ""
        kinds = ", ".join(
            f"{kind} (default)" if kind == device["default_memory_kind"] else kind for kind in device["memory_kinds"]
        )
        lines.append(f"Device {device['id']}: {device['platform']} {device['kind']}{memory}; memory kinds {kinds}")
    size, pool = sample.page_bytes, sample.pages * sample.page_bytes
    lines.append(
        f"Sample pool: {sample.layers} x {sample.dtype}{[sample.pages, *sample.page_shape]},"
        f" {size / 1024:.2f} KiB per page, {pool / GIB:.3f} GiB; on host as {layout.leaves[0].carrier}"
    )
    return "\n".join(lines)


def _table(layout: PoolLayout, usable: tuple[Route, ...]) -> str:
    lines = ["", f"{'platform':9}{'form':8}{'programs':10}{'here':9}{'standing':27}why"]
    for row in ROUTES:
        here = "default" if row is usable[0] else "yes" if row in usable else ""
        lines.append(f"{row.platform:9}{row.form:8}{row.programs:10}{here:9}{row.standing:27}{row.why}")
    problems = ((row, trouble(layout, row)) for row in usable)
    lines += [f"{row.form} by {row.programs}: {problem}" for row, problem in problems if problem]
    return "\n".join(lines)


def _rate(row: dict[str, Any]) -> str:
    if "rate" in row:
        return f"{row['path']:22} {row['rate']:9.2f} {row['rate']:9.2f}"
    if "problem" in row:
        return f"{row['path']:22} can't be used: {row['problem']}"
    text = (
        f"{row['path']:22} {row['backup']:9.2f} {row['load_back']:9.2f}  {'exact' if row['exact'] else 'BITS CHANGED'}"
    )
    programs = (
        f"{each['name']} ({each['variant']} pages): {each['temp_bytes'] / 1024:.1f} KiB" for each in row["programs"]
    )
    return "\n    temporary memory: ".join([text, ", ".join(programs)])


def _verdict(found: list[Finding], choice: str | None, measured: bool) -> str:
    lines = [""] + [f"{'PROBLEM' if each.grave else 'Note'}: {each.what}" for each in found]
    if choice is not None:
        form, programs = choice.split(" by ")
        why = "the fastest in its slower direction" if measured else "the default, nothing was measured"
        lines.append(f"Recommended: host_form={form!r}, copies={programs!r} ({why})")
    return "\n".join(lines)
