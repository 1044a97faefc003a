"""Prompts that can be compared and nothing else: what a recording has in place of tokens.

Every page becomes a keyed hash of the whole prefix that it ends, so equal prefixes stay equal, and a token looks
different wherever it stands: no frequencies, and no way to try out guesses without the key. The key is random and
is forgotten with the recorder.
"""

import hashlib
import secrets
from collections import OrderedDict

import numpy as np

from purecache.replay.arguments import Arguments

CHAIN = 16
"""Bytes of a hash that the next page is hashed with. They are kept secret."""
WORDS = 2
"""int32 words that are written for a page: 64 bits keep siblings apart."""
MOST_TOKENS = 1 << 22
"""Tokens of late prompts that are remembered, so that a prompt that comes again is not hashed again."""


def words_of(page_size: int) -> int:
    """int32 words that a hashed page has in a recording."""
    return min(WORDS, page_size)


def hashed_prompts(veil: "Veil", arguments: Arguments, leaves: list[np.ndarray]) -> None:
    """Replace the prompts and namespaces among the arguments of a program by what may be written of them."""
    for place in arguments.prompts:
        tokens = leaves[place.tokens].reshape(place.lanes, -1, veil.page_size)
        namespaces = leaves[place.namespace].reshape(place.lanes, 4)
        words = np.full((place.lanes, tokens.shape[1], words_of(veil.page_size)), -1, np.int32)
        spaces = np.empty((place.lanes, 4), np.int32)
        for lane, pages in enumerate(leaves[place.pages].reshape(-1).tolist()):
            pages = min(max(pages, 0), tokens.shape[1])
            spaces[lane], words[lane, :pages] = veil.hashed(namespaces[lane], tokens[lane, :pages])
        leaves[place.tokens], leaves[place.namespace] = words.reshape(-1), spaces.reshape(-1)
    for leaf in arguments.namespaces:
        leaves[leaf] = veil.hashed_namespace(leaves[leaf])


class Veil:
    """Hashes prompts with a key of its own. For one thread."""

    def __init__(self, page_size: int) -> None:
        """A new key. page_size: tokens per page."""
        self.page_size = page_size
        self._key = secrets.token_bytes(32)
        self._spaces: dict[bytes, tuple[np.ndarray, bytes]] = {}
        self._late: OrderedDict[tuple[bytes, int, int], _Prompt] = OrderedDict()
        self._remembered = 0

    def hashed_namespace(self, namespace: np.ndarray) -> np.ndarray:
        """What is written for a namespace int32[4], with prompts and without: int32[4]."""
        return self._space(namespace.tobytes())[0]

    def hashed(self, namespace: np.ndarray, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is written for a namespace int32[4] and pages int32[n, page_size]: int32[4] and int32[n, words]."""
        space, start = self._space(namespace.tobytes())
        before, common = self._longest(start, pages)
        chain = np.empty((len(pages), CHAIN), np.uint8)
        words = np.empty((len(pages), words_of(self.page_size)), np.int32)
        if before is not None:
            chain[:common], words[:common] = before.chain[:common], before.words[:common]
        key = chain[common - 1].tobytes() if common else start
        for number in range(common, len(pages)):
            key, word = self._page(key, pages[number].tobytes())
            chain[number], words[number] = np.frombuffer(key, np.uint8), np.frombuffer(word, "<i4")
        if common < len(pages):
            self._remember(start, _Prompt(pages.copy(), chain, words))
        return space, words

    def _space(self, namespace: bytes) -> tuple[np.ndarray, bytes]:
        if namespace not in self._spaces:
            if len(self._spaces) > 1 << 16:
                self._spaces.clear()
            digest = hashlib.blake2b(namespace, key=self._key, digest_size=16 + CHAIN).digest()
            self._spaces[namespace] = np.frombuffer(digest[:16], "<i4").astype(np.int32), digest[16:]
        return self._spaces[namespace]

    def _page(self, key: bytes, page: bytes) -> tuple[bytes, bytes]:
        """The key of the next page, and the words of this one."""
        if self.page_size > 1:
            digest = hashlib.blake2b(page, key=key, digest_size=CHAIN + 4 * WORDS).digest()
            return digest[:CHAIN], digest[CHAIN:]
        # 32 bits of a hash would confuse siblings once there are many; a permutation can't.
        return hashlib.blake2b(page, key=key, digest_size=CHAIN).digest(), _permuted(key, page)

    def _longest(self, start: bytes, pages: np.ndarray) -> tuple["_Prompt | None", int]:
        """A late prompt that shares many pages with this one, and how many."""
        for count in _counts(len(pages)):
            found = self._late.get((start, count, hash(pages[:count].tobytes())))
            if found is not None:
                both = min(len(pages), len(found.pages))
                differ = (found.pages[:both] != pages[:both]).any(axis=1)
                return found, int(differ.argmax()) if differ.any() else both
        return None, 0

    def _remember(self, start: bytes, prompt: "_Prompt") -> None:
        for count in _counts(len(prompt.pages)):
            key = (start, count, hash(prompt.pages[:count].tobytes()))
            if (old := self._late.pop(key, None)) is not None:
                self._remembered -= old.cost
            self._late[key] = prompt
            self._remembered += prompt.cost
        while self._remembered > MOST_TOKENS:
            self._remembered -= self._late.popitem(last=False)[1].cost


class _Prompt:
    """A prompt that was hashed lately."""

    def __init__(self, pages: np.ndarray, chain: np.ndarray, words: np.ndarray) -> None:
        self.pages, self.chain, self.words = pages, chain, words
        self.cost = max(1, pages.size // max(1, len(_counts(len(pages)))))


def _counts(pages: int) -> list[int]:
    """The lengths at which prompts of so many pages are looked up, longest first."""
    return [1 << power for power in range(pages.bit_length() - 1, -1, -1)]


def _permuted(key: bytes, word: bytes) -> bytes:
    """A keyed permutation of 4 bytes: four rounds, each of which adds a hash of one half to the other half."""
    left, right = word[:2], word[2:]
    for turn in range(4):
        mask = hashlib.blake2b(right, key=key, digest_size=2, person=b"round %d" % turn).digest()
        left, right = right, bytes(a ^ b for a, b in zip(left, mask, strict=True))
    return left + right
