"""The hit rate of an exact list of pages, the least recently used first: what a cache of pages should reach."""

from collections import OrderedDict

import numpy as np

from benchmarks.peers.workload import Workload


def hits(workload: Workload) -> np.ndarray:
    """int64[requests]: tokens of each prompt that were there.

    A request touches the pages it finds and adds those it computes, the deepest first, so that the oldest page never
    has one below it. The page that is begun takes room until the request ends.
    """
    page, block, room = workload.page, workload.block, workload.capacity // workload.page
    if block % page:
        raise ValueError(f"pages of {page} tokens do not divide blocks of {block}")
    there: OrderedDict[int, None] = OrderedDict()
    found = np.zeros(len(workload), np.int64)
    for request in range(len(workload)):
        pages = _pages(workload, request, page, block)
        most = workload.usable(request) // page
        hit = next((place for place, number in enumerate(pages[:most]) if number not in there), most)
        begun = -(-int(workload.wholes[request]) // page) - len(pages)
        found[request] = hit * page
        for number in reversed(pages[:hit]):
            there.move_to_end(number)
        while there and len(there) + len(pages) - hit + begun > room:
            there.popitem(last=False)
        for number in reversed(pages):
            there[number] = None
            there.move_to_end(number)
    return found


def _pages(workload: Workload, request: int, page: int, block: int) -> list[int]:
    """Numbers of the whole pages of a request: of a block's id, and of the place in the block."""
    whole = int(workload.wholes[request]) // page
    each = block // page
    ids = workload.ids[request][: -(-whole // each)]
    places = np.arange(min(each, whole), dtype=np.int64)
    return (ids[:, None] * each + places).reshape(-1)[:whole].tolist()


def hit_rate(workload: Workload, found: np.ndarray) -> float:
    """Share of the measured prompts' tokens."""
    return float(found[workload.first :].sum() / workload.prompts[workload.first :].sum())
