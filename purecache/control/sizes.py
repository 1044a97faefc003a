"""Sizes that a cache is on its way to: what is locked or in flight makes a smaller tier a matter of several ticks."""

from typing import Any

from purecache.cache import PrefixCache
from purecache.state.pools import ANCHOR

PER_TICK = 256
"""Pages per tier and rank that change hands in one tick."""


class Sizes:
    """An `Observer` that goes on with `PrefixCache.resize` until it is done. Use it on the cache's thread."""

    def __init__(self, cache: PrefixCache) -> None:
        """Observe `cache`."""
        self._cache = cache
        self._wanted: dict[tuple[str, int, str], int] = {}
        """Pages by name of the argument of `resize`, rank and pool."""
        cache.observe(self)

    def resize(
        self, *, device_pages: int | None, host_pages: int | None, rank: int | None = None, pool: str = ANCHOR
    ) -> dict[str, Any]:
        """Begin to use so many pages; see `PrefixCache.resize`, also for errors. Returns what is in use, and `wanted`.

        A later call for the same tier and rank takes the place of this one.
        """
        given = {"device_pages": device_pages, "host_pages": host_pages}
        wanted = {name: pages for name, pages in given.items() if pages is not None}
        self._cache.resize(**wanted, rank=rank, pool=pool, most=0)  # raises for what can't be
        for each in range(self._cache.config.ranks) if rank is None else (rank,):
            self._wanted |= {(name, each, pool): pages for name, pages in wanted.items()}
        self.ticked(self._cache)
        return self._cache.resize(rank=rank, pool=pool)._asdict() | {"wanted": self.wanted()}

    def wanted(self) -> list[dict[str, Any]]:
        """Sizes that have not been reached."""
        return [{"rank": rank, "pool": pool, name: pages} for (name, rank, pool), pages in self._wanted.items()]

    def ticked(self, cache: PrefixCache) -> None:
        """Go on."""
        if not self._wanted:
            return
        for key, pages in list(self._wanted.items()):
            name, rank, pool = key
            reached = cache.resize(**{name: pages}, rank=rank, pool=pool, most=PER_TICK)
            if getattr(reached, name) == pages:
                del self._wanted[key]

    def close(self) -> None:
        """Go on no more, and observe no more."""
        self._wanted.clear()
        self._cache.unobserve(self)
