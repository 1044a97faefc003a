"""What the cache has of a prompt, and how deep a prefix storage could make of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.answers import Node
from purecache.driver import Driver
from purecache.state import NONE, Tier
from purecache.state.layout import Column, Layout

STRIDE = 64
"""Nodes that are compared at once along a run of consecutive ids."""


@dataclass(frozen=True, eq=False)
class Known:
    """What the cache has of a prompt. Lengths in pages."""

    usable: int
    """As far as the law of every pool holds."""
    full: int
    """As far as kv is on device or on host."""
    anchor: Node
    """The node at the end of `full`."""
    values: tuple[np.ndarray, ...]
    """Per tail pool bool[pages of the prompt]: where it has a value on device or host, as far as a deeper prefix than
    `usable` may need it."""


def look_up(driver: Driver, layout: Layout, prompt: tuple[Any, ...]) -> Known:
    """What the cache has of a prompt now. Touches nothing."""
    pages = int(prompt[1])
    found = driver.run("peek", driver.programs.bucket(pages), *prompt)
    usable, full = found.length, found.full_length
    anchor = Node(found.node, found.clock)
    if not layout.tails:
        return Known(usable, full, anchor, ())
    nodes, tokens = driver.views()
    low = min(first_needed(layout, pool, usable + 1) for pool in range(1, layout.pools))
    path = np.full(full, NONE, np.int32)
    path[low:usable] = _above(nodes, anchor.number, usable - low)
    path[usable:] = _below(nodes, tokens, layout, prompt, anchor.number, usable, full)
    if full > usable:
        anchor = Node(int(path[-1]), found.clock)
    values = []
    for pool in range(1, layout.pools):
        there = np.zeros(pages, bool)
        for tier in (Tier.DEVICE, Tier.HOST):
            there[low:full] |= nodes[layout.page_row(tier, pool), path[low:]] >= 0
        values.append(there)
    return Known(usable, full, anchor, tuple(values))


def first_needed(layout: Layout, pool: int, depth: int) -> int:
    """The law of a pool: the first page on which a prefix of `depth` pages needs a value."""
    return int(layout.tails[pool - 1].law.first_needed(depth, layout.page_size))


def deepest(
    layout: Layout,
    usable: int,
    limit: int,
    cached: Sequence[np.ndarray],
    stored: Sequence[np.ndarray],
    room: Sequence[int] | None = None,
) -> int:
    """The deepest prefix of at most `limit` pages at which the law of every tail pool holds, or `usable`.

    cached, stored: per tail pool bool[limit or more], where the cache and where storage has a value. room: how many
    values of each can come from storage (default: any number).
    """
    depths = np.arange(usable + 1, limit + 1, dtype=np.int32)
    good = np.ones(len(depths), bool)
    for pool, (here, there) in enumerate(zip(cached, stored, strict=True)):
        first = np.asarray(layout.tails[pool].law.first_needed(depths, layout.page_size))
        good &= _within(~(here | there), first, depths) == 0
        if room is not None:
            good &= _within(~here, first, depths) <= room[pool]
    return int(depths[good][-1]) if good.any() else usable


def _within(mask: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """int[n]: how often `mask` holds in each [first, end)."""
    sums = np.concatenate([[0], np.cumsum(mask)])
    return sums[end] - sums[first]


def _above(nodes: np.ndarray, node: int, number: int) -> np.ndarray:
    """int32[number]: `node` and the nodes above it, shallowest first."""
    path, parents = np.full(number, NONE, np.int32), nodes[Column.PARENT]
    for place in range(number - 1, -1, -1):
        path[place], node = node, int(parents[node])
    return path


def _below(
    nodes: np.ndarray, tokens: np.ndarray, layout: Layout, prompt: tuple[Any, ...], node: int, first: int, end: int
) -> np.ndarray:
    """int32[end - first]: the nodes of the pages [first, end) of a prompt, all of them in the tree, below `node`."""
    wanted = np.asarray(prompt[0]).reshape(-1, layout.page_size)[first:end]
    parents, pages = nodes[Column.PARENT], tokens.reshape(-1, layout.page_size)
    path = np.full(end - first, NONE, np.int32)
    place = 0
    while place < len(path):
        # A page mostly has the id after that of the page above it.
        run = np.arange(node + 1, min(node + 1 + min(len(path) - place, STRIDE), layout.nodes))
        same = (parents[run] == run - 1) & (pages[run] == wanted[place : place + len(run)]).all(axis=1)
        children = run[: len(run) if same.all() else int(same.argmin())]
        if not len(children):
            below = np.flatnonzero(parents[: layout.nodes] == node)
            same = (pages[below] == wanted[place]).all(axis=1)
            if node >= layout.nodes:
                same &= (prompt[2] == nodes[Column.NAMESPACE : Column.NAMESPACE + 4, below].T).all(axis=1)
            children = below[same][:1]
        path[place : place + len(children)] = children
        place, node = place + len(children), int(children[-1])
    return path
