"""Random events on the facade with a real interpreter and real bytes, compared with the oracle after every event."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from oracle import DEVICE, HOST, Oracle
from support import content, digest_of, new_cache, no_failure, read_page, settle, tiny, tree_of, write_pages

from purecache.answers import CacheError, Load
from purecache.state import Policy, Tier, WritePolicy
from purecache.state.layout import Account, Column
from purecache.transitions import Status, TransferKind

settings.register_profile("default", max_examples=60, stateful_step_count=40)
settings.register_profile("soak", max_examples=400, stateful_step_count=50)
settings.register_profile("deep", max_examples=3000, stateful_step_count=60)
PROFILE = settings.get_profile(os.environ.get("PURECACHE_HYPOTHESIS", "default"))

SPACES = ((None, 0), (None, None), (None, 1), ("a", 0), (("salt", "x"), 1))
"""(namespace, rank) of the prompts."""
NAMES = {digest_of(space, rank is None): (space, rank is None) for space, rank in SPACES}
PAGES = st.lists(st.integers(0, 1), max_size=7)
SPACE = st.sampled_from(SPACES)
FAILURES = {
    "none": no_failure,
    "all": lambda kind, number: [True] * number,
    "deepest": lambda kind, number: [index == 0 for index in range(number)],
    "shallowest": lambda kind, number: [index == number - 1 for index in range(number)],
    "middle": lambda kind, number: [index == number // 2 for index in range(number)],
    "backups": lambda kind, number: [kind == TransferKind.BACKUP] * number,
    "loads": lambda kind, number: [kind == TransferKind.LOAD_BACK] * number,
}
CONFIGS = [
    tiny(),
    tiny(page_size=1, ranks=1, device_pages=6, host_pages=0),
]


class Request:
    """A running request: what it was admitted with, and the pages it computes into."""

    def __init__(self, path, receipt, pages):
        self.path, self.receipt, self.pages, self.counted = path, receipt, pages, 0


class AgainstOracle(RuleBasedStateMachine):
    requests = Bundle("requests")
    receipts = Bundle("receipts")
    loans = Bundle("loans")

    # ---- set up ----

    @initialize(
        config=st.sampled_from(CONFIGS),
        policy=st.sampled_from(Policy),
        write=st.sampled_from(WritePolicy),
        threshold=st.sampled_from([0, 0, 3]),
    )
    def begin(self, config, policy, write, threshold):
        values = {**vars(config), "policy": policy, "write": write, "load_back_threshold": threshold}
        self.config = type(config)(**values)
        self.cache, self.gate = new_cache(self.config, check_laws=False)
        self.oracle = Oracle(self.config, lambda kind, number: self.gate.fails(kind, number))
        self.returned, self.epoch = [], 0

    def path(self, pages, space):
        """(rank, (namespace, page), page, ...) and the keyword arguments that say the same to the facade."""
        namespace, rank = space
        assume((rank or 0) < self.config.ranks)
        blocks = [(value,) * self.config.page_size for value in pages]
        if blocks:
            blocks[0] = ((namespace, rank is None), blocks[0])
        return (rank or 0, *blocks), {"namespace": namespace, "rank": rank}

    def tokens(self, path, extra=0):
        blocks = [path[1][1], *path[2:]] if len(path) > 1 else []
        return np.array([*(token for block in blocks for token in block), *[1] * extra], np.int32)

    def keywords(self, path):
        rank = path[0]
        if len(path) == 1:
            return {"rank": rank}
        (namespace, no_rank), _ = path[1]
        return {"namespace": namespace, "rank": None if no_rank else rank}

    # ---- prompts ----

    @rule(pages=PAGES, space=SPACE, peek=st.booleans(), extra=st.integers(0, 1), load=st.booleans())
    def match(self, pages, space, peek, extra, load):
        path, keywords = self.path(pages, space)
        call = self.cache.peek if peek else self.cache.match
        got = call(self.tokens(path, extra % self.config.page_size), **keywords)
        self.check_match(got, path, *self.oracle.match(path, touch=not peek))
        if load:
            self.load_back(got, path)

    def check_match(self, got, path, device, usable):
        size = self.config.page_size
        assert (got.device_length, got.length) == (size * (len(device) - 1), size * (len(usable) - 1))
        assert len(got.device_pages) == len(device) - 1
        self.check_bytes(path[0], got.device_pages, self.oracle.prefixes(device))
        assert (got.device_node, got.node) == (self.node(device), self.node(usable))

    def check_bytes(self, rank, pages, paths):
        for page, path in zip(pages, paths, strict=True):
            np.testing.assert_array_equal(read_page(self.cache, rank, page), content(path), err_msg=str(path))

    def node(self, path):
        if len(path) == 1:
            return self.config.layout.root(path[0])
        return tree_of(self.cache.state, NAMES)[path]

    def load_back(self, match, path):
        usable = self.oracle.match(path, touch=False)[1]
        settle(self.cache)
        answer = self.cache.load_back(match)
        status, loaded = self.oracle.load(usable, self.gate.holding)
        if isinstance(answer, Load):
            assert status in (Status.OK, Status.JOINED)
            self.check_bytes(path[0], answer.pages, loaded)
        else:
            assert answer.status == status
        return answer

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
        if load and isinstance(answer := self.load_back(match, path), Load):
            have = np.concatenate([have, answer.pages])
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

    @rule(request=requests, length=st.integers(0, 7), priority=st.integers(-1, 4))
    def checkpoint(self, request, length, priority):
        self.still_good(request)
        path = request.path[: length + 1]
        pages = request.pages[: len(path) - 1]
        got = self.cache.checkpoint(
            self.tokens(path),
            pages,
            request.receipt,
            counted=request.counted,
            priority=priority,
            **self.keywords(request.path),
        )
        tip = self.inserted(got, request, path, priority)
        self.oracle.lent[path[0]] -= len(got.duplicates)
        self.oracle.move_lock(request.receipt, tip)
        self.oracle.write_through(tip)
        request.lent -= set(pages[: len(tip) - 1].tolist())
        request.pages = np.concatenate([got.pages, request.pages[len(got.pages) :]])
        request.counted = max(request.counted, len(tip) - 1)

    def inserted(self, got, request, path, priority):
        known = self.oracle.match(path, touch=False)[0]
        tip = self.oracle.insert(path, request.counted, priority)
        assert got.length == self.config.page_size * (len(tip) - 1)
        offered = request.pages[: len(known) - 1][: len(tip) - 1]
        assert got.duplicates.tolist() == [page for page in offered.tolist() if page in request.lent]
        self.check_bytes(path[0], got.pages, self.oracle.prefixes(tip))
        assert got.node == self.node(tip)
        return tip

    @rule(request=consumes(requests), priority=st.integers(-1, 4), length=st.integers(3, 7))
    def finish(self, request, priority, length):
        self.still_good(request)
        path = request.path[: length + 1]
        got = self.cache.finish(
            self.tokens(path),
            request.pages if length < 7 else request.pages[: len(path) - 1],
            request.receipt,
            counted=request.counted,
            priority=priority,
            **self.keywords(request.path),
        ) if set(request.pages[len(path) - 1 :].tolist()) <= request.lent else None
        assume(got is not None)
        tip = self.inserted(got, request, path, priority)
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

    def allocate_pages(self, number, rank):
        possible = self.oracle.allocate(number, rank)
        pages = self.cache.allocate(number, rank=rank)
        assert (pages is not None) == possible
        return pages

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
        call, model = (
            (self.cache.evict_host, self.oracle.evict_host) if host else (self.cache.evict, self.oracle.evict)
        )
        freed = 0
        for each in range(self.config.ranks) if rank is None else (rank,):
            freed += model(number - freed, each)
        assert call(number, rank=rank) == freed

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

    @rule(kinds=st.sets(st.sampled_from(TransferKind)), failure=st.sampled_from(sorted(FAILURES)))
    def weather(self, kinds, failure):
        self.gate.holding = kinds
        self.gate.fails = FAILURES[failure]

    @rule(chance=st.integers(0, 9))
    def reset(self, chance):
        assume(not chance)
        self.cache.reset()
        self.oracle.reset()
        self.epoch += 1

    # ---- what must hold ----

    @invariant()
    def same_as_oracle(self):
        assert self.cache.violations() == []
        state, config = self.cache.state, self.config
        nodes, tree = np.array(state.nodes), tree_of(state, NAMES)
        pool = np.array(self.cache.pool)
        assert sorted(tree, key=repr) == sorted(self.oracle.nodes, key=repr)
        for path, node in tree.items():
            model = self.oracle.nodes[path]
            has = [bool(nodes[row, node] >= 0) for row in (Column.DEVICE_PAGE, Column.HOST_PAGE, Column.INCOMING_PAGE)]
            assert has == [*model.has, model.incoming is not None], path
            assert (nodes[Column.HITS, node], nodes[Column.PRIORITY, node]) == (model.hits, model.priority), path
            for tier in (DEVICE, HOST):
                assert (nodes[Column.DEVICE_LOCKS + tier, node] > 0) == self.oracle.locked(path, tier), path
            if has[0]:
                page = path[0] * config.device_pages + nodes[Column.DEVICE_PAGE, node]
                np.testing.assert_array_equal(pool[page], content(path), err_msg=str(path))
        for rank in range(config.ranks):
            for tier in (Tier.DEVICE, Tier.HOST):
                assert self.cache.pages(Account.FREE, tier, rank) == self.oracle.free(tier, rank)
            assert self.cache.evictable_pages(rank) == self.oracle.evictable(rank)
            assert self.cache.lent_pages(rank) == self.oracle.lent[rank]

    def teardown(self):
        """P3: when everything has ended, evicting everything empties the cache."""
        if not hasattr(self, "cache"):
            return
        for receipt in list(self.oracle.receipts):
            self.cache.unlock(receipt)
        self.cache.drain()
        for rank in range(self.config.ranks):
            owners = np.array(self.cache.state.shelves[1])
            lent = owners[rank * self.config.device_pages :][: self.config.device_pages] == -2
            self.cache.release(np.flatnonzero(lent), rank=rank)
        for _ in range(2):
            self.cache.evict(2 * self.config.device_pages)
            self.cache.drain()
            self.cache.evict_host(2 * self.config.host_pages + 1)
        assert self.cache.violations() == []
        assert not tree_of(self.cache.state, NAMES)
        for rank in range(self.config.ranks):
            assert self.cache.free_pages(rank) == self.config.device_pages
            assert self.cache.pages(Account.FREE, Tier.HOST, rank) == self.config.host_pages


TestAgainstOracle = AgainstOracle.TestCase
TestAgainstOracle.settings = settings(
    PROFILE, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
