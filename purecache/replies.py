"""From what transitions reply to what the facade answers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from purecache.answers import Inserted, Match, Node, Receipt, check
from purecache.state import NONE, CacheConfig


class Replies:
    """Turns replies, in pages, into answers, in tokens. Raises CacheError for those that name a caller's mistake."""

    def __init__(self, config: CacheConfig) -> None:
        self._size, self._names = config.page_size, config.pool_names[1:]

    def matched(self, reply: Any) -> Match:
        """The answer to a match."""
        device, length, device_node, node, clock, full, pages, values = reply
        nodes = Node(device_node, clock), Node(node, clock)
        named = self._named(values, device)
        return Match(pages[:device], device * self._size, length * self._size, *nodes, full * self._size, named)

    def matched_many(self, reply: Any, number: int) -> list[Match]:
        """The answers to the first `number` prompts of a match of many."""
        *numbers, pages, values = reply
        columns = [column.tolist() for column in numbers]
        return [
            self.matched((*(column[lane] for column in columns), pages[lane], tuple(held[lane] for held in values)))
            for lane in range(number)
        ]

    def inserted(self, reply: Any) -> Inserted:
        """The answer to an insert."""
        check(reply.status)
        inside = [pages[: reply.length] for pages in reply.spare]
        spare = {name: pages[pages != NONE] for name, pages in zip(self._names, inside, strict=True)}
        return Inserted(
            reply.length * self._size,
            Node(reply.node, reply.clock),
            reply.pages[: reply.length],
            reply.duplicates[reply.duplicates != NONE],
            self._named(reply.values, reply.length),
            spare,
        )

    def receipt(self, reply: Any) -> Receipt:
        """The receipt of a lock."""
        check(reply.status)
        return Receipt(reply.receipt, reply.generation)

    def _named(self, values: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
        return {name: pages[:length] for name, pages in zip(self._names, values, strict=True)}
