"""Host pages for what a prefetch brings: reserved before it is read, given to the tree or freed at its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.answers import Node
from purecache.driver import Driver
from purecache.entries import of_pool
from purecache.state import NONE
from purecache.state.layout import Layout
from purecache.storage.prefetch import Names, Prefetch, Present, Share
from purecache.storage.prefixes import deepest, first_needed, look_up
from purecache.transitions import Status


def take_shares(driver: Driver, layout: Layout, prefetch: Prefetch, present: Present, least: int) -> bool:
    """Decide what a prefetch reads, now that storage has said what it has, and reserve host pages for that.

    False where the prefix would gain fewer than `least` pages; what was reserved is still to be ended.
    """
    pages = int(prefetch.prompt[1])
    stored = [np.zeros(pages, bool) for _ in range(layout.pools)]
    for pool, there in present.items():
        first = prefetch.asked_for[pool][0]
        stored[pool][first : first + len(there)] = there
    known = look_up(driver, layout, prefetch.prompt)  # it may have changed meanwhile
    full, prefetch.usable = known.full, known.usable
    end = full + int(np.append(stored[0][full:], False).argmin())
    end = deepest(layout, known.usable, end, known.values, stored[1:])
    if end - known.usable < least:
        return False
    missing = [np.arange(full, end), *_lacking(layout, known.values, end)]
    held = [_reserve(driver, known.anchor, pool, len(each)) for pool, each in enumerate(missing)]
    # Making room may have cost values that this prefix needs, and there may be less room than was asked for.
    known = look_up(driver, layout, prefetch.prompt)
    room = [len(each.pages) for each in held]
    end = deepest(layout, known.usable, full + room[0], known.values, stored[1:], room[1:])
    worth = end - known.usable >= least
    end = end if worth else 0
    missing = [np.arange(full, end), *_lacking(layout, known.values, end)]
    for pool, each in enumerate(held):
        if each.operation is not None:
            first = first_needed(layout, pool, end) if pool else full
            asked_for = prefetch.asked_for.get(pool, (0, []))
            prefetch.shares.append(_share(pool, each.operation, each.pages, first, missing[pool], asked_for))
    return worth


def _lacking(layout: Layout, cached: Sequence[np.ndarray], end: int) -> list[np.ndarray]:
    """Per tail pool int[m]: the pages on which a prefix of `end` pages needs a value that the cache has not."""
    lacking = []
    for pool, here in enumerate(cached, 1):
        first = first_needed(layout, pool, end)
        lacking.append(first + np.flatnonzero(~here[first:end]))
    return lacking


@dataclass(frozen=True, eq=False)
class _Reserved:
    """Host pages that an operation of the cache holds for one pool; there may be none."""

    operation: tuple[int, int] | None
    pages: np.ndarray
    """int32[n], local to the rank."""


def _reserve(driver: Driver, anchor: Node, pool: int, wanted: int) -> _Reserved:
    """Reserve up to `wanted` host pages of a pool for pages of storage that follow `anchor`."""
    if wanted > 0:
        name, size = of_pool("begin_prefetch", pool), driver.programs.bucket(wanted)
        reply = driver.run(name, size, *anchor, wanted)
        if reply.status == Status.OK:
            return _Reserved((reply.operation, reply.generation), reply.pages[: reply.number].copy())
    return _Reserved(None, np.zeros(0, np.int32))


def _share(
    pool: int,
    operation: tuple[int, int],
    reserved: np.ndarray,
    first: int,
    missing: np.ndarray,
    asked_for: tuple[int, Names],
) -> Share:
    """What a prefetch brings of one pool.

    missing: the pages of the prompt that are to be read, ascending, from page `first` on; no more than are reserved.
    asked_for: the first page whose objects are known, and the objects.
    """
    wanted = missing - first
    pages = np.full(max(len(reserved), *(wanted[-1:] + 1), 0), NONE, np.int32)
    pages[wanted] = reserved[: len(wanted)]
    # What is left over is held until the end as well: it stands where nothing is read.
    left = reserved[len(wanted) :]
    pages[np.flatnonzero(pages == NONE)[: len(left)]] = left
    begin, names = asked_for
    return Share(pool, operation, first, pages, wanted, [names[page - begin] for page in missing.tolist()])


def end_share(driver: Driver, share: Share, prompt: tuple[Any, ...], page_size: int) -> int:
    """End the operation of a share: what has landed becomes part of the tree, the other pages are free again.

    Returns how many pages the tree took. That of kv must be ended first.
    """
    tokens, pages, digest, rank = prompt
    last = min(share.first + len(share.pages), pages)
    size = driver.programs.bucket(max(last, len(share.pages)))
    ok = np.zeros(size, np.int32)
    ok[: len(share.ok)] = share.ok
    prompt = (tokens[: last * page_size], last, digest, rank)
    name = of_pool("finish_prefetch", share.pool)
    return driver.run(name, size, *share.operation, *prompt, share.first, share.pages, ok).number
