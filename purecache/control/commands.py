"""Commands of other threads, carried out between two steps of the scheduler, on the thread of the cache."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from typing import Any

from purecache.cache import PrefixCache
from purecache.effects import AgreedPlane

Command = Callable[[PrefixCache], Any]
"""Takes the cache and returns an answer, or a generator that works in parts: one per tick, the answer at the end."""

QUEUE = 64
"""Commands that may wait or be under way."""
PER_TICK = 4
"""Commands that begin in one tick."""
_LOG = logging.getLogger(__name__)


class TooLateError(TimeoutError):
    """The cache did not carry a command out in time, or takes no more of them."""


class Commands:
    """A queue of commands for one cache; an `Observer` that empties it. `ask` may be called from any other thread.

    Raises ValueError for a cache that several processes share: they would carry out different commands.
    """

    def __init__(self, cache: PrefixCache) -> None:
        """Observe `cache`, on whose thread this is called."""
        if isinstance(cache._driver.plane, AgreedPlane):
            raise ValueError("several processes share this cache: what one of them is told, the others would not do")
        self._cache = cache
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Command, Future[Any]]] = deque()
        self._running: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()
        self._open = True
        cache.observe(self)

    def ask(self, command: Command, timeout: float) -> Any:
        """Have a command carried out, and wait at most `timeout` seconds for its answer; raises what it raises.

        Raises TooLateError when the time is over (a command that has not begun is dropped then, one that works in
        parts ends with the part at hand, and what is being done at that moment is done), when too many commands wait,
        and after `close`.
        """
        future: Future[Any] = Future()
        with self._lock:
            if not self._open:
                raise TooLateError("the cache takes no commands any more")
            if len(self._waiting) + len(self._running) >= QUEUE:
                raise TooLateError(f"{QUEUE} commands wait already")
            self._waiting.append((command, future))
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # it came at the last moment, or the command itself raised
            future.cancel()
            raise TooLateError(f"the cache has not answered within {timeout:g} seconds: does it tick?") from None
        except CancelledError:
            raise TooLateError("the cache takes no commands any more") from None

    def ticked(self, cache: PrefixCache) -> None:
        """Carry out commands that wait, and the next part of those under way. What they raise goes to who asked."""
        if not (self._waiting or self._running):
            return
        for _ in range(len(self._running)):
            self._go_on(*self._running.popleft())
        for _ in range(PER_TICK):
            with self._lock:
                if not self._waiting:
                    return
                command, future = self._waiting.popleft()
            if not future.cancelled():
                self._begin(command, future)

    def close(self) -> None:
        """Take no more commands, and drop those that have not been answered. Call it on the cache's thread."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            dropped = [future for _, future in self._waiting]
            self._waiting.clear()
        for work, future in self._running:
            work.close()
            dropped.append(future)
        self._running.clear()
        for future in dropped:
            future.cancel()
        self._cache.unobserve(self)

    def _begin(self, command: Command, future: Future[Any]) -> None:
        try:
            answer = command(self._cache)
        except BaseException as error:
            _fail(future, error)
            return
        if isinstance(answer, Generator):
            self._go_on(answer, future)
        else:
            _answer(future, answer)

    def _go_on(self, work: Generator[None, None, Any], future: Future[Any]) -> None:
        if future.cancelled():
            work.close()
            return
        try:
            next(work)
        except StopIteration as end:
            _answer(future, end.value)
        except BaseException as error:
            _fail(future, error)
        else:
            self._running.append((work, future))


def _answer(future: "Future[Any]", answer: Any) -> None:
    # Who asked may give up at any moment.
    if future.set_running_or_notify_cancel():
        future.set_result(answer)


def _fail(future: "Future[Any]", error: BaseException) -> None:
    if not isinstance(error, Exception):
        future.cancel()
        raise error  # an interrupt is meant for the process
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
    _LOG.debug("a command raised %r", error)
