"""Workloads of recorded traces, or of stand-ins with the same shape where there is no trace."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers.workload import Workload, numbered
from purecache.workloads import Request, Trace, read_trace

SYNTHETIC, CONVERSATION = "mooncake/synthetic_trace.jsonl", "mooncake/conversation_trace.jsonl"
AGENTIC = "agentic/sessions.jsonl.gz"
"""Files below the folder of traces."""
SESSIONS, SHORTEST, LONGEST = 40, 10, 200
"""Sessions of the agentic workload, and the requests that each has."""


def mooncake(traces: Path | None, file: str, page: int, requests: int, capacity: int = 3_000_000) -> Workload:
    """One of Mooncake's traces."""
    trace, origin = _read(traces, file)
    if trace is None:
        trace = _documents(requests) if file == SYNTHETIC else _documents(requests, shared=0.25)
    name = f"mooncake {'synthetic' if file == SYNTHETIC else 'conversation'}, page {page}"
    return of_trace(name, trace, trace.requests[:requests], page, capacity, origin)


def agentic(traces: Path | None, capacity: int, requests: int = 1500, seed: int = 0) -> Workload:
    """Coding sessions that begin within an hour, merged by time; page 64."""
    trace, origin = _read(traces, AGENTIC)
    if trace is None:
        trace = _sessions(seed)
    lengths = Counter(request.scope for request in trace.requests)
    fitting = sorted(scope for scope, number in lengths.items() if SHORTEST <= number <= LONGEST)
    chosen = set(random.Random(seed).sample(fitting, min(SESSIONS, len(fitting))))
    merged = [request for request in trace.requests if request.scope in chosen][:requests]
    return of_trace(f"agentic, page 64, {capacity // 1_000_000}M tokens", trace, merged, 64, capacity, origin)


def of_trace(name: str, trace: Trace, requests: Sequence[Request], page: int, capacity: int, origin: str) -> Workload:
    """The prompts of some requests of a trace. The answers are not in these traces, so only prompts are kept."""
    block = trace.block
    paths = [[(each.scope, content) for content in each.blocks[: -(-each.tokens // block)]] for each in requests]
    lengths = [min(each.tokens, len(path) * block) for each, path in zip(requests, paths, strict=True)]
    tokens = np.array(lengths, np.int64)
    return Workload(name, page, capacity, block, numbered(paths, block), tokens, tokens, origin=origin)


def _read(traces: Path | None, file: str) -> tuple[Trace | None, str]:
    if traces is None or not (traces / file).is_file():
        return None, "stand-in (no trace given)"
    return read_trace(traces / file), file


def _documents(requests: int, shared: float = 0.6, seed: int = 0, block: int = 512) -> Trace:
    """Questions about long documents: a share of the requests is about one that was asked about before."""
    source, made, known = random.Random(seed), iter(range(1 << 40)), []
    found = []
    for number in range(requests):
        if not known or source.random() > shared:
            known.append([next(made) for _ in range(min(240, 1 + int(source.lognormvariate(3.0, 0.9))))])
        document = known[-1 - min(int(source.expovariate(1 / 60)), len(known) - 1)]
        blocks = [*document, *(next(made) for _ in range(source.randint(1, 3)))]
        found.append(Request(len(blocks) * block - source.randrange(block), tuple(blocks), number / 2))
    return Trace("stand-in", block, found)


def _sessions(seed: int, sessions: int = SESSIONS, block: int = 64) -> Trace:
    """Sessions whose prompts grow request by request up to a few hundred thousand tokens."""
    source, found = random.Random(seed), []
    for session in range(sessions):
        made, time = iter(range(1 << 40)), source.uniform(0, 3600)
        blocks = [next(made) for _ in range(source.randint(300, 800))]
        for _ in range(source.randint(SHORTEST, 120)):
            blocks = [*blocks, *(next(made) for _ in range(1 + int(source.lognormvariate(2.8, 1.0))))][:6000]
            found.append(Request(len(blocks) * block - source.randrange(block), tuple(blocks), time, 0, str(session)))
            time += source.expovariate(1 / 20)
    return Trace("stand-in", block, sorted(found, key=lambda request: request.time))
