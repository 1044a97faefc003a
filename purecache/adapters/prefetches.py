"""Prefetches from storage by the id of the request that they are for."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from purecache.adapters.slot_cache import Owner
from purecache.answers import Refusal
from purecache.cache import PrefixCache
from purecache.logs import log
from purecache.storage.reader import Prefetch, Progress
from purecache.storage.tier import StorageOptions, StorageTier
from purecache.stores.interface import Store
from purecache.stores.names import Naming

FORGOTTEN = 1 << 16
"""Requests that are remembered as served; a scheduler that never asks again must not fill the memory."""


@dataclass(eq=False)
class _Entry:
    """What is known of one request."""

    prefetch: Prefetch | None
    """None: it was not worth it, or it has ended."""
    loaded: int = 0
    """Tokens that came from storage."""


class Prefetches:
    """At most one prefetch per request. Without storage, every request is served at once."""

    def __init__(self, cache: PrefixCache, now: Callable[[], float] = time.monotonic) -> None:
        self._cache, self._now = cache, now
        self.tier: StorageTier | None = None
        self.store: Store | None = None
        self._entries: dict[str, _Entry] = {}

    def attach(self, store: Store, naming: Naming, options: StorageOptions | None = None) -> None:
        """Put a storage tier under the cache. Raises ValueError if it has one, or has no host pages."""
        self.tier, self.store = StorageTier(self._cache, store, naming, options), store

    def detach(self) -> None:
        """Take the storage tier off the cache; what it was asked for ends with what has landed."""
        if self.tier is not None:
            self.tier.detach()
        self.tier = self.store = None
        self._entries.clear()

    def start(self, request: str, tokens: np.ndarray, owner: Owner) -> None:
        """Ask storage for what follows the cached part of a prompt, unless this was done for the request before."""
        if self.tier is None or request in self._entries:
            return
        started = self.tier.prefetch(tokens, namespace=owner.namespace, rank=owner.rank)
        self._entries[request] = _Entry(None if isinstance(started, Refusal) else started)
        if isinstance(started, Refusal):
            log("prefetch_refused", request, reason=started.status.name.lower())
        else:
            log("prefetch_started", request, prompt_tokens=len(tokens))
        if len(self._entries) > FORGOTTEN:
            self.forget(next(iter(self._entries)))

    def knows(self, request: str) -> bool:
        """Whether `start` was called for a request."""
        return request in self._entries

    def done(self, request: str) -> bool:
        """Whether a request need not wait (any longer); by the end policy, asking may end its prefetch."""
        entry = self._entries.get(request)
        if self.tier is None or entry is None or entry.prefetch is None:
            return True
        if self.tier.progress(entry.prefetch, self._now()) is Progress.NOT_YET:
            return False
        log("prefetch_ended", request, tokens=entry.prefetch.loaded)
        entry.loaded, entry.prefetch = entry.prefetch.loaded, None
        return True

    def pop_loaded(self, request: str) -> int:
        """Tokens that came from storage for a request, once; it may prefetch again afterwards."""
        entry = self._entries.pop(request, None)
        return entry.loaded if entry is not None else 0

    def stop(self, request: str) -> None:
        """End the prefetch of a request now; what has landed stays in the cache."""
        entry = self._entries.get(request)
        if self.tier is not None and entry is not None and entry.prefetch is not None:
            self.tier.abort(entry.prefetch)

    def forget(self, request: str) -> None:
        """The request is gone."""
        self.stop(request)
        self._entries.pop(request, None)

    def reset(self) -> None:
        """The cache forgot everything; so does this."""
        self._entries.clear()
