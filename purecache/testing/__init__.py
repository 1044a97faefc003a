"""Checks for whoever implements a part that purecache lets others implement.

- `check_store`: a store of pages, `purecache.stores.Store`.
- `check_prefix_cache`: a prefix cache of the shape that sglang-jax's scheduler uses.
"""

from purecache.testing.memory import HostTier
from purecache.testing.pools import KVPool, PagedSlots, TokenSlots
from purecache.testing.prefix_caches import check_prefix_cache
from purecache.testing.scheduling import Scheduling
from purecache.testing.stand_ins import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    Request,
    RequestRows,
    Vocabulary,
)
from purecache.testing.stores import check_store
from purecache.testing.workload import Workload

__all__ = [
    "CacheInitParams",
    "EvictParams",
    "HostTier",
    "InsertParams",
    "KVPool",
    "MatchPrefixParams",
    "PagedSlots",
    "RadixKey",
    "Request",
    "RequestRows",
    "Scheduling",
    "TokenSlots",
    "Vocabulary",
    "Workload",
    "check_prefix_cache",
    "check_store",
]
