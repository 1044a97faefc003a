"""Random events on the facade with a real interpreter and real bytes, compared with the oracle after every event."""

import numpy as np
import pytest
from comparison import FAILURES, PROMPTS, SPACES, Compared
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, multiple, rule
from oracle_tree import DEVICE, HOST
from support import settle, write_pages

from purecache.answers import CacheError, Load
from purecache.transitions import TransferKind

PAGES = st.sampled_from(PROMPTS)
KEEP = st.sampled_from([None, None, 0, 1, 3, 6])
SPACE = st.sampled_from([SPACES[0]] * 8 + list(SPACES))


class Request:
    """A running request: what it was admitted with, and the pages it computes into."""

    def __init__(self, path, receipt, pages):
        self.path, self.receipt, self.pages, self.counted = path, receipt, pages, 0


class AgainstOracle(Compared):
    requests = Bundle("requests")
    receipts = Bundle("receipts")
    loans = Bundle("loans")

    # ---- prompts ----

    @rule(pages=PAGES, space=SPACE, peek=st.booleans(), extra=st.integers(0, 1), load=st.booleans())
    def match(self, pages, space, peek, extra, load):
        path, keywords = self.path(pages, space)
        call = self.cache.peek if peek else self.cache.match
        got = call(self.tokens(path, extra % self.config.page_size), **keywords)
        self.check_match(got, path, *self.oracle.match(path, touch=not peek))
        if load:
            self.load_back(got, path)

    @rule(target=requests, pages=PAGES, space=SPACE, load=st.booleans())
    def admit(self, pages, space, load):
        path, keywords = self.path(pages, space)
        if len(self.oracle.receipts) == self.config.max_receipts:
            with pytest.raises(CacheError):
                self.cache.admit(self.tokens(path), **keywords)
            self.oracle.match(path)
            return multiple()
        match, receipt = self.cache.admit(self.tokens(path), **keywords)
        device, usable = self.oracle.match(path)
        self.oracle.lock(device, receipt)
        self.check_match(match, path, device, usable)
        have = match.device_pages
        loaded = self.load_back(match, path) if load else None
        # What is not locked may be evicted, so without a receipt to spare the request does not use what was loaded.
        if isinstance(loaded, Load) and len(self.oracle.receipts) < self.config.max_receipts:
            receipt, first = self.cache.lock(self.node(usable)), receipt
            self.oracle.lock(usable, receipt)
            self.cache.unlock(first)
            self.oracle.unlock(first)
            have = np.concatenate([have, loaded.pages])
        new = self.allocate_pages(len(path) - 1 - len(have), path[0])
        if new is None:
            self.cache.abort([], receipt, rank=path[0])
            self.oracle.unlock(receipt)
            return multiple()
        paths = self.oracle.prefixes(path)
        write_pages(self.cache, path[0], new, paths[len(have) :])
        request = Request(path, receipt, np.concatenate([have, new]))
        request.lent = set(new.tolist())
        request.epoch = self.epoch
        return request

    @rule(request=requests, length=st.integers(0, 7), priority=st.integers(-1, 4), keep=KEEP)
    def checkpoint(self, request, length, priority, keep):
        self.still_good(request)
        # A shorter checkpoint would give up the lock on pages that the request goes on using.
        length = max(length, len(self.oracle.receipts[request.receipt]) - 1)
        path = request.path[: length + 1]
        pages = request.pages[: len(path) - 1]
        got = self.cache.checkpoint(
            self.tokens(path),
            pages,
            request.receipt,
            counted=request.counted,
            priority=priority,
            keep=keep,
            **self.keywords(request.path),
        )
        tip = self.inserted(got, request, path, priority, keep)
        self.oracle.lent[path[0]] -= len(got.duplicates)
        self.oracle.move_lock(request.receipt, tip)
        self.oracle.write_through(tip)
        request.lent -= set(pages[: len(tip) - 1].tolist())
        request.pages = np.concatenate([got.pages, request.pages[len(got.pages) :]])
        request.counted = max(request.counted, len(tip) - 1)

    @rule(request=consumes(requests), priority=st.integers(-1, 4), length=st.integers(3, 7), keep=KEEP)
    def finish(self, request, priority, length, keep):
        self.still_good(request)
        path = request.path[: length + 1]
        tail = request.pages[len(path) - 1 :]  # of which the request may give back only what is its own
        tail = np.array([page for page in tail.tolist() if page in request.lent], np.int32)
        got = self.cache.finish(
            self.tokens(path),
            np.concatenate([request.pages[: len(path) - 1], tail]),
            request.receipt,
            counted=request.counted,
            priority=priority,
            keep=keep,
            **self.keywords(request.path),
        )
        tip = self.inserted(got, request, path, priority, keep)
        self.oracle.lent[path[0]] -= len(request.lent) - len(set(request.pages[: len(tip) - 1].tolist()) & request.lent)
        self.oracle.lent[path[0]] -= len(got.duplicates)
        self.oracle.unlock(request.receipt)
        self.oracle.write_through(tip)
        self.returned.append(request.receipt)

    @rule(request=consumes(requests), retract=st.booleans())
    def abort(self, request, retract):
        self.still_good(request)
        call = self.cache.retract if retract else self.cache.abort
        call(np.array(sorted(request.lent), np.int32), request.receipt, rank=request.path[0])
        self.oracle.lent[request.path[0]] -= len(request.lent)
        self.oracle.unlock(request.receipt)
        self.returned.append(request.receipt)

    def still_good(self, request):
        """Requests from before a reset only keep their pages."""
        if request.epoch == self.epoch:
            return
        if request.lent:
            self.cache.release(sorted(request.lent), rank=request.path[0])
            self.oracle.lent[request.path[0]] -= len(request.lent)
            request.lent = set()
        assume(False)

    # ---- locks and pages ----

    @rule(target=receipts, pages=PAGES, space=SPACE, deep=st.booleans())
    def lock(self, pages, space, deep):
        path, _ = self.path(pages, space)
        node = self.oracle.match(path, touch=False)[deep]
        if len(self.oracle.receipts) == self.config.max_receipts:
            with pytest.raises(CacheError):
                self.cache.lock(self.node(node))
            return multiple()
        receipt = self.cache.lock(self.node(node))
        self.oracle.lock(node, receipt)
        return receipt

    @rule(receipt=consumes(receipts))
    def unlock(self, receipt):
        if receipt not in self.oracle.receipts:
            with pytest.raises(CacheError):
                self.cache.unlock(receipt)
            return
        self.cache.unlock(receipt)
        self.oracle.unlock(receipt)
        self.returned.append(receipt)

    @rule()
    def unlock_again(self):
        assume(self.returned)
        with pytest.raises(CacheError):
            self.cache.unlock(self.returned[-1])
        with pytest.raises(CacheError):
            self.cache.abort([], self.returned[0])

    @rule(target=loans, number=st.integers(1, 8), rank=st.integers(0, 1))
    def allocate(self, number, rank):
        assume(rank < self.config.ranks)
        pages = self.allocate_pages(number, rank)
        return multiple() if pages is None else (rank, pages)

    @rule(loan=consumes(loans))
    def release(self, loan):
        rank, pages = loan
        self.cache.release(pages, rank=rank)
        self.oracle.lent[rank] -= len(pages)
        with pytest.raises(CacheError):
            self.cache.release(pages, rank=rank)

    @rule(number=st.integers(0, 9), rank=st.sampled_from([None, 0, 1]), host=st.booleans())
    def evict(self, number, rank, host):
        assume((rank or 0) < self.config.ranks)
        call, model = (self.cache.evict_host, self.oracle.evict_host) if host else (self.cache.evict, self.oracle.evict)
        freed = 0
        for each in range(self.config.ranks) if rank is None else (rank,):
            freed += model(number - freed, each)
        assert call(number, rank=rank) == freed

    @rule(time=st.integers(0, 4))
    def advance(self, time):
        """A time that has passed already changes nothing."""
        self.cache.advance(max(0, self.oracle.time + time - 1))
        self.oracle.time = max(self.oracle.time, self.oracle.time + time - 1)

    # ---- tiers ----

    @rule(pages=PAGES, space=SPACE, hits=st.integers(0, 2))
    def backup(self, pages, space, hits):
        assume(self.config.host_pages)
        path, _ = self.path(pages, space)
        node = self.oracle.match(path, touch=False)[0]
        assert self.cache.backup(self.node(node), hits=hits) == self.oracle.backup(node, hits, 16)

    @rule(wait=st.booleans())
    def tick(self, wait):
        settle(self.cache)
        number = self.cache.drain() if wait else self.cache.tick()
        assert number == len(self.oracle.complete(() if wait else self.gate.holding))

    @rule(pages=PAGES, space=SPACE, levels=st.integers(1, 3))
    def demote(self, pages, space, levels):
        """Push the end of a prompt, and whatever is older, to the host."""
        path, _ = self.path(pages, space)
        for _ in range(8):
            device = self.oracle.match(path, touch=False)[0]
            if len(device) <= max(1, len(path) - levels) or not self.oracle.evictable(path[0]):
                break
            assert self.cache.evict(1, rank=path[0]) == self.oracle.evict(1, path[0])

    @rule(tier=st.sampled_from([DEVICE, HOST]), share=st.integers(1, 8), rank=st.integers(0, 1))
    def resize(self, tier, share, rank):
        assume(rank < self.config.ranks)
        pages = max(self.oracle.capacity[tier] * share // 8, 1 - tier)
        self.oracle.resize(tier, pages, rank, self.by_host_page(rank))
        got = self.cache.resize(**{("device_pages", "host_pages")[tier]: pages}, rank=rank)
        assert got == tuple(self.oracle.capacity[each] - self.oracle.withheld[each][rank] for each in (DEVICE, HOST))

    @rule(pages=PAGES, space=SPACE, keep=st.sampled_from([None, None, 0, 1, 2, 5]))
    def forget(self, pages, space, keep):
        path, keywords = self.path(pages, space)
        tokens = None if keep is None else keep * self.config.page_size
        assert list(self.cache.forget(self.tokens(path), keep=tokens, **keywords)) == self.oracle.forget(path, keep)

    @rule(space=SPACE, chance=st.integers(0, 4))
    def forget_namespace(self, space, chance):
        assume(not chance)
        assert list(self.cache.forget_namespace(space[0])) == self.oracle.forget_namespace(space[0])

    @rule(kinds=st.sets(st.sampled_from(TransferKind)), failure=st.sampled_from(["none", *sorted(FAILURES)]))
    def weather(self, kinds, failure):
        self.gate.holding = kinds
        self.gate.fails = FAILURES[failure]

    @rule(chance=st.integers(0, 9))
    def reset(self, chance):
        assume(not chance)
        self.cache.reset()
        self.oracle.reset()
        self.epoch += 1


TestAgainstOracle = AgainstOracle.TestCase
