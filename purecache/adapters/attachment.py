"""Storage attached and detached while a server runs, in the terms of sglang's HTTP control."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from purecache.adapters.prefetches import Prefetches
from purecache.storage.reader import EndPolicy
from purecache.storage.tier import StorageOptions
from purecache.stores.envelope import TRAILER
from purecache.stores.names import Naming
from purecache.stores.registry import open_store

UPSTREAM = {
    "prefetch_threshold": "threshold",
    "prefetch_timeout_base": "timeout_base",
    "prefetch_timeout_per_ki_token": "timeout_per_1024",
}
"""sglang's names of options of `StorageOptions`."""

Answer = tuple[bool, str]
"""Whether it was done, and a sentence."""


@dataclasses.dataclass(frozen=True)
class Shelf:
    """What a cache must know to attach storage."""

    naming: Naming
    page_bytes: int


def attach(
    prefetches: Prefetches, shelf: Shelf | None, spec: str, extra_json: str | None, policy: str | None
) -> Answer:
    """Open the store `spec` (see `open_store`) and put it under the cache. Never raises for what is asked of it.

    extra_json: an object; what `StorageOptions` has, under its names or sglang's, goes there, the rest to the store.
    policy: of prefetches, None: as in the options.
    """
    if prefetches.tier is not None:
        return False, "storage is attached already: detach it first"
    if shelf is None:
        return False, "this cache has no host memory, or was made without names for what it would store"
    try:
        given: dict[str, Any] = json.loads(extra_json or "{}")
        extra = {UPSTREAM.get(name, name): value for name, value in given.items()}
        known = {field.name for field in dataclasses.fields(StorageOptions)}
        settings: dict[str, Any] = {name: extra.pop(name) for name in known & set(extra)}
        if policy is not None:
            settings["policy"] = policy
        if "policy" in settings:
            settings["policy"] = EndPolicy(settings["policy"])
        prefetches.attach(
            open_store(spec, shelf.page_bytes + TRAILER, **extra), shelf.naming, StorageOptions(**settings)
        )
    except Exception as error:
        return False, f"storage was not attached: {error}"
    return True, f"storage is attached: {spec}"


def detach(prefetches: Prefetches) -> Answer:
    """Take storage off the cache; what it has stays there."""
    return _done(prefetches.detach, "storage is detached")


def clear(prefetches: Prefetches) -> bool:
    """Remove all objects of the store, if there is one that can; whether it was asked to. Waits for the store."""
    return prefetches.store is not None and _done(prefetches.store.clear, "")[0]


def _done(action: Callable[[], Any], text: str) -> Answer:
    try:
        action()
    except Exception as error:
        return False, str(error)
    return True, text
