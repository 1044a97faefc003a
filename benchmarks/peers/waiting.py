"""Many waiting prompts matched at once: one call of ours, as many calls of others."""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.replay import Peer

PAGE, TOKENS, PROMPTS, REPEATS = 16, 4096, 1024, 10


def rows(make: Callable[[str, int, int, int], Peer], name: str, quick: bool) -> list[dict[str, Any]]:
    """Microseconds per prompt. Half of each prompt is cached."""
    prompts = PROMPTS // 8 if quick else PROMPTS
    peer = make(name, PAGE, prompts * TOKENS, TOKENS)
    offsets = np.arange(prompts, dtype=np.int32)[:, None] * 100_003
    table = np.arange(TOKENS + 1, dtype=np.int32) + offsets
    for tokens in table:
        request = peer.prepare(tokens[: TOKENS // 2], TOKENS // 2)
        for step in (peer.match, peer.lock, peer.room, peer.insert, peer.unlock):
            step(request)
    cache: Any = getattr(peer, "cache", None)
    if cache is None:
        requests = [peer.prepare(tokens, len(tokens)) for tokens in table]
        return [_row(peer.form, prompts, lambda: [peer.match(each) for each in requests])]
    whole = np.ascontiguousarray(table[:, :TOKENS])
    forms = {
        peer.form: [peer.prepare(tokens, len(tokens)).prompt for tokens in table],
        "one array": whole,
    }
    many = cache.match_many
    return [_row(form, prompts, functools.partial(many, given)) for form, given in forms.items()]


def _row(form: str, prompts: int, action: Callable[[], Any]) -> dict[str, Any]:
    taken = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter_ns()
        action()
        taken.append((time.perf_counter_ns() - start) / 1000 / prompts)
    return {"form": form, "prompts": prompts, "us_min": min(taken[2:]), "us_median": float(np.median(taken[2:]))}
