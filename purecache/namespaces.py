"""Namespaces: whose prefixes are kept apart, as 128-bit digests that the tree stores and compares."""

import hashlib
from functools import lru_cache

import numpy as np

Part = None | bool | int | str | bytes
Namespace = Part | tuple[Part | tuple[str, Part], ...]
"""None, a name, or a tuple of parts such as `(("adapter", "summarise"), ("salt", "tenant-7"))`."""

_TAGS: tuple[tuple[type, bytes], ...] = ((bool, b"b"), (int, b"i"), (str, b"s"), (bytes, b"y"), (tuple, b"t"))


def namespace_digest(
    namespace: Namespace = None, *, rank: int | None = 0, first_token: int | None = None
) -> np.ndarray:
    """int32[4], read-only: digest of a namespace; two different records never share an encoding.

    A rank of None is a namespace of its own (it is accounted to rank 0). A tree of bigrams has its `first_token` here.
    Raises TypeError for a part that is neither None, bool, int, str, bytes nor a tuple of these.
    """
    if type(namespace) is tuple:
        return _digest(_encode(_record(namespace, rank is None, first_token)))
    return _digest_of_name(type(namespace), namespace, rank is None, first_token)


def _record(namespace: Namespace, no_rank: bool, first_token: int | None) -> tuple[object, ...]:
    return ("purecache-namespace-v1", namespace, no_rank, first_token)


def encoded_namespace(namespace: Namespace) -> bytes:
    """Tagged bytes of a namespace alone: prefix-free, the same in every process; two namespaces never share them.

    Raises TypeError as `namespace_digest` does.
    """
    return _encode(namespace)


@lru_cache(maxsize=4096)
def _digest_of_name(_: type, namespace: Part, no_rank: bool, first_token: int | None) -> np.ndarray:
    """The digest of one part. Its type is in the key of the cache, where 1 == True."""
    return _digest(_encode(_record(namespace, no_rank, first_token)))


@lru_cache(maxsize=4096)
def _digest(record: bytes) -> np.ndarray:
    digest = np.frombuffer(hashlib.blake2b(record, digest_size=16).digest(), "<i4").astype(np.int32)
    digest.flags.writeable = False
    return digest


def _encode(value: object) -> bytes:
    """Tag, length, content: prefix-free, so that a record can't be read in two ways."""
    if value is None:
        return b"n"
    for kind, tag in _TAGS:
        if type(value) is kind:
            if isinstance(value, tuple):
                content = b"".join(_encode(part) for part in value)
            elif isinstance(value, bytes):
                content = value
            else:
                content = str(value).encode()
            return tag + len(content).to_bytes(8, "little") + content
    raise TypeError(
        f"a namespace is made of None, bool, int, str, bytes and tuples of these, not {type(value).__name__}"
    )
