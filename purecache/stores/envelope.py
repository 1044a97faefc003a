"""The trailer that every stored page carries: what it is, how long, and a checksum, so that no store is believed.

Layout (little-endian, 64 bytes behind the page): magic 8 s | version u32 | flags u32 (0) | length u64 | xxh3-128 of the
page 16 s | blake2b-128 of the key 16 s | xxh3-64 of the 56 bytes before it u64. No store tried detects flipped bits by
itself, some deliver short objects as whole ones, and a slot may be recycled under a reader.
"""

import hashlib
import struct

import xxhash

MAGIC, VERSION = b"purecach", 1
_HEAD = struct.Struct("<8sIIQ16s16s")
_SUM = struct.Struct("<Q")
TRAILER = _HEAD.size + _SUM.size
"""Bytes of the trailer: 64."""


def key_digest(key: str) -> bytes:
    """16 bytes that stand for a key in the trailer."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def seal(key: str, buffer: memoryview) -> None:
    """Write the trailer of a page into the last `TRAILER` bytes of `buffer`, which begins with the page."""
    page = buffer[:-TRAILER]
    head = _HEAD.pack(MAGIC, VERSION, 0, len(page), xxhash.xxh3_128_digest(page), key_digest(key))
    buffer[-TRAILER:] = head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def is_intact(key: str, buffer: memoryview) -> bool:
    """Whether `buffer` holds the page of `key`, whole and unchanged."""
    page, trailer = buffer[:-TRAILER], bytes(buffer[-TRAILER:])
    head, check = trailer[: _HEAD.size], trailer[_HEAD.size :]
    if _SUM.unpack(check)[0] != xxhash.xxh3_64_intdigest(head):
        return False
    magic, version, flags, length, digest, owner = _HEAD.unpack(head)
    known = (magic, version, flags, length, owner) == (MAGIC, VERSION, 0, len(page), key_digest(key))
    return known and digest == xxhash.xxh3_128_digest(page)
