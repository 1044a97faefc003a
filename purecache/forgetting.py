"""Deleting prompts and namespaces: from the tree, and from the store behind it."""

from typing import Any, NamedTuple

import numpy as np

from purecache.answers import CacheError, check
from purecache.driver import Driver
from purecache.inputs import Inputs, Tokens, as_int32
from purecache.namespaces import Namespace, namespace_digest
from purecache.state import CacheConfig
from purecache.state.layout import FREE, Column, Shelf, Tier
from purecache.transitions import Status
from purecache.transitions.forget import ALONE


class Forgotten(NamedTuple):
    """What was deleted of kv; the values of other pools went with their pages."""

    device_pages: int
    host_pages: int
    left: int
    """Pages that stay, since a request holds them or they are in flight: forget again when that has ended."""


class Forgetting:
    """Carries out `PrefixCache.forget` and `forget_namespace`."""

    def __init__(self, config: CacheConfig, driver: Driver, inputs: Inputs) -> None:
        self._config, self._driver, self._inputs = config, driver, inputs

    def forget(self, tokens: Tokens, namespace: Namespace, rank: int | None, keep: int | None) -> Forgotten:
        """See `PrefixCache.forget`. Raises CacheError for a negative `keep`."""
        if keep is not None and keep < 0:
            raise CacheError(Status.BAD_LENGTH, f"keep is {keep}: give the number of tokens that stay")
        size, prompt = self._inputs.prompt(tokens, namespace, rank)
        kept = ALONE if keep is None else keep // self._config.page_size
        storage = self._driver.storage
        if storage is None:
            return self._after(self._driver.run("forget", size, *prompt, kept))
        known = self._driver.run("peek", size, *prompt).full_length if keep is None else kept
        with storage.forgetting(as_int32(tokens), namespace, known):
            return self._after(self._driver.run("forget", size, *prompt, kept))

    def forget_namespace(self, namespace: Namespace) -> Forgotten:
        """See `PrefixCache.forget_namespace`."""
        total = [0, 0, 0]
        found = self._digests(namespace)
        if self._driver.storage is None:
            total = self._each(found)
        else:
            with self._driver.storage.forgetting(np.zeros(0, np.int32), namespace, 0):
                total = self._each(found)
        return Forgotten(*total)

    def _each(self, found: list[tuple[np.ndarray, int]]) -> list[int]:
        replies = [self._after(self._driver.run("forget_namespace", 0, *each)) for each in found]
        return [sum(numbers) for numbers in zip([0, 0, 0], *replies, strict=True)]

    def _digests(self, namespace: Namespace) -> list[tuple[np.ndarray, int]]:
        """Digest and rank of every part of a namespace that the tree has."""
        if self._config.bigrams:
            known = {digest for digest, (name, _) in self._inputs.origins() if _same(name, namespace)}
        else:
            known = {namespace_digest(namespace, rank=rank).tobytes() for rank in (None, 0)}
        nodes, _ = self._driver.views()
        layout = self._config.layout
        below = np.flatnonzero(nodes[Column.PARENT] >= layout.nodes)
        words = nodes[Column.NAMESPACE : Column.NAMESPACE + 4, below].T
        rows = {
            (np.ascontiguousarray(row).tobytes(), int(nodes[Column.RANK, n]))
            for row, n in zip(words, below, strict=True)
        }
        del nodes, words
        there = sorted(row for row in rows if row[0] in known)
        return [(np.frombuffer(digest, np.int32).copy(), rank) for digest, rank in there]

    def _after(self, reply: Any) -> Forgotten:
        """Check a reply, and let the data plane give up the host pages that are free now."""
        check(reply.status)
        if reply.host:
            self._drop_free_pages()
        return Forgotten(reply.device, reply.host, reply.left)

    def _drop_free_pages(self) -> None:
        layout, owners = self._config.layout, np.asarray(self._driver.copy_state().shelves)[Shelf.OWNERS]
        for pool in range(layout.pools):
            size, start = layout.capacity(Tier.HOST, pool), layout.shelf(Tier.HOST, pool)
            for rank in range(layout.ranks):
                free = np.flatnonzero(owners[start + rank * size :][:size] == FREE)
                if len(free):
                    self._driver.drop_host(free.astype(np.int32), rank, pool)


def _same(one: Namespace, other: Namespace) -> bool:
    """Whether two names are one namespace: 1 and True are not."""
    return bool((namespace_digest(one) == namespace_digest(other)).all())
