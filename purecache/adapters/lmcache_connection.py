"""What goes to LMCache's server and comes back: a connection with shared memory, and what is asked about one prompt.

Whatever goes wrong raises: `lmcache_server.py` makes misses of it.
"""

import contextlib
import mmap
import os
import secrets
import uuid
from collections.abc import Callable
from typing import Any

import zmq  # pyright: ignore[reportMissingImports]
from lmcache.v1.multiprocess.custom_types import (  # pyright: ignore[reportMissingImports]
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory  # pyright: ignore[reportMissingImports]

from purecache.stores.keys import page_keys

SLACK = 0.25
"""Seconds after its deadline in which a call may still hand back what it holds in the server."""

_SHARED_MEMORY = "/dev/shm"


class Connection:
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


class Request:
    """What is asked about one prompt: a session of the server, which holds locks until it is left."""

    def __init__(self, server: Connection, model: str, tokens: list[int], seed: str | None) -> None:
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
