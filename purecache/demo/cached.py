"""Pages with a cache: the engine's page memory on top of the prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from purecache.cache import PrefixCache
from purecache.demo.loads import LoadBacks
from purecache.demo.memory import Lease, pages_for
from purecache.demo.model import Pool
from purecache.effects.interpreter import Interpreter
from purecache.state.config import CacheConfig
from purecache.storage import Prefetch, Progress, StorageOptions, StorageTier
from purecache.stores import Store
from purecache.stores.names import Naming

PROGRAMS = (
    "admit",
    "lock",
    "unlock",
    "allocate",
    "checkpoint",
    "finish",
    "abort",
    "begin_backup",
    "finish_backup",
    "begin_load_back",
    "finish_load_back",
)
"""The transitions that the engine uses."""
FLUSH = 30.0
"""Seconds that the end of a run waits for pages on their way to storage."""


class CachedMemory:
    """Lends pages of a PrefixCache: prompts are matched, locked and loaded back, and computed pages are inserted."""

    def __init__(self, cache: PrefixCache, storage: StorageTier | None = None, overlap: bool = True):
        """overlap: see `LoadBacks`."""
        self.cache, self.storage = cache, storage
        self._prefetches: dict[bytes, Prefetch] = {}
        self._loads = LoadBacks(cache, overlap)

    @classmethod
    def build(
        cls,
        config: CacheConfig,
        pool: Pool,
        longest: int,
        check_laws: bool = False,
        shelf: Callable[[int], Store | None] = lambda page_bytes: None,
        naming: Naming | None = None,
        copies: str | None = None,
        overlap: bool = True,
    ) -> CachedMemory:
        """Make a cache over an empty device pool, for requests of up to `longest` tokens with their answers.

        `check_laws`: check the whole state of the cache after every call, for tests. `shelf(page_bytes)` opens a store
        for the third tier, whose objects `naming` names. `copies`: the programs that move pages, see `Interpreter`.
        """
        plane = Interpreter(
            pool,
            host_pages=max(config.host_pages, 1),
            device_pages=config.device_pages,
            page_axis=1,  # of both arrays of the pool
            copies=copies,
        )
        # One size of program for all requests: compiling takes longer here than a larger program costs.
        cache = PrefixCache(config, plane, smallest=pages_for(longest, config.page_size), check_laws=check_laws)
        store = shelf(plane.page_bytes) if config.host_pages else None
        storage = None
        if store is not None and naming is not None:
            storage = StorageTier(cache, store, naming, StorageOptions(threshold=4 * config.page_size))
        return cls(cache, storage, overlap)

    def warm(self, longest: int, progress: Callable[[int, int, str], None]) -> None:
        """Compile the programs of the cache for requests of up to `longest` tokens; see PrefixCache.warm."""
        self.cache.warm(longest, PROGRAMS, progress)
        if self.storage is not None:
            self.storage.warm(longest)

    @property
    def pool(self) -> Pool:
        """The current device pool; the cache dispatches its copies on it, so it is taken anew for every program."""
        return self.cache.pool

    @pool.setter
    def pool(self, pool: Pool) -> None:
        self.cache.pool = pool

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.cache.config.page_size

    @property
    def pages(self) -> int:
        """Device pages in total."""
        return self.cache.config.device_pages

    def _whole(self, length: int) -> int:
        return length // self.page_size * self.page_size

    def announce(self, tokens: np.ndarray) -> None:
        """Prefetch from storage what no faster tier has; see Memory.announce."""
        if self.storage is not None:
            started = self.storage.prefetch(tokens[: self._whole(len(tokens) - 1)])
            if isinstance(started, Prefetch):
                self._prefetches[tokens.tobytes()] = started

    def open(self, tokens: np.ndarray, spare: int) -> Lease | None:
        """Match, lock, load back and lend the rest; see Memory.open."""
        prefetch, storage = self._prefetches.get(tokens.tobytes()), self.storage
        if prefetch is not None and storage and storage.progress(prefetch, time.monotonic()) is Progress.NOT_YET:
            return None
        lease = self._open(tokens, spare)
        if lease is not None and prefetch is not None:
            del self._prefetches[tokens.tobytes()]
            lease.stored = min(prefetch.loaded, lease.loaded)
        return lease

    def _open(self, tokens: np.ndarray, spare: int) -> Lease | None:
        if self._loads.under_way(tokens):
            return None
        # The engine keeps back the last token, whose logits it needs; a match may cover all it is asked for.
        match, receipt = self.cache.admit(tokens[: self._whole(len(tokens) - 1)])
        pages, (loaded, moved) = match.device_pages, self._loads.came(tokens, match)
        room = self.cache.free_pages() + self.cache.evictable_pages()
        short = pages_for(len(tokens), self.page_size) - len(pages) + spare > room
        if short or self._loads.begin(tokens, match):
            self.cache.unlock(receipt)
            return None
        before = self.bytes_to_device
        load, receipt = self._loads.now(match, receipt)
        if load is not None:
            pages, loaded = np.concatenate([pages, load.pages]), match.host_length
            moved = self.bytes_to_device - before
        lent = self.cache.allocate(pages_for(len(tokens), self.page_size) - len(pages))
        if lent is None:
            self.cache.unlock(receipt)
            return None
        self._loads.forget(tokens)
        hit = len(pages) * self.page_size - loaded
        return Lease(np.concatenate([pages, lent]), hit, loaded, moved, shared=len(pages), receipt=receipt)

    def stop(self, lease: Lease, position: int) -> int | None:
        """None."""

    def reserve(self, lease: Lease, end: int) -> bool:
        """Lend more pages, evicting if need be; see Memory.reserve."""
        missing = pages_for(end, self.page_size) - len(lease.pages)
        if missing > 0:
            lent = self.cache.allocate(missing)
            if lent is None:
                return False
            lease.pages = np.concatenate([lease.pages, lent])
        return True

    def advance(self, lease: Lease, tokens: np.ndarray) -> None:
        """Do nothing: pages are shared at the end of the prompt and of the answer."""

    def share(self, lease: Lease, tokens: np.ndarray) -> None:
        """Insert the whole pages of a computed prompt and go on with the tree's pages; see Memory.share."""
        whole = len(tokens) // self.page_size
        inserted = self.cache.checkpoint(
            tokens[: whole * self.page_size], lease.pages[:whole], lease.receipt, counted=lease.counted
        )
        # What another request has inserted meanwhile replaces this one's pages; what the tree refused stays lent.
        lease.shared = lease.counted = len(inserted.pages)
        lease.pages = np.concatenate([inserted.pages, lease.pages[lease.shared :]])

    def close(self, lease: Lease, tokens: np.ndarray) -> None:
        """Insert the whole pages of prompt and answer, hand back the rest and unlock; see Memory.close."""
        self.cache.finish(tokens, lease.pages, lease.receipt, counted=lease.counted)

    def cancel(self, lease: Lease) -> None:
        """Hand back the lent pages and unlock; see Memory.cancel."""
        self.cache.retract(lease.pages[lease.shared :], lease.receipt)

    def tick(self) -> None:
        """Let the cache handle copies that have ended."""
        self.cache.tick()

    def settle(self) -> dict[str, int]:
        """Wait for copies under way and return the counters of the cache."""
        self.cache.drain()
        if self.storage is None:
            return self.cache.counters()
        self.storage.flush(FLUSH)
        counters = self.cache.counters() | self.storage.counters()
        self.storage.detach()
        self.storage = None
        return counters

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys and values of one page."""
        return (self.pool.keys.nbytes + self.pool.values.nbytes) // self.pages

    @property
    def bytes_to_host(self) -> int:
        """Bytes copied to L2 by transfers that have ended."""
        return self.cache.counters()["bytes_backed_up"]

    @property
    def bytes_to_device(self) -> int:
        """Bytes loaded from L2."""
        return self.cache.counters()["bytes_loaded_back"]
