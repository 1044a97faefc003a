"""From what callers pass to what programs take: checked int32 arrays, and the size of the program for them."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from purecache.answers import CacheError, check
from purecache.entries import LANES, TAIL
from purecache.namespaces import Namespace, namespace_digest
from purecache.programs import ProgramTable
from purecache.state import NONE, CacheConfig
from purecache.transitions import Status

Tokens = Sequence[int] | np.ndarray
"""A flat sequence of token ids that fit into 32 bits."""


Values = Mapping[str, Tokens] | None
"""Page ids by name of tail pool; NONE where there is no value."""
Pieces = tuple[int | np.ndarray, ...]
"""What `Program.command` takes: ints and int32 arrays, not padded."""


ORIGINS = 1 << 16
"""Namespaces that are remembered by name. Pages of one that is forgotten are not stored until it is used again."""
_INT32 = np.dtype(np.int32)
_NO_PAGES = np.zeros(0, np.int32)


class Inputs:
    """Checks and sizes what callers pass to one cache."""

    def __init__(self, config: CacheConfig, programs: ProgramTable) -> None:
        self._config, self._programs = config, programs
        self._origins: dict[bytes, tuple[Namespace, int | None]] = {}

    def origin_of(self, digest: bytes) -> tuple[Namespace, int | None] | None:
        """Namespace and first token (in a tree of bigrams) that a digest was made from, if it was seen lately."""
        return self._origins.get(digest)

    def origins(self) -> Iterator[tuple[bytes, tuple[Namespace, int | None]]]:
        """Every digest that `origin_of` knows, with what it was made from."""
        return iter(list(self._origins.items()))

    def prompt(self, tokens: Tokens, namespace: Namespace, rank: int | None) -> tuple[int, Pieces]:
        """Size of the program for a prompt, and a `Prompt`. Raises CacheError for an unknown rank."""
        pages, prompt = self._prompt(tokens, namespace, rank)
        return self._programs.bucket(pages), prompt

    def _prompt(self, tokens: Tokens, namespace: Namespace, rank: int | None) -> tuple[int, Pieces]:
        key, first = as_int32(tokens), None
        if self._config.bigrams:
            first, key = (int(key[0]), key[1:]) if len(key) else (None, key)
        if not 0 <= (rank or 0) < self._config.ranks:
            check(Status.BAD_RANK)
        width = self._config.page_size
        pages = min(len(key) // width, self._programs.largest)
        digest = namespace_digest(namespace, rank=rank, first_token=first)
        self._origins[digest.tobytes()] = (namespace, first)
        if len(self._origins) > ORIGINS:
            del self._origins[next(iter(self._origins))]
        return pages, (key[: pages * width], pages, digest, rank or 0)

    def prompts(self, prompts: Sequence[Tokens], namespace: Namespace, rank: int | None) -> tuple[int, int, Pieces]:
        """Lanes and size of the program for up to LANES[-1] prompts, and these stacked; spare lanes are empty."""
        each = [self._prompt(tokens, namespace, rank) for tokens in prompts]
        lanes = next(lanes for lanes in LANES if lanes >= len(prompts))
        size = self._programs.bucket(max((pages for pages, _ in each), default=0))
        tokens, pages = np.zeros((lanes, size * self._config.page_size), np.int32), np.zeros(lanes, np.int32)
        digests, ranks = np.zeros((lanes, 4), np.int32), np.zeros(lanes, np.int32)
        for lane, (number, prompt) in enumerate(each):
            tokens[lane, : len(prompt[0])] = prompt[0]  # type: ignore[arg-type]
            pages[lane], digests[lane], ranks[lane] = number, prompt[2], prompt[3]
        return lanes, size, (tokens.reshape(-1), pages, digests.reshape(-1), ranks)

    def offer(
        self,
        tokens: Tokens,
        pages: np.ndarray,
        namespace: Namespace,
        rank: int | None,
        counted: int,
        priority: int,
        keep: int | None = None,
        values: Values = None,
        *,
        ends: bool = False,
    ) -> tuple[int, Pieces]:
        """Size of the program, and a `Prompt` with the `Offer` of the device pages that hold it.

        With `ends`, the pages behind those of the prompt are part of it. Raises CacheError if there are fewer pages
        than whole pages, or more than there can be.
        """
        whole, prompt = self._prompt(tokens, namespace, rank)
        given = as_int32(pages)
        if len(given) < whole:
            raise CacheError(Status.BAD_LENGTH, f"the tokens fill {whole} pages, but only {len(given)} were given")
        if not ends:
            given = given[:whole]
        elif len(given) > self._programs.largest + TAIL or (len(given) and given.min() < 0):
            check(Status.BAD_PAGE)
        extra = self.values(values)
        if not ends:
            extra = tuple(each[:whole] for each in extra)
        longest = max((len(each) for each in (given, *extra)), default=0)
        size = self._programs.bucket(max(whole, longest - TAIL))
        return size, (*prompt, given, counted, priority, self._kept(len(tokens), keep), *extra)

    def _kept(self, tokens: int, keep: int | None) -> int:
        """Pages that hold some of the first `keep` tokens of a prompt, without the spare tail that a cache may have."""
        most = tokens - self._config.spare_tail
        return -(-max(most if keep is None else min(keep, most), 0) // self._config.page_size)

    def values(self, values: Values) -> tuple[np.ndarray, ...]:
        """Per tail pool, the page ids given for it; NONE among them is skipped. Raises CacheError for unknown names."""
        given = values or {}
        names = self._config.pool_names[1:]
        if unknown := set(given) - set(names):
            raise CacheError(Status.BAD_PAGE, f"there are no pools named {sorted(unknown)}, only {list(names)}")
        arrays = tuple(as_int32(given[name]) if name in given else _NO_PAGES for name in names)
        if any(len(each) > self._programs.largest + TAIL or (len(each) and each.min() < NONE) for each in arrays):
            check(Status.BAD_PAGE)
        return arrays

    def pages(self, pages: np.ndarray) -> tuple[int, np.ndarray]:
        """Size of the program for a list of pages, and the list. Raises CacheError for ids below zero."""
        given = as_int32(pages)
        if len(given) > self._programs.largest or (given < 0).any():
            check(Status.BAD_PAGE)
        return self._programs.bucket(len(given)), given


def as_int32(values: Tokens) -> np.ndarray:
    """int32[n] of token or page ids. Raises ValueError for another shape or kind, or for ids that don't fit."""
    if type(values) is np.ndarray and values.dtype == _INT32 and values.ndim == 1:
        return values
    array = np.asarray(values) if len(values) else np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"expected a flat sequence of integers, got shape {array.shape} of {array.dtype}")
    wide = array.dtype.itemsize > 4 or array.dtype == np.uint32
    if wide and len(array) and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
        raise ValueError("ids must fit into 32 bits")
    return array.astype(np.int32, copy=False)
