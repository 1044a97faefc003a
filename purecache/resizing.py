"""Making the tiers of a running cache smaller and larger, within what it was built with."""

from typing import NamedTuple

from purecache.answers import CacheError, check
from purecache.driver import Driver
from purecache.entries import of_pool
from purecache.state import CacheConfig
from purecache.state.layout import Account, Tier
from purecache.transitions import Status

AT_ONCE = 256
"""Pages that one transition takes out of use or into it: one program serves every size."""


class Resized(NamedTuple):
    """Pages of a pool that are in use: of the rank asked for, or of the rank that has most."""

    device_pages: int
    host_pages: int


class Resizing:
    """Carries out `PrefixCache.resize`."""

    def __init__(self, config: CacheConfig, driver: Driver) -> None:
        self._config, self._driver = config, driver

    def in_use(self, tier: Tier, rank: int, pool: int) -> int:
        """Pages of a tier, rank and pool that are in use."""
        layout = self._config.layout
        withheld = self._driver.books()[layout.account(Account.WITHHELD, tier, rank, pool)]
        return layout.capacity(tier, pool) - int(withheld)

    def resize(self, wanted: dict[Tier, int], rank: int | None, pool: str, most: int | None) -> Resized:
        """Go towards the `wanted` pages of each tier named, `most` pages of each tier and rank at most."""
        number = self._config.pool_of(pool)
        for tier, pages in wanted.items():
            self._check(tier, pages, number, pool)
        if rank is not None and not 0 <= rank < self._config.ranks:
            check(Status.BAD_RANK)
        ranks = range(self._config.ranks) if rank is None else (rank,)
        for tier, pages in wanted.items():
            for each in ranks:
                self._move(tier, each, number, pages, most)
        device, host = (max(self.in_use(tier, each, number) for each in ranks) for tier in (Tier.DEVICE, Tier.HOST))
        return Resized(device, host)

    def _check(self, tier: Tier, pages: int, number: int, pool: str) -> None:
        name, capacity = f"{tier.name.lower()}_pages", self._config.layout.capacity(tier, number)
        if tier == Tier.DEVICE and self._config.external_pages:
            text = "an allocator outside the cache has the device pages: take them from it"
            raise CacheError(Status.BAD_LENGTH, text)
        least = 1 if tier == Tier.DEVICE else 0
        if isinstance(pages, bool) or not isinstance(pages, int) or not least <= pages <= capacity:
            text = f"{name} of {pool} must be an int from {least} to {capacity}, what the cache was built with"
            raise CacheError(Status.BAD_LENGTH, f"{text}: got {pages!r}")

    def _move(self, tier: Tier, rank: int, pool: int, pages: int, most: int | None) -> None:
        """Change the pages in use of one tier and rank until they are as wanted, or nothing moves any more."""
        left = abs(self.in_use(tier, rank, pool) - pages) if most is None else most
        size = self._driver.programs.bucket(AT_ONCE)
        while left > 0 and (change := pages - self.in_use(tier, rank, pool)):
            verb = "grow" if change > 0 else "shrink"
            asked = min(abs(change), left, AT_ONCE, size)
            reply = self._driver.run(of_pool(f"{verb}_{tier.name.lower()}", pool), size, rank, asked)
            check(reply.status)
            if verb == "shrink" and tier == Tier.HOST:
                self._driver.drop_host(reply.pages[: reply.number], rank, pool)
            left -= reply.number
            if reply.number < asked:
                return
