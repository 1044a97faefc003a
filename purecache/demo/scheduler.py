"""Continuous batching: a queue, one request in prefill, a batch of decoding requests, preemption when out of pages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from purecache.demo.engine import Geometry
from purecache.demo.memory import Lease, Memory, pages_for
from purecache.demo.weights import DemoError

PATIENCE = 10_000
"""Scheduler steps in a row without work after which the engine gives up."""
PAUSE = 0.001
"""Seconds to wait after such a step, for copies that hold pages to end."""


@dataclass(eq=False)
class Request:
    """A prompt on its way to an answer, and what it cost. Times are seconds of a monotonic clock."""

    name: str
    prompt: np.ndarray  # int32[n]
    limit: int  # most tokens of the answer
    answer: list[int] = field(default_factory=list)
    lease: Lease | None = field(default=None, repr=False)
    filled: int = 0  # leading tokens whose keys and values are in its pages
    computed: int = 0  # tokens computed in prefill that no tier had, those after a preemption included
    repeated: int = 0  # tokens computed once more because a chunk starts at a multiple
    hit: int = 0  # tokens found in L1
    loaded: int = 0  # tokens loaded from L2
    loaded_bytes: int = 0  # what was copied for that
    stored: int = 0  # of these, tokens that L2 had from L3
    preempted: int = 0  # times
    digest: bytes = field(default=b"", repr=False)  # of all that its pages and states held in the end; b"": not taken
    submitted: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and answer so far, int32[n]."""
        return np.concatenate([self.prompt, np.asarray(self.answer, np.int32)])


class Model(Protocol):
    """The compiled programs of a model. `memory` is the one of the engine, which also keeps the pools."""

    geometry: Geometry

    def start_of(self, position: int) -> int:
        """Where computing must begin for the token at a position."""
        ...

    def span(self, lease: Any, tokens: np.ndarray, start: int, first: int) -> Any:
        """Rows of the request that holds a lease: int32[n] tokens at positions from `start` on, new from `first` on."""
        ...

    def warm(self, memory: Any) -> None:
        """Compile everything; the pools keep what they hold."""
        ...

    def prefill(self, memory: Any, span: Any) -> tuple[int, Any]:
        """Compute a span; the token that follows, and more."""
        ...

    def decode(self, memory: Any, spans: list[Any]) -> np.ndarray:
        """Compute spans of one token; the tokens that follow, int32[n]."""
        ...

    def digest(self, memory: Any, lease: Any, filled: int) -> bytes:
        """A digest of all that a request with so many computed tokens can read; b"" where its bits mean nothing."""
        ...


