"""A plain model of a device and a host tier under LRU: what write policies, admission and exclusive tiers are worth."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

DEVICE, HOST = 0, 1


@dataclass(frozen=True)
class Tiering:
    """What goes to host. uses: of a page until it is copied. remembers: uses of pages that are gone count, too."""

    name: str
    write_back: bool
    uses: int = 1
    exclusive: bool = False
    remembers: bool = False


TIERINGS = (
    Tiering("write through", False),
    Tiering("selective (2 uses)", False, 2),
    Tiering("selective, remembered", False, 2, remembers=True),
    Tiering("write back", True),
    Tiering("write back, exclusive", True, exclusive=True),
    Tiering("write back, 2 uses", True, 2),
    Tiering("2 uses, remembered", True, 2, remembers=True),
    Tiering("2 uses, rem., exclusive", True, 2, True, True),
)


@dataclass(eq=False)
class Page:
    """One page that is held somewhere."""

    name: int
    above: "Page | None"
    depth: int
    hits: int = 0
    used: int = 0
    has: list[bool] = field(default_factory=lambda: [False, False])
    below: list[int] = field(default_factory=lambda: [0, 0])
    """Children on device, and all children."""
    keys: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0), (0, 0)])


class Tiers:
    """A device and a host tier. `copied` and `loaded` count pages between them."""

    def __init__(self, capacities: Sequence[int], tiering: Tiering) -> None:
        self._capacities, self._tiering = capacities, tiering
        self._held: dict[int, Page] = {}
        self._number = [0, 0]
        self._leaves: list[list[tuple[tuple[int, int], int, Page]]] = [[], []]
        self._uses: dict[int, int] = {}
        self._clock = self._pushed = 0
        self.copied = self.loaded = 0

    def serve(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Use a path; its blocks that were on device, and those behind them that only host had."""
        self._clock += 1
        path: list[Page] = []
        for block in blocks:
            if block not in self._held:
                break
            path.append(self._held[block])
        for page in path:
            page.used = self._clock
        on_device = sum(page.has[DEVICE] for page in path)
        found, waiting = len(path), []
        for depth, block in enumerate(blocks):
            page = path[depth] if depth < found else Page(block, path[-1] if path else None, depth)
            if page.has[DEVICE]:
                continue
            if self._number[DEVICE] >= self._capacities[DEVICE] and not self._evict(waiting):
                path = path[:depth]
                break
            self._arrive(page, path, depth)
        for page in path:
            page.hits, page.keys[DEVICE] = page.hits + 1, (self._clock, -page.depth)
            self._uses[page.name] = self._uses.get(page.name, 0) + 1
        for page in [*path[-1:], *waiting]:
            self._list(page, DEVICE)
        if not self._tiering.write_back:
            for page in path:
                if not page.has[HOST] and page.hits >= self._tiering.uses:
                    self._copy(page)
        return on_device, max(min(found, len(path)) - on_device, 0)

    def _arrive(self, page: Page, path: list[Page], depth: int) -> None:
        page.used, page.has[DEVICE] = self._clock, True
        self._number[DEVICE] += 1
        if page.above is not None:
            page.above.below[DEVICE] += 1
        if depth < len(path):
            self.loaded += 1
            if self._tiering.exclusive:
                page.has[HOST] = False
                self._number[HOST] -= 1
        else:
            page.hits = self._uses.get(page.name, 0) if self._tiering.remembers else 0
            if page.above is not None:
                page.above.below[HOST] += 1
            self._held[page.name] = page
            path.append(page)

    def _list(self, page: Page, tier: int) -> None:
        leaf = page.below[tier] == 0 and page.has[tier] and (tier == DEVICE or not page.has[DEVICE])
        if leaf:
            self._pushed += 1
            heapq.heappush(self._leaves[tier], (page.keys[tier], self._pushed, page))

    def _oldest(self, tier: int, waiting: list[Page]) -> Page | None:
        while self._leaves[tier]:
            key, _, page = heapq.heappop(self._leaves[tier])
            stale = not page.has[tier] or page.below[tier] or page.keys[tier] != key
            if stale or (tier == HOST and page.has[DEVICE]):
                continue
            if page.used == self._clock:
                waiting.append(page)
                continue
            return page
        return None

    def _evict(self, waiting: list[Page]) -> bool:
        page = self._oldest(DEVICE, waiting)
        if page is None:
            return False
        wanted = (self._tiering.write_back and page.hits >= self._tiering.uses) or page.below[HOST] > 0
        if not page.has[HOST] and wanted:
            self._copy(page)
        page.has[DEVICE] = False
        self._number[DEVICE] -= 1
        if page.above is not None:
            page.above.below[DEVICE] -= 1
            self._list(page.above, DEVICE)
        if page.has[HOST]:
            page.keys[HOST] = (self._clock, -page.depth)
            self._list(page, HOST)
        else:
            self._drop(page)
        return True

    def _copy(self, page: Page) -> None:
        waiting: list[Page] = []
        while self._number[HOST] >= self._capacities[HOST]:
            oldest = self._oldest(HOST, waiting)
            if oldest is None:
                break
            oldest.has[HOST] = False
            self._number[HOST] -= 1
            self._drop(oldest)
        for each in waiting:
            self._list(each, HOST)
        if self._number[HOST] < self._capacities[HOST]:
            page.has[HOST] = True
            self._number[HOST] += 1
            self.copied += 1

    def _drop(self, page: Page) -> None:
        """Forget a page that no tier has, and what hangs below it."""
        gone = [page]
        if page.below[HOST]:
            names = {page.name}
            for other in sorted(self._held.values(), key=lambda each: each.depth):
                if other.above is not None and other.above.name in names:
                    names.add(other.name)
                    gone.append(other)
        for each in gone:
            self._number[HOST] -= each.has[HOST]
            each.has[HOST] = False
            self._held.pop(each.name, None)
        if page.above is not None:
            page.above.below[HOST] -= 1
            self._list(page.above, HOST)
