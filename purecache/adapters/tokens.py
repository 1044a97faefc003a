"""Token lists of schedulers as int32 arrays, each token converted once."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from purecache.inputs import as_int32

REMEMBERED = 1 << 21
"""Tokens that `TokenMemo` keeps, in all lists together: 25 MB of references and ids."""


class TokenRow:
    """The tokens of one request, converted as it grows.

    To compare a list with the one seen before costs a twentieth of converting it, since the ints in both are the same
    objects; so a list that was changed in its middle is noticed, and converted again from there.
    """

    def __init__(self) -> None:
        self._known: list[int] = []
        self._row = np.zeros(0, np.int32)

    def of(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """int32[n] of `tokens`, to be read only, good until the next call. Raises ValueError for ids beyond 32 bits."""
        if not isinstance(tokens, list):
            return as_int32(unpaired(tokens))
        same = self._same(tokens)
        if same < len(tokens):
            more = as_int32(unpaired(tokens[same:] if same else tokens))
            if len(more) != len(tokens) - same:
                return more  # bigrams: one token more than pairs
            self._keep(tokens, same, more)
        return self._row[: len(tokens)]

    def _same(self, tokens: list[int]) -> int:
        """How many tokens at the front are as they were."""
        known, common = self._known, min(len(self._known), len(tokens))
        if known[:common] == tokens[:common]:
            return common
        return next(index for index in range(common) if known[index] != tokens[index])

    def _keep(self, tokens: list[int], same: int, more: np.ndarray) -> None:
        if len(tokens) > len(self._row):
            grown = np.zeros(max(len(tokens), 2 * same), np.int32)
            grown[:same] = self._row[:same]
            self._row = grown
        self._row[same : len(tokens)] = more
        self._known[same:] = tokens[same:]


class TokenMemo:
    """Lists that come without their request, such as those of a scheduling policy, found again by their content."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, int, int], TokenRow] = OrderedDict()
        self._size = 0

    def of(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """int32[n] of `tokens`, to be read only, good until the next call. Raises ValueError for ids beyond 32 bits."""
        if not isinstance(tokens, list) or not tokens:
            return as_int32(unpaired(tokens))
        # Only a guess at which list it is: `TokenRow` compares all of it.
        key = (len(tokens), id(tokens[-1]), id(tokens[len(tokens) // 2]))
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = TokenRow()
            self._size += len(tokens)
            while self._size > REMEMBERED and len(self._rows) > 1:
                (length, _, _), _ = self._rows.popitem(last=False)
                self._size -= length
        else:
            self._rows.move_to_end(key)
        return row.of(tokens)


def unpaired(tokens: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
    """The tokens that overlapping pairs were made from; other lists as they are."""
    if len(tokens) and isinstance(tokens[0], tuple):
        return [first for first, _ in tokens] + [tokens[-1][1]]  # type: ignore[misc]
    return tokens
