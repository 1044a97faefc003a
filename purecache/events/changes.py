"""Which nodes of a cache came, went or moved since the last look: the scheduler's part of KV events."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from purecache.cache import PrefixCache
from purecache.namespaces import Namespace, namespace_digest
from purecache.state import NONE, CacheConfig
from purecache.state.layout import Column, Stored

DEVICE, HOST, STORAGE = 1, 2, 4
"""Bits of the media that a block is in."""


@dataclass(frozen=True)
class Origin:
    """Where a path begins."""

    namespace: Namespace
    first_token: int | None
    """In a tree of bigrams."""
    without_rank: bool
    """Inserted with rank None."""


@dataclass(frozen=True, eq=False)
class Changes:
    """What may have changed, as copies: n nodes with what they are now. Entries of ids not in use have media 0."""

    nodes: np.ndarray
    """int32[n]: ids, ascending."""
    born: np.ndarray
    """int32[n]: with the id, says which node it is."""
    parents: np.ndarray
    """int32[n]: a root, from `Layout.nodes` on, or NONE for an id that is not in use."""
    ranks: np.ndarray
    """int32[n]."""
    depths: np.ndarray
    """int32[n]: pages of the prefix that ends there, 1 below a root."""
    media: np.ndarray
    """uint8[n]: bits."""
    tokens: np.ndarray
    """int32[n, page_size]."""
    origins: dict[int, Origin | None]
    """Of the nodes right below a root. None: the cache has forgotten the name of that namespace."""
    everything: bool
    """Whether this begins anew: what is not in it is not in the cache."""


class Watch:
    """Compares the nodes of one cache with what they were. Two or three passes over an int32 column, nothing else.

    Storage is looked at only if asked for: a block is there as far as the cache knows (`Stored.YES`) while it has the
    block on device or host, too.
    """

    def __init__(self, config: CacheConfig, storage: bool) -> None:
        self._layout = config.layout
        self._rows = [Column.BORN, Column.DEVICE_PAGE, Column.HOST_PAGE, *([Column.STORED] if storage else [])]
        self._storage = storage
        self.forget()

    def forget(self) -> None:
        """Take nothing for known: the next look is at everything."""
        size = self._layout.nodes
        self._seen = np.full((len(self._rows), size), NONE, np.int32)
        self._differs, self._one = np.zeros(size, bool), np.zeros(size, bool)
        self._books: np.ndarray | None = None
        self._everything = True

    def is_idle(self, cache: PrefixCache) -> bool:
        """Whether no transition has changed anything since the last `take`."""
        books = cache._driver.books()
        return self._books is not None and (books is self._books or np.array_equal(books, self._books))

    def take(self, cache: PrefixCache) -> Changes | None:
        """What has changed since the last call; None: nothing."""
        self._books, everything, self._everything = cache._driver.books(), self._everything, False
        size = self._layout.nodes
        nodes, tokens = cache._driver.views()  # dropped at return: a view that is held makes a transition copy
        differs, one = self._differs, self._one
        np.not_equal(nodes[self._rows[0], :size], self._seen[0], out=differs)
        for place, row in enumerate(self._rows[1:], 1):
            np.not_equal(nodes[row, :size], self._seen[place], out=one)
            np.logical_or(differs, one, out=differs)
        found = np.flatnonzero(differs)
        if not len(found) and not everything:
            return None
        now = nodes[:, found]
        for place, row in enumerate(self._rows):
            self._seen[place, found] = now[row]
        return Changes(
            nodes=found.astype(np.int32),
            born=now[Column.BORN],
            parents=now[Column.PARENT],
            ranks=now[Column.RANK],
            depths=now[Column.DEPTH],
            media=self._media(now),
            tokens=tokens.reshape(-1, self._layout.page_size)[found],
            origins=self._origins(found, now, cache._inputs.origin_of),
            everything=everything,
        )

    def _media(self, now: np.ndarray) -> np.ndarray:
        device, host = now[Column.DEVICE_PAGE] >= 0, now[Column.HOST_PAGE] >= 0
        media = device * np.uint8(DEVICE) | host * np.uint8(HOST)
        if self._storage:
            media |= ((now[Column.STORED] == Stored.YES) & (device | host)) * np.uint8(STORAGE)
        return media

    def _origins(
        self, found: np.ndarray, now: np.ndarray, origin_of: Callable[[bytes], tuple[Namespace, int | None] | None]
    ) -> dict[int, Origin | None]:
        origins: dict[int, Origin | None] = {}
        for place in np.flatnonzero(now[Column.PARENT] >= self._layout.nodes).tolist():
            digest = np.ascontiguousarray(now[Column.NAMESPACE : Column.NAMESPACE + 4, place]).tobytes()
            known = origin_of(digest)
            if known is None:
                origins[int(found[place])] = None
                continue
            without = namespace_digest(known[0], rank=None, first_token=known[1]).tobytes() == digest
            origins[int(found[place])] = Origin(*known, without)
        return origins
