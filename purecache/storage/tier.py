"""The storage tier of one cache: what to write after a backup, prefetches, and the bounds of both."""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from purecache.answers import Node, Refusal
from purecache.cache import PrefixCache
from purecache.effects import AgreedPlane, Interpreter, Planes, Transfer
from purecache.effects.interrupts import DeferredInterrupts
from purecache.entries import of_pool
from purecache.inputs import Tokens, as_int32
from purecache.namespaces import Namespace
from purecache.storage.erasing import Eraser, gone
from purecache.storage.keytable import KeyTable
from purecache.storage.options import StorageOptions
from purecache.storage.pool_pages import Namings, stored_pools
from purecache.storage.prefetch import Names, Prefetch, Present, Stage
from purecache.storage.prefixes import Known, deepest, first_needed, look_up
from purecache.storage.reader import Progress, Reader, is_over
from purecache.storage.shares import end_share, take_shares
from purecache.storage.writer import Writer
from purecache.stores.guard import Guard
from purecache.stores.interface import Store
from purecache.stores.keys import page_keys, seed_of
from purecache.transitions import Status

PROGRAMS = ("peek", "begin_store", "finish_store", "begin_prefetch", "finish_prefetch")
"""Transitions that the tier uses."""
OF_POOLS = ("finish_store", "begin_prefetch", "finish_prefetch")
"""Those of them that there are for every tail pool."""
WAITING = 4096
"""Paths that may wait for staging buffers; beyond that, the oldest is stored with its next backup."""
SMALL_PAGE = 16
"""Tokens below which a page is too little for an object."""


