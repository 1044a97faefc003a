"""How many prompt tokens each eviction policy serves from cache on a trace, beside the offline optimum.

    python -m benchmarks.policies TRACE [TRACE ...] --tokens 1e6 2.9e6 1e7 [--model | --check]

A trace has one JSON object per line, as the Mooncake traces (FAST'25): `timestamp` in ms, `input_length`,
`output_length`, and `hash_ids`, ids of prefix blocks of 512 tokens. Or one per coding session, as kv-cache-tester has
them (.gz), of blocks of 64 tokens, here put together to blocks of 512; the sessions start spread over an hour. A block
is a page of one token here. Every request runs through the real transitions: admit, allocate, finish; with `--model`,
through a plain model of them, which is faster; with `--check`, through both.
"""

import argparse
import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from benchmarks.policy_model import Model, key_of, optimum
from benchmarks.tier_model import TIERINGS, Tiers
from purecache import CacheConfig, Load, PrefixCache

BLOCK = 512
NEVER = 1 << 30


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    time: float
    """Seconds."""
    blocks: np.ndarray
    """int32[blocks of the prompt], and those of the answer where `answers` made them up."""
    prompt: int
    """Blocks of the prompt among them."""
    turn: int
    """Earlier requests of the same conversation: what a chat server knows."""
    answer: int
    """Tokens of the answer, which is known at its end."""


Caller = Callable[[Request], dict[str, Any]]


@dataclass(frozen=True)
class Candidate:
    """A policy as a user would set it up."""

    name: str
    options: dict[str, Any]
    caller: Caller = lambda request: {}
    """What the caller says at `finish`."""


def by_turn(request: Request) -> dict[str, Any]:
    """Priority 1 for a second turn, 2 for later ones."""
    return {"priority": min(request.turn, 2)}


def by_turn_and_answer(request: Request) -> dict[str, Any]:
    """One more for an answer below 100 tokens: questions about a document, steps of an agent."""
    return {"priority": min(request.turn, 2) + (request.answer < 100)}


def by_turn_or_answer(request: Request) -> dict[str, Any]:
    """As `by_turn`, but a first turn with a short answer counts as a second one."""
    return {"priority": max(min(request.turn, 2), int(request.answer < 100))}


def prompt_only(request: Request) -> dict[str, Any]:
    """Keep the prompt rather than the answer."""
    return {"keep": request.prompt}


def both(request: Request) -> dict[str, Any]:
    """`by_turn` and `prompt_only`."""
    return by_turn(request) | prompt_only(request)


CANDIDATES = (
    Candidate("lru", {"policy": "lru"}),
    Candidate("fifo", {"policy": "fifo"}),
    Candidate("lfu", {"policy": "lfu"}),
    Candidate("slru", {"policy": "slru"}),
    Candidate("priority by turn", {"policy": "priority"}, by_turn),
    Candidate("retention by turn", {"policy": "retention", "retention": (0, 0, 150, 300)}, by_turn),
    Candidate("by turn and answer", {"policy": "retention", "retention": (0, 0, 150, 300, 450)}, by_turn_and_answer),
    Candidate("by turn or answer", {"policy": "retention", "retention": (0, 0, 150, 300)}, by_turn_or_answer),
    Candidate("tail-optimized lru 1", {"policy": "retention", "retention": (0, 3600), "spare_tail": 1}),
    Candidate("tail-optimized lru 8", {"policy": "retention", "retention": (0, 3600), "spare_tail": 8}),
    Candidate("answers 60 earlier", {"policy": "retention", "retention": (0, 60)}, prompt_only),
    Candidate("answers first", {"policy": "retention", "retention": (0, 3600)}, prompt_only),
    Candidate("turn, answers 60 earlier", {"policy": "retention", "retention": (0, 60, 210, 360)}, both),
)


