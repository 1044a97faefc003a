"""A workload through one cache, in the order of arrival: one request after the other, or as many at once as run."""

import heapq
from collections import deque
from collections.abc import Callable

from purecache.traces.disk import Reading
from purecache.traces.engine import Engine, Running
from purecache.traces.meter import Meter
from purecache.traces.outcome import Outcome
from purecache.traces.setting import RunSetting
from purecache.workloads import PagedTrace


def run_trace(
    trace: PagedTrace, setting: RunSetting, name: str = "", progress: Callable[[int], None] | None = None
) -> Outcome:
    """Replay a workload. `progress(requests)` is called now and then. Raises ValueError for a setting that can't work.

    With `concurrent` 1, a request finds all that the one before has left, whatever their times; its answer takes no
    page unless the trace knows its tokens. Otherwise requests overlap: see `Schedule`.
    """
    engine = Engine(trace, setting)
    meter = Meter(engine, progress)
    if setting.concurrent == 1:
        _one_by_one(engine, meter)
    else:
        Schedule(engine, meter).run()
    return meter.outcome(name)


def _one_by_one(engine: Engine, meter: Meter) -> None:
    trace, hardware = engine.trace, engine.setting.hardware
    for request in range(len(trace)):
        reading, wait = engine.queue(request), 0.0
        if reading is not None:
            meter.reads.append(len(reading.pages))
            wait = hardware.read(len(reading.pages) * trace.page_tokens)
            engine.arrived(request, reading, len(reading.pages))
        running = engine.begin(request)
        if running is None:
            meter.refused(request, wait)
        else:
            meter.began(running, wait)
            engine.end(running)
        meter.mark(float(trace.times[request]), 0, last=request == len(trace) - 1)


class Schedule:
    """Requests that overlap, on a clock of its own.

    A request waits in a queue from its arrival, while its prefetch goes on. One prefill runs at a time, in the order
    of arrival, but for requests whose prefetch is not over yet (with `wait`). After it, the prompt is in the cache,
    and the request decodes beside others until its answer is complete. From its begin to its end it holds a lock on
    its prefix and pages for prompt and answer; where there is no room for them, the queue waits until one ends. The
    disk reads one prefetch after the other.
    """

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine, self._meter, self._trace = engine, meter, engine.trace
        self._setting, self._hardware = engine.setting, engine.setting.hardware
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._queue: deque[int] = deque()
        self._reading: dict[int, tuple[float, float, Reading]] = {}
        """Begin, end and `Reading` of the prefetches of queued requests."""
        self._arrivals: dict[int, float] = {}
        self._held_up: set[int] = set()
        self._running = self._number = 0
        self._busy, self._disk_free = False, 0.0

    def run(self) -> None:
        """All requests to their end."""
        for request, time in enumerate((self._trace.times / self._setting.speed).tolist()):
            self._at(time, lambda now, request=request: self._arrive(request, now))
        now = 0.0
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
            self._start(now)
            self._meter.mark(now, self._running)
        self._meter.mark(now, 0, last=True)

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, event))

    def _arrive(self, request: int, now: float) -> None:
        self._queue.append(request)
        self._arrivals[request] = now
        reading = self._engine.queue(request)
        if reading is not None:
            begin = max(now, self._disk_free)
            self._disk_free = end = begin + self._hardware.read(len(reading.pages) * self._trace.page_tokens)
            self._reading[request] = begin, end, reading
            self._meter.reads.append(len(reading.pages))
            self._at(end, lambda now: self._landed(request, now))

    def _landed(self, request: int, now: float) -> None:
        """A prefetch has ended, or its time has come."""
        if request in self._reading:
            begin, end, reading = self._reading.pop(request)
            whole = len(reading.pages)
            landed = whole if now >= end else int(whole * max(0.0, now - begin) / (end - begin))
            self._meter.late += landed < whole
            self._engine.arrived(request, reading, landed)

    def _start(self, now: float) -> None:
        """Begin the prefill of the first request that may begin."""
        while not self._busy and self._running < self._setting.concurrent:
            waits = self._setting.prefetch == "wait"
            request = next((each for each in self._queue if not (waits and each in self._reading)), None)
            if request is None:
                return
            self._landed(request, now)
            trace, wait = self._trace, now - self._arrivals[request]
            needed = -(-int(trace.tokens[request] + trace.output[request]) // trace.page_tokens)
            running = self._engine.begin(request, max(0, needed - int(trace.sizes[request])))
            if running is None and self._running:
                self._meter.waited += request not in self._held_up
                self._held_up.add(request)
                return
            self._queue.remove(request)
            self._busy = True
            if running is None:
                seconds = self._meter.refused(request, wait)
            else:
                seconds = self._meter.began(running, wait)
                self._running += 1
            self._at(now + seconds, lambda now, running=running: self._prefilled(running, now))

    def _prefilled(self, running: Running | None, now: float) -> None:
        self._busy = False
        if running is None:
            return
        self._engine.prefilled(running)
        answer = int(self._trace.output[running.request]) * self._hardware.decode_seconds
        self._at(now + answer, lambda now: self._end(running))

    def _end(self, running: Running) -> None:
        self._engine.end(running, counted=int(self._trace.prompt_pages[running.request]))
        self._running -= 1
