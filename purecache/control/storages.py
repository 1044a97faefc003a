"""How an operator attaches storage: which stores may be opened, under which names pages go there."""

from dataclasses import dataclass
from typing import Protocol

from purecache.cache import PrefixCache
from purecache.storage.options import StorageOptions
from purecache.storage.pool_pages import Namings
from purecache.storage.tier import StorageTier
from purecache.stores.envelope import TRAILER
from purecache.stores.interface import Store
from purecache.stores.registry import SCHEMES, open_store


class Storages(Protocol):
    """What `Operator` needs to attach and detach storage. A server that keeps track of its storage brings its own."""

    def open(self, url: str) -> Store:
        """The store of a URL. Called on the thread that asks, may take its time; ValueError, OSError or ImportError."""
        ...

    def attach(self, cache: PrefixCache, store: Store) -> None:
        """Put it under the cache. Called on the cache's thread; ValueError where it can't be."""
        ...

    def detach(self, cache: PrefixCache) -> bool:
        """Take storage off the cache; whether there was any. Called on the cache's thread, so it must not wait."""
        ...


@dataclass(frozen=True)
class PlainStorages:
    """Storage of a cache that nobody else attaches any to.

    naming: see `StorageTier`. page_bytes: of the largest page that is an object. Only the schemes of `open_store` may
    be opened, no classes or plug-ins: who may attach storage should not be able to run any code.
    """

    naming: Namings
    page_bytes: int
    options: StorageOptions | None = None
    schemes: tuple[str, ...] = SCHEMES

    def open(self, url: str) -> Store:
        """See `Storages.open`."""
        scheme, colon, _ = url.partition(":")
        if not colon or scheme not in self.schemes:
            raise ValueError(f"the URL of a store begins with one of {', '.join(self.schemes)}")
        return open_store(url, self.page_bytes + TRAILER)

    def attach(self, cache: PrefixCache, store: Store) -> None:
        """See `Storages.attach`."""
        StorageTier(cache, store, self.naming, self.options)

    def detach(self, cache: PrefixCache) -> bool:
        """See `Storages.detach`."""
        tier = cache._driver.storage
        if tier is None:
            return False
        tier.detach(timeout=0.0)
        return True
