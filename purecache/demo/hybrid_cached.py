"""A hybrid model with a cache: kv pages, window pages and states of prefixes are found, taken up and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from purecache.answers import Inserted, Match, Node, Refusal
from purecache.cache import PrefixCache
from purecache.demo.cached import PROGRAMS
from purecache.demo.engine import Geometry
from purecache.demo.hybrid_config import KV, STATE, WINDOW, HybridConfig
from purecache.demo.hybrid_memory import HybridLease, HybridMemory, window_law
from purecache.demo.hybrid_pools import PAGE_AXIS
from purecache.demo.loads import LoadBacks
from purecache.demo.memory import pages_for
from purecache.effects import Interpreter, Planes
from purecache.entries import of_pool
from purecache.state import CacheConfig, Checkpoint, PoolSpec
from purecache.state.layout import Account

POOL_PROGRAMS = ("allocate", "release", "finish_backup", "finish_load_back")
"""The transitions of a pool beside kv that the engine uses."""


class HybridCachedMemory(HybridMemory):
    """Lends pages of a PrefixCache with several pools.

    During prefill and decoding, a request offers its prefix to others (`checkpoint`) whenever it has passed a multiple
    of `snapshot` tokens, the place where its prompt leaves a known one, or the last page of its prompt. With it goes a
    copy of its state there: states come from places where somebody stopped, and a prefix can be taken up only there.
    """

    def __init__(
        self, cache: PrefixCache, config: HybridConfig, geometry: Geometry, snapshot: int, overlap: bool = True
    ):
        """overlap: see `LoadBacks`."""
        sizes = {KV: cache.config.device_pages} | {spec.name: spec.device_pages for spec in cache.config.pools}
        super().__init__(config, geometry, sizes)
        self.cache, self.snapshot = cache, snapshot
        self.snapshots_left_out = 0
        self._loads = LoadBacks(cache, overlap)

    @classmethod
    def build(
        cls,
        cache_config: CacheConfig,
        config: HybridConfig,
        geometry: Geometry,
        pools: Mapping[str, Any],
        host_pages: Mapping[str, int],
        snapshot: int,
        longest: int,
        check_laws: bool = False,
        copies: str | None = None,
        overlap: bool = True,
    ) -> HybridCachedMemory:
        """Make a cache over empty device pools, for requests of up to `longest` tokens with their answers.

        `cache_config`: of the kv pool alone; the others are registered here. `host_pages`: of the other pools.
        `check_laws`: check the whole state of the cache after every call, for tests. `copies`: the programs that move
        pages, see `Interpreter`.
        """
        laws = {WINDOW: window_law(config, geometry), STATE: Checkpoint()}
        planes = {}
        for name, pool in pools.items():
            device = next(iter(pool)).shape[PAGE_AXIS]
            host = cache_config.host_pages if name == KV else host_pages[name]
            if name != KV:
                spec = PoolSpec(name, laws[name], device_pages=device, host_pages=host)
                cache_config = cache_config.register_pool(spec)
            sizes = {"host_pages": max(host, 1), "device_pages": device}
            planes[name] = Interpreter(pool, page_axis=PAGE_AXIS, copies=copies, **sizes)
        # One size of program for all requests: compiling takes longer here than a larger program costs.
        smallest = pages_for(longest, geometry.page_size)
        cache = PrefixCache(cache_config, Planes(planes), smallest=smallest, check_laws=check_laws)
        return cls(cache, config, geometry, snapshot, overlap)

    def warm(self, longest: int, progress: Callable[[int, int, str], None]) -> None:
        """Compile the programs of the cache for requests of up to `longest` tokens; see PrefixCache.warm."""
        names = list(PROGRAMS)
        for name in POOL_PROGRAMS:
            names += [of_pool(name, self.cache.config.pool_of(pool)) for pool in self.sizes if pool != KV]
        if STATE in self.sizes:
            names += [of_pool(name, self.cache.config.pool_of(STATE)) for name in ("fork", "copy_page")]
        self.cache.warm(longest, names, progress)

    @property
    def pools(self) -> dict[str, Any]:
        """The current device pools; the cache dispatches its copies on them."""
        return self.cache.pools

    @pools.setter
    def pools(self, pools: dict[str, Any]) -> None:
        self.cache.pools = pools

    def take(self, pool: str, number: int) -> np.ndarray | None:
        """Free pages, evicting if need be; see HybridMemory.take."""
        return self.cache.allocate(number, pool=pool)

    def give(self, pool: str, pages: np.ndarray) -> None:
        """Release lent pages."""
        self.cache.release(pages, pool=pool)

    def announce(self, tokens: np.ndarray) -> None:
        """Do nothing: there is no storage tier here."""

    def open(self, tokens: np.ndarray, spare: int) -> HybridLease | None:
        """Match, lock, load back, copy the state and lend the rest; see Memory.open."""
        if self._loads.under_way(tokens):
            return None
        size, before = self.page_size, self.bytes_to_device
        # The engine keeps back the last token, whose logits it needs; a match may cover all it is asked for.
        last = (len(tokens) - 1) // size * size
        match, receipt = self.cache.admit(tokens[:last])
        if not self._fits(tokens, match, spare) or self._loads.begin(tokens, match):
            self.cache.unlock(receipt)
            return None
        pages, values, node = match.device_pages, match.values, match.device_node
        loaded, moved = self._loads.came(tokens, match)
        load, receipt = self._loads.now(match, receipt)
        if load is not None:
            pages, values, node = np.concatenate([pages, load.pages]), load.values, match.node
            loaded, moved = match.host_length, self.bytes_to_device - before
        filled = len(pages) * size
        lease = HybridLease(pages, filled - loaded, loaded, moved, shared=len(pages), receipt=receipt)
        lease.filled, lease.last, lease.branch = filled, last, match.full_length
        lease.windows = np.array(values.get(WINDOW, np.full(len(pages), -1)), np.int32)
        lease.lent = np.zeros(len(pages), bool)
        # The copy of the state comes first: nothing protects the original when room is made for other things.
        if not (self._own_state(lease, node) and self._own_pages(lease, len(tokens))):
            self.cancel(lease)
            return None
        self._loads.forget(tokens)
        return lease

    def _fits(self, tokens: np.ndarray, match: Match, spare: int) -> bool:
        """Whether free and evictable pages suffice for a request. What it has matched is locked already."""
        held = {name: int((ids >= 0).sum()) for name, ids in match.values.items()}
        needed = {KV: pages_for(len(tokens), self.page_size) - len(match.device_pages) + spare, STATE: 1}
        needed[WINDOW] = self.most_windows(len(tokens)) - held.get(WINDOW, 0)
        return all(needed[name] <= self._room(name) for name in self.sizes)

    def _room(self, pool: str) -> int:
        return sum(self.cache.pages(account, pool=pool) for account in (Account.FREE, Account.EVICTABLE))

    def _own_state(self, lease: HybridLease, node: Node) -> bool:
        if STATE not in self.sizes:
            return True
        if lease.filled:
            slot = self.cache.fork(node, STATE)
            if isinstance(slot, Refusal):
                return False
            lease.slot = slot
        else:
            lent = self.take(STATE, 1)
            if lent is None:
                return False
            lease.slot = int(lent[0])
        return True

    def _own_pages(self, lease: HybridLease, length: int) -> bool:
        lent = self.take(KV, pages_for(length, self.page_size) - len(lease.pages))
        if lent is not None:
            lease.pages = np.concatenate([lease.pages, lent])
        return lent is not None

    def stop(self, lease: HybridLease, position: int) -> int | None:
        """The next place at which the prefix is offered to others; see Memory.stop."""
        stops = [position // self.snapshot * self.snapshot + self.snapshot, lease.branch, lease.last]
        return min(stop for stop in stops if stop > position)

    def advance(self, lease: HybridLease, tokens: np.ndarray) -> None:
        """Offer the prefix where it is worth it, then give up window pages; see Memory.advance."""
        lease.filled = filled = len(tokens)
        worth = filled % self.snapshot == 0 or filled in (lease.branch, lease.last)
        if worth and filled > lease.shared * self.page_size:
            self._offer(lease, tokens)
        self.slide(lease)

    def _offer(self, lease: HybridLease, tokens: np.ndarray) -> None:
        """Insert a prefix of whole pages that the state of the request belongs to."""
        count, values = len(tokens) // self.page_size, {}
        if STATE in self.sizes:
            slot = self.take(STATE, 1)
            if slot is None:
                self.snapshots_left_out += 1
                return
            self.cache.copy_page(lease.slot, int(slot[0]), pool=STATE)
            values[STATE] = np.full(count, -1, np.int32)
            values[STATE][-1] = slot[0]
        if WINDOW in self.sizes:
            values[WINDOW] = lease.windows[:count]
        inserted = self.cache.checkpoint(
            tokens, lease.pages[:count], lease.receipt, counted=lease.counted, values=values
        )
        self._adopt(lease, inserted, count)

    def _adopt(self, lease: HybridLease, inserted: Inserted, offered: int) -> None:
        """Go on with the tree's pages, which the receipt protects now."""
        kept = len(inserted.pages)
        if kept != offered:
            # All that the laws ask for was offered, so the tree was out of nodes: it has one for every page.
            raise RuntimeError(f"the cache took {kept} of {offered} pages")
        lease.shared = lease.counted = kept
        lease.pages = np.concatenate([inserted.pages, lease.pages[kept:]])
        if WINDOW in self.sizes:
            # Nothing protects the tree's values further back than a window; the request does not read them any more.
            first = self.first_window(lease.filled)
            lease.windows[first:kept], lease.lent[:kept] = inserted.values[WINDOW][first:], False
            lease.windows[:first] = -1

    def share(self, lease: HybridLease, tokens: np.ndarray) -> None:
        """Offer the whole pages of a computed prompt, if no state is needed for that; see Memory.share."""
        whole = len(tokens) // self.page_size * self.page_size
        if STATE not in self.sizes and whole > lease.shared * self.page_size:
            self._offer(lease, tokens[:whole])

    def close(self, lease: HybridLease, tokens: np.ndarray) -> None:
        """Insert what is whole of prompt and answer, hand back the rest and unlock; see Memory.close.

        The state belongs to the last token: it is of use if that one ends a page. With a page in part it is released.
        """
        values: dict[str, np.ndarray] = {}
        if STATE in self.sizes:
            values[STATE] = np.full(pages_for(len(tokens), self.page_size), -1, np.int32)
            values[STATE][-1] = lease.slot
        if WINDOW in self.sizes:
            values[WINDOW] = lease.windows
        self.cache.finish(tokens, lease.pages, lease.receipt, counted=lease.counted, values=values)

    def cancel(self, lease: HybridLease) -> None:
        """Hand back what is lent and unlock; see Memory.cancel."""
        values: dict[str, np.ndarray] = {}
        if STATE in self.sizes and lease.slot >= 0:
            values[STATE] = np.array([lease.slot], np.int32)
        if WINDOW in self.sizes:
            values[WINDOW] = lease.lent_windows()
        self.cache.retract(lease.pages[lease.shared :], lease.receipt, values=values)

    def tick(self) -> None:
        """Let the cache handle copies that have ended."""
        self.cache.tick()

    def settle(self) -> dict[str, int]:
        """Wait for copies under way and return the counters of the cache."""
        self.cache.drain()
        return self.cache.counters() | {"snapshots_left_out": self.snapshots_left_out}

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys and values of one page of full layers."""
        return sum(array.nbytes for array in self.pools[KV]) // self.pages

    @property
    def bytes_to_host(self) -> int:
        """Bytes of all pools copied to L2 by transfers that have ended."""
        return self.cache.counters()["bytes_backed_up"]

    @property
    def bytes_to_device(self) -> int:
        """Bytes of all pools loaded from L2."""
        return self.cache.counters()["bytes_loaded_back"]
