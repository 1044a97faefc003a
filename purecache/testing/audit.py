"""Who owns which slot, seen from outside of a cache; and whether what it has cached is right."""

from typing import Any, Protocol

import numpy as np

from purecache.testing.device import check_bytes
from purecache.testing.pools import marks_of


class Audited(Protocol):
    """What is looked at of a scheduler's life; see `Scheduling`."""

    caller: Any
    allocator: Any
    cache: Any
    host: Any
    pool: Any
    rows: Any
    requests: Any
    page_size: int
    is_eagle: bool


def audit(run: Audited) -> None:
    """Every slot is free, or a request's own, or the cache's; and the cache counts its own right."""
    sizes = run.caller.sizes()
    for rank, (free, evictable, protected) in enumerate(sizes):
        taken, where = run.allocator.owned(rank), f"rank {rank}"
        own, used = _requests_slots(run, rank, taken)
        cached = len(taken) - len(own)
        total = f"{run.allocator.size_per_rank} slots are {free} free, {len(own)} of requests, and {cached} others"
        told = f"but the cache tells of {evictable} evictable and {protected} protected"
        difference = cached - evictable - protected
        name = "leaked" if difference > 0 else "owned twice or freed wrongly"
        assert not difference, f"{where}: {abs(difference)} slots are {name}: {total}, {told}"
        assert protected >= len(used), f"{where}: requests use {len(used)} slots of the cache, {told}"
    told = run.caller.call("total_size")
    told = told[0] if isinstance(told, tuple) else told
    wanted = sum(evictable + protected for _, evictable, protected in sizes)
    assert told == wanted, f"total_size is {told}, but evictable and protected sizes are {wanted} in all"
    if run.host.pages is not None:
        free, total = run.host.pages(run.cache)
        assert 0 <= free <= total, f"{free} of {total} host pages are free"


def _requests_slots(run: Audited, rank: int, taken: np.ndarray) -> tuple[set[int], set[int]]:
    """The slots that are requests' own, and those of the cache that requests use."""
    own: set[int] = set()
    used: set[int] = set()
    for request in run.rows.owners.values():
        if request.rank != rank:
            continue
        slots = run.rows.slots(request, 0, request.kv_allocated_len)
        protected = request.cache_protected_len
        size = run.page_size
        pages = np.unique(slots[protected:] // size)
        mine = set((pages[:, None] * size + np.arange(size)).reshape(-1).tolist())
        twice = sorted(mine & own)
        assert not twice, f"rank {rank}: slot {twice[:1]} is that of {request}, and of another request"
        own |= mine
        used |= set(slots[:protected].tolist())
        free = sorted((mine | used) - set(taken.tolist()))
        assert not free, f"rank {rank}: slot {free[:1]} is free, but {request} uses it"
    both = sorted(own & used)
    assert not both, f"rank {rank}: slot {both[:1]} is a request's own, and another request has it from the cache"
    return own, used


def audit_contents(run: Audited) -> None:
    """When idle: nothing is locked; prefixes of all requests so far have the right bytes; nothing else is cached."""
    for rank, (_, evictable, protected) in enumerate(run.caller.sizes()):
        assert protected == 0, f"rank {rank}: nothing runs, but {protected} slots are protected: a lock was not undone"
        there, found = run.pool.read(rank), set()
        for request in run.requests:
            if request.rank != rank:
                continue
            tokens = request.origin_input_ids + request.output_ids
            match = run.caller.match(run.caller.key(tokens, request.extra_key, request.dp_rank))
            slots = match.device_indices
            length = len(slots)
            marks = marks_of(tokens, request.extra_key, run.is_eagle)
            check_bytes(run.pool, there, slots, marks[:length], f"{request} has ended and its prefix is cached")
            found |= set(slots.tolist())
        free = sorted(found - set(run.allocator.owned(rank).tolist()))
        assert not free, f"rank {rank}: match_prefix answers slot {free[:1]}, which is free"
        lost = f"but all that was ever computed matches only {len(found)}"
        assert len(found) == evictable, f"rank {rank}: the cache tells of {evictable} evictable slots, {lost}"
