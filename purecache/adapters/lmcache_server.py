"""LMCache's server (`lmcache server`) as a second cache of whole prefixes, which a scheduler asks beside purecache.

The server keys by token ids and keeps an index of prefixes itself, so that it is no store of pages: it stands beside
the tree, and never below it. Pages go through shared memory, so the server must run on this machine, as the same user.
"""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from purecache.adapters.lmcache_connection import SLACK, Connection, Request
from purecache.stores import envelope
from purecache.stores.breaker import Breaker
from purecache.stores.keys import Tokens
from purecache.stores.names import ObjectRecord


class LmcacheServer:
    """A client of the server at `url` (`tcp://127.0.0.1:5555`) for pages of `page_bytes` bytes that `record` describes.

    Every call waits for at most `timeout` seconds (and `SLACK`), also when the server is dead, and raises nothing for
    what the server does: a failure is a miss. After some failures in a row `breaker` lets calls answer at once for a
    while. A failed call drops the connection; a later one makes a new one, and finds a restarted server.

    The server works in chunks of `--chunk-size` tokens, which must be whole pages; what follows the last whole chunk of
    a prompt is neither found nor stored. Each page goes with the trailer of `purecache.stores.envelope`, whose key is
    the chain of all tokens before it: a page that is damaged, or of other tokens, ends the prefix. It can't be replaced
    before the server evicts it.

    Calls of several threads run one after another. Raises ValueError for sizes and times below what makes sense.
    """

    def __init__(
        self,
        url: str,
        record: ObjectRecord,
        page_bytes: int,
        *,
        timeout: float = 1.0,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if page_bytes < 1 or timeout <= 0:
            raise ValueError(f"need page_bytes >= 1 and timeout > 0, not {page_bytes} and {timeout}")
        self.last_error = ""
        """What went wrong last; the address, and nothing that is secret, may be in it."""
        self.breaker = breaker or Breaker(failures=2, cooldown=5.0, clock=clock)
        self._url, self._timeout, self._clock = url, timeout, clock
        self._page_tokens, self._page_bytes = record.page_size, page_bytes
        self._stride = page_bytes + envelope.TRAILER
        # Bytes of other weights or layouts have another name: the server knows no more of them than that.
        self._model = f"purecache-{record.digest}-{page_bytes}"
        self._lock = threading.Lock()
        self._counts: dict[str, int] = dict.fromkeys(("calls", "failures", "skipped", "damaged"), 0)
        self._server: Connection | None = None
        self._closed = False

    def lookup(self, tokens: Tokens, seed: str | None = None) -> int:
        """Tokens of the longest prefix that the server has, whole chunks; 0 where it can't be asked.

        `seed` keeps namespaces apart: that of `purecache.stores.keys.seed_of`. The server begins to load what it has on
        disk, so that a `retrieve` soon after finds it in memory.
        """

        known = _list(tokens)

        def ask(server: Connection, deadline: float) -> int:
            request = Request(server, self._model, known, seed)
            chunks = request.lookup(deadline)
            request.leave(0, chunks, deadline)
            return chunks * server.chunk_tokens

        return self._run(ask)

    def retrieve(self, tokens: Tokens, buffers: Sequence[memoryview | None], seed: str | None = None) -> int:
        """Fill `buffers` with the pages of `tokens`, from the first one on; how many pages, from the first one, came.

        A buffer is writable bytes of one page, or None for a page that is not wanted. Those behind the number that is
        answered may hold anything. Raises ValueError, before anything is asked, for a buffer of another size.
        """
        self._check(buffers)
        known = _list(tokens)

        def ask(server: Connection, deadline: float) -> int:
            request = Request(server, self._model, known, seed)
            there = request.lookup(deadline)
            chunks = min(there, -(-len(buffers) // server.chunk_pages))
            slots = request.read(chunks, deadline) if chunks else []
            pages = self._copy_out(server, slots, request.page_keys(self._page_tokens), buffers, deadline)
            if slots:
                request.finish_read(chunks, deadline)
            request.leave(len(slots) and chunks, there, deadline)
            return pages

        return self._run(ask)

    def store(self, tokens: Tokens, buffers: Sequence[memoryview], seed: str | None = None) -> int:
        """Store the pages of `tokens`, as many as there are buffers and whole chunks of them.

        Answers how many pages, from the first one on, the server has afterwards: it may be full, and it doesn't say so.
        The buffers are copied before this returns. Raises ValueError for a buffer of another size.
        """
        self._check(buffers)
        known = _list(tokens)[: len(buffers) * self._page_tokens]

        def ask(server: Connection, deadline: float) -> int:
            request = Request(server, self._model, known, seed)
            if not request.chunks:
                return 0
            keys = request.page_keys(self._page_tokens)
            slots = request.begin_write(deadline)
            for chunk, slot in slots.items():
                for page in range(server.chunk_pages):
                    index = chunk * server.chunk_pages + page
                    room = slot[page * self._stride : (page + 1) * self._stride]
                    room[: self._page_bytes] = buffers[index]
                    envelope.seal(keys[index], room)
            if slots:
                request.finish_write(deadline)
            there = request.lookup(max(deadline, self._clock() + SLACK))
            request.leave(0, there, deadline)
            return there * server.chunk_pages

        return self._run(ask)

    def stats(self) -> dict[str, int]:
        """`calls` made; `failures` of them; calls `skipped` because of the breaker; `damaged` pages seen."""
        return dict(self._counts)

    def close(self) -> None:
        """Leave the server. Later calls answer 0; a second call does nothing."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
            if server is not None:
                server.close(self._clock() + SLACK)

    def _run(self, ask: Callable[[Connection, float], int]) -> int:
        deadline = self._clock() + self._timeout
        if not self._lock.acquire(timeout=self._timeout):
            return 0
        try:
            if self._closed or self._clock() >= deadline or not self.breaker.allows():
                self._counts["skipped"] += 1
                return 0
            self._counts["calls"] += 1
            try:
                answer = ask(self._connected(deadline), deadline)
            except Exception as error:
                self.last_error = f"{self._url}: {type(error).__name__}: {error}"
                self._counts["failures"] += 1
                self.breaker.failed()
                server, self._server = self._server, None
                if server is not None:
                    server.drop()
                return 0
            self.breaker.succeeded()
            return answer
        finally:
            self._lock.release()

    def _connected(self, deadline: float) -> Connection:
        if self._server is None:
            self._server = Connection(self._url, self._page_tokens, self._stride, self._clock)
        # Every time: a server that was restarted, or that has not heard of us for long, would answer as if it were
        # empty, and its shared memory is another one.
        self._server.register(self._model, deadline)
        return self._server

    def _check(self, buffers: Sequence[memoryview | None]) -> None:
        wrong = [buffer.nbytes for buffer in buffers if buffer is not None and buffer.nbytes != self._page_bytes]
        if wrong:
            raise ValueError(f"a buffer has {wrong[0]} bytes, but a page has {self._page_bytes}")

    def _copy_out(
        self,
        server: Connection,
        slots: Sequence[memoryview],
        keys: Sequence[str],
        buffers: Sequence[memoryview | None],
        deadline: float,
    ) -> int:
        for index in range(min(len(slots) * server.chunk_pages, len(buffers))):
            chunk, page = divmod(index, server.chunk_pages)
            content = slots[chunk][page * self._stride : (page + 1) * self._stride]
            buffer = buffers[index]
            if self._clock() >= deadline:
                return index
            if buffer is not None:
                if not envelope.is_intact(keys[index], content):
                    self._counts["damaged"] += 1
                    return index
                buffer[:] = content[: self._page_bytes]
        return min(len(slots) * server.chunk_pages, len(buffers))


def _list(tokens: Tokens) -> list[int]:
    array = np.asarray(tokens)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise ValueError("tokens are one axis of integers")
    return array.tolist() if array.size else []
