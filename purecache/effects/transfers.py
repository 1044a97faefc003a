"""What goes into the data plane and what comes out: transfers, completions, the hook for tests, and the two errors."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from purecache.transitions import TransferKind


class PoolGoneError(RuntimeError):
    """The device pool was deleted by its owner: it was donated to a step and the new pool was not put back."""


class PoolLostError(RuntimeError):
    """A load back failed while it owned the device pool, so the contents of every device page are gone."""


class PoolOwner(Protocol):
    """Who keeps the device pool, if it is not the interpreter: an engine whose steps donate it."""

    def access(self) -> AbstractContextManager[object]:
        """Inside, nobody else donates the pool. Waits for a step that is just being dispatched, not for its end."""
        ...

    def take(self) -> Any:
        """The pool as it is now."""
        ...

    def put(self, pool: Any) -> None:
        """Keep this one from now on; the one that was taken has been donated."""
        ...


@dataclass(frozen=True, eq=False)
class Transfer:
    """One operation's copies: page `source[k]` of one tier goes to page `target[k]` of the other, for every k.

    The order of k means nothing to the data plane; `Completion.ok` answers in the same order.
    """

    operation: int
    """Number of the operation, handed back in the completion."""
    generation: int
    """Generation of the operation, handed back in the completion."""
    kind: TransferKind
    """BACKUP: device to host. LOAD_BACK: host to device."""
    rank: int
    """Data-parallel rank that all pages belong to, 0 <= rank < ranks."""
    source: np.ndarray
    """int32[n] page ids local to the rank, in the tier that is read."""
    target: np.ndarray
    """int32[n] page ids local to the rank, in the tier that is written, each at most once."""
    pool: int = 0
    """Number of the pool in the control plane, handed back in the completion; see `Planes`."""


@dataclass(frozen=True, eq=False)
class Completion:
    """How a transfer ended, page by page."""

    operation: int
    """As in the transfer."""
    generation: int
    """As in the transfer."""
    kind: TransferKind
    """As in the transfer."""
    ok: np.ndarray
    """bool[n]: the bytes of page k are in its target. False is a miss: the target's bytes are then undefined."""
    pool: int = 0
    """As in the transfer."""
    rank: int = 0
    """As in the transfer."""
    pages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32[n]: the targets of the transfer."""


def completion_of(transfer: Transfer, ok: np.ndarray) -> Completion:
    """How a transfer ended."""
    names = (transfer.operation, transfer.generation, transfer.kind)
    return Completion(*names, ok, transfer.pool, transfer.rank, transfer.target)


class Gate:
    """Where a test or a simulator makes transfers fail or take long. This one lets everything through."""

    def failing(self, transfer: Transfer) -> np.ndarray | None:
        """bool[n]: the pages of `transfer` that fail; they are not copied. None: none. Raising fails every page of it.

        Called once per transfer, right before its copies are dispatched. `transfer` holds private copies of the ids.
        """
        return None

    def held(self, transfer: Transfer) -> bool:
        """Whether the completion of `transfer` is kept back at this poll. `drain` does not ask."""
        return False
