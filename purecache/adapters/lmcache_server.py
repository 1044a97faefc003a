"""LMCache's server (`lmcache server`) as a second cache of whole prefixes, which a scheduler asks beside purecache.

The server keys by token ids and keeps an index of prefixes itself, so that it is no store of pages: it stands beside
the tree, and never below it. Pages go through shared memory, so the server must run on this machine, as the same user.
"""

import contextlib
import mmap
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq  # pyright: ignore[reportMissingImports]
from lmcache.v1.multiprocess.custom_types import (  # pyright: ignore[reportMissingImports]
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory  # pyright: ignore[reportMissingImports]

from purecache.stores import envelope
from purecache.stores.breaker import Breaker
from purecache.stores.keys import Tokens, page_keys
from purecache.stores.names import ObjectRecord

SLACK = 0.25
"""Seconds after its deadline in which a call may still hand back what it holds in the server."""

_SHARED_MEMORY = "/dev/shm"


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
        self._server: _Connection | None = None
        self._closed = False

    def lookup(self, tokens: Tokens, seed: str | None = None) -> int:
        """Tokens of the longest prefix that the server has, whole chunks; 0 where it can't be asked.

        `seed` keeps namespaces apart: that of `purecache.stores.keys.seed_of`. The server begins to load what it has on
        disk, so that a `retrieve` soon after finds it in memory.
        """

        known = _list(tokens)

        def ask(server: "_Connection", deadline: float) -> int:
            request = _Request(server, self._model, known, seed)
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

        def ask(server: "_Connection", deadline: float) -> int:
            request = _Request(server, self._model, known, seed)
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

        def ask(server: "_Connection", deadline: float) -> int:
            request = _Request(server, self._model, known, seed)
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

    def _run(self, ask: Callable[["_Connection", float], int]) -> int:
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

    def _connected(self, deadline: float) -> "_Connection":
        if self._server is None:
            self._server = _Connection(self._url, self._page_tokens, self._stride, self._clock)
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
        server: "_Connection",
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


class _Connection:
    """A registered client of one server, and its shared memory. Whatever goes wrong raises."""

    def __init__(self, url: str, page_tokens: int, stride: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.chunk_tokens = self.chunk_pages = 0
        # By default what a dead server was to get stays queued: it would be done at its restart, and keep us at exit.
        self._context = zmq.Context()
        self._context.linger = 0
        self.client: Any = RequestClientFactory.create(url, context=self._context)
        self.instance = secrets.randbits(62)
        self._page_tokens, self._stride = page_tokens, stride
        self._memory: memoryview | None = None
        self._identity: tuple[int, int] | None = None

    def result(self, future: Any, deadline: float) -> Any:
        """What a request came to. A handler that raises in the server answers nothing at all. Raises TimeoutError."""
        if not future.wait(max(deadline - self.clock(), 0.0)):
            raise TimeoutError("no answer in time")
        return future.result(0)

    def register(self, model: str, deadline: float) -> None:
        """Tell the server what chunks look like, and map its memory. It may be called again at any time."""
        if not self.chunk_tokens:
            tokens = self.result(self.client.get_chunk_size(), deadline)
            if type(tokens) is not int or tokens < 1 or tokens % self._page_tokens:
                raise ValueError(f"chunks of {tokens} tokens are not whole pages of {self._page_tokens}")
            self.chunk_tokens, self.chunk_pages = tokens, tokens // self._page_tokens
        payload = RegisterEngineDrivenContextPayload(
            instance_id=self.instance,
            model_name=model,
            world_size=1,
            block_size=self._page_tokens,
            num_layers=1,  # pages are opaque: one layer, a slot for each page, bytes
            hidden_dim_size=self._stride,
            dtype_str="uint8",
            use_mla=True,  # one tensor, not two of K and V
            num_physical_slots=self.chunk_pages,
        )
        there = self.result(self.client.register_kv_cache_engine_driven_context(payload), deadline)
        if not there.shm_name or there.pool_size < 1:
            raise ValueError("the server has no shared memory: start it with --shm-name and --no-l1-use-lazy")
        self._map(os.path.join(_SHARED_MEMORY, os.path.basename(there.shm_name)), there.pool_size)

    def _map(self, path: str, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_size < size:
                raise ValueError(f"{path} has {status.st_size} bytes, not {size}")
            if self._identity != (status.st_ino, size):
                self._memory = memoryview(mmap.mmap(descriptor, size))
                self._identity = (status.st_ino, size)
        finally:
            os.close(descriptor)

    def slot(self, found: Any) -> memoryview:
        """The memory of one chunk, as the server names it."""
        offset, length = found["offset"], found["length"]
        memory = self._memory
        if memory is None or length != self.chunk_pages * self._stride or not 0 <= offset <= len(memory) - length:
            raise ValueError(f"the server named {length} bytes at {offset} for a chunk")
        return memory[offset : offset + length]

    def close(self, deadline: float) -> None:
        """Say good-bye, and go."""
        with contextlib.suppress(Exception):  # nobody is there to hear it
            self.result(self.client.unregister_kv_cache_engine_driven_context(self.instance), deadline)
        self.drop()

    def drop(self) -> None:
        """Go without a word. Memory stays mapped as long as someone has a part of it."""
        self._memory = None
        with contextlib.suppress(Exception):  # a socket that is closed already
            self.client.close()
            self._context.destroy(linger=0)


class _Request:
    """What is asked about one prompt: a session of the server, which holds locks until it is left."""

    def __init__(self, server: _Connection, model: str, tokens: list[int], seed: str | None) -> None:
        self._server, self._model, self._seed = server, model, seed
        self.chunks = len(tokens) // server.chunk_tokens
        self._tokens = tuple(tokens[: self.chunks * server.chunk_tokens])
        self._name = uuid.uuid4().hex

    def page_keys(self, page_tokens: int) -> list[str]:
        """The keys of the pages in whole chunks."""
        return page_keys(self._tokens, page_tokens, self._seed)

    def lookup(self, deadline: float) -> int:
        """Chunks, from the first one on, that the server has; it holds them until they are left or read."""
        if not self.chunks:
            return 0
        client = self._server.client
        self._result(client.lookup(self._key(0, self.chunks, None), 1), deadline)
        patience = max(deadline - self._server.clock(), 0.0)
        chunks = self._result(client.wait_prefetch_status(self._name, patience), deadline)
        if type(chunks) is not int or not 0 <= chunks <= self.chunks:
            raise ValueError(f"a look-up of {self.chunks} chunks answered {chunks!r}")
        return chunks

    def read(self, chunks: int, deadline: float) -> list[memoryview]:
        """The memory of the first `chunks` chunks, which were looked up; none where they have gone."""
        found = self._result(
            self._server.client.prepare_retrieve(self._key(0, chunks, 0), self._server.instance), deadline
        )
        slots = found.context.get("slots", []) if found.success is True else []
        if slots and len(slots) != chunks:
            raise ValueError(f"{len(slots)} chunks came for {chunks}")
        return [self._server.slot(slot) for slot in slots]

    def finish_read(self, chunks: int, deadline: float) -> None:
        """Give back what was read."""
        future = self._server.client.commit_retrieve(self._key(0, chunks, 0), self._server.instance)
        self._result(future, max(deadline, self._server.clock() + SLACK))

    def begin_write(self, deadline: float) -> dict[int, memoryview]:
        """Memory for the chunks that the server lacks and has room for."""
        key = self._key(0, self.chunks, 0)
        context = self._result(self._server.client.prepare_store(key, self._server.instance), deadline).context
        slots, indices = context["slots"], context["chunk_indices"]
        if len(slots) != len(indices) or not all(0 <= index < self.chunks for index in indices):
            raise ValueError(f"the server wants chunks {indices} of {self.chunks}, in {len(slots)} places")
        return {index: self._server.slot(slot) for index, slot in zip(indices, slots, strict=True)}

    def finish_write(self, deadline: float) -> None:
        """Make what was written visible. Without it the server frees the memory after --l1-write-ttl-seconds."""
        future = self._server.client.commit_store(self._key(0, self.chunks, 0), self._server.instance, b"")
        if self._result(future, max(deadline, self._server.clock() + SLACK)) is not True:
            raise ValueError("the server dropped what was written")

    def leave(self, first: int, end: int, deadline: float) -> None:
        """End the session, and let go of the chunks [first, end) that were looked up and not read."""
        client, late = self._server.client, max(deadline, self._server.clock() + SLACK)
        if first < end:
            self._result(client.free_lookup_locks(self._key(first, end, None), 1), late)
        self._result(client.end_session(self._name), late)

    def _key(self, first: int, end: int, worker: int | None) -> Any:
        size = self._server.chunk_tokens
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=worker,
            token_ids=self._tokens,
            start=first * size,
            end=end * size,
            request_id=self._name,
            cache_salt=self._seed or "",
            num_kv_readers=1,
        )

    def _result(self, future: Any, deadline: float) -> Any:
        return self._server.result(future, deadline)


def _list(tokens: Tokens) -> list[int]:
    array = np.asarray(tokens)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise ValueError("tokens are one axis of integers")
    return array.tolist() if array.size else []
