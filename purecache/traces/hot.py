"""Which prefixes a workload uses most, whatever a cache makes of it: the tree of all prompts, runs of pages joined."""

import numpy as np

from purecache.traces.outcome import Hot
from purecache.workloads import PagedTrace
from purecache.workloads.paging import TOP

MOST = 200
"""Stretches that are named, about: what is above them comes on top."""


def hot_stretches(trace: PagedTrace, most: int = MOST) -> tuple[Hot, ...]:
    """The stretches of pages with the most tokens times uses, and what is above them; parents before children."""
    parents, uses = trace.parents, np.bincount(trace.ids, minlength=trace.distinct)
    above = np.where(parents >= 0, parents, 0)
    children = np.bincount(parents[parents >= 0], minlength=trace.distinct)
    # Pages are numbered as they come, so that parents have the smaller numbers. A page goes on with the stretch of its
    # parent if it is the only child and is used as often.
    joins = (parents >= 0) & (children[above] == 1) & (uses == uses[above])
    first, depth = np.arange(trace.distinct), np.zeros(trace.distinct, np.int64)
    for page in np.flatnonzero(parents >= 0).tolist():
        depth[page] = depth[parents[page]] + 1
        if joins[page]:
            first[page] = first[parents[page]]
    length = np.bincount(first, minlength=trace.distinct)
    chosen: set[int] = set()
    heads = np.flatnonzero(length)
    for head in heads[np.argsort(-(length * uses)[heads], kind="stable")][:most].tolist():
        while head != TOP and head not in chosen:
            chosen.add(head)
            head = int(first[parents[head]]) if parents[head] >= 0 else TOP
    size = trace.page_tokens
    return tuple(
        Hot(
            id=head,
            parent=int(first[parents[head]]) if parents[head] >= 0 else TOP,
            depth=int(depth[head]) * size,
            tokens=int(length[head]) * size,
            uses=int(uses[head]),
        )
        for head in sorted(chosen)
    )
