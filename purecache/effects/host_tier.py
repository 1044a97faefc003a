"""What the interpreter asks of an L2, whatever its form."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

Arrays = tuple[jax.Array, ...]


class HostTier(Protocol):
    """Host pages by global id (rank * pages per rank + local id). Ids are int32 arrays, checked by the caller.

    `device` is the device pool, or a pool of the same pages but another number of them, on its way from or to storage.
    """

    epoch: int
    """Grows when pages of unfinished backups were lost: a backup of an older epoch did not arrive."""
    valid: np.ndarray
    """bool[pages]: a backup of the page was dispatched and is not known to have failed."""

    staged: bool
    """Whether `fetch` moves the bytes, so that the pool is free meanwhile."""

    def sizes(self, count: int) -> list[int]:
        """How `count` pages are cut into calls: positive sizes that add up to `count`."""
        ...

    def backup(self, device: Arrays, source: np.ndarray, target: np.ndarray) -> Any:
        """Dispatch the copy of device pages `source` to host pages `target`.

        Returns what gets ready, as a `jax.Array` does, when they are there.

        One call takes one of `sizes`. May raise anything; then no page of `target` holds what it should, and the tier
        is usable again.
        """
        ...

    def fetch(self, source: np.ndarray) -> Any:
        """The host pages `source` for `commit`. If `staged`, the copy to arrays on device that it starts is not waited
        for; else nothing moves yet.

        One call takes one of `sizes`. May raise anything.
        """
        ...

    def commit(self, device: Arrays, fetched: Any, target: np.ndarray) -> Arrays:
        """Dispatch the copy of fetched pages to device pages `target`; `device` is donated to it.

        May raise anything; the arrays in `device` may then be deleted.
        """
        ...

    def broken(self, epoch: int) -> None:
        """A backup dispatched in `epoch` turned out to have failed while running."""
        ...

    def drop(self, pages: np.ndarray) -> None:
        """The pages were given up: return their memory, if they have any of their own."""
        ...

    def reset(self) -> None:
        """Forget all pages."""
        ...

    def warm(self, progress: Callable[[int, int, str], None] | None) -> None:
        """Compile every program; calls `progress(done, total, name)` after each."""
        ...

    def prepare(self, device: Arrays) -> None:
        """Compile the programs for another pool of the same pages."""
        ...

    def programs(self) -> list[dict[str, Any]]:
        """One entry per compiled program."""
        ...
