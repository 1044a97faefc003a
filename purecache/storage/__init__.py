"""The third tier: pages that leave host memory for a store and come back. The stores are in `purecache.stores`."""

from purecache.storage.options import EndPolicy, StorageOptions
from purecache.storage.prefetch import Prefetch
from purecache.storage.reader import Progress
from purecache.storage.tier import StorageTier

__all__ = ["EndPolicy", "Prefetch", "Progress", "StorageOptions", "StorageTier"]
