"""Readers of recorded workloads, by the origin of their format. All are JSON objects, one per line, gzip or not.

mooncake: `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens; an id stands for the
whole prefix up to its block (kvcache-ai/Mooncake, FAST25-release/traces).
qwen: the same names with `timestamp` in seconds, blocks of 16 tokens, and `chat_id`, `parent_chat_id`, `type`, `turn`
(alibaba-edu/qwen-bailian-usagetraces-anon).
kv-cache-tester: a coding session per line: `block_size`, `requests` with `t` in seconds since its begin, `in`, `out`
and `h`, block ids run by run: start, length, start, length ... (callanjfox/kv-cache-tester, traces). Requests of
`type` subagent hold the requests of a session of their own. Ids are local to a session.
tokens: `tokens` (or `token_ids`, `prompt_token_ids`, `input_ids`), a list of token ids; optional `output_tokens`, a
list or a number, `timestamp` in seconds, and `scope`, a text: prompts of different scopes (tenants) share nothing.
"""

import gzip
import heapq
import json
import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from purecache.workloads.request import BLOCK, Request, Trace

QWEN_BLOCK = 16
"""Tokens per block of the traces of Qwen on Bailian."""
TOKEN_NAMES = ("tokens", "token_ids", "prompt_token_ids", "input_ids")
"""What a line with token ids may call them."""


def mooncake(path: str | Path) -> Iterator[Request]:
    """Requests of a trace in Mooncake's format. Raises ValueError for a line of another one, OSError for no file."""
    return _each(path, lambda row: _blocks(row, 1000))


def qwen(path: str | Path) -> Iterator[Request]:
    """Requests of a trace in the format of Qwen-Bailian. Raises ValueError for a line of another one."""
    return _each(path, lambda row: _blocks(row, 1))


def token_lines(path: str | Path) -> Iterator[Request]:
    """Requests whose prompts are token ids. Raises ValueError for a line without."""

    def request(row: dict[str, Any]) -> Request:
        name = next(name for name in TOKEN_NAMES if name in row)
        prompt, answer = array("q", row[name]), row.get("output_tokens", row.get("output_length", 0))
        behind = array("q", answer if isinstance(answer, list) else ())
        output = len(behind) if isinstance(answer, list) else int(answer)
        time, scope = float(row.get("timestamp", 0)), str(row.get("scope", ""))
        return Request(len(prompt), prompt + behind, time, output, scope)

    return _each(path, request)


def kv_cache_tester(path: str | Path, spread: float = 3600.0, seed: int = 0) -> Iterator[Request]:
    """Requests of coding sessions, merged by time: each session begins at a random time within `spread` seconds.

    Raises ValueError for a line of another format.
    """
    source = random.Random(seed)

    def session(row: dict[str, Any]) -> list[Request]:
        return list(_session(row["requests"], str(row["id"]), source.uniform(0, spread)))

    sessions = list(_each(path, session))
    # A session may ask for several things at once: the merge keeps the order in which they stand in the file.
    return heapq.merge(*(sorted(each, key=_time) for each in sessions), key=_time)


def read_trace(path: str | Path, form: str | None = None, *, spread: float = 3600.0, seed: int = 0) -> Trace:
    """All requests of a file, in the order of arrival. `form`: a name of `FORMS`; default: as its first line looks.

    spread, seed: see `kv_cache_tester`. Raises ValueError for a file in none of these formats, OSError for no file.
    """
    form = form or _form_of(path)
    if form == "kv-cache-tester":
        block = next(_each(path, lambda row: int(row["block_size"])), 0)
        return Trace(form, block, list(kv_cache_tester(path, spread, seed)))
    if form not in FORMS:
        raise ValueError(f"unknown format {form!r}: one of {', '.join(FORMS)}")
    reader, block = {"mooncake": (mooncake, BLOCK), "qwen": (qwen, QWEN_BLOCK), "tokens": (token_lines, 1)}[form]
    return Trace(form, block, sorted(reader(path), key=_time))


FORMS = ("mooncake", "qwen", "kv-cache-tester", "tokens")
"""Formats that `read_trace` knows."""


def _form_of(path: str | Path) -> str:
    row: Any = next(_each(path, lambda row: row), None)
    names = set(row) if isinstance(row, dict) else set()
    if "hash_ids" in names:
        return "qwen" if names & {"chat_id", "parent_chat_id", "turn"} else "mooncake"
    if {"requests", "block_size"} <= names:
        return "kv-cache-tester"
    if names & set(TOKEN_NAMES):
        return "tokens"
    raise ValueError(f"{path}, line 1: no request of a format that is known ({', '.join(FORMS)})")


def _time(request: Request) -> float:
    return request.time


def _blocks(row: dict[str, Any], per_second: float) -> Request:
    ids, time = array("q", row["hash_ids"]), float(row.get("timestamp", 0)) / per_second
    return Request(int(row["input_length"]), ids, time, int(row.get("output_length", 0)))


def _session(rows: Iterable[dict[str, Any]], scope: str, begin: float) -> Iterator[Request]:
    for row in rows:
        time = begin + float(row["t"])
        if "requests" in row:
            yield from _session(row["requests"], scope, time)
            continue
        runs, ids = row["h"], array("q")
        for start, length in zip(runs[::2], runs[1::2], strict=True):
            ids.extend(range(start, start + length))
        yield Request(int(row["in"]), ids, time, int(row["out"]), scope)


def _each(path: str | Path, make: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield make(json.loads(line))
            except (ValueError, KeyError, TypeError, StopIteration) as error:
                message = f"{path}, line {number}: not a request of a trace in this format: {error!r}"
                raise ValueError(message) from None


def _open(path: str | Path) -> TextIO:
    path = Path(path)
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
