"""A cache with tail pools and its oracle side by side: what must be the same after every event."""

from dataclasses import dataclass, replace

import numpy as np
from comparison import FAILURES, NAMES
from hybrid_support import (
    check_value,
    new_hybrid,
    settle_all,
    sizes_of,
    tails_of,
    three_tails,
    value_of,
    window_and_state,
    write_values,
)
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from oracle_hybrid import HybridOracle
from oracle_tree import DEVICE, HOST
from oracle_values import BACKUP
from support import tree_of

from purecache.answers import Load, Node
from purecache.state import NONE, Policy, Tier, WritePolicy
from purecache.state.layout import Account, Column, Scalar
from purecache.transitions import Status, TransferKind

CONFIGS = [window_and_state(), three_tails()]
WEATHERS = [*sorted(FAILURES), "none", "none"]


@dataclass(eq=False)
class Record:
    """A transfer that was started."""

    pool: str
    kind: TransferKind
    paths: list
    ok: np.ndarray
    """How it will end, as far as the gates of its pool and of the side pools say."""
    moved: object = None
    """What the oracle calls it."""


class Journal:
    """What the planes were asked to do and what they reported, in order."""

    def __init__(self, cache, gates):
        self.cache, self.records, self.new, self.done, self.errors = cache, {}, [], [], []
        config, planes = cache.config, cache._driver.plane
        for name, gate in gates.items():
            owner = config.pool_names[config.pool_of(name)]
            gate.note = lambda transfer, failing, owner=owner: self.note(owner, transfer, failing)
        poll, drain = planes.poll, planes.drain
        planes.poll, planes.drain = lambda: self.heard(poll()), lambda: self.heard(drain())

    def note(self, pool, transfer, failing):
        key = (transfer.operation, transfer.generation)
        if key in self.records:
            self.records[key].ok &= ~failing
            return
        paths = self.paths(pool, transfer)
        self.records[key] = Record(pool, transfer.kind, paths, ~failing)
        self.new.append(self.records[key])

    def paths(self, pool, transfer):
        """The nodes whose incoming page is a target of `transfer`, just begun; None for one that went since."""
        layout, nodes = self.cache.config.layout, np.array(self.cache.state.nodes)
        incoming = nodes[layout.page_row(Tier.INCOMING, self.cache.config.pool_of(pool))]
        on_host = nodes[layout.page_row(Tier.HOST, self.cache.config.pool_of(pool))] >= 0
        there = (nodes[Column.RANK] == transfer.rank) & (on_host == (transfer.kind != BACKUP))
        tree = {number: path for path, number in tree_of(self.cache.state, NAMES).items()}
        found = [[tree[n] for n in np.flatnonzero(there & (incoming == page)) if n in tree] for page in transfer.target]
        if any(len(each) > 1 for each in found):
            self.errors.append((pool, transfer, found))  # raised later: to the interpreter this is a failing transfer
        return [each[0] if each else None for each in found]

    def heard(self, completions):
        for done in completions:
            record = self.records.pop((done.operation, done.generation))
            assert done.ok.tolist() == record.ok.tolist(), record
            self.done.append(record)
        return completions

    def tell(self, oracle):
        """Tell the oracle of everything since the last time; returns how many transfers ended."""
        assert not self.errors, self.errors
        for record in self.new:
            record.moved = oracle.started(record.pool, record.kind, record.paths)
        oracle.all_started()
        for record in self.done:
            oracle.ended(record.pool, record.kind, record.moved, record.ok.tolist())
        ended = len(self.done)
        self.new, self.done = [], []
        return ended


