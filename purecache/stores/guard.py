"""The one place around every store: threads, deadlines, checks of what it answers, and counters."""

import enum
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from purecache.stores import envelope
from purecache.stores.batches import Batches, BatchSizes
from purecache.stores.breaker import Breaker
from purecache.stores.interface import Fetch, Presence, Store

SLACK = 0.1
"""Seconds after its deadline in which a call may still return: a store that keeps deadlines returns a little later."""


class Kind(enum.Enum):
    """What to ask a store."""

    EXISTS = "exists"
    GET = "get"
    PUT = "put"
    DELETE = "delete"


_ANSWER: dict[Kind, type] = {Kind.EXISTS: Presence, Kind.GET: Fetch, Kind.PUT: bool, Kind.DELETE: bool}
_FAILURE: dict[Kind, Any] = {
    Kind.EXISTS: Presence.UNKNOWN,
    Kind.GET: Fetch.FAILED,
    Kind.PUT: False,
    Kind.DELETE: False,
}
_SUCCESS: dict[Kind, Any] = {Kind.EXISTS: Presence.YES, Kind.GET: Fetch.HIT, Kind.PUT: True, Kind.DELETE: True}
_NOT_THERE = {Kind.EXISTS: Presence.NO, Kind.GET: Fetch.MISSING}


@dataclass(frozen=True, slots=True)
class Request:
    """One batch for a store.

    `number` is the caller's ticket, one that no call under way has. GET and PUT have a buffer per key: writable bytes,
    a page and `envelope.TRAILER` bytes behind it. The buffers belong to the guard until a `Done` says `finished`.
    """

    kind: Kind
    number: int
    keys: Sequence[str]
    buffers: Sequence[memoryview] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """What became of the request `number`: an answer per key, in order.

    A call that is late is answered twice, both times with failures: first with `finished` False, which means that the
    store may still use the buffers, and, if it ever returns, with `finished` True.
    """

    number: int
    kind: Kind
    answers: list[Presence] | list[Fetch] | list[bool]
    finished: bool


@dataclass(slots=True)
class Counters:
    """Of the requests of one kind. hits + missing + failed = pages, once all have been reported.

    calls, pages: accepted requests, and keys in them; bytes: of pages (without trailers) read or written;
    hits: YES, HIT or True; missing: not there; failed: anything else; corrupt: those of the failed that were read but
    are not what was written; late, exceptions: requests that took too long or made the store raise; dropped: requests
    never made because the store failed or was closed meanwhile; refused: not accepted.
    """

    calls: int = 0
    pages: int = 0
    bytes: int = 0
    hits: int = 0
    missing: int = 0
    failed: int = 0
    corrupt: int = 0
    late: int = 0
    exceptions: int = 0
    dropped: int = 0
    refused: int = 0


@dataclass(slots=True, eq=False)
class _Call:
    request: Request
    deadline: float
    probe: bool
    late: bool = False
    began: float = 0.0
    """When a worker took it."""


@dataclass(slots=True)
class _Outcome:
    answers: list[Any]
    reachable: bool | None
    """What the call says about the store as a whole; None: nothing."""
    corrupt: list[str] = field(default_factory=list)
    raised: bool = False
    error: str = ""