class StorageTier:
    """L3 of a cache: stores host pages once they are there, and prefetches them for later requests.

    Nothing here waits but `flush` and `detach`; `PrefixCache.tick` moves everything on.
    """

    def __init__(
        self,
        cache: PrefixCache,
        store: Store | Guard,
        naming: Namings,
        options: StorageOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Attach `store` to `cache`; the store is the tier's from now on. A guard around one is used as it is.

        `clock`: steady seconds, by which a prefetch without a staging buffer is given up.

        `naming` must make other names of page keys whenever anything differs that changes the bytes of a page (see
        `purecache.stores.names.ObjectRecord`): one where kv is the only pool, else one per pool, by name. What is on
        host already is stored when `store` is called for it, or when a backup below it ends. Raises ValueError without
        host pages, for a pool without a naming, or where storage is attached already, and for a cache whose plane
        agrees with other processes: what a store answers, and when, is not agreed on yet.
        """
        driver, inputs, config, plane = cache._driver, cache._inputs, cache.config, cache._driver.plane
        if driver.storage is not None:
            raise ValueError("storage is attached already: detach it first")
        if isinstance(plane, AgreedPlane):
            raise ValueError(
                "storage can't be attached to a cache that several processes share: its answers would differ between"
                " them, and then their caches; leave storage out, or give each process a cache of its own"
            )
        if config.host_pages == 0 or not isinstance(plane, Interpreter | Planes):
            raise ValueError("storage needs host pages to come from and go to: set host_pages, and give an interpreter")
        options = options or StorageOptions()
        if config.page_size < SMALL_PAGE:
            text = (
                f"a page is {config.page_size} tokens: every object in storage is one page; take {SMALL_PAGE} or more"
            )
            warnings.warn(text, stacklevel=2)
        self._config, self._driver, self._inputs, self._options = config, driver, inputs, options
        self._layout = config.layout
        self._pools = {pages.pool: pages for pages in stored_pools(config, plane, naming, options)}
        self.ring = self._pools[0].ring
        if isinstance(store, Store):
            for pages in self._pools.values():
                for region in pages.regions:
                    store.register(region)
            store = Guard(store, options.workers, options.queue, options.call_timeout)
        self.guard = store
        self._keys = KeyTable(config, inputs.origin_of)
        numbers = itertools.count()
        self._eraser = Eraser(self.guard, lambda: next(numbers))
        self._writer = Writer(self._pools, self.guard, self._end_store, lambda: next(numbers))
        patience = 2 * options.call_timeout
        hooks = self._reserve, self._end_prefetch, lambda: next(numbers)
        self._reader = Reader(self._pools, self.guard, patience, *hooks, clock)
        self._counts = {"prefetches": 0, "prefetches_limited": 0, "prefetches_given_up": 0, "tokens_prefetched": 0}
        self._occupied = 0
        self._waiting: dict[int, Node] = {}
        """Nodes whose path has pages that found no staging buffer, oldest first."""
        driver.storage = self
        half = config.host_pages * config.ranks * config.page_size // 2
        self._limit = options.tokens_in_flight or max(half, options.threshold)

    # ---- writing -------------------------------------------------------------------------------------------------

    def store(self, node: Node) -> int:
        """Start writing what the path to `node` has on host and storage lacks, of every pool; returns how many pages
        are on their way.

        Every backup that ends does this. What finds no staging buffer is begun by a later `tick`.
        """
        started = 0
        if self._driver.storage is not self:
            return 0
        while True:
            room = [self._room(pool) for pool in range(self._layout.pools)]
            reply = self._driver.run("begin_store", self._driver.programs.bucket(max(room)), *node, *room)
            started += reply.number + sum(reply.values)
            if reply.status != Status.OK:
                break
        # Only of kv it is told that something is left. Another pool without a buffer may lack something too.
        short = any(not pages.free for pages in self._pools.values() if pages.pool)
        if reply.status in (Status.NO_ROOM, Status.TABLE_FULL) or (short and reply.status == Status.NOTHING):
            self._waiting[node.number] = node
            if len(self._waiting) > WAITING:
                del self._waiting[next(iter(self._waiting))]
        return started

    def _room(self, pool: int) -> int:
        return min(self._pools[pool].free, self._options.batch_pages) if pool in self._pools else 0

    def write(self, transfer: Transfer) -> None:
        """Carry out the effect of a `begin_store`."""
        nodes, tokens = self._driver.views()
        keys = self._keys.keys_of(nodes, tokens, transfer.target.tolist())
        del nodes, tokens  # a view that is held would make the next transition copy the state
        pages = self._pools[transfer.pool]
        self._writer.start(transfer, None if keys is None else [pages.objects(key) for key in keys])

    # ---- reading -------------------------------------------------------------------------------------------------

    def prefetch(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> Prefetch | Refusal:
        """Ask storage for what follows the cached part of a prompt; a Refusal if it is not worth it or too much.

        Call it when a request is queued, and `progress` before it is admitted.
        """
        if self._driver.storage is not self:
            return Refusal(Status.STALE)
        key = as_int32(tokens).copy()  # the caller may write into its own before the prefetch ends
        prompt = self._inputs.prompt(key, namespace, rank)[1]
        known, width, least = look_up(self._driver, self._layout, prompt), self._config.page_size, self._least
        end = self._depth(known, int(prompt[1]))  # type: ignore[call-overload]
        if end - known.usable < least:
            return Refusal(Status.BELOW_THRESHOLD)
        self._counts["prefetches"] += 1
        end = self._depth(known, min(end, known.full + (self._limit - self._occupied) // width))
        if end - known.usable < least:
            self._counts["prefetches_limited"] += 1
            return Refusal(Status.NO_ROOM)
        read = key[: end * width + self._config.bigrams].view(np.uint32)
        keys = page_keys(read, width, seed_of(namespace), self._config.bigrams)
        asked_for: dict[int, tuple[int, Names]] = {}
        for pool, pages in self._pools.items():
            first = min(first_needed(self._layout, pool, known.usable + 1) if pool else known.full, end)
            asked_for[pool] = first, [pages.objects(each) for each in keys[first:end]]
        started = Prefetch(prompt, known.usable, end, asked_for)
        with DeferredInterrupts():  # what is asked for must be known here, and counted
            if not self._reader.start(started):
                return Refusal(Status.TABLE_FULL)
            self._occupied += self._cost(started)
        return started

    @property
    def _least(self) -> int:
        """Pages from which a prefetch is worth it."""
        return -(-self._options.threshold // self._config.page_size)

    def _depth(self, known: Known, limit: int) -> int:
        """How deep a prefix of at most `limit` pages can become at best, if storage has all of what it keeps."""
        stored = [np.full(len(here), pool in self._pools) for pool, here in enumerate(known.values, 1)]
        return deepest(self._layout, known.usable, limit, known.values, stored)

    def _cost(self, prefetch: Prefetch) -> int:
        """Tokens of kv that a prefetch may bring."""
        return len(prefetch.asked_for[0][1]) * self._config.page_size

    def progress(self, prefetch: Prefetch, now: float) -> Progress:
        """Whether a prefetch has ended; by the end policy, asking may end it. `now`: seconds, by any steady clock."""
        if prefetch.asked is None:
            prefetch.asked = now
        tokens = (prefetch.end - prefetch.usable) * self._config.page_size
        if prefetch.stage is not Stage.ENDED and is_over(self._options, tokens, now - prefetch.asked):
            self.abort(prefetch)
        if prefetch.stage is not Stage.ENDED:
            return Progress.NOT_YET
        return Progress.YES if prefetch.loaded else Progress.GIVEN_UP

    def abort(self, prefetch: Prefetch) -> None:
        """End a prefetch whose request is gone, whatever its stage. What has landed stays in the cache."""
        with DeferredInterrupts():
            self._reader.finish(prefetch)

    # ---- moving on -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Take answers of the store and go on with everything. Never blocks, never raises for what a store does."""
        with DeferredInterrupts():  # an answer that is taken must be dealt with
            for done in self.guard.poll():
                if not (self._writer.done(done) or self._eraser.done(done)):
                    self._reader.done(done)
            self._writer.poll()
            if self._eraser.in_flight:
                self._eraser.poll(self._writer.names())
            self._reader.poll()
            while self._waiting and any(pages.free for pages in self._pools.values()):
                if not self.store(self._waiting.pop(next(iter(self._waiting)))):
                    break  # one look per tick where there is nothing to gain

    @property
    def in_flight(self) -> int:
        """Stores and prefetches that have not ended, stores that wait for a staging buffer, objects to be deleted."""
        return self._writer.in_flight + self._reader.in_flight + len(self._waiting) + self._eraser.in_flight

    @property
    def under_way(self) -> dict[str, int]:
        """What `in_flight` counts, by what it is."""
        return {
            "stores": self._writer.in_flight,
            "prefetches": self._reader.in_flight,
            "stores_waiting": len(self._waiting),
        }

    def counters(self) -> dict[str, int]:
        """Totals of prefetches and deletions, and those of the guard (see `Guard.stats`)."""
        return self._counts | self._eraser.counts | self.guard.stats()

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
        for pages in self._pools.values():
            pages.warm()
        names = PROGRAMS + tuple(of_pool(name, pool) for pool in self._pools if pool for name in OF_POOLS)
        return self._driver.programs.warm(-(-tokens // self._config.page_size), names)

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

    # ---- deleting ------------------------------------------------------------------------------------------------

    @contextmanager
    def forgetting(self, tokens: np.ndarray, namespace: Namespace, first: int) -> Iterator[None]:
        """Delete from the store what the cache forgets meanwhile, and the pages of `tokens` from page `first` on.

        Prefetches of the namespace are given up first, so that they don't bring back what is forgotten.
        """
        seed, width = seed_of(namespace), self._config.page_size
        for prefetch in list(self._reader.open):
            origin = self._inputs.origin_of(np.asarray(prefetch.prompt[2]).tobytes())
            if origin is None or origin[0] == namespace:
                self.abort(prefetch)
        nodes, content = (np.array(view) for view in self._driver.views())
        yield
        after = np.array(self._driver.views()[0])
        lost = [self._keys.keys_of(nodes, content, [node]) for node in gone(self._layout, nodes, after)]
        keys = {key for each in lost if each is not None for key in each}
        keys.update(page_keys(tokens.copy().view(np.uint32), width, seed, self._config.bigrams)[first:])
        self._eraser.erase(
            name for key in sorted(keys) for pages in self._pools.values() for name in pages.objects(key)
        )

    # ---- hooks of the two machines -------------------------------------------------------------------------------

    def _end_store(self, transfer: Transfer, ok: np.ndarray) -> None:
        name = of_pool("finish_store", transfer.pool)
        where = (transfer.target,) if transfer.pool else ()
        self._driver.end(name, transfer.operation, transfer.generation, ok, *where)

    def _reserve(self, prefetch: Prefetch, present: Present) -> bool:
        return take_shares(self._driver, self._layout, prefetch, present, self._least)

    def _end_prefetch(self, prefetch: Prefetch) -> None:
        width, prompt = self._config.page_size, prefetch.prompt
        taken = sum([end_share(self._driver, share, prompt, width) for share in prefetch.shares])
        if taken and self._layout.tails:
            taken = max(0, look_up(self._driver, self._layout, prompt).usable - prefetch.usable)
        prefetch.loaded = taken * width
        self._occupied -= self._cost(prefetch)
        self._counts["tokens_prefetched"] += prefetch.loaded
        self._counts["prefetches_given_up"] += not prefetch.loaded
