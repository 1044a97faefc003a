"""Writes down what goes into the state machine of one cache, beside the cache and never in its way."""

import atexit
import contextlib
import importlib.metadata
import itertools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from purecache.entries import entries
from purecache.replay.arguments import arguments_of, described
from purecache.replay.configs import config_as_json
from purecache.replay.digests import answer_digest, code_digest, state_digest
from purecache.replay.format import END, EVENTS, MOST_RAW, Columns, frame_bytes, header_bytes
from purecache.replay.veil import Veil, hashed_prompts
from purecache.state import NONE, CacheConfig, Layout

_LOG = logging.getLogger(__name__)
PERIOD = 0.1
"""Seconds between two looks of the writer at what has come."""
PATIENCE = 1.0
"""Seconds after which a frame is written though it is small: what a process that dies may lose."""
FRAME_WORDS, FRAME_EVENTS = 1 << 19, 1 << 13
"""Size from which a frame is written."""
STATE_BYTES = 4096
"""Bytes of state that are digested per event on average, if nobody says how often: a few microseconds."""
LEAST_EVERY = 1024
_ENTRY = 1024
"""Bytes that an event takes while it waits, besides its command."""

_numbers = itertools.count()

Current = tuple[list[Any], Any]
"""The leaves of the state, and the answer of the transition that made it."""