class Guard:
    """A store as a single-threaded scheduler needs it: `start` and `poll` never wait and never raise for what it does.

    `workers` threads call the store. At most `queue` requests are accepted and not reported yet. A request that has not
    returned `timeout` seconds (and `SLACK`) after its start is late; its thread counts as stuck and another one takes
    its place. With twice as many stuck threads as `workers`, nothing is accepted until one of them returns.
    `clock` is `time.monotonic`, whose times a store gets as deadlines; tests pass another one.
    """

    def __init__(
        self,
        store: Store,
        workers: int = 2,
        queue: int = 64,
        timeout: float = 5.0,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if workers < 1 or queue < 1 or timeout <= 0:
            raise ValueError(f"need workers >= 1, queue >= 1, timeout > 0, not {workers}, {queue}, {timeout}")
        self.last_error = ""
        """The last exception of the store, or what was wrong with its last malformed answer."""
        self.breaker = breaker or Breaker(failures=5, cooldown=2.0, clock=clock)
        self._store, self._workers, self._queue, self._timeout, self._clock = store, workers, queue, timeout, clock
        self._counters = {kind: Counters() for kind in Kind}
        self._batches = {kind: Batches() for kind in Kind}
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._news = threading.Condition(self._lock)
        self._waiting: deque[_Call] = deque()
        self._running: list[_Call] = []
        self._done: list[Done] = []
        self._tickets: set[int] = set()
        """Of calls whose end has not been reported."""
        self._unreported: set[int] = set()
        """Of calls of which nothing has been reported."""
        self._live = self._stuck = 0
        self._closed = False
        self._closer: threading.Thread | None = None
        self._process = os.getpid()
        with self._lock:
            self._hire()

    def start(self, request: Request) -> bool:
        """Accept a request. False where too many are under way, the store is failing, or the guard is closed.

        Raises ValueError for a request that is wrong in itself, and RuntimeError in a forked process.
        """
        self._check_process()
        _check(request)
        with self._lock:
            if request.number in self._tickets:
                raise ValueError(f"request {request.number} is still under way")
            counters = self._counters[request.kind]
            full = len(self._unreported) >= self._queue or self._stuck >= 2 * self._workers
            if self._closed or full or not self.breaker.allows():
                counters.refused += 1
                return False
            counters.calls += 1
            counters.pages += len(request.keys)
            self._tickets.add(request.number)
            self._unreported.add(request.number)
            self._waiting.append(_Call(request, self._clock() + self._timeout, probe=self.breaker.is_open))
            self._work.notify()
            return True

    def poll(self) -> list[Done]:
        """What has been completed or has become late since the last call. Raises RuntimeError in a forked process."""
        self._check_process()
        with self._lock:
            limit = self._clock() - SLACK
            while self._waiting and self._waiting[0].deadline < limit:
                call = self._waiting.popleft()
                self._counters[call.request.kind].late += 1
                self._skip(call)
            for call in self._running:
                if call.deadline < limit and not call.late:
                    call.late = True
                    self._stuck += 1
                    self._live -= 1
                    self._counters[call.request.kind].late += 1
                    self._report(call, _failures(call.request), finished=False)
                    self._judge(call, reachable=False)
            self._hire()
            done, self._done = self._done, []
            self._unreported.difference_update(each.number for each in done)
            self._tickets.difference_update(each.number for each in done if each.finished)
            return done

    def wait(self, seconds: float) -> bool:
        """Wait until a call has been completed, for flushes and tests. Whether `poll` has something to report."""
        with self._lock:
            return self._news.wait_for(lambda: bool(self._done), seconds)

    @property
    def store(self) -> Store:
        """The store. Calling it oneself waits for it, and passes by deadlines and counters."""
        return self._store

    def stats(self) -> dict[str, int]:
        """All counters, as `get_hits`, and `breaker_openings`, `breaker_open`, `stuck_threads`, `unreported`.

        Raises RuntimeError in a forked process.
        """
        self._check_process()
        with self._lock:
            numbers = {f"{kind.value}_{name}": n for kind in Kind for name, n in asdict(self._counters[kind]).items()}
            state = {"breaker_openings": self.breaker.openings, "breaker_open": int(self.breaker.is_open)}
            return numbers | state | {"stuck_threads": self._stuck, "unreported": len(self._unreported)}

    def batches(self) -> dict[Kind, BatchSizes]:
        """Sizes and speeds of the calls that a worker has carried out in time. For any thread."""
        self._check_process()
        with self._lock:
            return {kind: batches.now() for kind, batches in self._batches.items()}

    def close(self, seconds: float = 5.0) -> bool:
        """Accept nothing more, drop what no worker has begun, and close the store once no call is in it.

        Waits at most `seconds`; False: calls are still under way, and the store is closed when they return, if ever,
        or there was no thread to be had for it, and a later call tries again. `poll` goes on reporting. A second call
        does nothing but wait. In a forked process nothing happens: all of it is the parent's.
        """
        if os.getpid() != self._process:
            return True
        with self._lock:
            if not self._closed:
                self._closed = True
                self._drop_waiting()
                self._work.notify_all()
            closer = self._closer
            if closer is None:
                closer = threading.Thread(target=self._close_store, name="purecache store closer", daemon=True)
                try:
                    closer.start()
                except (RuntimeError, MemoryError) as error:
                    self.last_error = _text(error)
                    return False
                self._closer = closer
        closer.join(seconds)
        return not closer.is_alive()

    def _check_process(self) -> None:
        # The threads that would answer are not there, and one of them may have held the lock when they went.
        if os.getpid() != self._process:
            raise RuntimeError("a store can't be used in a forked process: start processes by spawn")

    def _close_store(self) -> None:
        with self._lock:
            # A store that is closed under a running call may unmap memory that the call is using.
            self._news.wait_for(lambda: not self._running)
        try:
            self._store.close()
        except BaseException as error:
            self.last_error = _text(error)

    # Who carries calls out by itself, without threads, overrides `_hire` and calls `_begin`, `_perform` and `_end`.

    def _hire(self) -> None:
        """Start threads until `workers` are not stuck, but not more than three times as many in all."""
        while not self._closed and self._live < self._workers and self._stuck <= 2 * self._workers:
            try:
                threading.Thread(target=self._serve, name="purecache store worker", daemon=True).start()
            except (RuntimeError, MemoryError) as error:  # no threads to be had now; the next poll tries again
                self.last_error = _text(error)
                return
            self._live += 1

    def _serve(self) -> None:
        """The life of a worker. Nothing that waits happens under the lock."""
        while (call := self._next_call()) is not None:
            if not self._end(call, _perform(self._store, call)):
                return
            # Requests hold memory of the caller, which must not live on in a waiting thread.
            del call

    def _next_call(self) -> _Call | None:
        with self._lock:
            self._work.wait_for(lambda: self._waiting or self._closed)
            return None if self._closed else self._begin()

    def _begin(self) -> _Call:
        """Take the oldest call that waits, under the lock."""
        call = self._waiting.popleft()
        call.began = self._clock()
        self._running.append(call)
        return call

    def _end(self, call: _Call, outcome: _Outcome) -> bool:
        """Take note of what a call came to; whether its thread is to take another one."""
        with self._lock:
            self._running.remove(call)
            self._settle(call, outcome)
            self._news.notify_all()
            if call.late:
                self._stuck -= 1
                if self._live >= self._workers:
                    return False
                self._live += 1
        return True

    def _settle(self, call: _Call, outcome: _Outcome) -> None:
        counters = self._counters[call.request.kind]
        counters.corrupt += len(outcome.corrupt)
        counters.exceptions += outcome.raised
        self.last_error = outcome.error or self.last_error
        if call.late:  # counted and judged when it became late
            self._done.append(_done(call.request, _failures(call.request), finished=True))
        else:
            before = counters.bytes
            self._report(call, outcome.answers, finished=True)
            moved, seconds = counters.bytes - before, self._clock() - call.began
            self._batches[call.request.kind].add(len(call.request.keys), moved, seconds)
            self._judge(call, outcome.reachable)

    def _report(self, call: _Call, answers: list[Any], finished: bool) -> None:
        request, counters = call.request, self._counters[call.request.kind]
        hits = [index for index, answer in enumerate(answers) if answer is _SUCCESS[request.kind]]
        missing = sum(answer is _NOT_THERE.get(request.kind) for answer in answers)
        counters.hits += len(hits)
        counters.missing += missing
        counters.failed += len(answers) - len(hits) - missing
        if request.buffers:
            counters.bytes += sum(len(request.buffers[index]) - envelope.TRAILER for index in hits)
        self._done.append(_done(request, answers, finished))

    def _judge(self, call: _Call, reachable: bool | None) -> None:
        openings = self.breaker.openings
        if reachable:
            self.breaker.succeeded()
        elif reachable is not None:
            self.breaker.failed()
        elif call.probe:
            self.breaker.abandoned()
        if self.breaker.openings != openings:
            self._drop_waiting()  # otherwise each of them would wait for its deadline in vain

    def _drop_waiting(self) -> None:
        while self._waiting:
            call = self._waiting.popleft()
            self._counters[call.request.kind].dropped += 1
            self._skip(call)

    def _skip(self, call: _Call) -> None:
        """Answer a call that no worker has begun."""
        self._report(call, _failures(call.request), finished=True)
        self._judge(call, reachable=None)
        self._news.notify_all()


def _check(request: Request) -> None:
    number = len(request.keys) if request.kind in (Kind.GET, Kind.PUT) else 0
    if len(request.buffers) != number:
        raise ValueError(f"{request.kind.value} of {len(request.keys)} keys has {len(request.buffers)} buffers")
    for view in request.buffers:
        if (
            view.readonly
            or view.format != "B"
            or view.ndim != 1
            or not view.contiguous
            or len(view) <= envelope.TRAILER
        ):
            raise ValueError(f"a buffer must be writable bytes in one piece, over {envelope.TRAILER} of them: {view!r}")


def _failures(request: Request) -> list[Any]:
    return [_FAILURE[request.kind]] * len(request.keys)


def _done(request: Request, answers: list[Any], finished: bool) -> Done:
    return Done(request.number, request.kind, answers, finished)


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # whose text can't be had
        return type(error).__name__


def _perform(store: Store, call: _Call) -> _Outcome:
    """Ask the store, and believe nothing. Never raises."""
    request = call.request
    try:
        return _judged(store, request, call.deadline, _ask(store, request, call.deadline))
    except BaseException as error:  # a panic of foreign code need not be an Exception
        return _Outcome(_failures(request), reachable=False, raised=True, error=_text(error))


def _ask(store: Store, request: Request, deadline: float) -> Any:
    keys, buffers = list(request.keys), list(request.buffers)
    match request.kind:
        case Kind.EXISTS:
            return store.exists(keys, deadline)
        case Kind.GET:
            for buffer in buffers:  # so that a HIT that filled nothing can't pass with what was there before
                buffer[-envelope.TRAILER :] = bytes(envelope.TRAILER)
            return store.get(keys, buffers, deadline)
        case Kind.PUT:
            for key, buffer in zip(keys, buffers, strict=True):
                envelope.seal(key, buffer)
            return store.put(keys, buffers, deadline)
        case Kind.DELETE:
            return store.delete(keys, deadline)


def _judged(store: Store, request: Request, deadline: float, raw: Any) -> _Outcome:
    kind, failures = request.kind, _failures(request)
    if not isinstance(raw, list | tuple) or len(raw) != len(failures):
        what = f"{len(raw)} answers" if isinstance(raw, list | tuple) else f"a {type(raw).__name__}"
        return _Outcome(failures, reachable=False, error=f"{kind.value} of {len(failures)} keys answered {what}")
    # Only the very type counts: -1 and "no" are true in Python, and 1 is equal to True, YES and HIT.
    answers = [answer if type(answer) is _ANSWER[kind] else _FAILURE[kind] for answer in raw]
    wrong = [type(answer).__name__ for answer in raw if type(answer) is not _ANSWER[kind]]
    error = f"{kind.value} answered with {wrong[0]}, not {_ANSWER[kind].__name__}" if wrong else ""
    reachable: bool | None = True
    if answers == failures:
        # A full store refuses to write, which must not keep others from reading it.
        reachable = False if wrong or (answers and kind in (Kind.EXISTS, Kind.GET)) else None
    outcome = _Outcome(answers, reachable, error=error)
    if kind is Kind.GET:
        _verify(store, request, deadline, outcome)
    return outcome


def _verify(store: Store, request: Request, deadline: float, outcome: _Outcome) -> None:
    """Turn hits that are not what was written into failures, and delete them."""
    for index, (key, buffer) in enumerate(zip(request.keys, request.buffers, strict=True)):
        if outcome.answers[index] is Fetch.HIT and not envelope.is_intact(key, buffer):
            outcome.answers[index] = Fetch.FAILED
            outcome.corrupt.append(key)
    if outcome.corrupt:
        # Before the call is reported, lest it deletes a page that is put again because of the report.
        try:
            store.delete(list(outcome.corrupt), deadline)
        except BaseException as error:
            outcome.raised, outcome.error = True, _text(error)
