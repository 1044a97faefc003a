"""The second half of load backs: fetched pages are written into the pool when that disturbs nobody."""

from collections.abc import Callable

import numpy as np

from purecache.effects.device_pool import DevicePool
from purecache.effects.flights import Flight, Flights
from purecache.effects.host_tier import HostTier


class LoadBacks:
    """Writes fetched pages into the pool, oldest first. Nothing here waits for bytes."""

    def __init__(self, pool: DevicePool, tier: HostTier, flights: Flights, device_pages: int) -> None:
        """device_pages: of a rank."""
        self._pool, self._tier, self._flights, self._device_pages = pool, tier, flights, device_pages
        self._written: list[tuple[Flight, np.ndarray]] = []
        """What the present use of the pool has written: flights, and positions in them."""

    def commit_arrived(self) -> None:
        """Write what has arrived, if the pool is there to be written; a step that has it is not waited for."""
        oldest = next(iter(self._waiting()), None)
        if oldest is not None and oldest.fetches[0].arrived() is not None and self._pool.is_there:
            self._use(self._all_arrived)

    def hurry(self) -> None:
        """Write everything: programs that are dispatched before their bytes have arrived wait for them on device.

        Raises PoolGoneError if the pool was donated and not put back.
        """
        if self._waiting():
            self._use(self._all)

    def fetched(self) -> dict[tuple[int, int], bool]:
        """See `Interpreter.fetched`. None while a step has the pool, which `commit` could then not write."""
        if not self._pool.is_there:
            return {}
        found = {flight.key: (flight, [fetch.arrived() for fetch in flight.fetches]) for flight in self._waiting()}
        return {
            key: all(arrived) and sum(len(fetch.where) for fetch in flight.fetches) == len(flight.ok)
            for key, (flight, arrived) in found.items()
            if None not in arrived
        }

    def fetching(self) -> set[tuple[int, int]]:
        """See `Interpreter.fetching`."""
        return {flight.key for flight in self._waiting() if any(fetch.arrived() is None for fetch in flight.fetches)}

    def commit(self, operation: int, generation: int, ok: bool) -> None:
        """Write all of one load back, or give it up."""
        for flight in self._waiting():
            if flight.key == (operation, generation):
                if ok:
                    self.now(flight)
                self._give_up(flight)

    def _waiting(self) -> list[Flight]:
        return [flight for flight in self._flights.loads if flight.fetches]

    def now(self, flight: Flight) -> None:
        """Write all of one load back. Raises as `hurry` does."""
        self._use(lambda: self._whole(flight))

    def _use(self, action: Callable[[], None]) -> None:
        """Write pages inside `action`. If the pool's owner fails, so do they, and whatever waits."""
        self._written.clear()
        if self._pool.use(action, writes=True):
            return
        for flight, where in self._written:
            flight.ok[where] = False
        for flight in self._waiting():
            self._give_up(flight)

    def _give_up(self, flight: Flight) -> None:
        while flight.fetches:
            self._flights.take(flight)

    def _whole(self, flight: Flight) -> None:
        while flight.fetches:
            if flight.fetches[0].pages is not None or self._flights.fetch_now(flight, flight.fetches[0]):
                self._one(flight)

    def _all(self) -> None:
        for flight in self._flights.loads:
            self._whole(flight)

    def _all_arrived(self) -> None:
        for flight in self._flights.loads:
            while flight.fetches:
                arrived = flight.fetches[0].arrived()
                if arrived is None:
                    return
                if arrived:
                    self._one(flight)
                else:
                    self._flights.take(flight)
                self._flights.fetch()

    def _one(self, flight: Flight) -> None:
        fetch = self._flights.take(flight)
        target = flight.transfer.target[fetch.where] + np.int32(flight.transfer.rank * self._device_pages)
        flight.ok[fetch.where] = self._pool.write(lambda arrays: self._tier.commit(arrays, fetch.pages, target))
        self._written.append((flight, fetch.where))
