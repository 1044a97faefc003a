"""Objects as blocks of AIBrix: a length, the object, and zeros. Reading, writing and looking for many of them at once.

AIBrix answers for prefixes, and for whole batches; what is told here is known of each object.
"""

import contextlib
import logging
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from purecache.stores.engines.aibrix_manager import blocks_of
from purecache.stores.interface import Fetch, Presence

_LENGTH = struct.Struct("<QQ")  # bytes of the object, and their complement
HEAD = _LENGTH.size
"""Bytes that a block has before its object."""

_ONES = 2**64 - 1
_LOG = logging.getLogger(__name__)


def scan(manager: Any, names: list[str], deadline: float) -> dict[str, Presence]:
    """Which objects there are. AIBrix tells how many of the first ones there are: ask again behind each hole.

    All are asked for at first; behind a hole one, and then twice as many each time, so that a long run of missing
    objects costs one look-up for each.
    """
    found = dict.fromkeys(names, Presence.UNKNOWN)
    first, size = 0, len(names)
    while first < len(names) and time.monotonic() < deadline:
        asked = names[first : first + size]
        try:
            status = manager.exists(None, blocks_of(asked))
            count = status.value if status.is_ok() is True else 0 if status.is_not_found() is True else None
        except Exception as error:
            _LOG.debug("AIBrix raised %r", error)
            count = None
        known = type(count) is int and 0 <= count <= len(asked)
        there = count if known and count else 0
        found.update(dict.fromkeys(asked[:there], Presence.YES))
        if there < len(asked):
            found[asked[there]] = Presence.NO if known else Presence.UNKNOWN
        first, size = (first + there, size * 2) if there == len(asked) else (first + there + 1, 1)
    return found


def get_all(
    manager: Any,
    names: list[str],
    wanted: Mapping[str, list[int]],
    buffers: Sequence[memoryview],
    answers: list[Fetch],
    deadline: float,
) -> None:
    """Answer for some objects: which there are, and then those that follow one another together.

    `wanted` says which of `buffers` and `answers` are those of a name. What is damaged is removed.
    """
    found = scan(manager, names, deadline)
    for name in names:
        if found[name] is Presence.NO:
            for index in wanted[name]:
                answers[index] = Fetch.MISSING
    runs = [[name for name in names if found[name] is Presence.YES]]
    while runs and time.monotonic() < deadline:
        run = runs.pop()
        if not run:
            continue
        damaged: list[str] = []
        with _acquired(manager, run) as (tensors, unreadable):
            # A partial answer is no prefix: AIBrix counts hits behind a hole where it reads several at once.
            if len(tensors) == len(run):
                for name, tensor in zip(run, tensors, strict=True):
                    length = _length(tensor)
                    damaged += [name] if length is None else []
                    for index in wanted[name]:
                        answers[index] = _copy_out(tensor, length, buffers[index])
            elif len(run) > 1:
                runs += [run[len(run) // 2 :], run[: len(run) // 2]]
            elif unreadable:
                damaged = run
        for name in damaged:  # or a put would find it there, for ever
            remove(manager, name)


def put_all(manager: Any, names: list[str], contents: Mapping[str, memoryview], deadline: float) -> set[str]:
    """Write objects; of several where one failed it isn't known which, so that they are tried one by one."""
    if not names or time.monotonic() >= deadline:
        return set()
    if _put(manager, names, [contents[name] for name in names]):
        return set(names)
    if len(names) == 1:
        return set()
    return set().union(*(put_all(manager, [name], contents, deadline) for name in names))


def remove(manager: Any, name: str) -> None:
    """Remove an object, as far as AIBrix does: it calls every delete a success."""
    _value(manager.delete, None, blocks_of([name]))


def _value(call: Any, *arguments: Any) -> Any:
    """What a call answers; None where it found nothing, failed or raised."""
    try:
        status = call(*arguments)
        return status.value if status.is_ok() is True else None
    except Exception as error:
        _LOG.debug("AIBrix raised %r", error)
        return None


@contextlib.contextmanager
def _acquired(manager: Any, names: list[str]) -> Iterator[tuple[list[Any], bool]]:
    """The blocks of objects, as many of them as came, and whether AIBrix said that there is none of the first one."""
    handle, tensors, missing = None, [], False
    try:
        status = manager.acquire(None, blocks_of(names))
        missing = status.is_not_found() is True
        if status.is_ok() is True:
            count, handle = status.value
            tensors = list(handle.to_tensors())[:count]
    except Exception as error:
        _LOG.debug("AIBrix raised %r", error)
    try:
        yield tensors, missing
    finally:
        if handle is not None:
            handle.release()


def _put(manager: Any, names: list[str], contents: list[memoryview]) -> bool:
    """Write objects as one batch; whether all of them are there now."""
    blocks = blocks_of(names)
    handle = _value(manager.allocate_for, None, blocks)
    if handle is None:
        return False
    if len(handle) != len(names):
        handle.release()
        return False
    for tensor, content in zip(handle.to_tensors(), contents, strict=True):
        block = tensor.reshape(-1).numpy()
        end = HEAD + content.nbytes
        block[:HEAD] = np.frombuffer(_LENGTH.pack(content.nbytes, content.nbytes ^ _ONES), np.uint8)
        block[HEAD:end] = np.frombuffer(content, np.uint8)
        block[end:] = 0
    try:
        status = manager.put(None, blocks, handle)  # releases the handle, unless it raises
        return status.is_ok() is True and status.value == len(names)
    except Exception as error:  # SHFS raises AttributeError where a file can't be written
        _LOG.debug("AIBrix raised %r", error)
        with contextlib.suppress(ValueError):  # released already
            handle.release()
        return False


def _length(tensor: Any) -> int | None:
    """Bytes of the object in a block; None where that is not what was written."""
    block = tensor.reshape(-1).numpy()
    length, complement = _LENGTH.unpack(block[:HEAD].tobytes())
    return length if length ^ complement == _ONES and length <= block.size - HEAD else None


def _copy_out(tensor: Any, length: int | None, buffer: memoryview) -> Fetch:
    if length is None or length != buffer.nbytes:
        return Fetch.FAILED
    np.frombuffer(buffer, np.uint8)[:] = tensor.reshape(-1).numpy()[HEAD : HEAD + length]
    return Fetch.HIT
