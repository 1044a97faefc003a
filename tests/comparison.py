"""A cache and its oracle side by side: how prompts are named, and what must be the same after every event."""

from dataclasses import replace

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from oracle import Oracle
from oracle_tree import DEVICE, HOST
from support import content, digest_of, new_cache, no_failure, read_page, settle, tiny, tree_of

from purecache.answers import Load, Node
from purecache.state import Policy, Tier, WritePolicy
from purecache.state.layout import Account, Column, Scalar
from purecache.transitions import Status, TransferKind

SPACES = ((None, 0), (None, None), (None, 1), ("a", 0), (("salt", "x"), 1))
"""(namespace, rank) of the prompts."""
NAMES = {digest_of(space, rank is None): (space, rank is None) for space, rank in SPACES}
PROMPTS = (
    [],
    [0],
    [0, 0],
    [0, 0, 0],
    [0, 0, 0, 0, 0],
    [0, 0, 1],
    [0, 0, 1, 1],
    [0, 1],
    [1],
    [2],
    [1, 1, 1, 1, 1, 1, 1],
)
"""Pages of the prompts: few, so that they meet."""
FAILURES = {
    "none": no_failure,
    "all": lambda kind, number: [True] * number,
    "deepest": lambda kind, number: [index == 0 for index in range(number)],
    "shallowest": lambda kind, number: [index == number - 1 for index in range(number)],
    "middle": lambda kind, number: [index == number // 2 for index in range(number)],
    "backups": lambda kind, number: [kind == TransferKind.BACKUP] * number,
    "loads": lambda kind, number: [kind == TransferKind.LOAD_BACK] * number,
}
RETENTION = (0, 3, 4, 9)
"""Close to the times that pass, so that deadlines of all levels mix."""
CONFIGS = [
    tiny(),
    tiny(page_size=1, ranks=1, device_pages=6, host_pages=0, sketch=1024),
]


class Compared(RuleBasedStateMachine):
    """The machine without its rules."""

    @initialize(
        config=st.sampled_from(CONFIGS),
        policy=st.sampled_from(Policy),
        write=st.sampled_from(WritePolicy),
        threshold=st.sampled_from([0, 0, 0, 3]),
        uses=st.sampled_from([None, None, 2]),
        exclusive=st.booleans(),
    )
    def begin(self, config, policy, write, threshold, uses, exclusive):
        exclusive &= write == WritePolicy.WRITE_BACK
        self.config = replace(
            config,
            policy=policy,
            write=write,
            load_back_threshold=threshold,
            retention=RETENTION[: config.levels],
            backup_threshold=uses,
            exclusive=exclusive,
        )
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

    def check_match(self, got, path, device, usable):
        size = self.config.page_size
        assert (got.device_length, got.length) == (size * (len(device) - 1), size * (len(usable) - 1))
        assert len(got.device_pages) == len(device) - 1
        self.check_bytes(path[0], got.device_pages, self.oracle.prefixes(device))
        assert (got.device_node.number, got.node.number) == (self.number(device), self.number(usable))

    def check_bytes(self, rank, pages, paths):
        for page, path in zip(pages, paths, strict=True):
            np.testing.assert_array_equal(read_page(self.cache, rank, page), content(path), err_msg=str(path))

    def node(self, path):
        """A handle for the node of a path, as a match would name it now."""
        return Node(self.number(path), int(self.cache.state.scalar(Scalar.CLOCK)))

    def number(self, path):
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

    def allocate_pages(self, number, rank):
        possible = self.oracle.allocate(number, rank)
        pages = self.cache.allocate(number, rank=rank)
        assert (pages is not None) == possible
        return pages

    def inserted(self, got, request, path, priority, keep):
        known = self.oracle.match(path, touch=False)[0]
        kept = 99 if keep is None else -(-keep // self.config.page_size)
        tip = self.oracle.insert(path, request.counted, priority, kept)
        assert got.length == self.config.page_size * (len(tip) - 1)
        offered = request.pages[: len(known) - 1][: len(tip) - 1]
        assert got.duplicates.tolist() == [page for page in offered.tolist() if page in request.lent]
        self.check_bytes(path[0], got.pages, self.oracle.prefixes(tip))
        assert got.node.number == self.number(tip)
        return tip

    def by_host_page(self, rank):
        """Nodes that host has, in the order of their pages there."""
        column, tree = np.array(self.cache.state.nodes)[Column.HOST_PAGE], tree_of(self.cache.state, NAMES)
        return sorted((p for p, n in tree.items() if p[0] == rank and column[n] >= 0), key=lambda p: column[tree[p]])

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
                assert self.cache.pages(Account.WITHHELD, tier, rank) == self.oracle.withheld[tier][rank]
            assert self.cache.evictable_pages(rank) == self.oracle.evictable(rank)
            assert self.cache.lent_pages(rank) == self.oracle.lent[rank]

    def teardown(self):
        """P3: when everything has ended, evicting everything empties the cache."""
        if not hasattr(self, "cache"):
            return
        for receipt in list(self.oracle.receipts):
            self.cache.unlock(receipt)
        self.cache.resize(device_pages=self.config.device_pages, host_pages=self.config.host_pages)
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