class HybridCompared(RuleBasedStateMachine):
    """The machine without its rules."""

    @initialize(
        config=st.sampled_from(CONFIGS),
        policy=st.sampled_from([Policy.LRU] * 6 + list(Policy)),
        write=st.sampled_from(WritePolicy),
    )
    def begin(self, config, policy, write):
        self.config = replace(config, policy=policy, write=write)
        self.cache, self.gates = new_hybrid(self.config)
        self.tails = tails_of(self.config)
        self.oracle = HybridOracle(self.config, self.tails)
        self.journal = Journal(self.cache, self.gates)
        self.lent = {name: [set() for _ in range(self.config.ranks)] for name in ("kv", *self.tails)}
        self.returned, self.epoch = [], 0

    # ---- prompts and their nodes ----

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
        if len(path) == 1:
            return {"rank": path[0]}
        (namespace, no_rank), _ = path[1]
        return {"namespace": namespace, "rank": None if no_rank else path[0]}

    def node(self, path):
        """A handle for the node of a path, as a match would name it now."""
        return Node(self.number(path), int(self.cache.state.scalar(Scalar.CLOCK)))

    def number(self, path):
        return self.config.layout.root(path[0]) if len(path) == 1 else tree_of(self.cache.state, NAMES)[path]

    def page_of(self, pool, path, tier=Tier.DEVICE):
        """Page id of a value, NONE if there is none."""
        row = self.config.layout.page_row(tier, self.config.pool_of(pool))
        return int(np.array(self.cache.state.nodes)[row, self.number(path)])

    # ---- answers ----

    def check_match(self, got, path, device, usable, run):
        size = self.config.page_size
        lengths = [size * (len(part) - 1) for part in (device, usable, run)]
        assert [got.device_length, got.length, got.full_length] == lengths
        assert (got.device_node.number, got.node.number) == (self.number(device), self.number(usable))
        self.check_pages(path[0], got.device_pages, self.oracle.prefixes(device))
        self.check_values(got.values, device)

    def check_pages(self, rank, pages, paths):
        for page, path in zip(pages, paths, strict=True):
            check_value(self.cache, "kv", rank, page, path)

    def check_values(self, values, end):
        """`values` names the right pages for exactly what the laws ask of the prefix `end`."""
        assert set(values) == set(self.tails)
        for pool, pages in values.items():
            needed = self.oracle.needed(pool, end)
            for page, prefix in zip(pages.tolist(), self.oracle.prefixes(end), strict=True):
                assert (page != NONE) == (prefix in needed), (pool, prefix)
                if page != NONE:
                    check_value(self.cache, pool, end[0], page, prefix)

    def load_back(self, match, usable):
        settle_all(self.cache)
        status = self.oracle.begin_load(usable)
        answer = self.cache.load_back(match)
        self.journal.tell(self.oracle)
        if isinstance(answer, Load):
            assert status in (Status.OK, Status.JOINED)
            assert self.oracle.loaded(usable)
            behind = len(usable) - 1 - match.device_length // self.config.page_size
            self.check_pages(usable[0], answer.pages, self.oracle.prefixes(usable)[-behind:])
            self.check_values(answer.values, usable)
        elif status in (Status.OK, Status.JOINED):
            assert answer.status == Status.STALE
            assert not self.oracle.loaded(usable)
        else:
            assert answer.status == status
        return answer

    def allocate_pages(self, pool, number, rank):
        if pool == "kv":
            possible = self.oracle.allocate(number, rank)
        else:
            possible = self.oracle.allocate_values(pool, number, rank)
        pages = self.cache.allocate(number, rank=rank, pool=pool)
        assert (pages is not None) == possible
        if pages is None:
            return None
        assert not self.lent[pool][rank] & set(pages.tolist())
        self.lent[pool][rank] |= set(pages.tolist())
        return pages

    def gave_back(self, pool, rank, pages):
        """Pages that the oracle has to count as given back."""
        pages = set(pages)
        assert pages <= self.lent[pool][rank]
        self.lent[pool][rank] -= pages
        (self.oracle.lent if pool == "kv" else self.oracle.given[pool])[rank] -= len(pages)

    def adopted(self, pool, rank, pages):
        """Pages that became the tree's; the oracle counted them itself."""
        assert set(pages) <= self.lent[pool][rank]
        self.lent[pool][rank] -= set(pages)

    # ---- the state ----

    @invariant()
    def same_as_oracle(self):
        self.journal.tell(self.oracle)
        assert self.cache.violations() == []
        state = self.cache.state
        nodes, tree = np.array(state.nodes), tree_of(state, NAMES)
        assert sorted(tree, key=repr) == sorted(self.oracle.nodes, key=repr)
        self.oracle.sweep()
        for path, node in tree.items():
            model = self.oracle.nodes[path]
            assert (nodes[Column.HITS, node], nodes[Column.PRIORITY, node]) == (model.hits, model.priority), path
            for tier in (DEVICE, HOST):
                assert (nodes[Column.DEVICE_LOCKS + tier, node] > 0) == self.oracle.locked(path, tier), (path, tier)
        for name in sizes_of(self.config):
            self.same_values(name, nodes, tree)
        for name in self.config.pool_names:
            for rank in range(self.config.ranks):
                self.same_accounts(name, rank)

    def same_values(self, name, nodes, tree):
        """The same values per tier, and on device with the right bytes."""
        number = self.config.pool_of(name)
        rows = [nodes[self.config.layout.page_row(tier, number)] for tier in (0, 1, 2)]
        pool = np.array(self.cache.pools[name])
        for path, node in tree.items():
            model = self.oracle.value(name, path) if number else self.oracle.nodes[path]
            has = [bool(row[node] >= 0) for row in rows]
            assert has == [*model.has, model.incoming is not None], (name, path, has, model)
            if has[0]:
                page = path[0] * sizes_of(self.config)[name][0] + rows[0][node]
                np.testing.assert_array_equal(pool[page], value_of(name, path), err_msg=f"{name} {path}")

    def same_accounts(self, name, rank):
        oracle, counted = self.oracle, self.cache.pages
        got = [counted(Account.FREE, tier, rank, pool=name) for tier in (Tier.DEVICE, Tier.HOST)]
        assert counted(Account.LENT, Tier.DEVICE, rank, pool=name) == len(self.lent[name][rank]), name
        evictable = [counted(Account.EVICTABLE, tier, rank, pool=name) for tier in (Tier.DEVICE, Tier.HOST)]
        if name == "kv":
            assert len(self.lent[name][rank]) == oracle.lent[rank]
            assert got == [oracle.free(tier, rank) for tier in (DEVICE, HOST)]
            assert evictable[0] == oracle.evictable(rank)
        else:
            assert len(self.lent[name][rank]) == oracle.given[name][rank]
            assert got == [oracle.room(name, tier, rank) for tier in (DEVICE, HOST)], name
            assert evictable == [len(oracle.loose(name, tier, rank)) for tier in (DEVICE, HOST)], name

    def compute(self, pool, rank, pages, paths):
        write_values(self.cache, pool, rank, pages, paths)

    def teardown(self):
        """P3: when everything has ended, evicting everything empties the cache."""
        if not hasattr(self, "cache"):
            return
        for receipt in list(self.oracle.receipts):
            self.cache.unlock(receipt)
        self.cache.drain()
        for name, ranks in self.lent.items():
            for rank, pages in enumerate(ranks):
                self.cache.release(np.array(sorted(pages), np.int32), rank=rank, pool=name)
        for _ in range(2):
            self.cache.evict(2 * self.config.device_pages)
            self.cache.drain()
            self.cache.evict_host(2 * self.config.host_pages + 1)
        assert self.cache.violations() == []
        assert not tree_of(self.cache.state, NAMES)
        for name in self.config.pool_names:
            sizes = sizes_of(self.config)[name]
            for rank in range(self.config.ranks):
                for tier in (Tier.DEVICE, Tier.HOST):
                    assert self.cache.pages(Account.FREE, tier, rank, pool=name) == sizes[tier], name
