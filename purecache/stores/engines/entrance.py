"""Who is inside a client of an engine, so that it isn't closed under a call: clients crash then, or write anywhere."""

import contextlib
import threading
from collections.abc import Iterator


class Entrance:
    """Lets calls in until it is closed, from any thread, and says when the last one has left."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._inside = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closed

    @contextlib.contextmanager
    def entered(self) -> Iterator[bool]:
        """Around a call: whether it may begin. If so, it counts as inside until it has ended."""
        with self._news:
            may = not self._closed
            self._inside += may
        try:
            yield may
        finally:
            with self._news:
                self._inside -= may
                self._news.notify_all()

    def close(self) -> bool:
        """Let nobody in any more. True for the first one who says so, who has to close the client."""
        with self._news:
            was_closed, self._closed = self._closed, True
        return not was_closed

    def wait(self, seconds: float | None = None) -> bool:
        """Until nobody is inside; False where somebody still is after `seconds` (None: however long it takes)."""
        with self._news:
            return self._news.wait_for(lambda: not self._inside, seconds)
