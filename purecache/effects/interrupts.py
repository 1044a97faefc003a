"""Keeping Ctrl-C out of the moment in which a donated array has no owner."""

import signal
import threading
from typing import Any

_SIGINT = int(signal.SIGINT)


class DeferredInterrupts:
    """Context that holds back SIGINT inside the block and delivers it at the end.

    Between a donating call and the assignment of its result the old arrays are deleted and the new ones are nobody's:
    an interrupt there would lose the pool. Does nothing outside the main thread, which never sees interrupts.
    """

    # The functions of the C module: the wrappers turn numbers into enum members, which costs more than the rest.
    _set = staticmethod(getattr(signal.signal, "__wrapped__", signal.signal))
    __slots__ = ("_caught", "_handler")

    def __enter__(self) -> None:
        self._caught: tuple[int, Any] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self._handler = self._set(_SIGINT, self._catch)

    def __exit__(self, *raised: object) -> None:
        if self._handler is not None:
            self._set(_SIGINT, self._handler)
        if self._caught is not None and callable(self._handler):
            self._handler(*self._caught)

    def _catch(self, number: int, frame: Any) -> None:
        self._caught = (number, frame)
