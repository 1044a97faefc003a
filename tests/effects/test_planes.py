"""One interpreter per pool: side pools go along with their anchor, and copies within a pool."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from pool_samples import simple

from purecache import PrefixCache
from purecache.effects import Gate, Planes, Transfer, TransferKind
from purecache.state import CacheConfig, Checkpoint, PoolSpec

PAGES = 8
CONFIG = CacheConfig(
    page_size=2,
    device_pages=PAGES,
    host_pages=PAGES,
    load_back_threshold=0,
    pools=(
        PoolSpec("state", Checkpoint(), 4, 4),
        PoolSpec("indexer", anchor="kv"),
        PoolSpec("draft", anchor="indexer"),
    ),
)


class Holding(Gate):
    """Fails the first page of every transfer, or keeps its completion back."""

    def __init__(self, fails=False, holds=False):
        self.fails, self.holds = fails, holds

    def failing(self, transfer):
        return np.arange(len(transfer.target)) == 0 if self.fails else None

    def held(self, transfer):
        return self.holds


def planes(**gates):
    each = {name: simple(PAGES, gate=gates.get(name)) for name in ("kv", "indexer", "draft")}
    return Planes(each | {"state": simple(4, host_pages=4, gate=gates.get("state"))})


def move(kind, source, target, pool=0):
    return Transfer(3, 5, kind, 0, np.array(source), np.array(target), pool)


def test_a_transfer_is_carried_out_in_the_pool_and_its_side_pools():
    plane = planes()
    plane.bind(CONFIG)
    before = {name: np.array(pool) for name, pool in plane.pools.items()}
    plane.start(move(TransferKind.BACKUP, [1, 2], [6, 0]))
    (done,) = plane.drain()
    assert (done.operation, done.generation, done.pool, done.ok.tolist()) == (3, 5, 0, [True, True])
    plane.start(move(TransferKind.LOAD_BACK, [6, 0], [4, 5]))
    plane.drain()
    for name in ("kv", "indexer", "draft"):
        np.testing.assert_array_equal(np.array(plane.pools[name])[[4, 5]], before[name][[1, 2]])
    np.testing.assert_array_equal(plane.pools["state"], before["state"])


def test_a_page_that_fails_in_a_side_pool_has_not_arrived():
    plane = planes(draft=Holding(fails=True))
    plane.bind(CONFIG)
    plane.start(move(TransferKind.BACKUP, [1, 2, 3], [6, 0, 1]))
    (done,) = plane.drain()
    assert done.ok.tolist() == [False, True, True]


def test_a_transfer_ends_when_the_last_side_pool_has_it():
    gate = Holding(holds=True)
    plane = planes(indexer=gate)
    plane.bind(CONFIG)
    plane.start(move(TransferKind.LOAD_BACK, [0], [1]))
    plane.start(replace(move(TransferKind.LOAD_BACK, [0], [1], pool=1), operation=4))
    assert plane.poll() == []
    assert plane.in_flight == 2
    gate.holds = False
    assert [done.pool for done in plane.poll()] == [0, 1]


def test_a_backup_does_not_wait_for_those_of_other_pools():
    gate = Holding(holds=True)
    plane = planes(indexer=gate)
    plane.bind(CONFIG)
    plane.start(move(TransferKind.BACKUP, [0], [1]))
    plane.start(replace(move(TransferKind.BACKUP, [0], [1], pool=1), operation=4))
    plane.settle()
    assert [done.pool for done in plane.poll()] == [1]
    gate.holds = False
    assert [done.pool for done in plane.poll()] == [0]


def test_a_page_is_copied_within_its_pool():
    plane = planes()
    plane.bind(CONFIG)
    assert plane.copy(1, 3, 0, pool=1)
    state = np.array(plane.pools["state"])
    np.testing.assert_array_equal(state[3], state[1])
    assert plane.copy(0, 7, 0)
    for name in ("kv", "indexer", "draft"):
        np.testing.assert_array_equal(np.array(plane.pools[name])[7], np.array(plane.pools[name])[0])
    assert [row["pool_sized"] for row in plane.programs() if row["name"] == "copy a page"] == [[]] * 4
    with pytest.raises(ValueError, match="out of range"):
        plane.copy(0, 9, 0, pool=1)


def test_a_copy_that_fails_is_reported_and_the_page_comes_back(monkeypatch):
    plane = planes()
    cache = PrefixCache(CONFIG, plane, smallest=4)
    tokens, pages, state = np.arange(4), cache.allocate(2), cache.allocate(1, pool="state")
    node = cache.insert(tokens, pages, values={"state": [-1, *state]}).node

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(plane.planes["state"]._copies, "copy", fail)
    answer = cache.fork(node, "state")
    assert answer.status.name == "STALE"
    assert cache.lent_pages(pool="state") == 0
    assert cache.violations() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda each: each.pop("draft"), "the configuration has the pools"),
        (lambda each: each.update(state=simple(8)), "pool state has"),
    ],
)
def test_planes_that_do_not_fit_are_refused(change, message):
    each = dict(planes().planes)
    change(each)
    with pytest.raises(ValueError, match=message):
        PrefixCache(CONFIG, Planes(each))


def test_one_interpreter_does_not_serve_several_pools():
    with pytest.raises(ValueError, match="one for every pool"):
        PrefixCache(CONFIG, simple(PAGES))


def test_pools_are_put_back_by_name():
    plane = planes()
    cache = PrefixCache(CONFIG, plane)
    new = jax.numpy.zeros((4, 4), jax.numpy.int32)
    cache.pools = {"state": new}
    assert not np.array(cache.pools["state"]).any()
    assert np.array(cache.pool).any()
