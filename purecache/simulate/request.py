"""What a request of the simulated scheduler holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from purecache.answers import Receipt
from purecache.simulate.content import Prints
from purecache.state.pools import ANCHOR


@dataclass(eq=False)
class Request:
    """A request and the pages it holds."""

    tokens: list[int]
    """Prompt, and the answer so far."""
    space: dict[str, Any]
    """Namespace and rank, as they are passed."""
    prints: Prints
    receipt: Receipt
    pages: list[int] = field(default_factory=list)
    """Of kv."""
    shared: int = 0
    """How many of them are the tree's; the rest is lent."""
    counted: int = 0
    filled: int = 0
    """Tokens that are computed."""
    rows: dict[str, list[int]] = field(default_factory=dict)
    """Per pool that is read in place, a page per page of kv, or NONE."""
    own: dict[str, set[int]] = field(default_factory=dict)
    """Which of these are lent."""
    slots: dict[str, int] = field(default_factory=dict)
    """Per pool of states, the request's own."""

    @property
    def rank(self) -> int:
        """Data-parallel rank."""
        return self.space["rank"] or 0

    def lent(self) -> dict[str, int]:
        """Pages that are lent to it, by pool."""
        lent = {ANCHOR: len(self.pages) - self.shared} | {pool: len(pages) for pool, pages in self.own.items()}
        return lent | dict.fromkeys(self.slots, 1)
