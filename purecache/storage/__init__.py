"""The third tier: pages that leave host memory for a store and come back. The stores are in `purecache.stores`."""

from purecache.storage.reader import EndPolicy, Prefetch, Progress
from purecache.storage.tier import StorageOptions, StorageTier

__all__ = ["EndPolicy", "Prefetch", "Progress", "StorageOptions", "StorageTier"]
