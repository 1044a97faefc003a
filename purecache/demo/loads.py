"""Load backs of requests that are about to be admitted, beside the steps of those that run or before the next step."""

from __future__ import annotations

import numpy as np

from purecache.answers import Load, Loading, Match, Receipt
from purecache.cache import PrefixCache


class LoadBacks:
    """At most one load back per prompt: what has not come then is computed."""

    def __init__(self, cache: PrefixCache, overlap: bool):
        """overlap: requests that run go on meanwhile. Else the next step waits for the pages."""
        self._cache, self._overlap = cache, overlap
        self._begun: dict[bytes, tuple[Loading, int]] = {}
        """By prompt, its load back, and the bytes that had been loaded before."""

    def under_way(self, tokens: np.ndarray) -> bool:
        """Whether the pages of a prompt are on their way."""
        begun = self._begun.get(tokens.tobytes())
        return begun is not None and self._cache.loaded(begun[0]) is None

    def begin(self, tokens: np.ndarray, match: Match) -> bool:
        """Begin to load what only host has of a match; whether its request has to come back later."""
        if not (self._overlap and match.host_length) or tokens.tobytes() in self._begun:
            return False
        begun = self._cache.begin_load_back(match)
        if isinstance(begun, Loading):
            self._begun[tokens.tobytes()] = begun, self._bytes
        return isinstance(begun, Loading)

    def came(self, tokens: np.ndarray, match: Match) -> tuple[int, int]:
        """How many tokens of what a match has on device were begun to be loaded for this prompt, and the bytes moved.

        One prompt is loaded at a time, so all bytes that were loaded since are its own.
        """
        if tokens.tobytes() not in self._begun:
            return 0, 0
        loading, before = self._begun[tokens.tobytes()]
        came = max(0, min(match.device_length - loading.match.device_length, loading.match.host_length))
        return came, self._bytes - before

    def now(self, match: Match, receipt: Receipt) -> tuple[Load | None, Receipt]:
        """Load it at once, where nothing overlaps: what came, if it did, and the lock on all that is on device."""
        load = self._cache.load_back(match) if match.host_length and not self._overlap else None
        if not isinstance(load, Load):
            return None, receipt
        # Locking deeper before giving the first lock back leaves no moment in which a page could be evicted.
        deeper = self._cache.lock(match.node)
        self._cache.unlock(receipt)
        return load, deeper

    def forget(self, tokens: np.ndarray) -> None:
        """The request was admitted."""
        self._begun.pop(tokens.tobytes(), None)

    @property
    def _bytes(self) -> int:
        return self._cache.counters()["bytes_loaded_back"]
