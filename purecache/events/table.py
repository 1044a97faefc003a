"""From changed nodes to events: what every node is called, and in which order routers are told."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.events.changes import DEVICE, HOST, STORAGE, Changes, Origin
from purecache.events.labels import Label, label_of
from purecache.events.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from purecache.namespaces import Namespace
from purecache.state import NONE, CacheConfig
from purecache.stores.keys import KeyChain, seed_of

Group = int | None
"""A rank, or None for what was inserted with rank None."""
Told = list[tuple[Group, list[Event]]]
"""Events by group, in the order in which they are to be told."""
_KEY = 32
"""Bytes of a page key."""
PATHS = 1 << 14
"""Namespaces from which those that are not in use any more are looked for."""


@dataclass(frozen=True)
class _Path:
    """What all nodes below one node of depth 1 have in common."""

    group: Group
    label: Label


class BlockTable:
    """All nodes as routers know them. `apply` keeps it up to date; it belongs to one thread, not that of the cache.

    Per node id: a page key (that of storage: `purecache.stores.keys`), of which the first 8 bytes are the block hash,
    and what was told of it. Takes 60 bytes and the tokens per node of capacity.
    """

    def __init__(
        self,
        config: CacheConfig,
        media: dict[int, str],
        label: Callable[[Namespace], Label] = label_of,
    ) -> None:
        """media: names of the bits DEVICE, HOST, STORAGE that are told. label: what routers are told of a namespace."""
        self._width, self._bigrams, self._roots = config.page_size, config.bigrams, config.layout.nodes
        self._media = {bit: media[bit] for bit in (DEVICE, HOST, STORAGE) if bit in media}
        self._label = label
        self._size = config.layout.nodes
        self._groups: dict[Group, None] = {0: None}
        """All that were ever told of."""
        self.unnamed = 0
        """Nodes so far that nobody was told of, since the name of their namespace was not known."""
        self.clear()

    def clear(self) -> None:
        """Forget all nodes."""
        self._born = np.full(self._size, NONE, np.int32)
        self._told = np.zeros(self._size, np.uint8)
        self._keys = np.zeros((self._size, _KEY), np.uint8)
        self._parents = np.full(self._size, NONE, np.int32)
        self._depths = np.zeros(self._size, np.int32)
        self._lead = np.full(self._size, NONE, np.int64)
        self._path = np.full(self._size, NONE, np.int32)
        """Index in `paths`; NONE: of a namespace that nobody knows by name."""
        self._tokens = np.zeros((self._size, self._width), np.int32)
        self._paths: list[_Path] = []
        self._index: dict[_Path, int] = {}
        self._tidy_at = PATHS
        self.blocks = 0
        """How many blocks are told to be there, each in each of its media."""

    def apply(self, changes: Changes) -> Told:
        """Take note of changes; returns what is to be told, removals first."""
        if changes.everything:
            self.clear()
            return self._cleared() + self._applied(changes)
        return self._applied(changes)

    def _applied(self, changes: Changes) -> Told:
        nodes = changes.nodes
        same = self._born[nodes] == changes.born
        old = self._told[nodes]
        told = self._gone(nodes, np.where(same, old & ~changes.media, old))
        live = changes.parents != NONE
        fresh = ~same & live
        self._path[nodes[~live]] = NONE
        self._born[nodes] = changes.born
        self._told[nodes] = np.where(same, old & changes.media, 0)
        self._enter(changes, fresh)
        known = self._path[nodes] != NONE
        come = np.where(known, changes.media & ~self._told[nodes], 0).astype(np.uint8)
        self._told[nodes] |= come
        self.blocks += _bits(come)
        told += self._stored(nodes, come)
        self._tidy()
        return told

    def snapshot(self) -> Told:
        """Everything that is there, as if it had just come: each group begins with AllBlocksCleared."""
        nodes = np.flatnonzero(self._told).astype(np.int32)
        return self._cleared() + list(self._stored(nodes, self._told[nodes]))

    def _cleared(self) -> Told:
        return [(group, [AllBlocksCleared()]) for group in self._groups]

    # ---- removals ------------------------------------------------------------------------------------------------

    def _gone(self, nodes: np.ndarray, bits: np.ndarray) -> Told:
        number = _bits(bits)
        if not number:
            return []
        everything, self.blocks = number == self.blocks > 1, self.blocks - number
        if everything:
            return self._cleared()
        deepest_first = np.argsort(-self._depths[nodes], kind="stable")
        nodes, bits = nodes[deepest_first], bits[deepest_first]
        events: dict[Group, list[Event]] = {}
        groups = self._groups_of(nodes)
        for bit, medium in self._media.items():
            left = (bits & bit) != 0
            for index in np.unique(groups[left]).tolist():
                hashes = self._hashes(nodes[left & (groups == index)])
                events.setdefault(_group(index), []).append(BlockRemoved(hashes, medium))
        return list(events.items())

    def _groups_of(self, nodes: np.ndarray) -> np.ndarray:
        """int64[n]: ranks of nodes that were told of, NONE for no rank."""
        ranks = np.array([NONE if path.group is None else path.group for path in self._paths] or [NONE])
        return ranks[self._path[nodes]]

    def _hashes(self, nodes: np.ndarray) -> list[BlockHash]:
        """Block hashes: see `purecache.stores.keys.event_id`."""
        return self._keys[nodes, :8].copy().view(">i8")[:, 0].tolist()

    # ---- new nodes -----------------------------------------------------------------------------------------------

    def _enter(self, changes: Changes, fresh: np.ndarray) -> None:
        """Note what nodes are that were not seen before, and make their keys."""
        nodes = changes.nodes[fresh]
        self._parents[nodes], self._depths[nodes] = changes.parents[fresh], changes.depths[fresh]
        self._tokens[nodes] = changes.tokens[fresh]
        ranks = dict(zip(nodes.tolist(), changes.ranks[fresh].tolist(), strict=True))
        for chain in chains_of(nodes, self._parents[nodes], self._depths[nodes]):
            top = chain[0]
            above = int(self._parents[top])
            if above >= self._roots:
                origin = changes.origins[top]
                path = NONE if origin is None else self._path_of(origin, ranks[top])
                seed = None if origin is None else seed_of(origin.namespace)
                lead = NONE if origin is None or origin.first_token is None else origin.first_token
            else:
                path = int(self._path[above])
                seed = self._keys[above].tobytes().hex()
                lead = int(self._tokens[above, -1])
            self._path[chain] = path
            if path == NONE:
                self.unnamed += len(chain)
            else:
                self._name(chain, seed, lead)

    def _path_of(self, origin: Origin, rank: int) -> int:
        path = _Path(None if origin.without_rank else rank, self._label(origin.namespace))
        self._groups.setdefault(path.group)
        if path not in self._index:
            self._index[path] = len(self._paths)
            self._paths.append(path)
        return self._index[path]

    def _tidy(self) -> None:
        """Forget the namespaces that no node is in, once there are many."""
        if len(self._paths) < self._tidy_at:
            return
        used, place = np.unique(self._path, return_inverse=True)
        kept = used[used != NONE]
        self._path = (place - (len(used) - len(kept))).astype(np.int32)
        self._paths = [self._paths[index] for index in kept.tolist()]
        self._index = {path: index for index, path in enumerate(self._paths)}
        self._tidy_at = max(PATHS, 2 * len(kept))

    def _name(self, chain: list[int], seed: str | None, lead: int) -> None:
        """Make the keys of new nodes that follow each other; `seed` is what their chain of hashes goes on from."""
        content = self._tokens[chain].reshape(-1).view(np.uint32)
        if self._bigrams:
            self._lead[chain] = [lead, *self._tokens[chain[:-1], -1].tolist()]
            content = np.concatenate([np.array([lead], np.int32).view(np.uint32), content])
        keys = KeyChain(self._width, seed, self._bigrams).extend(content)
        self._keys[chain] = np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, _KEY)

    # ---- what has come -------------------------------------------------------------------------------------------

    def _stored(self, nodes: np.ndarray, bits: np.ndarray) -> Iterator[tuple[Group, list[Event]]]:
        """Events of what has come, a block never before the one above it; those of the device first."""
        used = bits != 0
        nodes, bits = nodes[used], bits[used]
        chains = [np.array(each) for each in chains_of(nodes, self._parents[nodes], self._depths[nodes])]
        come = np.zeros(self._size, np.uint8) if len(nodes) else bits
        come[nodes] = bits
        events: dict[Group, list[Event]] = {}
        for bit, medium in self._media.items():
            for chain in chains:
                path = self._paths[self._path[chain[0]]]
                there = (come[chain] & bit) != 0
                for part in _runs(chain, there):
                    events.setdefault(path.group, []).append(self._event(part, path.label, medium))
        yield from events.items()

    def _event(self, nodes: np.ndarray, label: Label, medium: str) -> BlockStored:
        above = int(self._parents[nodes[0]])
        tokens = self._tokens[nodes]
        listed: list[Any] = tokens.reshape(-1).tolist()
        if self._bigrams:
            before = np.concatenate([self._lead[nodes][:, None], tokens[:, :-1]], axis=1)
            listed = list(zip(before.reshape(-1).tolist(), tokens.reshape(-1).tolist(), strict=True))
        return BlockStored(
            block_hashes=self._hashes(nodes),
            parent_block_hash=None if above >= self._roots else self._hashes(np.array([above]))[0],
            token_ids=listed,
            block_size=self._width,
            lora_id=None,
            medium=medium,
            lora_name=label[0],
            cache_salt=label[1],
        )


def chains_of(nodes: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> list[list[int]]:
    """Nodes as paths: each goes down from one to its child, and comes after the path that has its first parent."""
    order = np.lexsort((nodes, depths))
    nodes, parents = nodes[order], parents[order]
    if len(nodes) and (parents[1:] == nodes[:-1]).all():
        return [nodes.tolist()]  # what one request has brought
    chains: list[list[int]] = []
    ends: dict[int, list[int]] = {}
    for node, parent in zip(nodes.tolist(), parents.tolist(), strict=True):
        chain = ends.pop(parent, None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(node)
        ends[node] = chain
    return chains


def _runs(chain: np.ndarray, there: np.ndarray) -> Iterator[np.ndarray]:
    """The parts of a path in which `there` holds without a gap."""
    if there.all():
        yield chain
        return
    for part in np.split(np.arange(len(chain)), np.flatnonzero(np.diff(there)) + 1):
        if there[part[0]]:
            yield chain[part]


def _bits(media: np.ndarray) -> int:
    return int(np.bitwise_count(media).sum())


def _group(index: int) -> Group:
    return None if index == NONE else index
