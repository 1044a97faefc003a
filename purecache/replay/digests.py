"""Digests of states and answers, and of the code that makes them."""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from purecache.state.layout import Column, Layout

DIGEST = 8
"""Bytes of a digest. They find accidents, not forgeries."""
NAMES = ("tokens", "nodes", "links", "orders", "shelves", "ledger", "books", "token")
"""The arrays of a state, in the order of its leaves."""
_SECRET = ("tokens", "links")
_CODE = ("state", "transitions", "entries.py")


def answer_digest(answer: Any) -> bytes:
    """Digest of what a transition answered: its effects and its reply, as one int32 vector."""
    return hashlib.sha256(_bytes(answer)).digest()[:DIGEST]


def state_digest(leaves: Sequence[Any], layout: Layout, *, hashed: bool) -> bytes:
    """Digest of the eight arrays of a state. Reads them all, about a GB per second.

    `hashed`: without what depends on the tokens themselves, which such a recording does not have: tokens, namespaces,
    the chains of the hash table and its keys. No decision depends on these.
    """
    digest = hashlib.sha256()
    for name, leaf in zip(NAMES, leaves, strict=True):
        array = np.asarray(leaf)
        if not hashed:
            parts = [array]
        elif name == "nodes":
            parts = [array[: Column.NAMESPACE], array[Column.NAMESPACE + 4 :]]
        elif name == "books":
            parts = [array[: layout.hash_keys]]
        else:
            parts = [] if name in _SECRET else [array]
        for part in parts:
            digest.update(_bytes(part))
    return digest.digest()[:DIGEST]


def _bytes(array: Any) -> Any:
    """The words of an int32 array, lowest byte first, without a copy where that is how they are."""
    return np.ascontiguousarray(np.asarray(array), "<i4").data.cast("B")


@functools.cache
def code_digest() -> str:
    """Digest of the source of all transitions: recordings of other code may differ for good reasons."""
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    for name in _CODE:
        path = root / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()[:16]
