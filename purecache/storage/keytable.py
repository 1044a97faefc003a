"""The keys of nodes: derived from the tree when they are needed, and kept by node id."""

from collections.abc import Callable

import numpy as np

from purecache.namespaces import Namespace
from purecache.state import CacheConfig
from purecache.state.layout import Column
from purecache.stores.keys import KeyChain, seed_of

Origin = tuple[Namespace, int | None]
"""Namespace of a prompt, and its first token in a tree of bigrams."""


class KeyTable:
    """Page keys by node id. A key is good as long as the node's clock of birth is the one that it was made for.

    Since keys are made from the tree, nothing has to be told while no storage is attached, and attaching finds the keys
    of all that is cached. Only namespaces must be known by name: the tree has digests.
    """

    def __init__(self, config: CacheConfig, origin_of: Callable[[bytes], Origin | None]) -> None:
        """`origin_of(digest)`: what the 16 bytes of a namespace in the tree stand for, or None if nobody knows."""
        self._config, self._layout, self._origin_of = config, config.layout, origin_of
        self._keys: list[str] = [""] * self._layout.nodes
        self._born = np.full(self._layout.nodes, -1, np.int64)

    def keys_of(self, nodes: np.ndarray, tokens: np.ndarray, path: list[int]) -> list[str] | None:
        """Keys of `path`, nodes on one path from the root, deepest first; None if its origin is unknown.

        nodes, tokens: the arrays of the state, as NumPy views.
        """
        unknown, node = [], path[0]
        while node < self._layout.nodes and self._born[node] != nodes[Column.BORN, node]:
            unknown.append(node)
            node = int(nodes[Column.PARENT, node])
        if unknown and not self._fill(nodes, tokens, unknown[::-1], node):
            return None
        return [self._keys[node] for node in path]

    def _fill(self, nodes: np.ndarray, tokens: np.ndarray, path: list[int], above: int) -> bool:
        """Make the keys of `path`, shallowest first, below a root or a node whose key is known."""
        pages = tokens.reshape(-1, self._layout.page_size)
        lead: list[int] = []
        if above >= self._layout.nodes:
            digest = nodes[Column.NAMESPACE : Column.NAMESPACE + 4, path[0]]
            origin = self._origin_of(np.ascontiguousarray(digest).tobytes())
            if origin is None:
                return False
            seed = seed_of(origin[0])
            lead = [] if origin[1] is None else [origin[1]]
        else:
            seed = self._keys[above]
            lead = [int(pages[above, -1])] if self._config.bigrams else []
        chain = KeyChain(self._layout.page_size, seed, self._config.bigrams)
        content = np.concatenate([np.array(lead, np.int32), pages[path].reshape(-1)])
        for node, key in zip(path, chain.extend(content.view(np.uint32)), strict=True):
            self._keys[node], self._born[node] = key, nodes[Column.BORN, node]
        return True
