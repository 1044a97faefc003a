"""`purecache capacity`: tables for planning, from the formulas and the model of docs/scale.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from purecache.capacity.break_even import Accelerator, break_even
from purecache.capacity.fleet import Fleet, Routing
from purecache.capacity.models import MODELS
from purecache.workloads import BLOCK, Trace, generated, read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the tables and their flags to a parser."""
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    sizes = tables.add_parser("bytes", help="bytes of KV per token of common models")
    even = tables.add_parser("break-even", help="prefix length from which loading beats computing")
    even.add_argument("--tflops", type=float, required=True, metavar="N", help="peak of all chips together, bf16")
    even.add_argument("--efficiency", type=float, default=0.5, metavar="SHARE", help="of the peak (default 0.5)")
    even.add_argument("--latency", type=float, default=0.005, metavar="SECONDS", help="first byte (default 0.005)")
    even.add_argument(
        "--bandwidth", nargs="+", type=float, default=[1, 5, 12.5, 25, 50], metavar="GB/S", help="from store to device"
    )
    fleet = tables.add_parser("fleet", help="hit rates of engines that share a store")
    fleet.add_argument("trace", nargs="?", metavar="FILE", help="a trace of blocks (default: a generated one)")
    fleet.add_argument("--calls", type=int, default=5000, metavar="N", help="of the generated workload (default 5000)")
    fleet.add_argument("--engines", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N")
    fleet.add_argument("--device", type=_tokens, default=400_000, metavar="TOKENS", help="per engine (default 400k)")
    fleet.add_argument("--host", type=_tokens, default=1_600_000, metavar="TOKENS", help="per engine (default 1.6M)")
    fleet.add_argument("--store", type=_tokens, default=None, metavar="TOKENS", help="shared (default: without end)")
    for each in (sizes, even):
        each.add_argument("--element", type=float, default=2, metavar="BYTES", help="per number of KV (default 2)")
    for each in (sizes, even, fleet):
        each.add_argument("--json", action="store_true", help="one JSON object per row")


def run(options: argparse.Namespace) -> int:
    """Print the table. Returns 0, or 2 for numbers and files that make no sense."""
    rows = {"bytes": _bytes, "break-even": _break_even, "fleet": _fleet}[options.table]
    try:
        for number, row in enumerate(rows(options)):
            if options.json:
                print(json.dumps(row), flush=True)
                continue
            if number == 0:
                print("  ".join(f"{name:>{_width(name)}}" for name in row))
            print("  ".join(f"{_text(value):>{_width(name)}}" for name, value in row.items()), flush=True)
    except (ValueError, OSError) as error:
        print(f"purecache capacity: {error}", file=sys.stderr)
        return 2
    return 0


def _bytes(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for shape in MODELS.values():
        each = shape.bytes_per_token(options.element)
        yield {
            "model": shape.name,
            "KiB per token": round(each / 1024, 1),
            "GiB of 32k tokens": round(each * 32768 / 2**30, 2),
            "MiB of windows": round(shape.window_bytes(options.element) / 2**20, 1),
            "tokens per TiB": round(2**40 / each),
        }


def _break_even(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chip = Accelerator("", options.tflops * 1e12, options.efficiency)
    for shape in MODELS.values():
        row: dict[str, Any] = {"model": shape.name}
        for speed in options.bandwidth:
            found = break_even(shape, chip, speed * 1e9, options.latency, options.element)
            row[f"{speed:g} GB/s"] = round(found.tokens)
            row["any length from GB/s"] = round(found.bandwidth / 1e9, 2)
        row["any length from GB/s"] = row.pop("any length from GB/s")
        yield row


def _fleet(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    made = None if options.trace else Trace("generated", BLOCK, list(generated(options.calls)))
    trace = made or read_trace(options.trace)
    for engines in options.engines:
        for routing in Routing:
            if engines == 1 and routing is not Routing.ROUND_ROBIN:
                continue
            hits = Fleet(engines, options.device, options.host, options.store, routing, trace.block).run(trace.requests)
            alone = Fleet(engines, options.device, options.host, 0, routing, trace.block).run(trace.requests)
            yield {
                "engines": engines,
                "routing": routing.value,
                "tokens": hits.tokens,
                "device": round(hits.share("device"), 4),
                "host": round(hits.share("host"), 4),
                "store": round(hits.share("store"), 4),
                "in all": round(hits.share("device", "host", "store"), 4),
                "without a store": round(alone.share("device", "host", "store"), 4),
            }


def _tokens(text: str) -> int | None:
    """Tokens of `400k`, `1.6M`, `2000` or `endless`."""
    if text == "endless":
        return None
    scale = {"k": 1000, "M": 1_000_000, "G": 1_000_000_000}.get(text[-1:], 1)
    number = float(text if scale == 1 else text[:-1])
    if number < 0 or number != number:
        raise ValueError(text)
    return int(number * scale)


def _width(name: str) -> int:
    return max(len(name), 16 if name == "model" else 11)


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
