"""The shapes of caches that runs use: few, so that runs share compiled programs."""

from dataclasses import dataclass
from typing import Any

from purecache.state import CacheConfig, Checkpoint, PoolSpec, Window

_SMALL = {"page_size": 2, "device_pages": 8, "host_pages": 6, "ranks": 2, "levels": 4, "load_back_threshold": 0}


@dataclass(frozen=True)
class Profile:
    """The shape of a cache and the prompts that fit to it."""

    sizes: dict[str, Any]
    """Arguments of `CacheConfig`."""
    longest: int
    """Tokens of the longest prompt with its answer."""
    objects: int
    """Objects that the store has room for."""
    smallest: int = 16
    """Pages of the smallest program."""

    def config(self, **policies: Any) -> CacheConfig:
        """A configuration of this shape."""
        return CacheConfig(**(self.sizes | policies))


PROFILES = {
    "small": Profile(_SMALL | {"max_operations": 4, "max_receipts": 6}, 15, 40),
    "hybrid": Profile(
        _SMALL
        | {
            "max_operations": 64,
            "max_receipts": 6,
            "pools": (
                PoolSpec("indexer", anchor="kv"),
                PoolSpec("window", Window(3), device_pages=5, host_pages=4),
                PoolSpec("state", Checkpoint(), device_pages=4, host_pages=3),
            ),
        },
        13,
        120,
    ),
    "large": Profile(
        {
            "page_size": 4,
            "device_pages": 48,
            "host_pages": 72,
            "levels": 4,
            "max_operations": 16,
            "max_receipts": 24,
        },
        90,
        200,
        128,
    ),
}
"""By name. The small ones are full all the time, which is where the mistakes are."""
