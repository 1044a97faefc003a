"""The facade: one object that owns the current state of a cache and carries out its effects."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from purecache.answers import CacheError, Inserted, Load, Loading, Match, Node, Receipt, Refusal, check
from purecache.driver import Driver, Record
from purecache.effects import AgreedPlane, Interpreter, Planes
from purecache.effects.interrupts import DeferredInterrupts
from purecache.entries import LANES, of_pool
from purecache.forgetting import Forgetting, Forgotten
from purecache.inputs import Inputs, Tokens, Values
from purecache.namespaces import Namespace
from purecache.observers import Observer, Observers
from purecache.programs import SMALLEST
from purecache.replies import Replies
from purecache.resizing import Resized, Resizing
from purecache.snapshots import Snapshot
from purecache.snapshots.taking import snapshot_of
from purecache.state import NONE, CacheConfig, CacheState
from purecache.state.config import TIME_LIMIT
from purecache.state.laws import violations
from purecache.state.layout import COUNTERS, Account, Column, Scalar, Tier
from purecache.state.pools import ANCHOR
from purecache.transitions import Status


class PrefixCache:
    """A hierarchical KV cache: prefixes of prompts keep their pages on device (L1) and in host memory (L2).

    Call it from one thread. Lengths are in tokens, pages are int32 ids local to a rank. Every method copies what it is
    given, and raises `CacheError` for a mistake of the caller, with nothing changed. Without an interpreter (`plane`)
    nothing is copied and every transfer counts as carried out: for tests and simulation. Several processes that serve
    one model each have a cache, with an `agreed` plane, and make the same calls of it.
    """

    def __init__(
        self,
        config: CacheConfig,
        plane: Interpreter | Planes | AgreedPlane | None = None,
        *,
        smallest: int = SMALLEST,
        check_laws: bool = False,
        record: Record | None = None,
    ) -> None:
        """An empty cache. `smallest`: pages of the smallest program. `check_laws`: assert all laws after each call.

        record: writes down everything that is decided (`purecache.replay.Recorder`), to be repeated elsewhere.
        """
        self.config = config
        self._driver = Driver(config, plane, smallest, check_laws, record)
        self._run = self._driver.run
        self._programs = self._driver.programs
        self._inputs = Inputs(config, self._programs)
        self._replies = Replies(config)
        self._observers: Observers[PrefixCache] = Observers()
        self._resizing = Resizing(config, self._driver)
        self._forgetting = Forgetting(config, self._driver, self._inputs)

    # ---- prompts -------------------------------------------------------------------------------------------------

    def match(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> Match:
        """The longest usable prefix of `tokens`, which becomes the most recently used. Keeps back no token."""
        size, prompt = self._inputs.prompt(tokens, namespace, rank)
        return self._replies.matched(self._run("match", size, *prompt))

    def peek(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> Match:
        """As `match`, without touching anything."""
        size, prompt = self._inputs.prompt(tokens, namespace, rank)
        return self._replies.matched(self._run("peek", size, *prompt))

    def match_many(
        self, prompts: Sequence[Tokens], *, namespace: Namespace = None, rank: int | None = 0
    ) -> list[Match]:
        """`match` of several prompts in order, in one call per 1,024 of them."""
        found: list[Match] = []
        for first in range(0, len(prompts), LANES[-1]):
            batch = prompts[first : first + LANES[-1]]
            lanes, size, stacked = self._inputs.prompts(batch, namespace, rank)
            reply = self._run(f"match_{lanes}", size, *stacked)
            found += self._replies.matched_many(reply, len(batch))
        return found

    def admit(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> tuple[Match, Receipt]:
        """Match `tokens` and lock the part on device, in one call."""
        size, prompt = self._inputs.prompt(tokens, namespace, rank)
        reply = self._run("admit", size, *prompt)
        return self._replies.matched(reply.matched), self._replies.receipt(reply.locked)

    def insert(
        self,
        tokens: Tokens,
        pages: np.ndarray,
        *,
        namespace: Namespace = None,
        rank: int | None = 0,
        counted: int = 0,
        priority: int = 0,
        keep: int | None = None,
        values: Values = None,
    ) -> Inserted:
        """Give the whole pages of computed tokens to the tree: `pages[i]` holds page i of the prompt.

        Pages must be the tree's own (of a match) or lent by `allocate`; new ones become the tree's. `counted`: pages
        at the front that an earlier insert of this request has counted as hits. `keep`: tokens at the front that are
        worth keeping, say the prompt without its answer (default: all): the pages behind them get priority -1, which
        is below all others under Policy.RETENTION. `values`: likewise per tail pool, NONE where the request has no
        value; the insert ends at the last page where the law of every pool holds.
        """
        size, offer = self._inputs.offer(tokens, pages, namespace, rank, counted, priority, keep, values)
        return self._inserted(self._run("insert", size, *offer))

    def checkpoint(
        self,
        tokens: Tokens,
        pages: np.ndarray,
        receipt: Receipt,
        *,
        namespace: Namespace = None,
        rank: int | None = 0,
        counted: int = 0,
        priority: int = 0,
        keep: int | None = None,
        values: Values = None,
    ) -> Inserted:
        """`insert` for a request that goes on: its receipt then locks all of it, and its duplicates are released.

        Offer at least what the receipt locks so far: a shorter checkpoint gives up the lock on the rest.
        """
        size, offer = self._inputs.offer(tokens, pages, namespace, rank, counted, priority, keep, values)
        return self._inserted(self._run("checkpoint", size, *offer, *receipt))

    def finish(
        self,
        tokens: Tokens,
        pages: np.ndarray,
        receipt: Receipt,
        *,
        namespace: Namespace = None,
        rank: int | None = 0,
        counted: int = 0,
        priority: int = 0,
        keep: int | None = None,
        values: Values = None,
    ) -> Inserted:
        """End a request: insert its whole pages, release duplicates and the pages behind them, and unlock."""
        size, offer = self._inputs.offer(tokens, pages, namespace, rank, counted, priority, keep, values, ends=True)
        return self._inserted(self._run("finish", size, *offer, *receipt))

    def abort(self, pages: np.ndarray, receipt: Receipt, *, rank: int | None = 0, values: Values = None) -> None:
        """End a request without keeping anything: release its lent `pages` and `values` and unlock."""
        size, given = self._inputs.pages(pages)
        extra = self._inputs.values(values)
        size = max(size, *(self._programs.bucket(len(each)) for each in extra)) if extra else size
        check(self._run("abort", size, rank or 0, given, *receipt, *extra).status)

    def retract(self, pages: np.ndarray, receipt: Receipt, *, rank: int | None = 0, values: Values = None) -> None:
        """Take a running request off the device to run it again later: as `abort`, and as sglang's retract."""
        self.abort(pages, receipt, rank=rank, values=values)

    # ---- locks and pages -----------------------------------------------------------------------------------------

    def lock(self, node: Node) -> Receipt:
        """Protect `node` and all above it from eviction until the receipt comes back."""
        return self._replies.receipt(self._run("lock", 0, *node))

    def unlock(self, receipt: Receipt) -> None:
        """Undo exactly the lock that `receipt` stands for."""
        check(self._run("unlock", 0, *receipt).status)

    def allocate(self, number: int, *, rank: int | None = 0, pool: str = ANCHOR) -> np.ndarray | None:
        """Lend `number` device pages (int32), evicting what is not locked; None if there are not so many."""
        if number > self._programs.largest:
            return None
        name = of_pool("allocate", self.config.pool_of(pool))
        reply = self._run(name, self._programs.bucket(number), rank or 0, number)
        if reply.status == Status.NO_ROOM:
            return None
        check(reply.status)
        return reply.pages[:number]

    def release(self, pages: np.ndarray, *, rank: int | None = 0, pool: str = ANCHOR) -> None:
        """Hand lent pages back."""
        if len(pages):
            size, given = self._inputs.pages(pages)
            check(self._run(of_pool("release", self.config.pool_of(pool)), size, rank or 0, given).status)

    def fork(self, node: Node, pool: str) -> int | Refusal:
        """Lend a page with a copy of the value of a tail pool at `node`, for a request that computes on from it.

        The copy is dispatched when this returns. A Refusal says NOTHING if there is no value on device (any more),
        NO_ROOM if all pages are lent or locked, STALE if the copy failed: match again, or compute from the beginning.
        """
        number = self.config.pool_of(pool)
        if not number:
            raise CacheError(Status.BAD_PAGE, f"only values of a tail pool are forked, {pool!r} is not one")
        reply = self._run(of_pool("fork", number), 0, *node)
        check(min(reply.status, Status.OK))
        if reply.status != Status.OK:
            return Refusal(Status(reply.status))
        if not self._driver.copied:
            rank = self._driver.rank_of(node.number)
            self.release(np.array([reply.page], np.int32), rank=rank, pool=pool)
            return Refusal(Status.STALE)
        return reply.page

    def copy_page(self, source: int, target: int, *, pool: str, rank: int | None = 0) -> bool:
        """Copy a lent page of a tail pool into another one: a snapshot. Whether the copy could be dispatched."""
        number = self.config.pool_of(pool)
        if not number:
            raise CacheError(Status.BAD_PAGE, f"only values of a tail pool are copied, {pool!r} is not one")
        check(self._run(of_pool("copy_page", number), 0, rank or 0, source, target).status)
        return self._driver.copied

    def evict(self, number: int, *, rank: int | None = None, pool: str = ANCHOR) -> int:
        """Free up to `number` device pages of a rank (default: of any); returns how many."""
        return self._evict("evict_device", number, rank, pool)

    def evict_host(self, number: int, *, rank: int | None = None, pool: str = ANCHOR) -> int:
        """Free up to `number` host pages of a rank (default: of any); returns how many.

        Of kv, pages that are the only copy; of tail pools, any value that nothing holds.
        """
        return self._evict("evict_host", number, rank, pool)

    def _evict(self, name: str, number: int, rank: int | None, pool: str) -> int:
        freed, index = 0, self.config.pool_of(pool)
        for each in range(self.config.ranks) if rank is None else (rank,):
            wanted = min(number - freed, self._programs.largest)
            if wanted > 0:
                reply = self._run(of_pool(name, index), self._programs.bucket(wanted), each, wanted)
                check(reply.status)
                freed += reply.number
                if name == "evict_host":
                    self._driver.drop_host(reply.pages[: reply.number], each, index)
        return freed

    # ---- tiers ---------------------------------------------------------------------------------------------------

    def backup(self, node: Node, *, hits: int = 0) -> int:
        """Start copying to host what the path to `node` lacks there; returns the pages on their way.

        `hits`: only pages with so many. The write policy does this by itself at every insert.
        """
        return self._backup(node, hits, self._programs.largest)

    def load_back(self, match: Match) -> Load | Refusal:
        """Bring the part of `match` that only host has to the device: all of it, or nothing and the reason.

        The copy is dispatched, and the pages are part of the tree, when this returns; work dispatched later sees the
        bytes. Lock `match.node` before anything else may evict them.
        """
        begun = self.begin_load_back(match)
        if isinstance(begun, Refusal):
            return begun
        self._driver.hurry()
        if self.config.layout.tails:
            return self._loaded(match)
        there = self._driver.on_device(match.node.number)
        short = len(begun.pages) * self.config.page_size != match.host_length
        return Refusal(Status.STALE) if short or not there else Load(begun.pages)

    def begin_load_back(self, match: Match) -> Loading | Refusal:
        """Begin what `load_back` does, without making the steps of other requests wait for it.

        Call `tick` and ask `loaded` until it has an answer. Where copies are staged, the device pool is written by the
        first `tick` after the bytes have arrived; elsewhere the copy is dispatched when this returns.
        """
        # Room for the whole match: its part on device may have been evicted since.
        size = self._programs.bucket(match.length // self.config.page_size)
        reply = self._run("begin_load_back", size, *match.node)
        if reply.status not in (Status.OK, Status.JOINED):
            check(min(reply.status, Status.OK))
            return Refusal(Status(reply.status))
        return Loading(match, reply.pages[reply.pages != NONE])

    def loaded(self, loading: Loading) -> Load | Refusal | None:
        """How a load back ended: None while it is under way. Lock `match.node` before anything may evict its pages."""
        match = loading.match
        if self._driver.is_loading(match.node, match.length // self.config.page_size):
            return None
        return self._loaded(match)

    def _loaded(self, match: Match) -> Load | Refusal:
        """What a match has on device now that it was loaded, if that is all it needs."""
        size, node, layout = self.config.page_size, match.node.number, self.config.layout
        depth, values = match.length // size, {}
        if not self._driver.is_same(match.node):
            return Refusal(Status.STALE)
        pages = self._driver.pages_above(node, match.host_length // size)
        short = bool((pages < 0).any())
        for pool, name in enumerate(self.config.pool_names[1:], 1):
            values[name] = np.full(depth, NONE, np.int32)
            first = int(layout.tails[pool - 1].law.first_needed(depth, size))
            values[name][first:] = self._driver.pages_above(node, depth - first, pool)
            short |= bool((values[name][first:] < 0).any())
        return Refusal(Status.STALE) if short else Load(pages, values)

    def advance(self, time: int) -> None:
        """Tell the time that retention is measured by, say in seconds: 0 at first, and never going back.

        Raises ValueError unless it is from 0 to below 2**30.
        """
        if not 0 <= time < TIME_LIMIT:
            raise ValueError(f"time must be from 0 to below {TIME_LIMIT}, got {time}")
        self._run("advance", 0, time)

    def tick(self) -> int:
        """Take note of transfers that have ended; returns how many. Never blocks: call it once per scheduler step."""
        ended = len(self._driver.complete())
        if self._driver.storage is not None:
            self._driver.storage.tick()
        self._observers.ticked(self)
        return ended

    def observe(self, observer: "Observer[PrefixCache]") -> None:
        """Call `observer.ticked(cache)` at the end of every tick. Raises ValueError if it observes already."""
        self._observers.add(observer)

    def unobserve(self, observer: "Observer[PrefixCache]") -> None:
        """Undo `observe`. Raises ValueError if it does not observe."""
        self._observers.remove(observer)

    def drain(self) -> int:
        """Wait for all transfers and take note of them; returns how many."""
        return len(self._driver.complete(wait=True))

    def reset(self) -> None:
        """Forget every prefix. Pages lent to requests stay lent; receipts are void.

        Storage keeps what it has: after new weights, attach it anew with their revision in its naming.
        """
        with DeferredInterrupts():  # none of the three may go on with what the others have forgotten
            self._run("reset", 0)
            self._driver.plane.reset()
            self._driver.tally.forget()
            if self._driver.storage is not None:
                self._driver.storage.reset()

    def resize(
        self,
        *,
        device_pages: int | None = None,
        host_pages: int | None = None,
        rank: int | None = None,
        pool: str = ANCHOR,
        most: int | None = None,
    ) -> Resized:
        """Use so many pages of a rank (default: of each), at most those of the configuration; returns what is in use.

        A tier gets smaller by evicting what is not held, as `evict` and `evict_host` do; copies on host of pages that
        are on device go last. What is locked, lent or in flight stays: call it again to go on. `most`: pages per tier
        and rank that change hands in this call. The memory of a device pool, and of host pages that are slots of one
        array, stays allocated; host pages of the form "arrays" give theirs back. Raises CacheError for sizes out of
        range, and for device pages of an allocator outside the cache.
        """
        wanted = {Tier.DEVICE: device_pages, Tier.HOST: host_pages}
        asked = {tier: pages for tier, pages in wanted.items() if pages is not None}
        return self._resizing.resize(asked, rank, pool, most)

    def forget(
        self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0, keep: int | None = None
    ) -> Forgotten:
        """Delete a prompt with everything that goes on from it; of its own pages those that no other prompt shares.

        keep: delete the pages behind so many tokens of it, shared or not, with everything that goes on from them. What
        a request holds, or is in flight, stays and is counted: call it again to go on. An attached store is asked to
        delete the same pages, and those of the prompt itself that only it has; other caches may write them again.
        """
        return self._forgetting.forget(tokens, namespace, rank, keep)

    def forget_namespace(self, namespace: Namespace) -> Forgotten:
        """Delete every prompt of a namespace, in all ranks, as `forget` does.

        Storage has pages by content, so that only those are deleted there that the tree knows. In a tree of bigrams,
        prompts that were used long ago (see `purecache.inputs.ORIGINS`) are not found.
        """
        return self._forgetting.forget_namespace(namespace)

    # ---- what there is -------------------------------------------------------------------------------------------

    @property
    def pool(self) -> Any:
        """The device pool. An engine that donates it puts the new one back: `cache.pool = new_pool`."""
        return self._driver.plane.pool

    @pool.setter
    def pool(self, pool: Any) -> None:
        self._driver.plane.pool = pool

    @property
    def pools(self) -> dict[str, Any]:
        """The device pools by name, with `Planes`. Assign those that were donated and came back: any part of them."""
        return self._driver.plane.pools

    @pools.setter
    def pools(self, pools: Mapping[str, Any]) -> None:
        self._driver.plane.pools = pools

    @property
    def state(self) -> CacheState:
        """A copy of the current state."""
        return self._driver.copy_state()

    def snapshot(self) -> Snapshot:
        """Which prefixes there are, the hottest first, without their bytes; see `purecache.storage.rewarm`."""
        return snapshot_of(self.config, self._driver.copy_state(), self._inputs.origin_of)

    def pages(self, account: Account, tier: Tier = Tier.DEVICE, rank: int = 0, pool: str = ANCHOR) -> int:
        """Pages of a tier, rank and pool that are in an account (free, evictable, protected, in flight, lent)."""
        index = self.config.layout.account(account, tier, rank, self.config.pool_of(pool))
        return int(self._driver.books()[index])

    def free_pages(self, rank: int = 0, pool: str = ANCHOR) -> int:
        """Free device pages of a rank."""
        return self.pages(Account.FREE, Tier.DEVICE, rank, pool)

    def evictable_pages(self, rank: int = 0, pool: str = ANCHOR) -> int:
        """Device pages of a rank that eviction can free."""
        return self.pages(Account.EVICTABLE, Tier.DEVICE, rank, pool)

    def protected_pages(self, rank: int = 0, pool: str = ANCHOR) -> int:
        """Device pages of a rank that locks protect."""
        return self.pages(Account.PROTECTED, Tier.DEVICE, rank, pool)

    def lent_pages(self, rank: int = 0, pool: str = ANCHOR) -> int:
        """Device pages of a rank that requests hold outside the tree."""
        return self.pages(Account.LENT, Tier.DEVICE, rank, pool)

    def counters(self) -> dict[str, int]:
        """Totals since the cache was made: of the control plane in pages, and of the data plane."""
        books = self._driver.books()
        totals = {name.name.lower(): int(books[name]) for name in COUNTERS}
        return totals | self._driver.plane.counters()

    @property
    def largest(self) -> int:
        """Most pages that one call takes or gives."""
        return self._programs.largest

    @property
    def clock(self) -> int:
        """Clock of the state: handles of nodes carry the one at which they were good."""
        return int(self._driver.books()[Scalar.CLOCK])

    def columns(self, *columns: Column) -> list[np.ndarray]:
        """Copies of some columns of the nodes, int32[rows] each."""
        nodes, _ = self._driver.views()
        return [np.array(nodes[column]) for column in columns]

    def violations(self) -> list[str]:
        """Every law that the current state breaks; none, if the cache is sound."""
        return violations(self._driver.copy_state())

    def warm(
        self,
        tokens: int,
        names: Iterable[str] | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> int:
        """Compile the programs for prompts of up to so many tokens; returns the number of new ones.

        names: the methods that will be used (see `purecache.entries.TABLE`; default: all). `progress(done, total,
        name)` is called after each program.
        """
        new = self._programs.warm(-(-tokens // self.config.page_size), names, progress)
        self._driver.plane.warm()
        return new

    def programs(self) -> list[dict[str, Any]]:
        """What was compiled, one row per program: name, size in pages, temp_bytes, aliased_bytes."""
        return self._programs.report() + self._driver.plane.programs()

    # ---- machinery -----------------------------------------------------------------------------------------------

    def _inserted(self, reply: Any) -> Inserted:
        """The answer to an insert; backs up what the write policy wants."""
        answer = self._replies.inserted(reply)
        if reply.wanted:
            self._backup(answer.node, self.config.backup_hits, reply.wanted)
        return answer

    def _backup(self, node: Node, hits: int, most: int) -> int:
        """Begin backups until `most` pages of every pool are on their way, or no more can be; how many of kv are."""
        started, size, begun = [0] * self.config.layout.pools, self._programs.bucket(most), False
        while min(started) < most:
            reply = self._run("begin_backup", size, *node, hits)
            if reply.status == Status.BAD_NODE and begun:
                break  # the end of the path, on host alone, has made room for what is above it
            check(min(reply.status, Status.OK))
            begun = True
            started = [sum(each) for each in zip(started, (reply.number, *reply.values), strict=True)]
            if reply.status != Status.OK:
                break
        return started[0]
