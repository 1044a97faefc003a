"""Flags that the replay and the sizing of a trace share: which trace, which engine, how large."""

import argparse
import re
from pathlib import Path

from purecache.capacity import MODELS, Accelerator
from purecache.traces.hardware import Hardware
from purecache.workloads import BLOCK, FORMS, PagedTrace, Trace, generated, paged, read_trace

_SIZE = re.compile(r"([0-9.]+)([kMGTP]?)(i?)(B|t|p)?")
_SCALE = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}
SIZES = "8G or 8GB (10^9 bytes), 8GiB, 3Mt (tokens), 500p (pages), endless"
"""What a size may look like, for help texts."""


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Which trace."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="a trace, .jsonl[.gz] (default: generated)")
    parser.add_argument("--format", choices=FORMS, default=None, help="of the file (default: as it looks)")
    parser.add_argument("--page-size", type=int, metavar="TOKENS", help="default: a block of the trace; 16 for tokens")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N (generated: default 2000)")
    parser.add_argument(
        "--spread", type=float, default=3600, metavar="SECONDS", help="in which sessions without a date begin"
    )
    parser.add_argument("--seed", type=int, default=0, help="of these begins, and of a generated trace")


def add_hardware_arguments(parser: argparse.ArgumentParser) -> None:
    """Which engine."""
    group = parser.add_argument_group("the engine, for bytes and times (a model: nothing is measured)")
    group.add_argument("--model", choices=MODELS, default="Llama-3.1-70B", help="(default: Llama-3.1-70B)")
    group.add_argument("--element", type=float, default=2, metavar="BYTES", help="per number of KV (default 2)")
    group.add_argument(
        "--tflops", type=float, default=7344, metavar="N", help="peak of all chips, bf16 (default 7344: eight v6e)"
    )
    group.add_argument("--efficiency", type=float, default=0.5, metavar="SHARE", help="of the peak (default 0.5)")
    group.add_argument("--host-bandwidth", type=float, default=50, metavar="GB/S", help="host to device (default 50)")
    group.add_argument("--disk-bandwidth", type=float, default=12.5, metavar="GB/S", help="disk to host (default 12.5)")
    group.add_argument("--disk-latency", type=float, default=0.005, metavar="SECONDS", help="first byte (default .005)")
    group.add_argument("--decode", type=float, default=0.02, metavar="SECONDS", help="per output token (default 0.02)")


def hardware_of(options: argparse.Namespace) -> Hardware:
    """The engine that the flags describe. Raises ValueError."""
    return Hardware(
        model=MODELS[options.model],
        chip=Accelerator("", options.tflops * 1e12, options.efficiency),
        host_bandwidth=options.host_bandwidth * 1e9,
        disk_bandwidth=options.disk_bandwidth * 1e9,
        disk_latency=options.disk_latency,
        decode_seconds=options.decode,
        element=options.element,
    )


def trace_of(options: argparse.Namespace) -> tuple[str, PagedTrace]:
    """Name and pages of the trace that the flags describe. Raises ValueError, or OSError for no file."""
    if options.requests is not None and options.requests < 1:
        raise ValueError("--requests must be positive")
    if options.file is None:
        trace = Trace("generated", BLOCK, list(generated(options.requests or 2000, options.seed)))
        return "generated", paged(trace, options.page_size)
    trace = read_trace(options.file, options.format, spread=options.spread, seed=options.seed)
    return Path(options.file).name, paged(trace, options.page_size, options.requests)


def pages_of(text: str, trace: PagedTrace, hardware: Hardware) -> int:
    """Pages of a size like those of `SIZES`. No trace needs more than all its pages and one request.

    Raises ValueError for a text that is no size.
    """
    most = trace.distinct + trace.largest
    if text == "endless":
        return most
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no size: {SIZES}")
    number, scale, binary, unit = found.groups()
    amount = float(number) * (1024 if binary else 1000) ** _SCALE[scale]
    of_page = {"t": trace.page_tokens, "p": 1}.get(unit, hardware.token_bytes * trace.page_tokens)
    return min(int(amount / of_page), most)
