"""What an adapter knows of pools beside full attention: window pages and recurrent states, which schedulers own too."""

from typing import Protocol

import numpy as np


class Tail(Protocol):
    """The scheduler's side of one tail pool. Values are page ids local to a rank; 0 is padding and none of them.

    Like the slots of full attention, all values belong to the scheduler's own allocator, to requests or to the tree;
    what leaves the tree is free in the allocator at once.
    """

    def offered(self, pages: np.ndarray, rank: int) -> np.ndarray:
        """int32[n]: the value that goes with each of a request's device pages [n], NONE where there is none."""
        ...

    def settle(self, mine: np.ndarray, trees: np.ndarray, values: np.ndarray, rank: int) -> None:
        """The tree took over a request's pages.

        mine, trees: int32[n] each, the pages that the request gave and those that the tree has. values: int32[n], what
        the tree has there, or NONE. The caller frees pages of `mine` that are not among `trees`, and the values that
        still go with them.
        """
        ...

    def loaded(self, pages: np.ndarray, values: np.ndarray, rank: int) -> None:
        """The tree has brought values [n] (NONE: none) of its device pages [n] back from host."""
        ...

    def lend(self, number: int, rank: int) -> np.ndarray:
        """int32[at most number]: free values, for the tree to load into."""
        ...

    def take(self, values: np.ndarray, rank: int) -> None:
        """Free values int32[n] that the tree has given up. Pages of full attention that go with them are freed after
        this."""
        ...

    def reset(self) -> None:
        """The tree has forgotten everything, and the scheduler clears its allocator."""
        ...
