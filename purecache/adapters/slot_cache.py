"""What all adapters share: a prefix cache spoken to in token slots, beside an allocator that the scheduler keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from purecache.adapters.nodes import TreeNode, TreeView
from purecache.adapters.room import Room
from purecache.adapters.slots import PageMath, SlotAllocator
from purecache.adapters.tails import Tail
from purecache.answers import Inserted, Match, Receipt
from purecache.cache import PrefixCache

_NO_PAGES = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Owner:
    """Whose tokens they are: a namespace, and the data-parallel rank (None: a namespace of its own, on rank 0)."""

    namespace: str | None
    rank: int | None
    priority: int = 0


@dataclass(frozen=True, eq=False)
class Found:
    """What a match found."""

    slots: np.ndarray
    """int32[n]: slots of the part on device, the caller's own."""
    device_node: TreeNode
    node: TreeNode
    """Deepest usable node, on device or on host."""
    host_length: int
    """Tokens between the two."""
    full_length: int
    """Tokens whose KV of full attention is cached, whatever the other pools lack."""
    values: dict[str, np.ndarray]
    """Per tail pool: values of the part on device, by page."""


@dataclass(frozen=True, eq=False)
class Kept:
    """What the tree holds of a request now."""

    slots: np.ndarray
    """int32[n]: the tree's slots of its first n tokens, which replace the request's."""
    node: TreeNode
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """Per tail pool: the tree's values by page, NONE where it has none."""


