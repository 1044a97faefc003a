"""Checks of what callers hand to the data plane. They raise before anything is dispatched and return private copies."""

from typing import Any

import numpy as np

from purecache.effects.transfers import Transfer
from purecache.transitions import TransferKind


def positive(name: str, value: int) -> int:
    """`value` as an int > 0. Raises ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value <= 0:
        raise ValueError(f"{name} is {value!r}, expected an int > 0")
    return int(value)


def checked_pages(what: str, pages: Any, rank: int, ranks: int, limit: int) -> np.ndarray:
    """A copy of `pages` as int32[n], each in [0, limit). Raises ValueError, also for a rank outside [0, ranks)."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is out of range: there are {ranks}")
    array = np.array(pages)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{what} ids must be a vector of integers, found {array.dtype}{list(array.shape)}")
    if array.size and (array.min() < 0 or array.max() >= limit):
        wrong = array[(array < 0) | (array >= limit)][0]
        raise ValueError(f"{what} id {wrong} is out of range: rank {rank} has {limit} pages")
    return array.astype(np.int32, copy=False)


def checked_transfer(transfer: Transfer, ranks: int, device_pages: int, host_pages: int) -> Transfer:
    """`transfer` with private copies of its ids.

    Raises ValueError for an unknown kind, lengths that differ, ids or a rank out of range, and a target given twice.
    """
    kind = TransferKind(transfer.kind)
    tiers = (("device page", device_pages), ("host page", host_pages))
    read, written = tiers if kind is TransferKind.BACKUP else tiers[::-1]
    source = checked_pages(f"source {read[0]}", transfer.source, transfer.rank, ranks, read[1])
    target = checked_pages(f"target {written[0]}", transfer.target, transfer.rank, ranks, written[1])
    if len(source) != len(target):
        raise ValueError(f"a transfer needs as many sources as targets, found {len(source)} and {len(target)}")
    if len(set(target.tolist())) < len(target):
        ids, counts = np.unique(target, return_counts=True)
        raise ValueError(f"target {written[0]} {ids[counts > 1][0]} is given twice in one transfer")
    return Transfer(transfer.operation, transfer.generation, kind, transfer.rank, source, target, transfer.pool)