class Engine:
    """Serves requests with one model and one page memory. Call `submit` and then `step` until `idle`."""

    def __init__(self, programs: Model, memory: Memory, stop: int, clock: Callable[[], float] = time.monotonic):
        self.programs, self.memory, self.stop, self.clock = programs, memory, stop, clock
        self.queue: deque[Request] = deque()
        self.prefilling: Request | None = None
        self.running: list[Request] = []  # oldest first
        self._waited = 0

    @property
    def idle(self) -> bool:
        """Whether every submitted request is finished."""
        return not (self.queue or self.prefilling or self.running)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises DemoError when it could not run even alone."""
        geometry, length = self.programs.geometry, len(request.prompt) + request.limit
        if not len(request.prompt) or request.limit < 1:
            raise DemoError(f"Request {request.name} needs a prompt and room for an answer.")
        if length > geometry.context:
            raise DemoError(f"Request {request.name} needs a context of {length} tokens: raise --context.")
        if (needed := pages_for(length, geometry.page_size)) > self.memory.pages:
            raise DemoError(
                f"Request {request.name} needs {needed} device pages and there are {self.memory.pages}: "
                f"raise --device-tokens to at least {needed * geometry.page_size}."
            )
        request.submitted = self.clock()
        self.memory.announce(request.tokens)
        self.queue.append(request)

    def step(self) -> list[Request]:
        """Admit, compute one prefill chunk, decode one token of every running request. Returns who finished."""
        self.memory.tick()
        self._admit()
        if not (self.prefilling or self.running):
            self._waited += 1
            if self._waited > PATIENCE and self.queue:
                raise RuntimeError(f"request {self.queue[0].name} cannot be admitted although nothing else runs")
            time.sleep(PAUSE)
            return []
        self._waited = 0
        finished = self._prefill() + self._decode()
        for request in finished:
            assert request.lease is not None
            request.digest = self.programs.digest(self.memory, request.lease, request.filled)
            # The token sampled last was never an input: its keys and values do not exist.
            self.memory.close(request.lease, request.tokens[: request.filled])
            request.lease, request.finished = None, self.clock()
        return finished

    def _admit(self) -> None:
        # One request in prefill at a time: the next one is matched when the prompt before it is in the cache.
        if self.prefilling or not self.queue or len(self.running) >= self.programs.geometry.batch:
            return
        request = self.queue[0]
        # Each running request may soon need a page more; a newcomer that takes the last ones would be thrown out.
        lease = self.memory.open(request.tokens, spare=len(self.running))
        if lease is None:
            return
        self.queue.popleft()
        request.lease, request.filled = lease, lease.cached
        request.hit += lease.hit
        request.loaded += lease.loaded
        request.loaded_bytes += lease.loaded_bytes
        request.stored += lease.stored
        request.admitted = request.admitted or self.clock()
        self.prefilling = request

    def _prefill(self) -> list[Request]:
        request = self.prefilling
        if request is None:
            return []
        assert request.lease is not None
        tokens, start = request.tokens, self.programs.start_of(request.filled)
        stop = self.memory.stop(request.lease, request.filled) or len(tokens)
        end = min(start + self.programs.geometry.chunk, stop, len(tokens))
        if not self.memory.reserve(request.lease, end):
            # The others go on and free what is missing; alone, it starts again with all there is.
            if not self.running:
                self._preempt(request)
            return []
        span = self.programs.span(request.lease, tokens[start:end], start, request.filled)
        token, _ = self.programs.prefill(self.memory, span)
        request.computed += end - request.filled
        request.repeated += request.filled - start
        request.filled = end
        self.memory.advance(request.lease, tokens[:end])
        if end < len(tokens):
            return []
        self.prefilling = None
        request.first_token = request.first_token or self.clock()
        if self._answered(request, token):
            return [request]
        self.memory.share(request.lease, tokens)
        self.running.append(request)
        return []

    def _decode(self) -> list[Request]:
        self._make_room()
        if not self.running:
            return []
        batch = list(self.running)
        spans = []
        for request in batch:
            assert request.lease is not None
            last = np.asarray(request.answer[-1:], np.int32)
            spans.append(self.programs.span(request.lease, last, request.filled, request.filled))
        finished = []
        for request, token in zip(batch, self.programs.decode(self.memory, spans), strict=True):
            assert request.lease is not None
            request.filled += 1
            self.memory.advance(request.lease, request.tokens[: request.filled])
            if self._answered(request, int(token)):
                self.running.remove(request)
                finished.append(request)
        return finished

    def _make_room(self) -> None:
        """Give every running request pages for its next token, oldest first, at the cost of the youngest."""
        for request in list(self.running):
            while request.lease and not self.memory.reserve(request.lease, request.filled + 1):
                self._preempt(self.prefilling or self.running[-1])

    def _preempt(self, request: Request) -> None:
        assert request.lease is not None
        self.memory.cancel(request.lease)
        request.lease, request.filled = None, 0
        request.preempted += 1
        if request is self.prefilling:
            self.prefilling = None
        else:
            self.running.remove(request)
        self.queue.appendleft(request)

    def _answered(self, request: Request, token: int) -> bool:
        """Add a token to the answer; whether the answer is complete. The stop token is not part of the answer."""
        if token != self.stop:
            request.answer.append(token)
        return token == self.stop or len(request.answer) >= request.limit
