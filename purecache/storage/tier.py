"""The storage tier of one cache: what to write after a backup, prefetches, and the bounds of both."""

import itertools
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.answers import Node, Refusal
from purecache.cache import PrefixCache
from purecache.effects import Interpreter, Transfer
from purecache.effects.interrupts import DeferredInterrupts
from purecache.inputs import Tokens, as_int32
from purecache.namespaces import Namespace
from purecache.state import NONE
from purecache.storage.buffers import PageBuffers
from purecache.storage.keytable import KeyTable
from purecache.storage.reader import EndPolicy, Prefetch, Progress, Reader, Stage
from purecache.storage.writer import Writer
from purecache.stores.guard import Guard
from purecache.stores.interface import Store
from purecache.stores.keys import page_keys, seed_of
from purecache.stores.names import Naming, objects_of
from purecache.transitions import Status

POOL = "kv"
PROGRAMS = ("peek", "begin_store", "finish_store", "begin_prefetch", "finish_prefetch")
"""Transitions that the tier uses."""
WAITING = 4096
"""Paths that may wait for staging buffers; beyond that, the oldest is stored with its next backup."""
SMALL_PAGE = 16
"""Tokens below which a page is too little for an object."""


@dataclass(frozen=True)
class StorageOptions:
    """Bounds and policies of a storage tier. Raises ValueError for a value that cannot work.

    threshold: tokens from which a prefetch is worth it. tokens_in_flight: of all prefetches together (default: half of
    what host memory holds). policy, timeout_base (s), timeout_per_1024 (s per 1,024 tokens): when a prefetch ends.
    staging_pages: buffers between host memory and the store; they bound the pages under way in both directions.
    batch_pages: most pages of one read or write. head_axis: axis of the heads in every leaf of a page, not counting the
    page axis, along which a naming with several objects per page (`HeadGroups`) cuts it. workers, queue, call_timeout
    (s): of the guard around the store.
    """

    threshold: int = 256
    tokens_in_flight: int | None = None
    policy: EndPolicy = EndPolicy.TIMEOUT
    timeout_base: float = 1.0
    timeout_per_1024: float = 0.25
    staging_pages: int = 64
    batch_pages: int = 16
    head_axis: int = 0
    workers: int = 2
    queue: int = 64
    call_timeout: float = 5.0

    def __post_init__(self) -> None:
        for name in ("threshold", "staging_pages", "batch_pages", "workers", "queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if min(self.timeout_base, self.timeout_per_1024) < 0 or self.call_timeout <= 0:
            raise ValueError("times must not be negative, and call_timeout must be positive")
        if self.tokens_in_flight is not None and self.tokens_in_flight < self.threshold:
            raise ValueError("tokens_in_flight is below the threshold: no prefetch could ever start")


class StorageTier:
    """L3 of a cache: stores host pages once they are there, and prefetches them for later requests.

    Nothing here waits but `flush` and `detach`; `PrefixCache.tick` moves everything on.
    """

    def __init__(
        self, cache: PrefixCache, store: Store | Guard, naming: Naming, options: StorageOptions | None = None
    ) -> None:
        """Attach `store` to `cache`; the store is the tier's from now on. A guard around one is used as it is.

        `naming` must make other names of page keys whenever anything differs that changes the bytes of a page (see
        `purecache.stores.names.ObjectRecord`). What is on host already is stored when `store` is called for it, or when
        a backup below it ends. Raises ValueError without host pages, or where storage is attached already.
        """
        driver, inputs, config, plane = cache._driver, cache._inputs, cache.config, cache._driver.plane
        if driver.storage is not None:
            raise ValueError("storage is attached already: detach it first")
        if config.host_pages == 0 or not isinstance(plane, Interpreter):
            raise ValueError("storage needs host pages to come from and go to: set host_pages, and give an interpreter")
        options = options or StorageOptions()
        if config.page_size < SMALL_PAGE:
            text = (
                f"a page is {config.page_size} tokens: every object in storage is one page; take {SMALL_PAGE} or more"
            )
            warnings.warn(text, stacklevel=2)
        self._config, self._driver, self._inputs, self._options = config, driver, inputs, options
        self._host_pages, self._naming = plane.host_pages, naming
        parts = len(objects_of("0" * 64, naming, (POOL,)))
        batch = min(options.batch_pages, options.staging_pages)
        self._staged = staged = plane.staged(batch, parts, options.head_axis)
        self.ring = PageBuffers(options.staging_pages, staged.row_bytes, parts)
        if isinstance(store, Store):
            store.register(self.ring.ring.region)
            store = Guard(store, options.workers, options.queue, options.call_timeout)
        self.guard = store
        self._keys = KeyTable(config, inputs.origin_of)
        numbers = itertools.count()
        self._writer = Writer(staged, self.ring, self.guard, self._end_store, lambda: next(numbers))
        self._reader = Reader(
            staged,
            self.ring,
            self.guard,
            self._host_pages,
            batch,
            2 * options.call_timeout,
            self._reserve,
            self._end_prefetch,
            lambda: next(numbers),
        )
        self._counts = {"prefetches": 0, "prefetches_limited": 0, "prefetches_given_up": 0, "tokens_prefetched": 0}
        self._occupied = 0
        self._waiting: dict[int, Node] = {}
        """Nodes whose path has pages that found no staging buffer, oldest first."""
        driver.storage = self
        half = self._host_pages * config.ranks * config.page_size // 2
        self._limit = options.tokens_in_flight or max(half, options.threshold)

    # ---- writing -------------------------------------------------------------------------------------------------

    def store(self, node: Node) -> int:
        """Start writing what the path to `node` has on host and storage lacks; returns the pages on their way.

        Every backup that ends does this. What finds no staging buffer is begun by a later `tick`.
        """
        started = 0
        if self._driver.storage is not self:
            return 0
        while True:
            room = min(self.ring.free, self._options.batch_pages)
            reply = self._driver.run("begin_store", self._driver.programs.bucket(room), *node, room)
            started += reply.number
            if reply.status != Status.OK:
                break
        if reply.status in (Status.NO_ROOM, Status.TABLE_FULL):
            self._waiting[node.number] = node
            if len(self._waiting) > WAITING:
                del self._waiting[next(iter(self._waiting))]
        return started

    def write(self, transfer: Transfer) -> None:
        """Carry out the effect of a `begin_store`."""
        pages = transfer.source + np.int32(transfer.rank * self._host_pages)
        nodes, tokens = self._driver.views()
        keys = self._keys.keys_of(nodes, tokens, transfer.target.tolist())
        del nodes, tokens  # a view that is held would make the next transition copy the state
        names = None if keys is None else [objects_of(key, self._naming, (POOL,)) for key in keys]
        self._writer.start(transfer, pages, names)

    # ---- reading -------------------------------------------------------------------------------------------------

    def prefetch(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> Prefetch | Refusal:
        """Ask storage for what follows the cached part of a prompt; a Refusal if it is not worth it or too much.

        Call it when a request is queued, and `progress` before it is admitted.
        """
        if self._driver.storage is not self:
            return Refusal(Status.STALE)
        key = as_int32(tokens).copy()  # the caller may write into its own before the prefetch ends
        size, prompt = self._inputs.prompt(key, namespace, rank)
        found, width = self._driver.run("peek", size, *prompt), self._config.page_size
        missing = int(prompt[1]) - found.length  # type: ignore[call-overload]
        if missing * width < self._options.threshold:
            return Refusal(Status.BELOW_THRESHOLD)
        self._counts["prefetches"] += 1
        missing = min(missing, (self._limit - self._occupied) // width)
        if missing * width < self._options.threshold:
            self._counts["prefetches_limited"] += 1
            return Refusal(Status.NO_ROOM)
        end = (found.length + missing) * width + self._config.bigrams
        keys = page_keys(key[:end].view(np.uint32), width, seed_of(namespace), self._config.bigrams)[found.length :]
        names = [objects_of(key, self._naming, (POOL,)) for key in keys]
        started = Prefetch(prompt, Node(found.node, found.clock), found.length, names)
        if not self._reader.start(started):
            return Refusal(Status.TABLE_FULL)
        self._occupied += len(names) * width
        return started

    def progress(self, prefetch: Prefetch, now: float) -> Progress:
        """Whether a prefetch has ended; by the end policy, asking may end it. `now`: seconds, by any steady clock."""
        if prefetch.asked is None:
            prefetch.asked = now
        if prefetch.stage is not Stage.ENDED and self._is_over(prefetch, now - prefetch.asked):
            self.abort(prefetch)
        if prefetch.stage is not Stage.ENDED:
            return Progress.NOT_YET
        return Progress.YES if prefetch.loaded else Progress.GIVEN_UP

    def abort(self, prefetch: Prefetch) -> None:
        """End a prefetch whose request is gone, whatever its stage. What has landed stays in the cache."""
        with DeferredInterrupts():
            self._reader.finish(prefetch)

    def _is_over(self, prefetch: Prefetch, waited: float) -> bool:
        if self._options.policy is EndPolicy.TIMEOUT:
            tokens = len(prefetch.names) * self._config.page_size
            return waited > self._options.timeout_base + tokens / 1024 * self._options.timeout_per_1024
        return self._options.policy is EndPolicy.BEST_EFFORT

    # ---- moving on -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Take answers of the store and go on with everything. Never blocks, never raises for what a store does."""
        with DeferredInterrupts():  # an answer that is taken must be dealt with
            for done in self.guard.poll():
                if not self._writer.done(done):
                    self._reader.done(done)
            self._writer.poll()
            self._reader.poll()
            while self._waiting and self.ring.free:
                if not self.store(self._waiting.pop(next(iter(self._waiting)))):
                    break  # one look per tick where there is nothing to gain

    @property
    def in_flight(self) -> int:
        """Stores and prefetches that have not ended, and stores that wait for a staging buffer."""
        return self._writer.in_flight + self._reader.in_flight + len(self._waiting)

    def counters(self) -> dict[str, int]:
        """Totals of prefetches, and those of the guard (see `Guard.stats`)."""
        return self._counts | self.guard.stats()

    def flush(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until nothing is under way; whether that is so. For shutdown and tests."""
        end = time.monotonic() + timeout
        while self.in_flight:
            if time.monotonic() > end:
                return False
            self.tick()
            time.sleep(0.0005)
        return True

    def warm(self, tokens: int) -> int:
        """Compile what this tier uses for prompts of up to so many tokens; returns the number of new transitions.

        Without it, the first store and the first prefetch of each size compile within `tick`, which takes seconds.
        """
        self._staged.warm()
        return self._driver.programs.warm(-(-tokens // self._config.page_size), PROGRAMS)

    def detach(self, timeout: float = 1.0) -> None:
        """Take storage off the cache and close the store; waits at most `timeout` seconds for it.

        Stores under way count as failed; prefetches end with what has landed.
        """
        if self._driver.storage is not self:
            return
        with DeferredInterrupts():
            for prefetch in list(self._reader.open):
                self._reader.finish(prefetch)
            self._waiting.clear()
            self._writer.give_up()
            self._driver.storage = None
        self.guard.close(timeout)

    def reset(self) -> None:
        """The cache forgot all operations: so does this."""
        self._writer.forget()
        self._reader.forget()
        self._waiting.clear()

    # ---- hooks of the two machines -------------------------------------------------------------------------------

    def _end_store(self, operation: int, generation: int, ok: np.ndarray) -> None:
        self._driver.end("finish_store", operation, generation, ok)

    def _reserve(self, prefetch: Prefetch, pages: int) -> bool:
        least = -(-self._options.threshold // self._config.page_size)
        if pages < least:
            return False
        size = self._driver.programs.bucket(pages)
        reply = self._driver.run("begin_prefetch", size, *prefetch.anchor, pages)
        if reply.status != Status.OK:
            return False
        prefetch.operation = (reply.operation, reply.generation)
        prefetch.pages = reply.pages[: reply.number].copy()
        return reply.number >= least

    def _end_prefetch(self, prefetch: Prefetch) -> None:
        if prefetch.operation is not None:
            self._insert(prefetch, *prefetch.operation)
        self._occupied -= len(prefetch.names) * self._config.page_size
        self._counts["tokens_prefetched"] += prefetch.loaded
        self._counts["prefetches_given_up"] += not prefetch.loaded

    def _insert(self, prefetch: Prefetch, operation: int, generation: int) -> None:
        """End the operation of a prefetch: what arrived becomes part of the tree, the other pages are free again."""
        number = len(prefetch.pages)
        last = prefetch.first + number
        size = self._driver.programs.bucket(last)
        tokens, pages, digest, rank = prefetch.prompt
        prompt = (tokens[: last * self._config.page_size], min(pages, last), digest, rank)
        ok = np.zeros(size, np.int32)
        ok[: len(prefetch.ok)] = prefetch.ok
        held = np.full(size, NONE, np.int32)
        held[:number] = prefetch.pages
        reply: Any = self._driver.run("finish_prefetch", size, operation, generation, *prompt, prefetch.first, held, ok)
        prefetch.loaded = reply.number * self._config.page_size
