"""`python -m benchmarks.peers`: this project's control plane beside other prefix caches, in turns in one run."""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import page_lru, recorded
from benchmarks.peers.chats import chats
from benchmarks.peers.environment import ROOT, versions
from benchmarks.peers.rounds import Rounds, best
from benchmarks.peers.sglang_jax_peers import SOURCE
from benchmarks.peers.tables import call_table, workload_table
from benchmarks.peers.worker import OURS, SGLANG, SGLANG_JAX
from benchmarks.peers.workload import Workload

OWN = "purecache"
PEERS = [OWN, "purecache, int32", "rust core", "unified, rust", "radix"]
"""Who is measured unasked. sglang-jax's trees join where a checkout of it is given."""
OTHERS = ("single", "waiting", "memory", "warm")
QUICK = 300
"""Requests of each workload with --quick."""


def workloads(traces: Path | None) -> dict[str, Callable[[], Workload]]:
    """Every workload by its short name."""
    return {
        "synthetic": lambda: recorded.mooncake(traces, recorded.SYNTHETIC, 16, 3993),
        "conversation": lambda: recorded.mooncake(traces, recorded.CONVERSATION, 16, 2000),
        "synthetic-1": lambda: recorded.mooncake(traces, recorded.SYNTHETIC, 1, 1500),
        "agentic-8m": lambda: recorded.agentic(traces, 8_000_000),
        "agentic-2m": lambda: recorded.agentic(traces, 2_000_000),
        "chats": chats,
    }


def options_given() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    names = [*workloads(None), *OTHERS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--peers", nargs="*", choices=[*OURS, *SGLANG, *SGLANG_JAX], metavar="NAME")
    traces = os.environ.get("PURECACHE_TRACES")
    parser.add_argument("--traces", type=Path, default=traces, help="folder of traces (default: $PURECACHE_TRACES)")
    parser.add_argument("--rounds", type=int, default=3, help="turns that every peer has")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} requests of each workload, one round")
    parser.add_argument("--requests", type=int, help="only so many requests of each workload")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a slow peer stops")
    parser.add_argument("--python", default=str(ROOT / ".venv-peers/bin/python"), help="interpreter with the peers")
    parser.add_argument("--sglang-jax", metavar="CHECKOUT", help="measure the trees of this checkout, too")
    parser.add_argument("--profile", action="store_true", help="where the time of our requests goes, and nothing else")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured to FILE")
    return parser.parse_args()


def main() -> None:
    """Run what is asked for, and print the tables."""
    options = options_given()
    options.requests = options.requests or (QUICK if options.quick else None)
    options.rounds = 1 if options.quick else options.rounds
    if options.peers is None:
        options.peers = PEERS + (list(SGLANG_JAX) if options.sglang_jax else [])
    machine = {"machine": _processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    found: dict[str, Any] = {"about": machine | versions(Path(options.python))}
    print(", ".join(f"{name} {value}" for name, value in found["about"].items()), flush=True)
    with tempfile.TemporaryDirectory() as programs:
        kept = os.environ.get("JAX_COMPILATION_CACHE_DIR") or programs
        rounds = Rounds(options.python, kept, {SOURCE: str(Path(options.sglang_jax or "").resolve())})
        for name, build in workloads(options.traces).items():
            if name in options.only:
                found[name] = _replayed(rounds, build().head(options.requests), options)
        for name in OTHERS:
            if name in options.only and not options.profile:
                found[name] = _called(rounds, name, options)
        found["about"]["load at the end"] = os.getloadavg()[0]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def _replayed(rounds: Rounds, workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """One workload with every peer."""
    if options.profile:
        parts = rounds.one(OWN, kind="replay", workload=workload, profile=True)
        print(f"\n{workload.name}: microseconds per request of {OWN}")
        for part, micros in parts.items():
            print(f"{part:34}{micros:10.1f}", flush=True)
        return parts
    exact = page_lru.hits(workload)
    results = rounds.run(options.peers, options.rounds, kind="replay", workload=workload, limit=options.limit)
    for peer, each in results.items():
        for row in each:
            row["as_exact"] = sum(int(one == other) for one, other in zip(row.pop("hits"), exact, strict=False))
        if peer in OURS and any(row["as_exact"] != len(workload) for row in each if row["complete"]):
            print(f"warning: hits of {peer} are not those of an exact list of pages", flush=True)
    least = {peer: best(each) for peer, each in results.items()}
    workload_table(workload.about(), least, page_lru.hit_rate(workload, exact), OWN)
    return {"about": workload.about(), "exact": page_lru.hit_rate(workload, exact), "rounds": results}


def _called(rounds: Rounds, name: str, options: argparse.Namespace) -> Any:
    """One of the tables that are not about a workload."""
    if name == "warm":
        return _warmed(rounds, options.quick)
    if name == "memory":
        each = [rounds.run(options.peers, options.rounds, kind=name, page=page) for page in (1, 16, 64)]
        found = {peer: [rows for part in each for rows in part.get(peer, [])] for peer in options.peers}
        call_table("bytes per cached token, by the growth of the process", found, ("page",), "rss")
        own = {peer: rows for peer, rows in found.items() if rows and "state" in rows[0][0]}
        call_table("bytes per cached token, arrays of the state", own, ("page",), "state")
        return found
    found = rounds.run(options.peers, options.rounds, kind=name, quick=options.quick)
    if name == "waiting":
        call_table("waiting prompts of 4,096 tokens, us per prompt", found, ("prompts", "form"), "us_min")
    else:
        keys = ("operation", "tokens", "turns", "nodes")
        call_table("single calls at page 16, us, minimum", found, keys, "us_min")
        call_table("single calls at page 16, us, median", found, keys, "us_median")
    return found


def _warmed(rounds: Rounds, quick: bool) -> dict[str, Any]:
    """Compiling all programs with an empty folder, then again from it."""
    with tempfile.TemporaryDirectory() as empty:
        found = {about: rounds.one(OWN, programs=empty, kind="warm", quick=quick) for about in ("cold", "from disk")}
    for about, row in found.items():
        print(f"warm-up {about}: {row['programs']} programs in {row['seconds']:.1f} s", flush=True)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