class Recorder:
    """Records one cache into a file: `PrefixCache(config, plane, record=Recorder(path))`, and `close` at the end.

    The caller of the cache only puts each command on a queue. A thread does the rest: hashing, compressing, writing.
    Whatever goes wrong there (a full disk, one that hangs, a writer that can't follow) ends the recording and nothing
    else: `stopped` says why, `lost` counts the events since, and what was written until then can be replayed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tokens: Literal["hashed", "plain"] = "hashed",
        state_every: int | None = None,
        most_bytes: int = 4 << 30,
        most_waiting: int = 64 << 20,
    ) -> None:
        """Create the file, which must not exist (FileExistsError, or another OSError).

        tokens: "hashed" writes of prompts only which of them share prefixes. state_every: events between two digests of
        the whole state (default: by its size, so that they cost a few microseconds per event; 0: only at both ends).
        most_bytes: size of the file at which it stops. most_waiting: bytes of events that may wait for the writer.
        """
        if tokens not in ("hashed", "plain"):
            raise ValueError(f"tokens must be 'hashed' or 'plain', got {tokens!r}")
        if state_every is not None and state_every < 0:
            raise ValueError(f"state_every must not be negative, got {state_every}")
        self.path = os.fspath(path)
        self._hashed = tokens == "hashed"
        self._every, self._most_bytes, self._most_waiting = state_every, most_bytes, most_waiting
        self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self.stopped: str | None = None
        """Why the recording ended before it was closed, or None."""
        self.lost = 0
        """Events that happened after it had stopped."""
        self.events = 0
        """Events that were written."""
        self.bytes = 0
        """Bytes that were written."""
        self._queue: deque[tuple[Any, int, Any, Any]] = deque()
        """(name, size, command, answer before) of each event, and (None, 0, digest, answer) for a digest of the state.

        An event took place if the answer of the next entry is another object. So an entry is right whenever an
        interrupt comes: between the entry and the transition it names, or between that and the next entry.
        """
        self._came, self._gone = 0, 0
        """Bytes that were put on the queue, counted by the caller, and taken off, counted by the writer."""
        self._left = 0
        """Events until the next digest of the state."""
        self._look: Callable[[], Current] | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def in_folder(cls, folder: str | os.PathLike[str], **options: Any) -> "Recorder":
        """A recorder with a new file, named by time and process, in `folder`, which is made if it is not there.

        For servers, whose processes each make caches of their own. options: those of `Recorder`. Raises OSError.
        """
        os.makedirs(folder, mode=0o700, exist_ok=True)
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}-{next(_numbers)}.rec"
        return cls(os.path.join(folder, name), **options)

    def begin(self, config: CacheConfig, smallest: int, look: Callable[[], Current]) -> None:
        """Begin with a new cache, whose state `look` returns. For the driver. Raises ValueError if used twice."""
        if self._look is not None or self._closing.is_set():
            raise ValueError("a recorder is for one cache: make another one")
        settings = config_as_json(config, secret=not self._hashed)
        self._layout, self._look = config.layout, look
        if self._every is None:
            size = sum(leaf.nbytes for leaf in look()[0])
            self._every = max(LEAST_EVERY, size // STATE_BYTES)
        self._left = self._every
        header = {
            "tokens": "hashed" if self._hashed else "plain",
            "config": settings,
            "smallest": smallest,
            "programs": described(config.layout),
            "code": code_digest(),
            "versions": {package: _version(package) for package in ("purecache", "jax", "jaxlib")},
        }
        self._queue.append((None, 0, self._digest(), look()[1]))
        self._thread = threading.Thread(target=self._work, args=(header,), name="purecache-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # ---- the caller's side -----------------------------------------------------------------------------------------

    def note(self, name: str, size: int, command: np.ndarray, current: Current) -> None:
        """A transition is about to run on the state `current`. For the driver; never raises but for interrupts."""
        if self._closing.is_set():
            self.lost += self.stopped is not None
            return
        try:
            self._left -= 1
            if self._left < 0 and self._every:
                self._queue.append((None, 0, self._digest(), current[1]))
                self._left = self._every - 1
            if self._came - self._gone > self._most_waiting:
                self._stop("the writer could not follow")
                self.lost += 1
                return
            # If an interrupt comes between these two, the count is a little too high.
            self._came += command.nbytes + _ENTRY
            self._queue.append((name, size, command, current[1]))
        except Exception as error:
            self._stop(repr(error))

    def close(self, timeout: float = 10.0) -> bool:
        """End the recording with a digest of the state; whether the file is whole. The cache goes on without it.

        Waits for the disk `timeout` seconds at most. May be called again.
        """
        atexit.unregister(self.close)
        if self._thread is None:
            self._closing.set()
            self._file.close()
            return False
        if not self._closing.is_set():
            assert self._look is not None
            self._queue.append((None, 0, self._digest(), self._look()[1]))
            self._closing.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._stop(f"the disk did not answer within {timeout:g} s")
        self._look = _nothing
        return self.stopped is None

    def _digest(self) -> bytes:
        assert self._look is not None
        return state_digest(self._look()[0], self._layout, hashed=self._hashed)

    def _stop(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = reason
            _LOG.warning("stopped recording to %s: %s", self.path, reason)
        self._closing.set()

    # ---- the writer's side -----------------------------------------------------------------------------------------

    def _work(self, header: dict[str, Any]) -> None:
        try:
            with self._file:
                self._write(header_bytes(header))
                _Writer(self, self._layout, self._hashed).run()
        except Exception as error:
            self._stop(str(error) or repr(error))
        self._queue.clear()

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()
        self.bytes += len(content)


class _Writer:
    """What the thread of a recorder does with the entries of its queue."""

    def __init__(self, recorder: Recorder, layout: Layout, hashed: bool) -> None:
        self._recorder, self._layout, self._entries = recorder, layout, entries(layout)
        self._names = {name: number for number, name in enumerate(self._entries)}
        self._veil = Veil(layout.page_size) if hashed else None
        self._frame, self._words, self._begun = Columns(), 0, time.monotonic()
        self._pending: tuple[Any, int, Any, Any] | None = None

    def run(self) -> None:
        """Until the recorder closes or stops."""
        recorder = self._recorder
        while True:
            closing = recorder._closing.wait(PERIOD)
            while recorder._queue:
                self._take(recorder._queue.popleft())
                if self._words > FRAME_WORDS or len(self._frame.programs) >= FRAME_EVENTS:
                    self._flush()
            if closing or time.monotonic() - self._begun > PATIENCE:
                self._flush()
            if recorder.bytes > recorder._most_bytes:
                recorder._stop("the file has reached its size")
            if closing:
                break
        end = json.dumps({"events": recorder.events, "stopped": recorder.stopped}).encode()
        recorder._write(frame_bytes(END, end, 0, recorder.events, 0))
        with contextlib.suppress(OSError):
            os.fsync(recorder._file.fileno())

    def _take(self, entry: tuple[Any, int, Any, Any]) -> None:
        before, self._pending = self._pending, None
        if before is not None and entry[3] is not before[3]:
            self._event(before[0], before[1], before[2], entry[3])
        if entry[0] is None:
            self._frame.states.append((len(self._frame.programs), entry[2]))
        else:
            self._pending = entry
            self._recorder._gone += entry[2].nbytes + _ENTRY

    def _event(self, name: str, size: int, command: np.ndarray, answer: Any) -> None:
        arguments = arguments_of(self._layout, name, size)
        leaves = [command[part] for part in arguments.parts]
        if self._veil is not None:
            hashed_prompts(self._veil, arguments, leaves)
        frame, written = self._frame, []
        for leaf, is_array in zip(leaves, arguments.arrays, strict=True):
            if is_array:
                used = leaf[::-1] != NONE
                leaf = leaf[: len(leaf) - int(used.argmax()) if used.any() else 0]
                frame.lengths.append(len(leaf))
            written.append(leaf)
        if written:
            frame.words.append(np.concatenate(written))  # not views: they would keep all of the command
            self._words += len(frame.words[-1])
        frame.programs.append(self._names[name])
        frame.sizes.append(size if self._entries[name].sized else 0)
        frame.digests.append(answer_digest(answer))

    def _flush(self) -> None:
        frame, recorder = self._frame, self._recorder
        if frame.programs or frame.states:
            payload, raw_length = frame.pack()
            if raw_length > MOST_RAW:
                raise ValueError(f"an event has {raw_length >> 20} MiB, more than a frame may have")
            recorder._write(frame_bytes(EVENTS, payload, raw_length, recorder.events, len(frame.programs)))
            recorder.events += len(frame.programs)
        self._frame, self._words, self._begun = Columns(), 0, time.monotonic()


def _nothing() -> Current:
    return [], None


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "unknown"
