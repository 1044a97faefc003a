"""Page keys: one chain of hashes per request, the only place that makes them.

The key of a page is `SHA-256(key of the page before || its tokens as u32 little-endian)`: all tokens up to its end in
256 bits, the same in every process, rank and restart. A chain starts with the seed of its namespace, or with nothing.
Pages of bigrams feed the pairs `(t_j, t_j+1)` token by token. Chains and `sglang_seed` agree with sglang's.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from purecache.namespaces import Namespace, encoded_namespace

Tokens = Sequence[int] | np.ndarray
"""Token ids in [0, 2**32), one axis."""

_SEED_DOMAIN = b"purecache-namespace-seed-v1"
_SGLANG_DOMAIN = b"sglang-cache-namespace-v1"
_TOKEN_BYTES = 4


def seed_of(namespace: Namespace) -> str | None:
    """64 hex characters that start the chains of a namespace; None for the namespace None.

    What is hashed begins with another domain than `sglang_seed`, and its length is no multiple of 4, as that of the
    input of every page is: so no tokens have this seed for a key. Raises TypeError for what is no namespace.
    """
    if namespace is None:
        return None
    record = hashlib.sha256(encoded_namespace(namespace)).digest()
    return hashlib.sha256(_SEED_DOMAIN + record).hexdigest()


def sglang_seed(extra_key: str | None = None, cache_salt: str | None = None) -> str | None:
    """The seed that sglang gives a request with these; None where both are None."""
    if extra_key is None and cache_salt is None:
        return None
    return hashlib.sha256(_SGLANG_DOMAIN + _optional(extra_key) + _optional(cache_salt)).hexdigest()


def _optional(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    content = text.encode()
    return b"\1" + len(content).to_bytes(8, "little") + content


def event_id(key: str) -> int:
    """The int64 that stands for a page in KV events: the first 16 hex characters of its key, as a signed number."""
    return int.from_bytes(bytes.fromhex(key[:16]), "big", signed=True)


class KeyChain:
    """The keys of one request, computed once and extended as it grows. Not for several threads at once.

    `KeyChain(64, seed_of(("adapter", "summarise")))` hashes pages of 64 tokens. With `bigrams`, a page is `page_size`
    bigrams, so that n tokens make n - 1 of them.
    """

    def __init__(self, page_size: int, seed: str | None = None, bigrams: bool = False) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        if seed is not None and len(bytes.fromhex(seed)) != hashlib.sha256().digest_size:
            raise ValueError(f"a seed is 64 hex characters, as of `seed_of`, not {seed!r}")
        self.page_size = page_size
        self.bigrams = bigrams
        self._seed = b"" if seed is None else bytes.fromhex(seed)
        self._keys: list[str] = []
        self._rest = b""  # tokens behind the last whole page; with bigrams, after its last token
        self._ends: list[bytes] = []  # with bigrams: the last token of each page, which begins the next one

    def __len__(self) -> int:
        """Whole pages so far."""
        return len(self._keys)

    @property
    def fed(self) -> int:
        """Tokens that the chain has seen (after `truncate`: still knows): go on with `extend(prompt[chain.fed :])`."""
        return len(self) * self.page_size + len(self._rest) // _TOKEN_BYTES

    def keys(self, first: int = 0, end: int | None = None) -> list[str]:
        """The keys of the whole pages [first, end), 64 hex characters each."""
        return self._keys[first:end]

    def extend(self, tokens: Tokens) -> list[str]:
        """Take in the tokens that follow; returns the keys of the pages that became whole.

        Raises ValueError, and changes nothing, for what is not one axis of integers in [0, 2**32).
        """
        known = self._rest + _as_u32(tokens)
        step = self.page_size * _TOKEN_BYTES
        count = max(len(known) - _TOKEN_BYTES * self.bigrams, 0) // step
        content, size = known[: count * step], step
        if self.bigrams and count:
            words = np.frombuffer(known, "<u4")[: count * self.page_size + 1]
            content, size = np.stack((words[:-1], words[1:]), axis=1).tobytes(), 2 * step
            self._ends += [known[end : end + _TOKEN_BYTES] for end in range(step, (count + 1) * step, step)]
        prior = bytes.fromhex(self._keys[-1]) if self._keys else self._seed
        fresh = []
        for page in range(count):
            digest = hashlib.sha256(prior + content[page * size : (page + 1) * size])
            prior = digest.digest()
            fresh.append(digest.hexdigest())
        self._keys += fresh
        self._rest = known[count * step :]
        return fresh

    def truncate(self, pages: int) -> None:
        """Forget all behind the first `pages` pages. Raises ValueError where there are fewer."""
        if not 0 <= pages <= len(self):
            raise ValueError(f"the chain has {len(self)} pages, it can't be cut to {pages}")
        del self._keys[pages:], self._ends[pages:]
        self._rest = self._ends[-1] if self._ends else b""

    def clone(self, pages: int | None = None) -> "KeyChain":
        """A chain of its own that goes on from here, or from behind the first `pages` pages. Hashes nothing."""
        copy = KeyChain(self.page_size, None, self.bigrams)
        copy._seed, copy._keys, copy._ends, copy._rest = self._seed, self._keys[:], self._ends[:], self._rest
        if pages is not None:
            copy.truncate(pages)
        return copy


def page_keys(tokens: Tokens, page_size: int, seed: str | None = None, bigrams: bool = False) -> list[str]:
    """The keys of all whole pages of `tokens`, in one go."""
    return KeyChain(page_size, seed, bigrams).extend(tokens)


def _as_u32(tokens: Any) -> bytes:
    array = np.asarray(tokens)
    if array.ndim == 1 and array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 2**32:
        raise ValueError("tokens are one axis of integers in [0, 2**32)")
    return array.astype("<u4").tobytes()
