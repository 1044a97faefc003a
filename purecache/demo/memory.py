"""Who owns the pages that requests compute into: the interface the scheduler uses, and its version without a cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from purecache.demo.model import Pool


@dataclass(eq=False)
class Lease:
    """The device pages of one admitted request, in the order of its tokens."""

    pages: np.ndarray  # int32[n]
    hit: int = 0  # leading tokens that were found on the device
    loaded: int = 0  # tokens after them that were loaded from the host
    loaded_bytes: int = 0  # what was copied for that
    stored: int = 0  # of these, tokens that came to the host from storage for this request
    shared: int = 0  # leading pages that the cache owns: read, never written, never released
    counted: int = 0  # leading pages that an insert of this request has counted as hits
    receipt: Any = field(default=None, repr=False)  # what the cache gave for the lock on the shared pages

    @property
    def cached(self) -> int:
        """Leading tokens that need not be computed."""
        return self.hit + self.loaded


class PoolOwner(Protocol):
    """Keeps the device pool of a llama model."""

    @property
    def pool(self) -> Pool:
        """The current device pool. Whoever donates it to a program puts the program's result back here."""
        ...

    @pool.setter
    def pool(self, pool: Pool) -> None: ...


class Memory(Protocol):
    """Lends device pages to requests. What `open` gave is the `lease` of the other calls."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def pages(self) -> int:
        """Device pages in total."""
        ...

    def announce(self, tokens: np.ndarray) -> None:
        """A request with int32[n] tokens was queued: `open` will be asked for it."""
        ...

    def open(self, tokens: np.ndarray, spare: int) -> Lease | None:
        """Lend pages for int32[n] tokens, of which the last must be computed anyway.

        None when free and evictable pages do not suffice (`spare` pages must remain besides), or when it is worth
        waiting for storage.
        """
        ...

    def stop(self, lease: Any, position: int) -> int | None:
        """Next position after this one at which prefill must stop, for `advance`; None: none before the end."""
        ...

    def reserve(self, lease: Any, end: int) -> bool:
        """Add the pages that are needed to compute up to position `end`. False when there are not enough."""
        ...

    def advance(self, lease: Any, tokens: np.ndarray) -> None:
        """Note that int32[n] tokens are computed by now, in prefill or decoding."""
        ...

    def share(self, lease: Any, tokens: np.ndarray) -> None:
        """Offer the whole pages of int32[n] computed tokens to others while the request goes on."""
        ...

    def close(self, lease: Any, tokens: np.ndarray) -> None:
        """End a finished request whose int32[n] tokens are computed, the last page perhaps in part."""
        ...

    def cancel(self, lease: Any) -> None:
        """End a request without keeping what it computed."""
        ...

    def tick(self) -> None:
        """Give the memory a turn to handle finished copies. Never waits."""
        ...


def pages_for(tokens: int, page_size: int) -> int:
    """Return how many pages hold that many tokens."""
    return -(-tokens // page_size)


class PlainMemory:
    """Pages without a cache: every request computes its whole prompt. The baseline of the demo."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self._free = list(range(self.pages))[::-1]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.pool.keys.shape[2]

    @property
    def pages(self) -> int:
        """Device pages in total."""
        return self.pool.keys.shape[1]

    @property
    def free(self) -> int:
        """Device pages that nobody holds."""
        return len(self._free)

    def announce(self, tokens: np.ndarray) -> None:
        """Do nothing: there is nothing to fetch."""

    def open(self, tokens: np.ndarray, spare: int) -> Lease | None:
        """Lend pages for all tokens; see Memory.open."""
        needed = pages_for(len(tokens), self.page_size)
        if needed + spare > self.free:
            return None
        return Lease(np.array([self._free.pop() for _ in range(needed)], np.int32))

    def stop(self, lease: Lease, position: int) -> int | None:
        """None."""

    def reserve(self, lease: Lease, end: int) -> bool:
        """Add free pages; see Memory.reserve."""
        while end > len(lease.pages) * self.page_size:
            if not self._free:
                return False
            lease.pages = np.append(lease.pages, np.int32(self._free.pop()))
        return True

    def advance(self, lease: Lease, tokens: np.ndarray) -> None:
        """Do nothing: the pages stay as they are."""

    def share(self, lease: Lease, tokens: np.ndarray) -> None:
        """Do nothing: nobody can find these pages."""

    def close(self, lease: Lease, tokens: np.ndarray) -> None:
        """Free the pages."""
        self.cancel(lease)

    def cancel(self, lease: Lease) -> None:
        """Free the pages."""
        self._free.extend(int(page) for page in lease.pages[::-1])
        lease.pages = lease.pages[:0]

    def tick(self) -> None:
        """Do nothing: there are no copies."""
