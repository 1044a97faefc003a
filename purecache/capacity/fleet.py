"""Engines that share one store: where the tokens of a workload's prompts come from.

A model of capacities, not of time: calls come one after the other, what a call has computed is in all tiers when the
next one comes, and every tier evicts exactly by least recent use, by blocks from the end of a prefix. That is what
`purecache.PrefixCache` does under LRU with write through, which a test compares.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from purecache.workloads import BLOCK, Request

UNEVEN = 1.25


class Routing(enum.Enum):
    """Which engine a call goes to."""

    ROUND_ROBIN = "round-robin"
    """In turns, wherever its prefix is."""
    PREFIX = "prefix"
    """To the engine that has most of its prefix, unless that one has had over `UNEVEN` times its share of the calls:
    then, and where several have as much, to the one with fewest calls. As cache-aware routers do."""


@dataclass
class Hits:
    """Tokens of prompts by where they came from."""

    device: int = 0
    host: int = 0
    store: int = 0
    computed: int = 0

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))

    def share(self, *names: str) -> float:
        """The share of all tokens that came from these."""
        return sum(getattr(self, name) for name in names) / max(self.tokens, 1)


class _Tier:
    """Blocks, least recently used first. Capacity in blocks; None: without end."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity, self._blocks = capacity, OrderedDict[int, None]()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def run(self, blocks: Sequence[int], first: int) -> int:
        """The end of the run of blocks from `first` on that are here."""
        while first < len(blocks) and blocks[first] in self._blocks:
            first += 1
        return first

    def use(self, blocks: Sequence[int]) -> None:
        """They were used, and are here now: the front of a prefix counts as used last."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._capacity is not None and len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Fleet:
    """`engines` with a device tier and a host tier each, and one store for all.

    Capacities in tokens; None: without end. A host tier or a store of capacity 0 is none. Raises ValueError for
    numbers below 0 and for no engine.
    """

    def __init__(
        self,
        engines: int,
        device: int | None,
        host: int | None,
        store: int | None,
        routing: Routing = Routing.ROUND_ROBIN,
        block: int = BLOCK,
    ) -> None:
        if engines < 1 or block < 1 or any(size is not None and size < 0 for size in (device, host, store)):
            raise ValueError("a fleet needs an engine, a block of a token, and capacities that are not negative")

        def tier(tokens: int | None) -> _Tier:
            return _Tier(None if tokens is None else tokens // block)

        self._engines = [(tier(device), tier(host)) for _ in range(engines)]
        self._store, self._routing, self._block = tier(store), routing, block
        self._calls = [0] * engines
        self.hits = Hits()

    def run(self, calls: Iterable[Request]) -> Hits:
        """Serve calls in their order; what came from where, of all calls so far."""
        for call in calls:
            self._serve(call)
        return self.hits

    def _serve(self, call: Request) -> None:
        blocks, hits = call.whole(self._block), self.hits
        engine = self._engine_for(blocks)
        self._calls[engine] += 1
        device, host = self._engines[engine]
        ends = [0]
        for tier in (device, host, self._store):
            ends.append(tier.run(blocks, ends[-1]))
        lengths = [self._block * (end - before) for before, end in pairwise(ends)]
        hits.device += lengths[0]
        hits.host += lengths[1]
        hits.store += lengths[2]
        hits.computed += call.tokens - sum(lengths)
        for tier in (device, host, self._store):
            tier.use(blocks)

    def _engine_for(self, blocks: Sequence[int]) -> int:
        if self._routing is Routing.ROUND_ROBIN:
            return sum(self._calls) % len(self._engines)
        found = [host.run(blocks, device.run(blocks, 0)) for device, host in self._engines]
        most = UNEVEN * (sum(self._calls) + 1) / len(self._calls) + 1
        free = [engine for engine, calls in enumerate(self._calls) if calls <= most]
        best = min(range(len(found)), key=lambda engine: (-found[engine], self._calls[engine]))
        return best if best in free else min(free, key=lambda engine: self._calls[engine])
