"""What looks on at a cache while it works: metrics, events for routers, leases, an operator's commands."""

import logging
from typing import Any, Generic, Protocol, TypeVar

Cache = TypeVar("Cache")
Seen = TypeVar("Seen", contravariant=True)
_LOG = logging.getLogger(__name__)


class Observer(Protocol[Seen]):
    """Called on the thread of the cache, between two steps of the scheduler. It may call the cache, but not `tick`."""

    def ticked(self, cache: Seen, /) -> Any:
        """A tick of the cache has ended. Must be quick; what it raises ends its observing, and nothing else."""
        ...


class Observers(Generic[Cache]):
    """The observers of one cache, called in the order in which they came."""

    def __init__(self) -> None:
        self._all: list[Observer[Cache]] = []

    def add(self, observer: Observer[Cache]) -> None:
        """Call `observer` at every tick from now on. Raises ValueError if it is called already."""
        if observer in self._all:
            raise ValueError(f"{observer!r} observes this cache already")
        self._all.append(observer)

    def remove(self, observer: Observer[Cache]) -> None:
        """Call `observer` no more. Raises ValueError if it is not called."""
        if observer not in self._all:
            raise ValueError(f"{observer!r} does not observe this cache: its observing may have ended by an error")
        self._all.remove(observer)

    def ticked(self, cache: Cache) -> None:
        """Call all of them. One that raises is logged and dropped: a scheduler must not fail for who looks on."""
        for observer in tuple(self._all):
            try:
                observer.ticked(cache)
            except Exception:
                _LOG.exception("%r raised, and observes the cache no longer", observer)
                self._all = [other for other in self._all if other is not observer]
