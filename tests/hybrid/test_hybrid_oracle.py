"""Random events on a cache with tail pools, real interpreters and real bytes, compared with the oracle after each."""

import numpy as np
import pytest
from comparison import FAILURES, PROMPTS, SPACES
from hybrid_comparison import WEATHERS, HybridCompared
from hybrid_support import check_value, settle_all
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, multiple, rule
from oracle_tree import DEVICE

from purecache.answers import CacheError, Load, Refusal
from purecache.state import NONE
from purecache.transitions import Status, TransferKind

PAGES = st.sampled_from(PROMPTS)
SPACE = st.sampled_from([SPACES[0]] * 8 + list(SPACES))
POOL = st.integers(0, 3)
CHOICE = st.one_of(st.just("law"), st.just("law"), st.integers(0, 127))
WANTED = st.lists(CHOICE, min_size=3, max_size=3)
"""Per pool, the pages of a prompt for which a request computes values: those that its end needs, or a set of bits."""


class Request:
    """A running request: what it was admitted with, and what it computes into."""

    def __init__(self, path, receipt, pages, lent, epoch):
        self.path, self.receipt, self.pages, self.lent, self.epoch = path, receipt, pages, set(lent), epoch
        self.own = {}
        """{pool: {place: lent page with the value there}}"""
        self.counted = 0