def read(path: Path) -> list[Request]:
    """The requests of a trace, in order of arrival, with their turns."""
    if path.suffix == ".gz":
        return sessions(path)
    requests, turns = [], {}
    for row in lines(path):
        ids = row["hash_ids"]
        turn = turn_of(ids, turns)
        answer = row["output_length"]
        requests.append(Request(row["timestamp"] / 1000, np.array(ids, np.int32), len(ids), turn, answer))
    return requests


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one per line."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def turn_of(ids: list[int], turns: dict[int, int]) -> int:
    """One more than the turn in which the deepest known block was used last; its blocks are noted.

    The first block, which many conversations share, does not count.
    """
    known = next((turns[each] for each in reversed(ids[1:]) if each in turns), None)
    turn = 0 if known is None else known + 1
    turns |= dict.fromkeys(ids, turn)
    return turn


def sessions(path: Path) -> list[Request]:
    """The requests of coding sessions, merged by time."""
    random, found, first = np.random.default_rng(0), [], 0
    for session in lines(path):
        start, width, last = random.uniform(0, 3600), BLOCK // session["block_size"], first
        for row in session["requests"]:
            if "h" not in row:  # a sub-agent, of which only the sum is known
                continue
            runs = zip(row["h"][::2], row["h"][1::2], strict=True)
            ids = [first + each for at, number in runs for each in range(at, at + number)]
            last = max(last, *ids, first)
            found.append((start + row["t"], ids[width - 1 :: width], row["out"]))
        first = last + 1
    turns: dict[int, int] = {}
    found.sort(key=lambda each: each[0])
    return [Request(t, np.array(ids, np.int32), len(ids), turn_of(ids, turns), out) for t, ids, out in found]


