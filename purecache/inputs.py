"""From what callers pass to what programs take: int32 copies of fixed size."""

from collections.abc import Sequence

import numpy as np

from purecache.answers import CacheError, Receipt, check
from purecache.namespaces import Namespace, namespace_digest
from purecache.programs import LANES, ProgramTable
from purecache.state import NONE, CacheConfig
from purecache.transitions import Offer, Prompt, ReceiptHandle, Status

Tokens = Sequence[int] | np.ndarray
"""A flat sequence of token ids that fit into 32 bits."""


class Inputs:
    """Pads prompts and pages to the sizes of the programs of one cache."""

    def __init__(self, config: CacheConfig, programs: ProgramTable) -> None:
        self._config, self._programs = config, programs

    def prompt(self, tokens: Tokens, namespace: Namespace, rank: int | None) -> tuple[int, Prompt]:
        """Size of the program for a prompt, and the prompt padded to it. Raises CacheError for an unknown rank."""
        key, first = as_int32(tokens), None
        if self._config.bigrams:
            first, key = (int(key[0]), key[1:]) if len(key) else (None, key)
        if not 0 <= (rank or 0) < self._config.ranks:
            check(Status.BAD_RANK)
        width = self._config.page_size
        pages = min(len(key) // width, self._programs.largest)
        size = self._programs.bucket(pages)
        digest = namespace_digest(namespace, rank=rank, first_token=first)
        whole = padded(key[: pages * width], size * width, 0)
        return size, Prompt(whole, np.int32(pages), digest, np.int32(rank or 0))  # type: ignore[arg-type]

    def prompts(self, prompts: Sequence[Tokens], namespace: Namespace, rank: int | None) -> tuple[int, int, Prompt]:
        """Lanes and size of the program for up to LANES[-1] prompts, and these stacked; spare lanes are empty."""
        each = [self.prompt(tokens, namespace, rank) for tokens in prompts]
        lanes = next(lanes for lanes in LANES if lanes >= len(prompts))
        size = max((size for size, _ in each), default=self._programs.bucket(0))
        stacked = Prompt(
            np.zeros((lanes, size * self._config.page_size), np.int32),  # type: ignore[arg-type]
            np.zeros(lanes, np.int32),  # type: ignore[arg-type]
            np.zeros((lanes, 4), np.int32),  # type: ignore[arg-type]
            np.zeros(lanes, np.int32),  # type: ignore[arg-type]
        )
        for lane, (_, prompt) in enumerate(each):
            stacked.tokens[lane, : len(prompt.tokens)] = prompt.tokens
            stacked.pages[lane], stacked.namespace[lane] = prompt.pages, prompt.namespace
            stacked.rank[lane] = prompt.rank
        return lanes, size, stacked

    def offer(
        self, tokens: Tokens, pages: np.ndarray, namespace: Namespace, rank: int | None, counted: int, priority: int
    ) -> tuple[int, Prompt, Offer]:
        """A prompt and the device pages that hold it. Raises CacheError if there are fewer pages than whole pages."""
        size, prompt = self.prompt(tokens, namespace, rank)
        given, whole = as_int32(pages), int(prompt.pages)
        if len(given) < whole:
            raise CacheError(Status.BAD_LENGTH, f"the tokens fill {whole} pages, but only {len(given)} were given")
        offered = padded(given[:whole], size)
        return size, prompt, Offer(offered, np.int32(counted), np.int32(priority))  # type: ignore[arg-type]

    def pages(self, pages: np.ndarray) -> tuple[int, np.ndarray]:
        """Size of the program for a list of pages, and the list padded to it. Raises CacheError for ids below zero."""
        given = as_int32(pages)
        if len(given) > self._programs.largest or (given < 0).any():
            check(Status.BAD_PAGE)
        size = self._programs.bucket(len(given))
        return size, padded(given, size)


def handle(receipt: Receipt) -> ReceiptHandle:
    """A receipt as transitions take it."""
    return ReceiptHandle(np.int32(receipt.number), np.int32(receipt.generation))  # type: ignore[arg-type]


def as_int32(values: Tokens) -> np.ndarray:
    """int32[n] of token or page ids. Raises ValueError for another shape or kind, or for ids that don't fit."""
    array = np.asarray(values) if len(values) else np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"expected a flat sequence of integers, got shape {array.shape} of {array.dtype}")
    wide = array.dtype.itemsize > 4 or array.dtype == np.uint32
    if wide and len(array) and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
        raise ValueError("ids must fit into 32 bits")
    return array.astype(np.int32, copy=False)


def padded(values: np.ndarray, size: int, fill: int = NONE) -> np.ndarray:
    """`values` followed by `fill`: a fresh int32[size]."""
    array = np.full(size, fill, np.int32)
    array[: len(values)] = values
    return array
