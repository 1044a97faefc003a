"""The file of a recording: a header, then frames of events, each with a checksum, then an end.

    magic (8 bytes)   header length (u32)   header (JSON)   checksum (8)
    frame: tag (4)    length (u32)   raw length (u32)   first event (u64)   events (u32)   checksum (8)   payload

Numbers are little-endian. A payload is compressed by zlib, except that of the end, which is JSON. A checksum covers
what stands before it and the payload. Raw, a payload has the columns of its events one after the other (see `Columns`).
"""

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from purecache.replay.digests import DIGEST

MAGIC = b"PureRec\x01"
"""Its last byte is the version of the format."""
EVENTS, END = b"evts", b"end."
MOST_HEADER = 1 << 22
"""Bytes of the longest header that is read."""
MOST_RAW = 1 << 28
"""Bytes of the longest payload that is unpacked."""
_FRAME = struct.Struct("<4sIIQI")
_COUNTS = struct.Struct("<IIII")
_CHECKSUM = 8


class Unusable(ValueError):
    """A file that is no recording, or one that this version can't replay."""


@dataclass(frozen=True)
class Frame:
    """Where a frame is in its file, and which events it has."""

    offset: int
    """Of its payload."""
    length: int
    raw_length: int
    first: int
    events: int


@dataclass
class Columns:
    """Events side by side. An event is a program, its arguments, and a digest of its answer."""

    programs: Any = field(default_factory=list)
    """uint16[events]: number of the program in the header's list."""
    sizes: Any = field(default_factory=list)
    """uint32[events]: its size in pages."""
    digests: Any = field(default_factory=list)
    """bytes[8] each: of the answers."""
    lengths: Any = field(default_factory=list)
    """uint32[arrays]: words of each array among the arguments that are written; the rest of it is NONE."""
    words: Any = field(default_factory=list)
    """int32[n]: all arguments of all events."""
    states: Any = field(default_factory=list)
    """(uint32 events of this frame before it, bytes[8]) each: digests of the whole state."""

    def pack(self) -> tuple[bytes, int]:
        """The payload, and its raw length in bytes."""
        lengths = np.array(self.lengths, "<u4")
        words = np.concatenate([np.zeros(0, np.int32), *self.words]).astype("<i4", copy=False)
        states = np.array([after for after, _ in self.states], "<u4")
        parts = [
            _COUNTS.pack(len(self.programs), len(lengths), len(words), len(states)),
            np.array(self.programs, "<u2").tobytes(),
            np.array(self.sizes, "<u4").tobytes(),
            b"".join(self.digests),
            lengths.tobytes(),
            states.tobytes(),
            b"".join(digest for _, digest in self.states),
            # The lowest bytes of all words, then the next ones and so on: half as long when compressed.
            words.view(np.uint8).reshape(-1, 4).T.tobytes(),
        ]
        raw = b"".join(parts)
        return zlib.compress(raw, 1), len(raw)


def unpack(payload: bytes, frame: Frame) -> Columns:
    """The columns of a frame, as arrays. Raises Unusable for a payload that is none."""
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(payload, frame.raw_length + 1)
    except zlib.error as error:
        raise Unusable(f"the frame at byte {frame.offset} can't be unpacked: {error}") from error
    if len(raw) != frame.raw_length or len(raw) < _COUNTS.size or not unpacker.eof:
        raise Unusable(f"the frame at byte {frame.offset} has another length than it says")
    events, arrays, words, states = _COUNTS.unpack_from(raw)
    sizes = (2 * events, 4 * events, DIGEST * events, 4 * arrays, 4 * states, DIGEST * states, 4 * words)
    if events != frame.events or _COUNTS.size + sum(sizes) != len(raw):
        raise Unusable(f"the columns of the frame at byte {frame.offset} do not fit together")
    parts, at = [], _COUNTS.size
    for size in sizes:
        parts.append(raw[at : at + size])
        at += size
    planes = np.frombuffer(parts[6], np.uint8).reshape(4, -1)
    return Columns(
        programs=np.frombuffer(parts[0], "<u2"),
        sizes=np.frombuffer(parts[1], "<u4"),
        digests=_split(parts[2]),
        lengths=np.frombuffer(parts[3], "<u4"),
        words=np.ascontiguousarray(planes.T).view("<i4").reshape(-1).astype(np.int32, copy=False),
        states=list(zip(np.frombuffer(parts[4], "<u4").tolist(), _split(parts[5]), strict=True)),
    )


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST] for at in range(0, len(digests), DIGEST)]


def header_bytes(header: dict[str, Any]) -> bytes:
    """What a file begins with."""
    content = json.dumps(header, separators=(",", ":")).encode()
    start = MAGIC + struct.pack("<I", len(content)) + content
    return start + _checksum(start)


def frame_bytes(tag: bytes, payload: bytes, raw_length: int, first: int, events: int) -> bytes:
    """A frame."""
    start = _FRAME.pack(tag, len(payload), raw_length, first, events)
    return start + _checksum(start, payload) + payload


def _checksum(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()[:_CHECKSUM]


def read_header(file: BinaryIO) -> dict[str, Any]:
    """The header of a file. Raises Unusable if there is none, or one of another version of the format."""
    start = file.read(len(MAGIC) + 4)
    if len(start) < len(MAGIC) + 4 or not start.startswith(MAGIC[:-1]):
        raise Unusable("this is no recording of purecache, or only the beginning of its header")
    if start[: len(MAGIC)] != MAGIC:
        version = start[len(MAGIC) - 1]
        raise Unusable(f"the recording has version {version} of the format, this purecache reads {MAGIC[-1]}")
    length = int.from_bytes(start[len(MAGIC) :], "little")
    if length > MOST_HEADER:
        raise Unusable(f"the header claims to be {length} bytes long")
    content = file.read(length)
    if file.read(_CHECKSUM) != _checksum(start + content):
        raise Unusable("the header is cut off or damaged")
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"the header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise Unusable("the header is no object")
    return header


def read_frames(file: BinaryIO) -> tuple[list[Frame], dict[str, Any] | None, str | None]:
    """The frames that follow the header, what the end says if there is one, and what is wrong with the rest if it is.

    Reads everything once and keeps nothing of it. What stands before a damaged or missing part is good.
    """
    frames: list[Frame] = []
    expected = 0
    while True:
        begin = file.tell()
        start = file.read(_FRAME.size)
        if not start:
            return frames, None, "the recording was not closed: its last events may be missing"
        checksum = file.read(_CHECKSUM)
        if len(start) < _FRAME.size or len(checksum) < _CHECKSUM:
            return frames, None, f"cut off in the frame at byte {begin}"
        tag, length, raw_length, first, events = _FRAME.unpack(start)
        if tag not in (EVENTS, END) or max(length, raw_length) > MOST_RAW or first != expected:
            return frames, None, f"damaged at byte {begin}"
        payload = file.read(length)
        if len(payload) < length:
            return frames, None, f"cut off in the frame at byte {begin}"
        if checksum != _checksum(start, payload):
            return frames, None, f"damaged at byte {begin}"
        if tag == END:
            return frames, _end(payload), "there is something behind the end" if file.read(1) else None
        frames.append(Frame(begin + _FRAME.size + _CHECKSUM, length, raw_length, first, events))
        expected += events


def _end(payload: bytes) -> dict[str, Any]:
    try:
        end = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return end if isinstance(end, dict) else {}
