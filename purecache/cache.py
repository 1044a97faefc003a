"""The facade: one object that owns the current state of a cache and carries out its effects."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from purecache.answers import MESSAGES, CacheError, Inserted, Load, Match, Receipt, Refusal
from purecache.driver import Driver
from purecache.effects import Interpreter
from purecache.namespaces import Namespace, namespace_digest
from purecache.programs import SMALLEST, TAIL
from purecache.state import NONE, CacheConfig, CacheState
from purecache.state.laws import violations
from purecache.state.layout import COUNTERS, Account, Tier
from purecache.transitions import Offer, Prompt, ReceiptHandle, Status

Tokens = Sequence[int] | np.ndarray


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
        """An empty cache. `smallest`: pages of the smallest compiled program. `check_laws`: check all laws per call."""
        self.config = config
        self._driver = Driver(config, plane, smallest, check_laws)
        self._run = self._driver.run
        self._bucket = self._driver.programs.bucket

    # ---- prompts -------------------------------------------------------------------------------------------------

    def match(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> Match:
        """The longest usable prefix of `tokens`, which becomes the most recently used. Keeps back no token."""
        size, prompt = self._prompt(tokens, namespace, rank)
        return self._matched(self._run("match", size, prompt))

    def peek(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> Match:
        """As `match`, without touching anything."""
        size, prompt = self._prompt(tokens, namespace, rank)
        return self._matched(self._run("peek", size, prompt))

    def admit(self, tokens: Tokens, *, namespace: Namespace = None, rank: int | None = 0) -> tuple[Match, Receipt]:
        """Match `tokens` and lock the part on device, in one call."""
        size, prompt = self._prompt(tokens, namespace, rank)
        reply = self._run("admit", size, prompt)
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
        size, prompt, offer = self._offer(tokens, pages, namespace, rank, counted, priority)
        return self._inserted(self._run("insert", size, prompt, offer))

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
        """`insert` for a request that goes on: its receipt then locks all of it, and its duplicates are released."""
        size, prompt, offer = self._offer(tokens, pages, namespace, rank, counted, priority)
        return self._inserted(self._run("checkpoint", size, prompt, offer, _handle(receipt)))

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
        size, prompt, offer = self._offer(tokens, pages, namespace, rank, counted, priority)
        tail = _int32(pages)[int(prompt.pages) :]
        if len(tail) > TAIL:
            self.release(tail[TAIL:], rank=rank)
        reply = self._run("finish", size, prompt, offer, _padded(tail[:TAIL], TAIL), _handle(receipt))
        return self._inserted(reply)

    def abort(self, pages: np.ndarray, receipt: Receipt, *, rank: int | None = 0) -> None:
        """End a request without keeping anything: release its lent `pages` and unlock."""
        size, padded = self._pages(pages)
        self._check(self._run("abort", size, np.int32(rank or 0), padded, _handle(receipt)).status)

    def retract(self, pages: np.ndarray, receipt: Receipt, *, rank: int | None = 0) -> None:
        """Take a running request off the device to run it again later: as `abort`, and as sglang's retract."""
        self.abort(pages, receipt, rank=rank)

    # ---- locks and pages -----------------------------------------------------------------------------------------

    def lock(self, node: int) -> Receipt:
        """Protect `node` and all above it from eviction until the receipt comes back."""
        return self._receipt(self._run("lock", 0, np.int32(node)))

    def unlock(self, receipt: Receipt) -> None:
        """Undo exactly the lock that `receipt` stands for."""
        self._check(self._run("unlock", 0, _handle(receipt)).status)

    def allocate(self, number: int, *, rank: int | None = 0) -> np.ndarray | None:
        """Lend `number` device pages (int32), evicting what is not locked; None if there are not so many."""
        if number > self._largest:
            return None
        reply = self._run("allocate", self._bucket(number), np.int32(rank or 0), np.int32(number))
        if reply.status == Status.NO_ROOM:
            return None
        self._check(reply.status)
        return reply.pages[:number]

    def release(self, pages: np.ndarray, *, rank: int | None = 0) -> None:
        """Hand lent pages back."""
        if len(pages):
            size, padded = self._pages(pages)
            self._check(self._run("release", size, np.int32(rank or 0), padded).status)

    def evict(self, number: int, *, rank: int | None = None) -> int:
        """Free up to `number` device pages of a rank (default: of any); returns how many."""
        freed = 0
        for each in range(self.config.ranks) if rank is None else (rank,):
            wanted = min(number - freed, self._largest)
            if wanted > 0:
                reply = self._run("evict_device", self._bucket(wanted), np.int32(each), np.int32(wanted))
                self._check(reply.status)
                freed += reply.count
        return freed

    def evict_host(self, number: int, *, rank: int | None = None) -> int:
        """Free up to `number` host pages that are the only copy, of a rank (default: of any); returns how many."""
        freed = 0
        for each in range(self.config.ranks) if rank is None else (rank,):
            wanted = min(number - freed, self._largest)
            if wanted > 0:
                reply = self._run("evict_host", self._bucket(wanted), np.int32(each), np.int32(wanted))
                self._check(reply.status)
                freed += reply.count
                self._driver.plane.drop_host(reply.pages[: reply.count], each)
        return freed

    # ---- tiers ---------------------------------------------------------------------------------------------------

    def backup(self, node: int, *, hits: int = 0) -> int:
        """Start copying to host what the path to `node` lacks there; returns the pages on their way.

        `hits`: only pages with so many. The write policy does this by itself at every insert.
        """
        return self._backup(node, hits, self._largest)

    def load_back(self, match: Match) -> Load | Refusal:
        """Bring the part of `match` that only host has to the device: all of it, or nothing and the reason.

        The copy is dispatched, and the pages are part of the tree, when this returns; work dispatched later sees the
        bytes. Lock `match.node` before anything else may evict them.
        """
        size = self._bucket(match.host_length // self.config.page_size)
        reply = self._run("begin_load_back", size, np.int32(match.node))
        if reply.status not in (Status.OK, Status.JOINED):
            self._check(reply.status)
            return Refusal(Status(reply.status))
        published = self._driver.complete()
        if reply.status == Status.OK and published.get((reply.operation, reply.generation)) != reply.count:
            return Refusal(Status.STALE)
        return Load(reply.pages[reply.pages != NONE])

    def tick(self) -> int:
        """Take note of transfers that have ended; returns how many. Never blocks: call it once per scheduler step."""
        return len(self._driver.complete())

    def drain(self) -> int:
        """Wait for all transfers and take note of them; returns how many."""
        return len(self._driver.complete(wait=True))

    def reset(self) -> None:
        """Forget every prefix. Pages lent to requests stay lent; receipts are void."""
        self._run("reset", 0)
        self._driver.plane.reset()

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

    def violations(self) -> list[str]:
        """Every law that the current state breaks; none, if the cache is sound."""
        return violations(self._driver.copy_state())

    def warm(self, tokens: int, progress: Callable[[int, int, str], None] | None = None) -> int:
        """Compile everything for prompts of up to so many tokens; returns the number of new programs."""
        new = self._driver.programs.warm(-(-tokens // self.config.page_size), progress=progress)
        self._driver.plane.warm()
        return new

    def programs(self) -> list[dict[str, Any]]:
        """What was compiled, one row per program: name, size in pages, temp_bytes, aliased_bytes."""
        return self._driver.programs.report() + self._driver.plane.programs()

    # ---- machinery -----------------------------------------------------------------------------------------------

    @property
    def _largest(self) -> int:
        return self._driver.programs.largest

    def _prompt(self, tokens: Tokens, namespace: Namespace, rank: int | None) -> tuple[int, Prompt]:
        """Size of the program for a prompt, and the prompt padded to it."""
        key, first = _int32(tokens), None
        if self.config.bigrams:
            first, key = (int(key[0]), key[1:]) if len(key) else (None, key)
        pages = min(len(key) // self.config.page_size, self._largest)
        size = self._bucket(pages)
        whole = key[: pages * self.config.page_size]
        digest = namespace_digest(namespace, rank=rank, first_token=first)
        if not 0 <= (rank or 0) < self.config.ranks:
            self._check(Status.BAD_RANK)
        padded = _padded(whole, size * self.config.page_size, 0)
        return size, Prompt(padded, np.int32(pages), digest, np.int32(rank or 0))  # type: ignore[arg-type]

    def _offer(
        self, tokens: Tokens, pages: np.ndarray, namespace: Namespace, rank: int | None, counted: int, priority: int
    ) -> tuple[int, Prompt, Offer]:
        size, prompt = self._prompt(tokens, namespace, rank)
        given = _int32(pages)
        if len(given) < int(prompt.pages):
            raise CacheError(Status.BAD_LENGTH, f"{int(prompt.pages)} whole pages of tokens, but {len(given)} pages")
        offered = _padded(given[: int(prompt.pages)], size)
        return size, prompt, Offer(offered, np.int32(counted), np.int32(priority))  # type: ignore[arg-type]

    def _pages(self, pages: np.ndarray) -> tuple[int, np.ndarray]:
        given = _int32(pages)
        if len(given) > self._largest or (given < 0).any():
            self._check(Status.BAD_PAGE)
        size = self._bucket(len(given))
        return size, _padded(given, size)

    def _matched(self, reply: Any) -> Match:
        size, device = self.config.page_size, reply.device_length
        pages = reply.device_pages[:device]
        return Match(pages, device * size, reply.length * size, reply.device_node, reply.node)

    def _inserted(self, reply: Any) -> Inserted:
        """The answer to an insert; backs up what the write policy wants."""
        self._check(reply.status)
        if reply.wanted:
            self._backup(reply.node, self.config.backup_hits, reply.wanted)
        duplicates = reply.duplicates[reply.duplicates != NONE]
        return Inserted(reply.length * self.config.page_size, reply.node, reply.pages[: reply.length], duplicates)

    def _backup(self, node: int, hits: int, most: int) -> int:
        started, size = 0, self._bucket(most)
        while started < most:
            reply = self._run("begin_backup", size, np.int32(node), np.int32(hits))
            self._check(reply.status)
            started += reply.count
            if reply.status != Status.OK:
                break
        return started

    def _receipt(self, reply: Any) -> Receipt:
        self._check(reply.status)
        return Receipt(reply.receipt, reply.generation)

    def _check(self, status: int) -> None:
        """Raise what a status below zero, or a full table, says."""
        message = MESSAGES.get(Status(status))
        if message is not None and (status < 0 or status == Status.TABLE_FULL):
            raise CacheError(Status(status), message)


def _handle(receipt: Receipt) -> ReceiptHandle:
    return ReceiptHandle(np.int32(receipt.number), np.int32(receipt.generation))  # type: ignore[arg-type]


def _int32(values: Tokens) -> np.ndarray:
    """int32[n] of token or page ids. Raises ValueError for another shape or kind, or for ids that don't fit."""
    array = np.asarray(values) if len(values) else np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"expected a flat sequence of integers, got shape {array.shape} of {array.dtype}")
    wide = array.dtype.itemsize > 4 or array.dtype == np.uint32
    if wide and len(array) and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
        raise ValueError("ids must fit into 32 bits")
    return array.astype(np.int32, copy=False)


def _padded(values: np.ndarray, size: int, fill: int = NONE) -> np.ndarray:
    """`values` followed by `fill`, int32[size]."""
    padded = np.full(size, fill, np.int32)
    padded[: len(values)] = values
    return padded
