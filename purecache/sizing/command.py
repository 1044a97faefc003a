"""`purecache size`: many configurations of one trace at once. docs/sizing.md."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from purecache.sizing.advice import Knee, advice, knee_of
from purecache.sizing.distances import LruCurve
from purecache.sizing.plot import write_plot
from purecache.sizing.sweep import TIERS, Sweep, seconds_of_model, sweep
from purecache.state import CacheConfig, Policy
from purecache.traces.arguments import (
    SIZES,
    add_hardware_arguments,
    add_trace_arguments,
    hardware_of,
    pages_of,
    trace_of,
)
from purecache.traces.command import progress_bar
from purecache.traces.hardware import Hardware
from purecache.traces.setting import RunSetting
from purecache.workloads import PagedTrace

FORMAT = "purecache-size-1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    add_trace_arguments(parser)
    parser.add_argument("--device", default="20G,40G,80G", metavar="SIZES", help=f"of L1, by commas: {SIZES}")
    parser.add_argument("--host", default="0", metavar="SIZES", help="of L2 (default: none)")
    parser.add_argument("--disk", default="0", metavar="SIZES", help="of L3 (default: none)")
    parser.add_argument("--policy", default="lru", metavar="NAMES", help="which page is evicted first (default lru)")
    parser.add_argument("--write", default="write_through", metavar="NAMES", help="when pages go to host")
    parser.add_argument("--load-back", type=int, default=10, metavar="TOKENS", help="worth a load back (default 10)")
    parser.add_argument("--threads", type=int, metavar="N", help="(default: one per core)")
    parser.add_argument("--compare", action="store_true", help="time the plain Python model on the same LRU sizes, too")
    add_hardware_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write all of it there; - for stdout")
    parser.add_argument("--plot", metavar="FILE", help="write a picture there (PNG; needs purecache[plot])")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Print the table and the advice. Returns 0, or 2 for flags and files that make no sense."""
    try:
        if options.plot and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'purecache[plot]'")
        name, trace = trace_of(options)
        hardware = hardware_of(options)
        found = _found(options, name, trace, hardware)
        if options.plot:
            _plot(options.plot, found)
        if options.json == "-":
            print(json.dumps(found["json"]))
            return 0
        if options.json:
            Path(options.json).write_text(json.dumps(found["json"]) + "\n")
    except (ValueError, OSError) as error:
        print(f"purecache size: {error}", file=sys.stderr)
        return 2
    for line in _lines(found):
        print(line)
    return 0


def _found(options: argparse.Namespace, name: str, trace: PagedTrace, hardware: Hardware) -> dict[str, Any]:
    configs, disks = _configs(options, trace, hardware)
    began = time.perf_counter()
    with progress_bar(len(trace), "request", options.quiet) as progress:
        curve = LruCurve(trace, progress)
    distances = time.perf_counter() - began
    with progress_bar(len(trace) * len(configs), "request", options.quiet) as progress:
        swept = sweep(trace, hardware, curve, configs, disks, options.threads, progress)
    capacities = curve.capacities()
    rates = curve.pages(capacities) * trace.page_tokens / max(int(trace.tokens.sum()), 1)
    knee = knee_of(capacities, rates)
    page_bytes = hardware.token_bytes * trace.page_tokens
    words = advice(swept.rows, knee, page_bytes)
    sizes = [(each.device_pages, each.host_pages) for each in configs if each.policy is Policy.LRU]
    compared = {"runs": len(sizes), "seconds": seconds_of_model(trace, sizes)} if options.compare and sizes else None
    return {
        "name": name, "trace": trace, "hardware": hardware, "sweep": swept, "knee": knee, "advice": words,
        "capacities": capacities, "rates": rates, "page_bytes": page_bytes, "compared": compared,
        "distances": distances,
        "json": {
            "format": FORMAT,
            "trace": {"name": name, "form": trace.form, "requests": len(trace), "tokens": int(trace.tokens.sum()),
                      "page_tokens": trace.page_tokens, "distinct_pages": trace.distinct},
            "model": hardware.model.name,
            "bytes_per_page": round(page_bytes),
            "prefill_without": float(hardware.prefill(0, trace.tokens).sum()),
            "rows": [asdict(row) for row in swept.rows],
            "lru_curve": {"pages": capacities.tolist(), "rates": rates.tolist()},
            "knee": asdict(knee),
            "advice": words,
            "agree": swept.agree,
            "seconds": {"distances": distances, "compile": swept.compile_seconds, "runs": swept.run_seconds,
                        "threads": swept.threads, "number_of_runs": swept.runs, "model": compared},
        },
    }  # fmt: skip


