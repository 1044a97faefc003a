"""A plain model of eviction by one key per page, for trying policies on long traces in seconds.

A page's key is set when a request uses it; the leaf with the least key goes first. That is what the transitions do but
for corners: a page that becomes a leaf goes by its own last use here, whatever the level of those below it.
`python -m benchmarks.policies --check` runs both and prints them side by side.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

NEVER = 1 << 60
"""Next use of a page that is not used again."""


class Page:
    """One page that is held."""

    __slots__ = ("above", "below", "depth", "hits", "key", "name", "priority", "used")

    def __init__(self, name: int, above: "Page | None", depth: int, number: int) -> None:
        self.name, self.above, self.depth = name, above, depth
        self.below, self.hits, self.priority, self.used = 0, 0, -1, number
        self.key: Any = (number, -depth)


Key = Callable[[Page, int, float], tuple[Any, ...]]
"""(page, number of the request, time) -> the key; less goes earlier."""


def key_of(options: dict[str, Any]) -> Key:
    """The key of a policy, by the options of `CacheConfig`."""
    policy = options["policy"]
    table = options.get("retention", (0, 600))

    def retention(page: Page, number: int, time: float) -> tuple[Any, ...]:
        kept = table[min(max(page.priority + 1, 0), len(table) - 1)]
        return int(time) + kept, number, -page.depth

    keys: dict[str, Key] = {
        "lru": lambda page, number, time: (number, -page.depth),
        "fifo": lambda page, number, time: page.key,
        "lfu": lambda page, number, time: (min(page.hits, 16), number, -page.depth),
        "slru": lambda page, number, time: (min(page.hits, 2), number, -page.depth),
        "priority": lambda page, number, time: (max(page.priority, 0), number, -page.depth),
        "retention": retention,
    }
    return keys[policy]


class Model:
    """The pages of a device."""

    def __init__(self, capacity: int, key: Key) -> None:
        self._capacity, self._key = capacity, key
        self._held: dict[int, Page] = {}
        self._leaves: list[tuple[Any, int, Page]] = []
        self._count = 0

    def serve(self, blocks: Sequence[int], number: int, time: float, priority: int, kept: int) -> int:
        """Use a path; the blocks of it that were there."""
        path: list[Page] = []
        for block in blocks:
            if block not in self._held:
                break
            path.append(self._held[block])
        found = len(path)
        for page in path:
            page.used = number
        locked: list[Page] = []
        for depth in range(found, len(blocks)):
            if len(self._held) >= self._capacity and not self._evict(number, locked):
                break
            page = Page(blocks[depth], path[-1] if path else None, depth, number)
            if path:
                path[-1].below += 1
            self._held[page.name] = page
            path.append(page)
        for depth, page in enumerate(path):
            page.hits += 1
            page.priority = max(page.priority, priority if depth < kept else -1)
            page.key = self._key(page, number, time)
        for page in (path[-1:] if path else []) + locked:
            self._list(page)
        return found

    def _list(self, page: Page) -> None:
        if not page.below:
            self._count += 1
            heapq.heappush(self._leaves, (page.key, self._count, page))

    def _evict(self, number: int, locked: list[Page]) -> bool:
        while self._leaves:
            key, _, page = heapq.heappop(self._leaves)
            if self._held.get(page.name) is not page or page.below or page.key != key:
                continue
            if page.used == number:
                locked.append(page)
                continue
            del self._held[page.name]
            if page.above is not None:
                page.above.below -= 1
                self._list(page.above)
            return True
        return False


def optimum(paths: Sequence[tuple[Sequence[int], int]], capacity: int) -> list[int]:
    """Blocks that a cache which knows the future finds of each path (blocks, how many are of the prompt).

    It gives up what is used again last, or never (Belady's rule; a deeper page is never used before the ones above it).
    """
    following: dict[int, int] = {}
    uses = []
    for number in range(len(paths) - 1, -1, -1):
        blocks, prompt = paths[number]
        uses.append([following.get(block, NEVER) for block in blocks])
        following |= dict.fromkeys(blocks[:prompt], number)
    held: dict[int, int] = {}
    queue: list[tuple[int, int, int]] = []
    found = []
    for (blocks, prompt), nexts in zip(paths, reversed(uses), strict=True):
        found.append(next((n for n, block in enumerate(blocks[:prompt]) if block not in held), prompt))
        for depth, (block, use) in enumerate(zip(blocks, nexts, strict=True)):
            held.pop(block, None)
            if use != NEVER:
                held[block] = use
                heapq.heappush(queue, (-use, -depth, block))
        while len(held) > capacity:
            use, _, block = heapq.heappop(queue)
            if held.get(block) == -use:
                del held[block]
    return found