def answers(path: Path, requests: list[Request]) -> list[Request]:
    """The same requests with the whole blocks of their answers, which traces leave out.

    Where a later prompt goes on from all whole blocks of this one, the answer is what comes next there; else it is
    blocks that nobody asks for again. Blocks that were not full are left out: an engine caches whole pages.
    """
    rows = lines(path)
    fresh = 1 + max(int(request.blocks.max(initial=0)) for request in requests)
    following: dict[int, np.ndarray] = {}
    whole = []
    for row, request in zip(reversed(rows), reversed(requests), strict=True):
        full = row["input_length"] // BLOCK
        length = (row["input_length"] + row["output_length"]) // BLOCK
        prompt = request.blocks[:full]
        later = following.get(int(prompt[-1])) if full else None
        tail = later[full:length] if later is not None else prompt[:0]
        missing = length - full - len(tail)
        own = np.arange(fresh, fresh + missing, dtype=np.int32)
        fresh += missing
        blocks = np.concatenate([prompt, tail, own])
        following |= dict.fromkeys(prompt.tolist(), request.blocks[: row["input_length"] // BLOCK])
        whole.append(Request(request.time, blocks, full, request.turn, request.answer))
    return whole[::-1]


class Runner:
    """Runs candidates in caches of one size, which share their programs; of smaller ones, pages are lent for good."""

    def __init__(self, requests: list[Request], largest: int, host_pages: int = 0) -> None:
        self._requests, self._largest, self._host = requests, largest, host_pages
        longest = max(len(request.blocks) for request in requests)
        self._smallest = 1 << max(longest - 1, 1).bit_length()

    def run(self, candidate: Candidate, capacity: int) -> list[int]:
        """Blocks of each prompt that were found."""
        config = CacheConfig(
            page_size=1, device_pages=self._largest, host_pages=self._host, load_back_threshold=0, **candidate.options
        )
        cache = PrefixCache(config, smallest=self._smallest)
        for spare in range(0, self._largest - capacity, self._smallest):
            cache.allocate(min(self._largest - capacity - spare, self._smallest))
        found, times = [], candidate.options["policy"] == "retention"
        for request in tqdm(self._requests, desc=f"{candidate.name}, {capacity} pages", leave=False):
            if times:
                cache.advance(int(request.time))
            found.append(self._serve(cache, request, candidate.caller(request)))
        return found

    @staticmethod
    def _serve(cache: PrefixCache, request: Request, said: dict[str, Any]) -> int:
        match, receipt = cache.admit(request.blocks)
        hit, pages = match.device_length, match.device_pages
        if match.host_length:
            loaded = cache.load_back(match)
            if isinstance(loaded, Load):
                hit, pages = match.length, np.concatenate([pages, loaded.pages])
                receipt, first = cache.lock(match.node), receipt
                cache.unlock(first)
        new = cache.allocate(len(request.blocks) - len(pages))
        if new is None:
            cache.abort(np.zeros(0, np.int32), receipt)
        else:
            cache.finish(request.blocks, np.concatenate([pages, new]), receipt, **said)
        cache.tick()
        return min(hit, request.prompt)


def modelled(requests: list[Request], candidate: Candidate, capacity: int) -> list[int]:
    """Blocks of each prompt that the plain model finds."""
    model, spare = Model(capacity, key_of(candidate.options)), candidate.options.get("spare_tail", 0)
    found = []
    for number, request in enumerate(requests):
        said = candidate.caller(request)
        kept = min(said.get("keep", NEVER), len(request.blocks) - spare)
        hit = model.serve(request.blocks.tolist(), number, request.time, said.get("priority", 0), kept)
        found.append(min(hit, request.prompt))
    return found


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per trace, capacity and candidate."""
    chosen = [each for each in CANDIDATES if not options.policies or each.name in options.policies]
    for path in options.traces:
        requests = read(path)
        requests = answers(path, requests) if options.answers else requests
        prompts = sum(request.prompt for request in requests)
        paths = [(request.blocks.tolist(), request.prompt) for request in requests]
        pages = [int(tokens) // BLOCK for tokens in options.tokens]
        runner = Runner(requests, max(pages))
        for capacity in pages:
            label = {"trace": path.name, "tokens": capacity * BLOCK}
            best = sum(optimum(paths, capacity)) / prompts
            yield label | {"policy": "optimum", "hits": best}
            plain: float | None = None
            for candidate in chosen:
                found = {}
                if options.model or options.check:
                    found["model"] = sum(modelled(requests, candidate, capacity)) / prompts
                if not options.model:
                    found["hits"] = sum(runner.run(candidate, capacity)) / prompts
                hits = found.setdefault("hits", found.get("model", 0.0))
                plain = hits if plain is None else plain
                gap = (hits - plain) / max(best - plain, 1e-9)
                yield label | {"policy": candidate.name, **found, "gap closed": gap}


def tier_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per trace, capacity of the device and way to use the host, by a plain model under LRU."""
    for path in options.traces:
        requests = read(path)
        total = sum(request.prompt for request in requests)
        for tokens in options.tokens:
            sizes = [int(each) // BLOCK for each in (tokens, options.host_tokens)]
            for tiering in TIERINGS:
                tiers = Tiers(sizes, tiering)
                found = [tiers.serve(request.blocks.tolist()) for request in requests]
                device, host = (sum(column) / total for column in zip(*found, strict=True))
                row = {"trace": path.name, "tokens": sizes[0] * BLOCK, "policy": tiering.name, "hits": device + host}
                yield row | {"device": device, "host": host, "copied": tiers.copied / total}


def main() -> None:
    """Print the table; JSON lines with --json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--tokens", nargs="+", type=float, default=[1e6, 2.9e6, 1e7], help="capacities")
    parser.add_argument("--policies", nargs="*", metavar="NAME", help=f"of {[each.name for each in CANDIDATES]}")
    parser.add_argument("--model", action="store_true", help="the plain model instead of the transitions")
    parser.add_argument("--check", action="store_true", help="the plain model as well")
    parser.add_argument("--answers", action="store_true", help="cache the blocks of answers, too")
    parser.add_argument("--host-tokens", type=float, help="instead: ways to use a host tier of this size (plain model)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    print(f"{os.cpu_count()} cores, jax {jax.__version__}", flush=True)
    found = []
    for row in tier_rows(options) if options.host_tokens else rows(options):
        found.append(row)
        closed = f"{row['gap closed']:8.2f}" if "gap closed" in row else ""
        closed += f"  model {row['model']:.4f}" if options.check and "model" in row else ""
        if "copied" in row:
            closed = f"  device {row['device']:.4f} host {row['host']:.4f} copied {row['copied']:.3f} of all blocks"
        print(f"{row['trace']:28} {row['tokens']:10,} {row['policy']:24} {row['hits']:7.4f} {closed}", flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in found))


if __name__ == "__main__":
    main()
