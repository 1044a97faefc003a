"""The facade: one object that owns the current state of a cache and carries out its effects."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from purecache.answers import Inserted, Load, Match, Node, Receipt, Refusal, check
from purecache.driver import Driver
from purecache.effects import Interpreter
from purecache.inputs import Inputs, Tokens
from purecache.namespaces import Namespace
from purecache.programs import LANES, SMALLEST
from purecache.state import NONE, CacheConfig, CacheState
from purecache.state.laws import violations
from purecache.state.layout import COUNTERS, Account, Column, Scalar, Tier
from purecache.transitions import Status


class PrefixCache:
    """A hierarchical KV cache: prefixes of prompts keep their pages on device (L1) and in host memory (L2).

    Call it from one thread. Lengths are in tokens, pages are int32 ids local to a rank. Every method copies what it is
    given, and raises `CacheError` for a mistake of the caller, with nothing changed. Without an interpreter (`plane`)
    nothing is copied and every transfer counts as carried out: for tests and simulation.
    """

    def __init__(
        self,
        config: CacheConfig,
        plane: Interpreter | None = None,
        *,
        smallest: int = SMALLEST,
        check_laws: bool = False,
    ) -> None:
        """An empty cache. `smallest`: pages of the smallest program. `check_laws`: assert all laws after each call."""
        self.config = config
        self._driver = Driver(config, plane, smallest, check_laws)
        self._run = self._driver.run
        self._programs = self._driver.programs
        self._inputs = Inputs(config, self._programs)

    # ---- prompts -------------------------------------------------------------------------------------------------

    def match(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> Match:
        """The longest usable prefix of `tokens`, which becomes the most recently used. Keeps back no token."""
        size, prompt = self._inputs.prompt(tokens, namespace, rank)
        return self._matched(self._run("match", size, *prompt))

    def peek(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> Match:
        """As `match`, without touching anything."""
        size, prompt = self._inputs.prompt(tokens, namespace, rank)
        return self._matched(self._run("peek", size, *prompt))

    def match_many(
        self, prompts: Sequence[Tokens], *, namespace: Namespace = None, rank: int | None = 0
    ) -> list[Match]:
        """`match` of several prompts in order, in one call per 1,024 of them."""
        found: list[Match] = []
        for first in range(0, len(prompts), LANES[-1]):
            batch = prompts[first : first + LANES[-1]]
            lanes, size, stacked = self._inputs.prompts(batch, namespace, rank)
            reply = self._run(f"match_{lanes}", size, *stacked)
            *numbers, pages = reply
            for lane in zip(*(column.tolist() for column in numbers), pages[: len(batch)], strict=False):
                found.append(self._matched(type(reply)(*lane)))
        return found

    def admit(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> tuple[Match, Receipt]:
        """Match `tokens` and lock the part on device, in one call."""
        size, prompt = self._inputs.prompt(tokens, namespace, rank)
        reply = self._run("admit", size, *prompt)
        return self._matched(reply.matched), self._receipt(reply.locked)

    def insert(
        self,
        tokens: Tokens,
        pages: np.ndarray,
        *,
        namespace: Namespace = None,
        rank: int | None = 0,
        counted: int = 0,
        priority: int = 0,
    ) -> Inserted:
        """Give the whole pages of computed tokens to the tree: `pages[i]` holds page i of the prompt.

        Pages must be the tree's own (of a match) or lent by `allocate`; new ones become the tree's. `counted`: pages
        at the front that an earlier insert of this request has counted as hits.
        """
        size, offer = self._inputs.offer(tokens, pages, namespace, rank, counted, priority)
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
    ) -> Inserted:
        """`insert` for a request that goes on: its receipt then locks all of it, and its duplicates are released.

        Offer at least what the receipt locks so far: a shorter checkpoint gives up the lock on the rest.
        """
        size, offer = self._inputs.offer(tokens, pages, namespace, rank, counted, priority)
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
    ) -> Inserted:
        """End a request: insert its whole pages, release duplicates and the pages behind them, and unlock."""
        size, offer = self._inputs.offer(tokens, pages, namespace, rank, counted, priority, ends=True)
        return self._inserted(self._run("finish", size, *offer, *receipt))

    def abort(self, pages: np.ndarray, receipt: Receipt, *, rank: int | None = 0) -> None:
        """End a request without keeping anything: release its lent `pages` and unlock."""
        size, given = self._inputs.pages(pages)
        check(self._run("abort", size, rank or 0, given, *receipt).status)

    def retract(self, pages: np.ndarray, receipt: Receipt, *, rank: int | None = 0) -> None:
        """Take a running request off the device to run it again later: as `abort`, and as sglang's retract."""
        self.abort(pages, receipt, rank=rank)

    # ---- locks and pages -----------------------------------------------------------------------------------------

    def lock(self, node: Node) -> Receipt:
        """Protect `node` and all above it from eviction until the receipt comes back."""
        return self._receipt(self._run("lock", 0, *node))

    def unlock(self, receipt: Receipt) -> None:
        """Undo exactly the lock that `receipt` stands for."""
        check(self._run("unlock", 0, *receipt).status)

    def allocate(self, number: int, *, rank: int | None = 0) -> np.ndarray | None:
        """Lend `number` device pages (int32), evicting what is not locked; None if there are not so many."""
        if number > self._programs.largest:
            return None
        reply = self._run("allocate", self._programs.bucket(number), rank or 0, number)
        if reply.status == Status.NO_ROOM:
            return None
        check(reply.status)
        return reply.pages[:number]

    def release(self, pages: np.ndarray, *, rank: int | None = 0) -> None:
        """Hand lent pages back."""
        if len(pages):
            size, given = self._inputs.pages(pages)
            check(self._run("release", size, rank or 0, given).status)

    def evict(self, number: int, *, rank: int | None = None) -> int:
        """Free up to `number` device pages of a rank (default: of any); returns how many."""
        freed = 0
        for each in range(self.config.ranks) if rank is None else (rank,):
            wanted = min(number - freed, self._programs.largest)
            if wanted > 0:
                reply = self._run("evict_device", self._programs.bucket(wanted), each, wanted)
                check(reply.status)
                freed += reply.number
        return freed

    def evict_host(self, number: int, *, rank: int | None = None) -> int:
        """Free up to `number` host pages that are the only copy, of a rank (default: of any); returns how many."""
        freed = 0
        for each in range(self.config.ranks) if rank is None else (rank,):
            wanted = min(number - freed, self._programs.largest)
            if wanted > 0:
                reply = self._run("evict_host", self._programs.bucket(wanted), each, wanted)
                check(reply.status)
                freed += reply.number
                self._driver.plane.drop_host(reply.pages[: reply.number], each)
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
        # Room for the whole match: its part on device may have been evicted since.
        size = self._programs.bucket(match.length // self.config.page_size)
        reply = self._run("begin_load_back", size, *match.node)
        if reply.status not in (Status.OK, Status.JOINED):
            check(min(reply.status, Status.OK))
            return Refusal(Status(reply.status))
        self._driver.complete()
        pages = reply.pages[reply.pages != NONE]
        if not self._driver.on_device(match.node.number) or len(pages) * self.config.page_size != match.host_length:
            return Refusal(Status.STALE)
        return Load(pages)

    def tick(self) -> int:
        """Take note of transfers that have ended; returns how many. Never blocks: call it once per scheduler step."""
        ended = len(self._driver.complete())
        if self._driver.storage is not None:
            self._driver.storage.tick()
        return ended

    def drain(self) -> int:
        """Wait for all transfers and take note of them; returns how many."""
        return len(self._driver.complete(wait=True))

    def reset(self) -> None:
        """Forget every prefix. Pages lent to requests stay lent; receipts are void.

        Storage keeps what it has: after new weights, attach it anew with their revision in its naming.
        """
        self._run("reset", 0)
        self._driver.plane.reset()
        if self._driver.storage is not None:
            self._driver.storage.reset()

    # ---- what there is -------------------------------------------------------------------------------------------

    @property
    def pool(self) -> Any:
        """The device pool. An engine that donates it puts the new one back: `cache.pool = new_pool`."""
        return self._driver.plane.pool

    @pool.setter
    def pool(self, pool: Any) -> None:
        self._driver.plane.pool = pool

    @property
    def state(self) -> CacheState:
        """A copy of the current state."""
        return self._driver.copy_state()

    def pages(self, account: Account, tier: Tier = Tier.DEVICE, rank: int = 0) -> int:
        """Pages of a tier and rank that are in an account (free, evictable, protected, in flight, lent)."""
        return int(self._driver.books()[self.config.layout.account(account, tier, rank)])

    def free_pages(self, rank: int = 0) -> int:
        """Free device pages of a rank."""
        return self.pages(Account.FREE, Tier.DEVICE, rank)

    def evictable_pages(self, rank: int = 0) -> int:
        """Device pages of a rank that eviction can free."""
        return self.pages(Account.EVICTABLE, Tier.DEVICE, rank)

    def protected_pages(self, rank: int = 0) -> int:
        """Device pages of a rank that locks protect."""
        return self.pages(Account.PROTECTED, Tier.DEVICE, rank)

    def lent_pages(self, rank: int = 0) -> int:
        """Device pages of a rank that requests hold outside the tree."""
        return self.pages(Account.LENT, Tier.DEVICE, rank)

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

        names: the methods that will be used (see `purecache.programs.TABLE`; default: all). `progress(done, total,
        name)` is called after each program.
        """
        new = self._programs.warm(-(-tokens // self.config.page_size), names, progress)
        self._driver.plane.warm()
        return new

    def programs(self) -> list[dict[str, Any]]:
        """What was compiled, one row per program: name, size in pages, temp_bytes, aliased_bytes."""
        return self._programs.report() + self._driver.plane.programs()

    # ---- machinery -----------------------------------------------------------------------------------------------

    def _matched(self, reply: Any) -> Match:
        device, length, device_node, node, clock, pages = reply
        size = self.config.page_size
        return Match(pages[:device], device * size, length * size, Node(device_node, clock), Node(node, clock))

    def _inserted(self, reply: Any) -> Inserted:
        """The answer to an insert; backs up what the write policy wants."""
        check(reply.status)
        node = Node(reply.node, reply.clock)
        if reply.wanted:
            self._backup(node, self.config.backup_hits, reply.wanted)
        duplicates = reply.duplicates[reply.duplicates != NONE]
        return Inserted(reply.length * self.config.page_size, node, reply.pages[: reply.length], duplicates)

    def _backup(self, node: Node, hits: int, most: int) -> int:
        started, size = 0, self._programs.bucket(most)
        while started < most:
            reply = self._run("begin_backup", size, *node, hits)
            check(min(reply.status, Status.OK))
            started += reply.number
            if reply.status != Status.OK:
                break
        return started

    def _receipt(self, reply: Any) -> Receipt:
        check(reply.status)
        return Receipt(reply.receipt, reply.generation)
