"""64-bit fingerprints as pairs of 32-bit words, for NumPy and JAX alike: of pages, prefixes and whole states.

Not cryptographic. Among 10 million states the chance that any two share a fingerprint is about 3 in a million
(n^2 / 2^65).
"""

from typing import Any

import jax
import numpy as np

WORDS = 2
"""Words of a fingerprint: the last axis of everything here."""
_FIRST = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)
_SECOND = np.array([0xC2B2AE3D, 0x27D4EB2F], np.uint32)
_THIRD = np.array([0x165667B1, 0x7FEB352D], np.uint32)
_SEED = np.array([0x243F6A88, 0x13198A2E], np.uint32)


def lift(value: Any) -> Any:
    """[..., WORDS] uint32: the fingerprint of an int32 array [...]."""
    array = value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value, np.int32)
    return scramble(array.astype(np.uint32)[..., None] * _FIRST + _SEED)


def scramble(words: Any) -> Any:
    """Spread every bit over the word: the finaliser of a multiplicative hash."""
    words = (words ^ (words >> 16)) * _SECOND
    words = (words ^ (words >> 13)) * _THIRD
    return words ^ (words >> 16)


def mix(first: Any, second: Any) -> Any:
    """[..., WORDS]: the fingerprint of two fingerprints in this order."""
    return scramble(first * _FIRST + second + _SEED)


def chain(start: Any, *values: Any) -> Any:
    """[..., WORDS]: `start` followed by int32 arrays, one after the other."""
    for value in values:
        start = mix(start, lift(value))
    return start


def page_signature(tokens: Any) -> Any:
    """[..., WORDS]: of the tokens [..., page_size] of a page."""
    start = lift(tokens[..., 0])
    return chain(start, *(tokens[..., place] for place in range(1, tokens.shape[-1])))


def root_signature(rank: Any) -> Any:
    """[..., WORDS]: of the root of a rank."""
    return lift(rank + 1_000_003)


def space_signature(words: Any) -> Any:
    """[..., WORDS]: of the four words [..., 4] of a namespace."""
    return chain(lift(words[..., 0] + 7919), *(words[..., place] for place in range(1, 4)))
