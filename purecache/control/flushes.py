"""Emptying a tier, a part per tick."""

from collections.abc import Generator

import numpy as np

from purecache.answers import Node
from purecache.cache import PrefixCache
from purecache.state import NONE
from purecache.state.layout import Column, Tier

PER_TICK = 1024
"""Pages that one tick evicts."""
LEAVES_PER_TICK = 64
"""Paths that one tick begins to copy to host."""


def flush(cache: PrefixCache, tier: Tier) -> Generator[None, None, dict[str, int]]:
    """Evict all that nothing holds from a tier, of every pool; from the device, what the write policy would copy to
    host is copied there first, as far as there is room. Returns pages freed and copied."""
    copied = 0
    if tier == Tier.DEVICE and cache.config.backup_hits:
        while (started := _save(cache)) > 0:
            copied += started
            yield
    freed = 0
    evict = cache.evict if tier == Tier.DEVICE else cache.evict_host
    for pool in cache.config.pool_names:
        while (number := evict(PER_TICK, pool=pool)) > 0:
            freed += number
            yield
    return {"freed": freed, "copied": copied}


def _save(cache: PrefixCache) -> int:
    """Begin to copy to host what some paths lack there; returns how many pages."""
    rows = (
        Column.DEVICE_PAGE,
        Column.HOST_PAGE,
        Column.INCOMING_PAGE,
        Column.DEVICE_CHILDREN,
        Column.HITS,
        Column.PARENT,
    )
    device, host, incoming, children, hits, parent = cache.columns(*rows)
    leaves = (parent != NONE) & (device >= 0) & (children == 0)
    bare = leaves & (host < 0) & (incoming < 0) & (hits >= cache.config.backup_hits)
    clock, started = cache.clock, 0
    for node in np.flatnonzero(bare)[:LEAVES_PER_TICK].tolist():
        started += cache.backup(Node(node, clock), hits=cache.config.backup_hits)
    return started
