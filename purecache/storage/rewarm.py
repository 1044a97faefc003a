"""Fetching the hottest prefixes of a snapshot from storage into host memory, a little at each step of the scheduler."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from purecache.answers import Refusal
from purecache.cache import PrefixCache
from purecache.snapshots.snapshot import Prefix, Snapshot, SnapshotError
from purecache.storage.prefetch import Prefetch, Stage
from purecache.storage.tier import StorageTier
from purecache.transitions import Status

LOOKED_AT = 32
"""Prefixes that are looked at per tick, at most."""


@dataclass(eq=False)
class _Fetch:
    """A prefix on its way."""

    prefix: Prefix
    prefetch: Prefetch
    first: int
    """First page that is fetched."""
    end: int
    """Pages of the prefix that there will be at best."""


class Rewarm:
    """Brings back what a snapshot has, the hottest first, as far as storage has it and host memory takes it.

    Call `tick` once per step of the scheduler, after `cache.tick`, until it returns False. Requests may be served
    meanwhile. Pages are on host then, and the hottest are the most recently used.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tier: StorageTier,
        snapshot: Snapshot,
        *,
        operations: int = 4,
        pages: int = 256,
        share: float = 0.5,
    ) -> None:
        """Plan, begin nothing.

        operations, pages: most prefetches, and pages of kv, under way at once. share: of the host pages of a rank, what
        is filled at most: what comes last would push out what came first, and requests need room too. Raises
        SnapshotError where page size, bigrams or ranks of the snapshot are not those of the cache.
        """
        config = cache.config
        ours = {"page_size": config.page_size, "bigrams": config.bigrams, "ranks": config.ranks}
        if ours != snapshot.settings:
            raise SnapshotError(f"the snapshot is of a cache with {snapshot.settings}, this one has {ours}")
        if operations < 1 or pages < 1 or not 0 < share <= 1:
            raise ValueError("operations and pages must be at least 1, and share between 0 and 1")
        self._cache, self._tier, self._config = cache, tier, config
        self._operations, self._pages = operations, pages
        self._room = [int(share * config.host_pages)] * config.ranks
        """Pages per rank that may still be filled."""
        self._waiting: deque[Prefix] = deque(each for each in snapshot.prefixes() if each.pages_stored)
        self._flying: list[_Fetch] = []
        self._landed: dict[int, Prefix] = {}
        """What has come, by its tip, the hottest first."""
        self._touching: deque[Prefix] | None = None
        self.begun = 0
        """Prefetches that were begun."""
        self.tokens = 0
        """Tokens that they brought."""
        self.left_out = 0
        """Prefixes for which there was no room, or that were not worth a prefetch."""

    def tick(self) -> bool:
        """Take note of what has landed and begin more; whether there is anything left to do. Never blocks."""
        self._land()
        if self._touching is None:
            self._begin()
            if not self._waiting and not self._flying:
                self._touching = deque(reversed(self._landed.values()))
        else:
            self._touch()
        return self._touching is None or bool(self._touching)

    def _land(self) -> None:
        for fetch in [each for each in self._flying if each.prefetch.stage is Stage.ENDED]:
            self._flying.remove(fetch)
            self.tokens += fetch.prefetch.loaded
            prefix = fetch.prefix
            self._room[prefix.rank or 0] += (fetch.end - fetch.first) - fetch.prefetch.loaded // self._config.page_size
            if fetch.prefetch.loaded:
                self._landed.setdefault(int(prefix.nodes[-1]), prefix)
                if fetch.end < prefix.pages_stored:
                    self._waiting.appendleft(prefix)  # the rest of it

    def _begin(self) -> None:
        put_off: list[Prefix] = []
        for _ in range(LOOKED_AT):
            if not self._waiting or len(self._flying) >= self._operations:
                break
            prefix = self._waiting.popleft()
            if any(_overlaps(prefix, fetch) for fetch in self._flying):
                put_off.append(prefix)
                continue
            refused = self._start(prefix)
            if refused in (Status.NO_ROOM, Status.TABLE_FULL):
                # Others have what there is; if nobody has, there will never be more.
                if self._flying or self._tier.in_flight:
                    put_off.append(prefix)
                    break
                self.left_out += 1
            elif refused is Status.STALE:
                self._waiting.clear()  # storage was detached
                return
            elif refused is not None:
                self.left_out += 1
        self._waiting.extendleft(reversed(put_off))

    def _start(self, prefix: Prefix) -> Status | None:
        """Begin a prefetch of a prefix, or of its front if all of it is too much; why not, if it can't be."""
        rank, config = prefix.rank or 0, self._config
        there = self._cache.peek(self._front(prefix, prefix.pages_stored), namespace=prefix.namespace, rank=prefix.rank)
        known = there.full_length // config.page_size
        flying = self._pages - sum(fetch.end - fetch.first for fetch in self._flying)
        end = min(prefix.pages_stored, known + self._room[rank], known + flying)
        if end < prefix.pages_stored and config.layout.tails:
            # A part of it may be of no use to the other pools.
            end = known
        if end <= known < prefix.pages_stored:
            return Status.NO_ROOM if self._room[rank] > 0 and self._flying else Status.NOTHING
        prefetch = self._tier.prefetch(self._front(prefix, end), namespace=prefix.namespace, rank=prefix.rank)
        if isinstance(prefetch, Refusal):
            return prefetch.status
        first = prefetch.asked_for[0][0]
        end = first + len(prefetch.asked_for[0][1])
        self._room[rank] -= end - first
        self._flying.append(_Fetch(prefix, prefetch, first, end))
        self.begun += 1
        return None

    def _front(self, prefix: Prefix, pages: int) -> np.ndarray:
        return prefix.tokens[: pages * self._config.page_size + self._config.bigrams]

    def _touch(self) -> None:
        """What came first was touched first, and would be evicted first: touch the hottest last."""
        assert self._touching is not None
        for _ in range(min(self._operations, len(self._touching))):
            prefix = self._touching.popleft()
            tokens = self._front(prefix, prefix.pages_stored)
            self._cache.match(tokens, namespace=prefix.namespace, rank=prefix.rank)


def _overlaps(prefix: Prefix, fetch: _Fetch) -> bool:
    """Whether a prefix needs pages that are on their way for another one."""
    ours, theirs = prefix.nodes, fetch.prefix.nodes
    both = min(len(ours), len(theirs))
    differ = ours[:both] != theirs[:both]
    return (int(differ.argmax()) if differ.any() else both) > fetch.first
