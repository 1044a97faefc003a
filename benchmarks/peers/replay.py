"""One peer on one workload: match, lock, make room, insert, unlock per request, each timed."""

import gc
import time
from typing import Any, Protocol

import numpy as np

from benchmarks.peers.workload import Workload

PHASES = ("match", "slots", "lock", "room", "insert", "unlock")
"""What a request does, in this order. A peer that does two of them in one call does so in the first."""


class Peer(Protocol):
    """A prefix cache with a pool of so many tokens beside it, driven as a scheduler drives it.

    What `prepare` does is not timed: it makes the form of the tokens that the peer likes best.
    """

    form: str
    """That form."""

    def prepare(self, tokens: np.ndarray, prompt: int) -> Any:
        """A request of these tokens, the first `prompt` of which are its prompt."""
        ...

    def match(self, request: Any) -> int:
        """Tokens of the prompt, but the last, that are cached. The request remembers where."""
        ...

    def slots(self, request: Any) -> None:
        """Read where in the pool these tokens are."""
        ...

    def lock(self, request: Any) -> None:
        """Keep them."""
        ...

    def room(self, request: Any) -> None:
        """Take the rest of what the request needs from the pool, evicting what is short."""
        ...

    def insert(self, request: Any) -> None:
        """Keep the whole pages of the request, give the begun one back."""
        ...

    def unlock(self, request: Any) -> None:
        """Undo `lock`."""
        ...

    def evict(self, tokens: int) -> None:
        """Evict at least so many tokens."""
        ...

    def unused(self) -> int:
        """Tokens of the pool that are free."""
        ...

    def cached(self) -> int:
        """Tokens that the tree holds."""
        ...


def replay(peer: Peer, workload: Workload, limit: float = 1e9) -> dict[str, Any]:
    """Times of all measured requests in microseconds, by phase, with the hit rate.

    limit: seconds after which a slow peer stops. Raises AssertionError where a peer lost tokens of its pool.
    """
    steps = [getattr(peer, phase) for phase in PHASES]
    taken = np.zeros((len(workload), len(PHASES)), np.int64)
    hit = np.zeros(len(workload), np.int64)
    clock, ended, done = time.perf_counter_ns, time.monotonic() + limit, 0
    gc.collect()
    gc.freeze()
    for number in range(len(workload)):
        request = peer.prepare(workload.tokens(number), int(workload.prompts[number]))
        row, before = taken[number], clock()
        for place, step in enumerate(steps):
            answer = step(request)
            now = clock()
            row[place] = now - before
            if place == 0:
                hit[number] = answer
            before = clock()
        done = number + 1
        if number % 64 == 0 and time.monotonic() > ended:
            break
    size = workload.capacity // workload.page * workload.page
    there = peer.cached() + peer.unused()
    assert there == size, f"{there} tokens are cached or unused, of {size}"
    return _summary(peer, workload, taken[:done], hit[:done])


def _summary(peer: Peer, workload: Workload, taken: np.ndarray, hit: np.ndarray) -> dict[str, Any]:
    first = min(workload.first, len(taken) - 1)
    micros = taken[first:] / 1000
    whole = micros.sum(axis=1)
    prompts = workload.prompts[first : len(taken)]
    return {
        "form": peer.form,
        "requests": len(whole),
        "complete": len(taken) == len(workload),
        "us": float(whole.mean()),
        "phases": {name: float(mean) for name, mean in zip(PHASES, micros.mean(axis=0), strict=True)},
        "p50": float(np.percentile(whole, 50)),
        "p99": float(np.percentile(whole, 99)),
        "max": float(whole.max()),
        "hit_rate": float(hit[first:].sum() / prompts.sum()),
        "hits": hit.tolist(),
    }