def _configs(options: argparse.Namespace, trace: PagedTrace, hardware: Hardware) -> tuple[list[CacheConfig], list[int]]:
    policies: list[str] = options.policy.split(",")
    writes: list[str] = options.write.split(",")
    devices, hosts, disks = (
        [pages_of(text.strip(), trace, hardware) for text in sizes.split(",")]
        for sizes in (options.device, options.host, options.disk)
    )
    if max(disks) and not max(hosts):
        raise ValueError("a disk needs host memory: what is stored comes from there")
    configs = [
        RunSetting(hardware, device, host, 0, policy, write, load_back_tokens=options.load_back).config(
            trace.page_tokens
        )
        for device, host, policy, write in itertools.product(devices, hosts, policies, writes)
        if host or write == writes[0]
    ]
    return configs, disks


def _lines(found: dict[str, Any]) -> Iterator[str]:
    trace, swept, size = found["trace"], found["sweep"], found["page_bytes"] / 1e9
    whole = float(found["hardware"].prefill(0, trace.tokens).sum())
    yield (
        f"{found['name']} ({trace.form}): {len(trace):,} requests, {int(trace.tokens.sum()):,} prompt tokens, "
        f"{trace.distinct:,} different pages of {trace.page_tokens} tokens, {size:.3g} GB each "
        f"({found['hardware'].model.name})"
    )
    yield ""
    heads = "".join(f"{tier + ' GB':>12}" for tier in TIERS) + f"  {'policy':<10}{'write':<25}"
    yield heads + "".join(f"{name:>8}" for name in (*TIERS, "all")) + f"{'saved s':>11}{'share':>8}"
    for row in swept.rows:
        sizes = "".join(f"{pages * size:12,.1f}" for pages in (row.device_pages, row.host_pages, row.disk_pages))
        rates = "".join(f"{row.rates[tier]:8.4f}" for tier in TIERS)
        share = row.seconds / whole if whole else 0.0
        refused = f"  {row.too_large} too large" if row.too_large else ""
        yield (
            f"{sizes}  {row.policy:<10}{row.write if row.host_pages else '-':<25}{rates}{row.rate:8.4f}"
            f"{row.seconds:11,.1f}{share:8.3f}{refused}"
        )
    yield ""
    yield from found["advice"]
    yield ""
    yield from _times(swept, found["distances"], found["compared"])


def _times(swept: Sweep, distances: float, compared: dict[str, Any] | None) -> Iterator[str]:
    same, there = swept.agree
    yield (
        f"{swept.runs} runs in {swept.run_seconds:.1f} s in {swept.threads} threads, compiled in "
        f"{swept.compile_seconds:.1f} s; stack distances in {distances:.1f} s."
    )
    if there:
        yield f"Under LRU with write through, {same} of {there} runs found what the stack distances say, by request."
    if compared:
        each, model = swept.run_seconds / swept.runs, compared["seconds"] / compared["runs"]
        yield (
            f"The plain Python model of LRU took {compared['seconds']:.1f} s for {compared['runs']} of them, one after "
            f"the other: {model / each:.2f} times as long per run."
        )


def _plot(path: str, found: dict[str, Any]) -> None:
    knee: Knee = found["knee"]
    rates: np.ndarray = found["rates"]
    write_plot(path, found["name"], found["capacities"], rates, found["sweep"].rows, knee, found["page_bytes"])
