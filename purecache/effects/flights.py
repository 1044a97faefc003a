"""Transfers under way: what was dispatched of them, what waits, and how they ended."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from purecache.effects.host_tier import HostTier
from purecache.effects.transfers import Transfer
from purecache.transitions import TransferKind


@dataclass(eq=False)
class Part:
    """One dispatched program of a backup."""

    where: np.ndarray
    """Positions in the transfer that it copies."""
    token: Any
    """Gets ready when the bytes are there."""
    epoch: int
    """Of the tier, at dispatch."""


@dataclass(eq=False)
class Fetch:
    """Pages of a load back that are not in the pool yet."""

    where: np.ndarray
    """Positions in the transfer."""
    pages: Any = None
    """What the tier fetched, or None before that."""

    def arrived(self) -> bool | None:
        """Whether the bytes are on device and right; None while they are under way or not fetched."""
        if self.pages is None:
            return None
        arrays = jax.tree.leaves(self.pages)
        try:
            if not all(array.is_ready() for array in arrays):
                return None
            jax.block_until_ready(arrays)  # raises what made a copy fail
        except Exception:
            return False
        return True


@dataclass(eq=False)
class Flight:
    """A started transfer that was not reported yet."""

    number: int
    transfer: Transfer
    ok: np.ndarray
    parts: list[Part] = field(default_factory=list)
    fetches: deque[Fetch] = field(default_factory=deque)

    @property
    def key(self) -> tuple[int, int]:
        """Operation and generation."""
        return self.transfer.operation, self.transfer.generation

    @property
    def done(self) -> bool:
        """Whether all of it has ended, well or not."""
        return not self.fetches and all(is_ready(part.token) for part in self.parts)


def is_ready(token: Any) -> bool:
    """Whether waiting for `token` returns at once; a program that failed counts as ready."""
    try:
        return token.is_ready()
    except Exception:
        return True


class Flights:
    """All transfers under way, by kind and in the order of their start, and the staging memory of load backs."""

    def __init__(self, tier: HostTier, host_pages: int, staging_pages: int) -> None:
        """host_pages: of a rank. staging_pages: most pages that load backs hold in staging arrays at a time."""
        self._tier, self._host_pages, self._most = tier, host_pages, staging_pages
        self._by_kind: dict[TransferKind, deque[Flight]] = {kind: deque() for kind in TransferKind}
        self._started = 0
        self._staged = 0

    def __len__(self) -> int:
        return sum(len(flights) for flights in self._by_kind.values())

    def open(self, transfer: Transfer) -> Flight:
        """Add a transfer of which no page has arrived."""
        flight = Flight(self._started, transfer, np.zeros(len(transfer.target), bool))
        self._started += 1
        self._by_kind[transfer.kind].append(flight)
        return flight

    @property
    def loads(self) -> Iterable[Flight]:
        """The load backs, oldest first."""
        return self._by_kind[TransferKind.LOAD_BACK]

    def wait_for(self, flight: Flight, where: np.ndarray) -> None:
        """Have pages of a load back fetched, as soon as there is room in the staging memory."""
        arrived = self._tier.valid[self._source(flight, where)]
        first, where = 0, where[arrived]
        for size in self._tier.sizes(len(where)):
            flight.fetches.append(Fetch(where[first : first + size]))
            first += size

    def fetch(self, whole: bool = False) -> None:
        """Start the fetches that have room, oldest first. `whole`: all of a load back at once, or none of it."""
        for flight in self.loads:
            waiting = [fetch for fetch in flight.fetches if fetch.pages is None]
            pages = sum(len(fetch.where) for fetch in waiting)
            for place, fetch in enumerate(waiting):
                needed = len(fetch.where) if not whole else 0 if place else pages
                if self._staged and needed and self._staged + needed > self._most:
                    return
                self.fetch_now(flight, fetch)

    def fetch_now(self, flight: Flight, fetch: Fetch) -> bool:
        """Start one fetch, room or not. One that can't be started is a miss: it is taken out, and the answer False."""
        try:
            fetch.pages = self._tier.fetch(self._source(flight, fetch.where))
        except Exception:
            flight.fetches.remove(fetch)
            return False
        self._staged += len(fetch.where)
        return True

    def take(self, flight: Flight) -> Fetch:
        """The oldest fetch of a load back, which leaves the staging memory."""
        fetch = flight.fetches.popleft()
        self._staged -= len(fetch.where) if fetch.pages is not None else 0
        return fetch

    def ended(self, held: Any) -> list[Flight]:
        """Take out what has ended and is not `held(transfer)`; of one kind never a younger one before an older one."""
        found = []
        for flights in self._by_kind.values():
            while flights and flights[0].done and not held(flights[0].transfer):
                found.append(flights.popleft())
        return sorted(found, key=lambda flight: flight.number)

    def settle(self) -> None:
        """Wait for the bytes of all that was dispatched."""
        for flight in (flight for flights in self._by_kind.values() for flight in flights):
            for token in [part.token for part in flight.parts] + jax.tree.leaves([f.pages for f in flight.fetches]):
                try:
                    token.block_until_ready()
                except Exception:
                    continue  # whoever reports it finds out

    def clear(self) -> list[Flight]:
        """Take out all, in the order of their start."""
        found = [flight for flights in self._by_kind.values() for flight in flights]
        for flights in self._by_kind.values():
            flights.clear()
        self._staged = 0
        return sorted(found, key=lambda flight: flight.number)

    def _source(self, flight: Flight, where: np.ndarray) -> np.ndarray:
        return flight.transfer.source[where] + np.int32(flight.transfer.rank * self._host_pages)