class HybridAgainstOracle(HybridCompared):
    requests = Bundle("requests")
    receipts = Bundle("receipts")
    loans = Bundle("loans")

    # ---- prompts ----

    @rule(pages=PAGES, space=SPACE, peek=st.booleans(), extra=st.integers(0, 1), load=st.booleans())
    def match(self, pages, space, peek, extra, load):
        path, keywords = self.path(pages, space)
        call = self.cache.peek if peek else self.cache.match
        got = call(self.tokens(path, extra % self.config.page_size), **keywords)
        device, usable, run = self.oracle.match(path, touch=not peek)
        self.check_match(got, path, device, usable, run)
        if load:
            self.load_back(got, usable)

    @rule(target=requests, pages=PAGES, space=SPACE, load=st.booleans(), wanted=WANTED)
    def admit(self, pages, space, load, wanted):
        path, keywords = self.path(pages, space)
        rank = path[0]
        if len(self.oracle.receipts) == self.config.max_receipts:
            with pytest.raises(CacheError):
                self.cache.admit(self.tokens(path), **keywords)
            self.oracle.match(path)
            return multiple()
        match, receipt = self.cache.admit(self.tokens(path), **keywords)
        device, usable, run = self.oracle.match(path, lock=receipt)
        self.check_match(match, path, device, usable, run)
        have = match.device_pages
        loaded = self.load_back(match, usable) if load else None
        # What is not locked may be evicted, so without a receipt to spare the request does not use what was loaded.
        if isinstance(loaded, Load) and len(self.oracle.receipts) < self.config.max_receipts:
            receipt, first = self.cache.lock(self.node(usable)), receipt
            self.oracle.lock(usable, receipt)
            self.cache.unlock(first)
            self.oracle.unlock(first)
            have = np.array([self.page_of("kv", prefix) for prefix in self.oracle.prefixes(usable)], np.int32)
        new = self.allocate_pages("kv", len(path) - 1 - len(have), rank)
        if new is None:
            self.cache.abort([], receipt, rank=rank, values={})
            self.oracle.unlock(receipt)
            return multiple()
        self.compute("kv", rank, new, self.oracle.prefixes(path)[len(have) :])
        request = Request(path, receipt, np.concatenate([have, new]), new.tolist(), self.epoch)
        for pool, choice in zip(self.tails, wanted, strict=False):
            self.compute_values(request, pool, choice)
        return request

    def compute_values(self, request, pool, choice):
        """Allocate and compute values for some pages of a request; for none of them if there is no room."""
        prefixes = self.oracle.prefixes(request.path)
        if choice == "law":
            places = list(range(len(prefixes) - len(self.oracle.needed(pool, request.path)), len(prefixes)))
        else:
            places = [place for place in range(len(prefixes)) if choice >> place & 1]
        pages = self.allocate_pages(pool, len(places), request.path[0])
        if pages is not None:
            self.compute(pool, request.path[0], pages, [prefixes[place] for place in places])
            request.own[pool] = dict(zip(places, pages.tolist(), strict=True))

    def offer(self, request, path, ends, mine):
        """The `values` of an insert of `path`: the request's own, and with `mine` also those that the tree has."""
        offers, known = {}, {}
        for pool in self.tails:
            own = {place: page for place, page in request.own.get(pool, {}).items() if ends or place < len(path) - 1}
            held = {}
            for place, prefix in enumerate(self.oracle.prefixes(path)) if mine else ():
                if place not in own and self.oracle.value(pool, prefix).has[DEVICE]:
                    held[place] = self.page_of(pool, prefix)
            row = np.full(max([*own, *held], default=-1) + 1, NONE, np.int32)
            for place, page in (own | held).items():
                row[place] = page
            if len(row):
                offers[pool] = row
            known[pool] = {place for place in own if place < len(path) - 1}
        return offers, known

    def inserted(self, got, request, path, priority, known):
        """Compare what an insert answers; returns its deepest node. Takes what became the tree's from the request."""
        rank, size = path[0], self.config.page_size
        on_device = self.oracle.run_of(path, lambda has: has[DEVICE])
        tip, adopted = self.oracle.insert(path, request.counted, priority, known)
        assert got.length == size * (len(tip) - 1)
        assert got.node.number == self.number(tip)
        offered = request.pages[: len(on_device) - 1][: len(tip) - 1]
        duplicates = [page for page in offered.tolist() if page in request.lent]
        assert got.duplicates.tolist() == duplicates
        new = (request.lent & set(request.pages[: len(tip) - 1].tolist())) - set(duplicates)
        request.lent -= new
        self.adopted("kv", rank, new)
        spare = {}
        for pool in self.tails:
            own = request.own.get(pool, {})
            self.adopted(pool, rank, [own.pop(place) for place in adopted[pool]])
            spare[pool] = [own[place] for place in sorted(own) if place < len(tip) - 1]
            assert got.spare[pool].tolist() == spare[pool], pool
        self.check_pages(rank, got.pages, self.oracle.prefixes(tip))
        self.check_all_values(got.values, tip)
        return tip, duplicates, spare

    def check_all_values(self, values, tip):
        """An insert names every value that the tree has now."""
        assert set(values) == set(self.tails)
        for pool, pages in values.items():
            for page, prefix in zip(pages.tolist(), self.oracle.prefixes(tip), strict=True):
                assert (page != NONE) == self.oracle.value(pool, prefix).has[DEVICE], (pool, prefix)
                if page != NONE:
                    check_value(self.cache, pool, tip[0], page, prefix)

    @rule(request=requests, length=st.integers(0, 7), priority=st.integers(-1, 4), mine=st.booleans())
    def checkpoint(self, request, length, priority, mine):
        self.still_good(request)
        # A shorter checkpoint would give up the lock on pages that the request goes on using.
        locked = self.oracle.receipts[request.receipt]
        path = request.path[: max(length + 1, len(locked))]
        offers, known = self.offer(request, path, False, mine)
        pages = request.pages[: len(path) - 1]
        keywords = {"counted": request.counted, "priority": priority, **self.keywords(request.path)}
        got = self.cache.checkpoint(self.tokens(path), pages, request.receipt, values=offers, **keywords)
        tip, duplicates, spare = self.inserted(got, request, path, priority, known)
        self.freed_duplicates(request, duplicates, spare)
        self.oracle.move_lock(request.receipt, tip)
        self.oracle.write_through(tip)
        request.pages = np.concatenate([got.pages, request.pages[len(got.pages) :]])
        request.counted = max(request.counted, len(tip) - 1)

    def freed_duplicates(self, request, duplicates, spare):
        rank = request.path[0]
        self.gave_back("kv", rank, duplicates)
        request.lent -= set(duplicates)
        for pool, pages in spare.items():
            self.gave_back(pool, rank, pages)
            own = request.own.get(pool, {})
            request.own[pool] = {place: page for place, page in own.items() if page not in pages}

    def freed_all(self, request):
        rank = request.path[0]
        self.gave_back("kv", rank, request.lent)
        for pool, own in request.own.items():
            self.gave_back(pool, rank, own.values())
        request.lent, request.own = set(), {}

    @rule(request=consumes(requests), priority=st.integers(-1, 4), length=st.integers(3, 7), mine=st.booleans())
    def finish(self, request, priority, length, mine):
        self.still_good(request)
        path = request.path[: length + 1]
        offers, known = self.offer(request, path, True, mine)
        tail = request.pages[len(path) - 1 :]  # of which the request may give back only what is its own
        tail = np.array([page for page in tail.tolist() if page in request.lent], np.int32)
        pages = np.concatenate([request.pages[: len(path) - 1], tail])
        keywords = {"counted": request.counted, "priority": priority, **self.keywords(request.path)}
        got = self.cache.finish(self.tokens(path), pages, request.receipt, values=offers, **keywords)
        tip, _, _ = self.inserted(got, request, path, priority, known)
        self.freed_all(request)
        self.oracle.unlock(request.receipt)
        self.oracle.write_through(tip)
        self.returned.append(request.receipt)

    @rule(request=consumes(requests), priority=st.integers(-1, 4), mine=st.booleans())
    def finish_by_hand(self, request, priority, mine):
        """Insert, give back what is left, unlock."""
        self.still_good(request)
        path, rank = request.path, request.path[0]
        offers, known = self.offer(request, path, False, mine)
        keywords = {"counted": request.counted, "priority": priority, **self.keywords(path)}
        got = self.cache.insert(self.tokens(path), request.pages, values=offers, **keywords)
        tip, _, _ = self.inserted(got, request, path, priority, known)
        self.oracle.write_through(tip)
        self.journal.tell(self.oracle)
        own = {pool: np.array(sorted(places.values()), np.int32) for pool, places in request.own.items()}
        self.cache.abort(np.array(sorted(request.lent), np.int32), request.receipt, rank=rank, values=own)
        self.freed_all(request)
        self.oracle.unlock(request.receipt)
        self.returned.append(request.receipt)

    @rule(request=consumes(requests), retract=st.booleans())
    def abort(self, request, retract):
        self.still_good(request)
        call = self.cache.retract if retract else self.cache.abort
        own = {pool: np.array(sorted(places.values()), np.int32) for pool, places in request.own.items()}
        call(np.array(sorted(request.lent), np.int32), request.receipt, rank=request.path[0], values=own)
        self.freed_all(request)
        self.oracle.unlock(request.receipt)
        self.returned.append(request.receipt)

    def still_good(self, request):
        """Requests from before a reset only keep their pages."""
        if request.epoch == self.epoch:
            return
        rank = request.path[0]
        self.cache.release(sorted(request.lent), rank=rank)
        for pool, own in request.own.items():
            self.cache.release(sorted(own.values()), rank=rank, pool=pool)
        self.freed_all(request)
        assume(False)

    @rule(request=requests, pool=POOL, place=st.integers(0, 6), page=st.integers(0, 8))
    def offer_what_is_not_ours(self, request, pool, place, page):
        """Nothing is changed by an offer of a value that is somebody else's, or nobody's."""
        self.still_good(request)
        pool = list(self.tails)[pool % len(self.tails)]
        assume(place < len(request.path) - 1)
        prefix = request.path[: place + 2]
        ours = prefix in self.oracle.nodes and page == self.page_of(pool, prefix)
        assume(not ours and page not in self.lent[pool][request.path[0]])
        values = {pool: np.array([*[NONE] * place, page], np.int32)}
        before = np.array(self.cache.state.books)
        with pytest.raises(CacheError) as error:
            self.cache.insert(self.tokens(request.path), request.pages, values=values, **self.keywords(request.path))
        assert error.value.status == Status.BAD_PAGE
        np.testing.assert_array_equal(before, np.array(self.cache.state.books))

    # ---- locks and pages ----

    @rule(target=receipts, pages=PAGES, space=SPACE, deep=st.integers(0, 2))
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
            self.cache.abort([], self.returned[0], values={})

    @rule(target=loans, number=st.integers(1, 8), rank=st.integers(0, 1), pool=POOL)
    def allocate(self, number, rank, pool):
        assume(rank < self.config.ranks)
        pool = self.config.pool_names[pool % len(self.config.pool_names)]
        pages = self.allocate_pages(pool, number, rank)
        return multiple() if pages is None else (pool, rank, pages)

    @rule(loan=consumes(loans))
    def release(self, loan):
        pool, rank, pages = loan
        self.cache.release(pages, rank=rank, pool=pool)
        self.gave_back(pool, rank, pages.tolist())
        with pytest.raises(CacheError):
            self.cache.release(pages, rank=rank, pool=pool)

    @rule(target=loans, pages=PAGES, space=SPACE, deep=st.integers(0, 2))
    def fork(self, pages, space, deep):
        """A request starts from a state: it gets a copy of its own."""
        path, _ = self.path(pages, space)
        end, rank = self.oracle.match(path, touch=False)[deep], path[0]
        if len(end) == 1:
            return multiple()
        answer = self.cache.fork(self.node(end), "state")
        status = self.oracle.fork("state", end)
        if isinstance(answer, Refusal):
            assert answer.status == status
            return multiple()
        assert status == Status.OK
        assert answer not in self.lent["state"][rank]
        self.lent["state"][rank].add(answer)
        check_value(self.cache, "state", rank, answer, end)
        return "state", rank, np.array([answer], np.int32)

    @rule(loan=loans, mark=st.integers(0, 9))
    def copy_page(self, loan, mark):
        """A snapshot of a running state into another page of the same request."""
        pool, rank, pages = loan
        assume(pool != "kv" and len(pages) > 1 and set(pages.tolist()) <= self.lent[pool][rank])
        self.compute(pool, rank, pages[:1], [("mark", mark)])
        self.cache.copy_page(int(pages[0]), int(pages[1]), pool=pool, rank=rank)
        self.compute(pool, rank, pages[:1], [("later", mark)])
        check_value(self.cache, pool, rank, pages[1], ("mark", mark))

    @rule(number=st.integers(0, 9), rank=st.sampled_from([None, 0, 1]), host=st.booleans(), pool=POOL)
    def evict(self, number, rank, host, pool):
        assume((rank or 0) < self.config.ranks)
        pool = self.config.pool_names[pool % len(self.config.pool_names)]
        call = self.cache.evict_host if host else self.cache.evict
        freed = 0
        for each in range(self.config.ranks) if rank is None else (rank,):
            freed += self.model_evicts(pool, host, number - freed, each)
        assert call(number, rank=rank, pool=pool) == freed

    def model_evicts(self, pool, host, number, rank):
        if pool == "kv":
            return (self.oracle.evict_host if host else self.oracle.evict)(number, rank)
        return (self.oracle.evict_host_values if host else self.oracle.evict_values)(pool, number, rank)

    # ---- tiers ----

    @rule(pages=PAGES, space=SPACE, hits=st.integers(0, 2))
    def backup(self, pages, space, hits):
        path, _ = self.path(pages, space)
        node = self.oracle.run_of(path, lambda has: has[DEVICE])
        self.oracle.backup(node, hits, 16)
        self.cache.backup(self.node(node), hits=hits)

    @rule(wait=st.booleans())
    def tick(self, wait):
        settle_all(self.cache)
        number = self.cache.drain() if wait else self.cache.tick()
        assert number == self.journal.tell(self.oracle)

    @rule(pages=PAGES, space=SPACE, levels=st.integers(1, 3))
    def demote(self, pages, space, levels):
        """Push the end of a prompt, and whatever is older, to the host."""
        path, _ = self.path(pages, space)
        for _ in range(8):
            device = self.oracle.run_of(path, lambda has: has[DEVICE])
            if len(device) <= max(1, len(path) - levels) or not self.oracle.evictable(path[0]):
                break
            assert self.cache.evict(1, rank=path[0]) == self.oracle.evict(1, path[0])

    @rule(kinds=st.sets(st.sampled_from([TransferKind.BACKUP, TransferKind.LOAD_BACK])), pool=POOL)
    def hold(self, kinds, pool):
        list(self.gates.values())[pool % len(self.gates)].holding = kinds

    @rule(failure=st.sampled_from(WEATHERS), pool=POOL)
    def fail(self, failure, pool):
        list(self.gates.values())[pool % len(self.gates)].fails = FAILURES[failure]

    @rule(failure=st.sampled_from(["backups", "loads", "deepest"]), pool=POOL)
    def only_one_fails(self, failure, pool):
        """The pools come apart: one of them fails what the others carry out at once."""
        self.fair_weather()
        self.fail(failure, pool)

    @rule()
    def fair_weather(self):
        for gate in self.gates.values():
            gate.holding, gate.fails = set(), FAILURES["none"]

    @rule(chance=st.integers(0, 9))
    def reset(self, chance):
        assume(not chance)
        self.cache.reset()
        self.oracle.reset()
        self.journal.records.clear()
        self.epoch += 1


TestHybridAgainstOracle = HybridAgainstOracle.TestCase
# A step reads four pools: fewer of them than elsewhere, unless a deeper profile is asked for.
EXAMPLES = max(12, settings().max_examples // 5)
TestHybridAgainstOracle.settings = settings(max_examples=EXAMPLES, stateful_step_count=25)
