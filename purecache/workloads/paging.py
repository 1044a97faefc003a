"""Workloads as pages: every page of a prompt gets a number that stands for the whole prefix up to it."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from purecache.workloads.request import Request, Trace

TOP = -1
"""What is above the first page of a prompt."""


@dataclass(frozen=True, eq=False)
class PagedTrace:
    """A workload whose prompts are numbers of pages. With pages of one of these numbers each, a prefix tree that
    compares them is the tree of the prompts: one number takes the place of a page's tokens."""

    form: str
    page_tokens: int
    ids: np.ndarray
    """int32[all pages]: those of all requests, one after the other."""
    starts: np.ndarray
    """int64[requests + 1]: where those of each begin."""
    parents: np.ndarray
    """int32[distinct]: the page above each, or TOP."""
    prompt_pages: np.ndarray
    """int32[requests]: whole pages of the prompt. What follows belongs to the answer."""
    tokens: np.ndarray
    """int64[requests]: of the prompt."""
    output: np.ndarray
    """int64[requests]: tokens of the answer."""
    times: np.ndarray
    """float64[requests]: seconds since the first arrival."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def distinct(self) -> int:
        """Different pages: what an endless cache would hold."""
        return len(self.parents)

    @cached_property
    def sizes(self) -> np.ndarray:
        """int32[requests]: pages of prompt and answer."""
        return np.diff(self.starts).astype(np.int32)

    @cached_property
    def match_pages(self) -> np.ndarray:
        """int32[requests]: pages that a request can find. One token of a prompt is computed in any case."""
        return np.minimum((self.tokens - 1) // self.page_tokens, self.prompt_pages).clip(0).astype(np.int32)

    @property
    def largest(self) -> int:
        """Pages of the largest request, with the one that is begun."""
        return int(self.sizes.max(initial=0)) + 1

    def pages(self, request: int) -> np.ndarray:
        """int32[n]: those of a request."""
        return self.ids[self.starts[request] : self.starts[request + 1]]


def paged(trace: Trace, page_tokens: int | None = None, requests: int | None = None) -> PagedTrace:
    """The first `requests` requests (default: all) as pages of `page_tokens` tokens (default: a block, 16 for tokens).

    Raises ValueError where pages and blocks do not divide each other, and for a trace without a request.
    """
    page = page_tokens or (trace.block if trace.block > 1 else 16)
    if page < 1 or (page % trace.block and trace.block % page):
        raise ValueError(f"pages of {page} tokens do not fit to blocks of {trace.block}: one must divide the other")
    chosen = trace.requests[:requests]
    if not chosen:
        raise ValueError("a trace needs a request")
    numbers: dict[tuple[int, Hashable], int] = {}
    parents: list[int] = []
    ids: list[np.ndarray] = []
    for request in chosen:
        above, path = TOP, []
        for content in _contents(request, trace.block, page):
            key = above, content
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(parents)
                parents.append(above)
            path.append(number)
            above = number
        ids.append(np.array(path, np.int32))
    tokens = np.array([each.tokens for each in chosen], np.int64)
    sizes = np.array([len(each) for each in ids], np.int64)
    times = np.array([each.time for each in chosen])
    return PagedTrace(
        form=trace.form,
        page_tokens=page,
        ids=np.concatenate(ids),
        starts=np.concatenate([[0], np.cumsum(sizes)]),
        parents=np.array(parents, np.int32),
        prompt_pages=np.minimum(tokens // page, sizes).astype(np.int32),
        tokens=tokens,
        output=np.array([each.output for each in chosen], np.int64),
        times=times - times[0],
    )


def _contents(request: Request, block: int, page: int) -> Iterator[Hashable]:
    """What tells the pages below one prefix apart: of each whole page, its ids, and the scope at the first."""
    known = len(request.blocks) * block
    # The KV of the last token of an answer is never computed. An answer without ids is unknown.
    length = request.tokens + (request.output - 1 if known > request.tokens and block == 1 else 0)
    pages = min(length, known) // page
    for number in range(pages):
        start = number * page
        if page >= block:
            content: Hashable = tuple(request.blocks[start // block : (start + page) // block])
        else:
            content = request.blocks[start // block], start % block
        yield (request.scope, content) if number == 0 else content