class SlotCache:
    """A `PrefixCache` whose device pages come from the scheduler's own allocator and go back to it.

    The scheduler takes slots for its requests, and the tree takes them over from there; so in the books of the cache
    every page outside the tree is lent (`CacheConfig.external_pages`), and `available + evictable + protected` of the
    scheduler is all there is whenever no request holds any. What the tree gives up, it frees in the allocator at once.
    """

    def __init__(self, cache: PrefixCache, allocator: SlotAllocator, tails: Mapping[str, Tail] | None = None) -> None:
        """tails: the scheduler's side of every tail pool of the cache.

        Raises ValueError for a cache that thinks the device pages are its own.
        """
        if not cache.config.external_pages:
            raise ValueError("the cache must be made with external_pages=True: the scheduler's allocator has the pages")
        self.cache, self.math = cache, PageMath(cache.config.page_size)
        self.view = TreeView(cache)
        self.tails = dict(tails or {})
        self._room = Room(cache, allocator, self.tails)
        self._bigrams = int(cache.config.bigrams)
        self._held: dict[int, list[Receipt]] = {}
        """Receipts that are out, by the node they lock, for holders that did not keep theirs."""
        self._node_of: dict[Receipt, int] = {}

    # ---- prompts -------------------------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, owner: Owner, *, remember: bool = False) -> Found:
        """The longest usable prefix of int32[n] `tokens`. `remember`: nodes know the tokens (for a prefetch)."""
        match = self.cache.match(tokens, namespace=owner.namespace, rank=owner.rank)
        prompt = (tokens.copy(), owner.namespace) if remember else None
        device = self.view.handle(match.device_node, match.device_length, owner.rank, prompt)
        deepest = device if not match.host_length else self.view.handle(match.node, match.length, owner.rank, prompt)
        slots = self.math.slots_of(match.device_pages)
        return Found(slots, device, deepest, match.host_length, match.full_length, match.values)

    def insert(
        self,
        tokens: np.ndarray,
        row: np.ndarray,
        owner: Owner,
        *,
        take_from: int | None = None,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[int, dict[str, np.ndarray]]:
        """Give `row` int32[n], the slots of `tokens`, to the tree.

        take_from: free what the tree did not take, from this token on. None: it is still the caller's. values: as for
        `keep`. Returns how many tokens the tree had on device before, and its values by page, per tail pool.
        """
        whole = self._whole(len(tokens))
        key = tokens[: whole + self._bigrams]
        before = self.cache.peek(key, namespace=owner.namespace, rank=owner.rank).device_length
        pages = self.math.pages_of(row[:whole])
        offer = self._offered(pages, owner) | dict(values or {})
        reply = self.cache.insert(
            key, pages, namespace=owner.namespace, rank=owner.rank, priority=owner.priority, values=offer
        )
        self.view.changed()
        self._settle(pages, reply, owner)
        if take_from is not None:
            first = take_from // self.math.page_size
            duplicates = reply.duplicates[~np.isin(reply.duplicates, pages[:first])]
            self._free(self.math.slots_of(duplicates), owner.rank)
            self._free(row[max(reply.length, take_from) : whole], owner.rank)
        return before, reply.values

    def keep(
        self,
        tokens: np.ndarray,
        row: np.ndarray,
        receipt: Receipt,
        owner: Owner,
        counted: int,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> Kept:
        """Take over what a running request has computed; `receipt` locks it from now on.

        tokens, row: int32[n] and the n slots. counted: tokens at the front that earlier calls for it took over. Slots
        of which the tree has others are freed; those behind `Kept.slots` stay the request's. values: of tail pools
        whose values don't go by the slots; those that the tree does not take stay the request's.
        """
        whole = self._whole(len(tokens))
        pages = self.math.pages_of(row[:whole])
        reply = self.cache.checkpoint(
            tokens[: whole + self._bigrams],
            pages,
            receipt,
            namespace=owner.namespace,
            rank=owner.rank,
            counted=counted // self.math.page_size,
            priority=owner.priority,
            values=self._offered(pages, owner) | dict(values or {}),
        )
        self._settle(pages, reply, owner)
        self._free(self.math.slots_of(reply.duplicates), owner.rank)
        node = self.view.handle(reply.node, reply.length, owner.rank)
        self._forget(receipt)
        self._note(receipt, node)
        return Kept(self.math.slots_of(reply.pages), node, reply.values)

    def finish(
        self,
        tokens: np.ndarray,
        row: np.ndarray,
        receipt: Receipt | None,
        owner: Owner,
        counted: int,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """End a request: the tree takes over its whole pages, the rest of the row is freed, and it is unlocked.

        values: as for `keep`. Returns the tree's values by page, per tail pool, NONE where it has none.
        """
        # A slot of 0 was taken from the request meanwhile: what lies behind it is no prefix.
        whole = self._whole(min(len(tokens), _length_without_holes(row)))
        pages = self.math.pages_of(row[:whole])
        receipt = self.lock(self.view.root) if receipt is None else receipt
        reply = self.cache.finish(
            tokens[: whole + self._bigrams],
            pages,
            receipt,
            namespace=owner.namespace,
            rank=owner.rank,
            counted=counted // self.math.page_size,
            priority=owner.priority,
            values=self._offered(pages, owner) | dict(values or {}),
        )
        self._forget(receipt)
        self.view.changed()
        self._settle(pages, reply, owner)
        rest = row[reply.length :]
        self._free(np.concatenate([self.math.slots_of(reply.duplicates), rest[rest != 0]]), owner.rank)
        return reply.values

    def drop(self, row: np.ndarray, receipt: Receipt | None, owner: Owner) -> None:
        """End a request without keeping anything: `row`, its own slots, is freed, and it is unlocked."""
        self._free(row[row != 0], owner.rank)
        if receipt is not None:
            self.unlock(receipt)

    # ---- locks ---------------------------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> Receipt:
        """Protect a prefix from eviction. Raises CacheError for one that was evicted."""
        receipt = self.cache.lock(node.node)
        self._note(receipt, node)
        return receipt

    def unlock(self, receipt: Receipt) -> None:
        """Undo one lock. Raises CacheError if it was undone before."""
        self.cache.unlock(receipt)
        self._forget(receipt)

    def locks(self, receipt: Receipt, node: TreeNode | None) -> bool:
        """Whether a receipt stands for a lock of `node` still."""
        return node is not None and self._node_of.get(receipt) == node.node.number

    def receipt_of(self, node: TreeNode) -> Receipt | None:
        """A receipt for `node` that is out, for a holder that did not keep it; the youngest."""
        receipts = self._held.get(node.node.number)
        return receipts[-1] if receipts else None

    def _note(self, receipt: Receipt, node: TreeNode) -> None:
        self._held.setdefault(node.node.number, []).append(receipt)
        self._node_of[receipt] = node.node.number

    def _forget(self, receipt: Receipt) -> None:
        number = self._node_of.pop(receipt, None)
        if number is not None:
            self._held[number].remove(receipt)
            if not self._held[number]:
                del self._held[number]

    # ---- pages ---------------------------------------------------------------------------------------------------

    def evict(self, tokens: int, rank: int | None) -> int:
        """Free at least `tokens` slots of a rank (None: of any), as far as there are evictable ones; returns how many.

        They are in the allocator when this returns.
        """
        freed = self._room.evict(tokens, rank)
        self.view.changed()
        return freed

    def take_free(self) -> int:
        """Give the allocator what has left the tree by other ways than these, such as `PrefixCache.forget`; returns how
        many slots. To be called after those: see `purecache.control.Operator`.
        """
        freed = self._room.take_free()
        self.view.changed()
        return freed

    def evict_values(self, number: int, rank: int | None, pool: str) -> int:
        """Free up to `number` values of a tail pool, of a rank or any; returns how many. The KV stays."""
        return self._room.evict_values(number, rank, pool)

    def load_back(self, node: TreeNode, host_length: int) -> np.ndarray:
        """Bring the last `host_length` tokens of a prefix from host: int32[host_length] slots, or none of them.

        Room comes from the allocator first, then from eviction. The copy has been dispatched when this returns.
        """
        match = Match(_NO_PAGES, node.length - host_length, node.length, node.node, node.node)
        slots = self._room.load_back(match, node.rank or 0)
        self.view.changed()
        return slots

    def reset(self) -> None:
        """Forget every prefix. Nothing is freed: the scheduler clears its allocator too."""
        self.cache.reset()
        for tail in self.tails.values():
            tail.reset()
        self._held.clear()
        self._node_of.clear()
        self.view.changed()

    def evictable(self, rank: int = 0) -> int:
        """Slots of a rank that eviction can free."""
        return self.cache.evictable_pages(rank) * self.math.page_size

    def protected(self, rank: int = 0) -> int:
        """Slots of a rank that locks protect."""
        return self.cache.protected_pages(rank) * self.math.page_size

    def _whole(self, tokens: int) -> int:
        return self.math.whole(max(tokens - self._bigrams, 0))

    def _offered(self, pages: np.ndarray, owner: Owner) -> dict[str, np.ndarray]:
        """The values that go with a request's pages."""
        return {name: tail.offered(pages, owner.rank or 0) for name, tail in self.tails.items()}

    def _settle(self, pages: np.ndarray, reply: Inserted, owner: Owner) -> None:
        mine = pages[: len(reply.pages)]
        for name, tail in self.tails.items():
            tail.settle(mine, reply.pages, reply.values[name], owner.rank or 0)

    def _free(self, slots: np.ndarray, rank: int | None) -> None:
        self._room.free(slots, rank or 0)


def _length_without_holes(row: np.ndarray) -> int:
    holes = np.flatnonzero(row == 0)
    return int(holes[0]) if len(holes) else len(row)
