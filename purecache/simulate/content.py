"""What a fault-free model would compute: one 64-bit word per page, a function of all that the page depends on."""

from collections.abc import Sequence

import numpy as np
import xxhash

IN_FLIGHT, FAILED, DROPPED, LOST, PARTIAL, BLANK = (np.uint64(0xDEAD000000000000 + reason) for reason in range(1, 7))
REASONS = {
    int(IN_FLIGHT): "half-written bytes of a copy under way",
    int(FAILED): "what a failed copy left behind",
    int(DROPPED): "a host page that was given up",
    int(LOST): "host memory that was lost",
    int(PARTIAL): "a page that is not full yet",
    int(BLANK): "a page that was never written",
}
"""What stands in pages whose bytes are undefined."""


def described(word: int) -> str:
    """A word of a page for people."""
    return REASONS.get(word, f"{word:#018x}")


def salt_of(pool: str) -> np.uint64:
    """What the words of a pool differ by."""
    return np.uint64(xxhash.xxh3_64_intdigest(pool.encode()))


class Prints:
    """The words of the pages of one prompt, which may grow.

    A word depends on the namespace and on all tokens up to the end of the page. It does not depend on the rank: the
    ranks compute the same, and share storage.
    """

    def __init__(self, namespace: str | None, page_size: int, bigrams: bool) -> None:
        self._page_size, self._bigrams = page_size, bigrams
        self._before = xxhash.xxh3_64_digest(repr(namespace).encode())
        self._words: list[int] = []

    def of(self, tokens: Sequence[int]) -> np.ndarray:
        """uint64[n]: the words of the whole pages of `tokens`, which begin with those of the last call."""
        size, extra = self._page_size, int(self._bigrams)
        whole = max(0, len(tokens) - extra) // size
        while len(self._words) < whole:
            start = len(self._words) * size
            digest = xxhash.xxh3_64(self._before + bytes(tokens[start : start + size + extra]))
            self._before = digest.digest()
            self._words.append(digest.intdigest())
        return np.array(self._words[:whole], np.uint64)

    def state(self, tokens: Sequence[int]) -> np.uint64:
        """The word of a recurrent state after all of `tokens`, which are those of the last `of` at least."""
        words = self.of(tokens)
        rest = bytes(tokens[len(words) * self._page_size :])
        if not rest:
            return words[-1] if len(words) else BLANK
        return np.uint64(xxhash.xxh3_64_intdigest(self._before + rest))
