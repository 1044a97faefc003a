"""This project as a peer: the facade, called as a scheduler calls it. `admit` locks, and `finish` unlocks."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.peers.workload import buffer
from purecache import CacheConfig, PrefixCache
from purecache.state.layout import Account

CALLS = ("admit", "allocate", "finish")
"""Programs of a request."""


@dataclass(slots=True)
class OurRequest:
    """What a request carries from one step to the next."""

    prompt: Any
    whole: Any
    need: int
    """Pages for all of it."""
    pages: Any = None
    receipt: Any = None


class Purecache:
    """`PrefixCache` without a data plane."""

    def __init__(self, page: int, capacity: int, form: str = "array('q')", longest: int = 0) -> None:
        """longest: tokens of the longest request, for which programs are compiled before anything is timed."""
        jax.config.update("jax_cpu_enable_async_dispatch", False)  # as the documents tell servers to
        self.form, self._page = form, page
        self._form = FORMS[form]
        self.cache = PrefixCache(CacheConfig(page_size=page, device_pages=capacity // page))
        if longest:
            self._warm(longest)

    def _warm(self, longest: int) -> None:
        """Compile, and call each program once: a first call takes a longer way."""
        self.cache.warm(longest, CALLS)
        pages = 1
        while pages < 2 * longest // self._page and pages <= self.cache.config.device_pages:
            tokens = np.full(pages * self._page, -1, np.int32)
            for _ in range(2):
                request = self.prepare(tokens, len(tokens))
                self.match(request)
                self.room(request)
                self.insert(request)
            pages *= 2
        self.cache.reset()

    def prepare(self, tokens: np.ndarray, prompt: int) -> OurRequest:
        """Tokens in the form that is asked for."""
        usable = (prompt - 1) // self._page * self._page
        return OurRequest(self._form(tokens[:usable]), self._form(tokens), -(-len(tokens) // self._page))

    def match(self, request: OurRequest) -> int:
        """`admit`."""
        found, request.receipt = self.cache.admit(request.prompt)
        request.pages = found.device_pages
        return found.device_length

    def slots(self, request: OurRequest) -> None:
        """`admit` has answered."""

    def lock(self, request: OurRequest) -> None:
        """`admit` has locked."""

    def room(self, request: OurRequest) -> None:
        """`allocate`, which evicts."""
        fresh = self.cache.allocate(request.need - len(request.pages))
        assert fresh is not None, "a request is larger than the cache"
        request.pages = np.concatenate([request.pages, fresh])

    def insert(self, request: OurRequest) -> None:
        """`finish`."""
        self.cache.finish(request.whole, request.pages, request.receipt)

    def unlock(self, request: OurRequest) -> None:
        """`finish` has unlocked."""

    def evict(self, tokens: int) -> None:
        """`evict`."""
        self.cache.evict(-(-tokens // self._page), rank=0)

    def unused(self) -> int:
        """Tokens that are free."""
        return self.cache.free_pages() * self._page

    def cached(self) -> int:
        """Tokens of the tree."""
        accounts = (Account.EVICTABLE, Account.PROTECTED)
        return sum(self.cache.pages(account) for account in accounts) * self._page

    def state_bytes(self) -> int:
        """Bytes of all arrays of the state, which are all that a cache keeps."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache.state))


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "int32": np.ascontiguousarray,
    "array('q')": buffer,
    "list": np.ndarray.tolist,
}
"""How tokens come: NumPy as this project wants them, sglang's scheduler's arrays, sglang-jax's lists."""


def seconds_to_warm(quick: bool) -> dict[str, float]:
    """Seconds that `warm` takes in this process for all programs of a cache, and how many there are.

    They come from disk where JAX's persistent cache has them.
    """
    cache = PrefixCache(CacheConfig(page_size=16, device_pages=8192 if quick else 200_000))
    start = time.perf_counter()
    programs = cache.warm(4096 if quick else 131_072)
    return {"programs": programs, "seconds": time.perf_counter() - start}
