"""Load backs in two steps: the bytes come first, the pool is written when they are there."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pool_samples import FORMS, backup, load_back, run, simple

from purecache.effects import PoolGoneError
from purecache.effects.flights import Fetch


class Bus:
    """Decides when the bytes of a fetch count as arrived."""

    def __init__(self, monkeypatch):
        self.here, self.failing = False, False
        original = Fetch.arrived

        def arrived(fetch):
            if not self.here or fetch.pages is None:
                return None
            jax.block_until_ready(fetch.pages)
            return False if self.failing else original(fetch)

        monkeypatch.setattr(Fetch, "arrived", arrived)


@pytest.fixture
def bus(monkeypatch):
    return Bus(monkeypatch)


@partial(jax.jit, donate_argnums=0)
def step(pool):
    return pool.at[7].set(-1)


def staged(*args, **options):
    """An interpreter with pages 0 to 5 on host as well, in host pages of the same number."""
    plane = simple(*args, **FORMS["staged"], **options)
    assert run(plane, backup(list(range(6)), list(range(6)))) == [True] * 6
    return plane


def rows(plane, *pages):
    return np.array(plane.pool)[list(pages)].tolist()


def page(number):
    return [10 * number + k for k in range(4)]


def test_steps_donate_the_pool_while_bytes_are_on_their_way(bus):
    plane = staged()
    pool = plane.pool
    plane.start(load_back([0, 1], [4, 5]))
    assert plane.pool is pool
    for _ in range(3):
        plane.pool = step(plane.pool)
        assert plane.poll() == []
        assert rows(plane, 4, 5, 7) == [page(4), page(5), [-1] * 4]
    bus.here = True
    (done,) = plane.poll()
    assert done.ok.tolist() == [True, True]
    assert rows(plane, 4, 5, 7) == [page(0), page(1), [-1] * 4]
    assert plane.in_flight == 0


def test_a_pool_that_a_step_has_is_written_when_it_comes_back(bus):
    plane = staged()
    plane.start(load_back([0], [4]))
    bus.here = True
    new = step(plane.pool)
    assert plane.poll() == []
    assert plane.in_flight == 1
    plane.pool = new
    assert [done.ok.tolist() for done in plane.poll()] == [[True]]
    assert rows(plane, 4, 7) == [page(0), [-1] * 4]


def test_a_pool_that_never_comes_back_is_a_miss(bus):
    plane = staged()
    plane.start(load_back([0], [4]))
    step(plane.pool)
    with pytest.raises(PoolGoneError):
        plane.hurry()
    assert [done.ok.tolist() for done in plane.drain()] == [[False]]


def test_no_more_pages_than_allowed_are_in_staging_arrays(bus):
    plane = staged(batch_pages=2, staging_pages=2)
    plane.start(load_back([0, 1, 2], [3, 4, 5]))
    plane.start(load_back([4], [6]))
    held = []
    bus.here = True
    while plane.in_flight:
        held.append(sum(len(f.where) for flight in plane._flights.loads for f in flight.fetches if f.pages is not None))
        bus.here = len(held) % 2 == 0
        plane.poll()
    assert max(held) == 2
    assert rows(plane, 3, 4, 5, 6) == [page(0), page(1), page(2), page(4)]


def test_what_arrives_wrong_is_a_miss_and_harms_nothing(bus):
    plane = staged()
    plane.start(load_back([0, 1], [4, 5]))
    bus.here = bus.failing = True
    (done,) = plane.poll()
    assert done.ok.tolist() == [False, False]
    assert rows(plane, 4, 5) == [page(4), page(5)]


@pytest.mark.parametrize(
    ("batch", "ok"),
    [
        (1, [True, True, True, False, True, True]),
        (2, [True, True, False, False, True, True]),
        (4, [False] * 4 + [True] * 2),
    ],
)
def test_what_cannot_be_fetched_is_a_miss_and_the_next_goes_on(monkeypatch, batch, ok):
    plane = staged(batch_pages=batch)
    fetch = plane._tier.fetch

    def failing(source):
        if 3 in source:
            raise MemoryError
        return fetch(source)

    monkeypatch.setattr(plane._tier, "fetch", failing)
    assert run(plane, load_back([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0])) == ok
    expected = [page(5 - place) if ok[5 - place] else page(place) for place in range(6)]
    assert rows(plane, *range(6)) == expected


def test_nothing_counts_as_fetched_while_a_step_has_the_pool(bus):
    plane = staged()
    plane.commit_alone = False
    plane.start(load_back([0], [4], operation=3))
    bus.here = True
    new = step(plane.pool)
    assert plane.fetched() == {}
    plane.pool = new
    assert plane.fetched() == {(3, 0): True}


def test_a_batch_is_never_larger_than_the_staging_memory():
    plane = simple(**FORMS["staged"], batch_pages=8, staging_pages=2)
    assert max(plane._tier.sizes(7)) == 2


def test_host_pages_that_are_gone_are_not_kept_alive_by_their_copies():
    plane = staged()
    plane.settle()
    plane.drop_host(np.arange(6), 0)
    assert not plane._tier._leaving
    run(plane, backup([0], [0]))
    plane.reset()
    assert not plane._tier._leaving


def test_hurry_does_not_wait_for_bytes(bus):
    plane = staged(batch_pages=1, staging_pages=1)
    plane.start(load_back([0, 1], [4, 5]))
    plane.hurry()
    assert rows(plane, 4, 5) == [page(0), page(1)]
    assert [done.ok.tolist() for done in plane.poll()] == [[True, True]]


def test_younger_load_backs_wait_for_older_ones(bus):
    plane = staged()
    plane.start(load_back([0], [4], operation=1))
    plane.start(load_back([1], [5], operation=2))
    assert plane.poll() == []
    bus.here = True
    assert [done.operation for done in plane.poll()] == [1, 2]


@pytest.mark.parametrize("ok", [True, False])
def test_somebody_else_decides_when_to_commit(bus, ok):
    plane = staged(batch_pages=1)
    plane.commit_alone = False
    plane.start(load_back([0, 1], [4, 5], operation=3))
    assert plane.fetched() == {}
    assert plane.fetching() == {(3, 0)}
    bus.here = True
    assert plane.poll() == []
    assert plane.fetched() == {(3, 0): True}
    plane.commit(3, 0, ok)
    assert plane.fetched() == {}
    (done,) = plane.poll()
    assert done.ok.tolist() == [ok, ok]
    assert rows(plane, 4, 5) == ([page(0), page(1)] if ok else [page(4), page(5)])


def test_an_incomplete_fetch_is_told(bus, monkeypatch):
    plane = staged(batch_pages=1)
    plane.commit_alone = False
    plane._tier.valid[1] = False
    plane.start(load_back([0, 1], [4, 5], operation=3))
    bus.here = True
    assert plane.fetched() == {(3, 0): False}


class Owner:
    def __init__(self, pool):
        self.pool, self.puts = pool, 0

    def access(self):
        return contextlib.nullcontext()

    def take(self):
        return self.pool

    def put(self, pool):
        self.pool, self.puts = pool, self.puts + 1


def test_an_owner_is_asked_only_when_the_bytes_are_there(bus):
    pool = jnp.arange(32, dtype=jnp.int32).reshape(8, 4)
    owner = Owner(pool)
    plane = type(simple())(pool, host_pages=8, device_pages=8, owner=owner, **FORMS["staged"])
    plane.start(backup([0], [0]))
    plane.drain()
    plane.start(load_back([0], [3]))
    plane.poll()
    assert owner.puts == 0
    bus.here = True
    assert [done.ok.tolist() for done in plane.poll()] == [[True]]
    assert owner.puts == 1
    assert np.array(owner.pool)[3].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("failing", ["access", "take", "put"])
def test_an_owner_that_fails_makes_misses_and_nothing_raises(form, failing):
    pool = jnp.arange(32, dtype=jnp.int32).reshape(8, 4)
    owner = Owner(pool)
    plane = type(simple())(pool, host_pages=8, device_pages=8, owner=owner, **FORMS[form])
    plane.start(backup([0, 1], [0, 1]))
    plane.drain()

    def fails(*_):
        raise RuntimeError("the engine is shutting down")

    setattr(owner, failing, fails)

    def load():
        plane.start(load_back([0, 1], [3, 4]))
        plane.settle()
        return plane.poll()

    with pytest.warns(UserWarning, match="can't be used: the engine is shutting down"):
        (done,) = load()
    assert done.ok.tolist() == [False, False]
    if failing != "put":
        with pytest.warns(UserWarning, match="the engine is shutting down"):
            plane.start(backup([2], [2]))
        assert [done.ok.tolist() for done in plane.drain()] == [[False]]
    with pytest.warns(UserWarning, match="the device pool can't be used"):
        assert plane.copy(0, 5, 0) is False
    assert plane.in_flight == 0


def test_reset_forgets_what_is_on_its_way(bus):
    plane = staged()
    plane.start(load_back([0], [4]))
    plane.reset()
    bus.here = True
    assert plane.poll() == []
    assert rows(plane, 4) == [page(4)]


def test_backups_beyond_the_staging_memory_wait_for_earlier_ones():
    plane = staged(batch_pages=2, staging_pages=2)
    for _ in range(4):
        plane.start(backup([0, 1], [6, 7]))
        assert sum(count for count, _ in plane._tier._leaving) <= 2
    assert all(done.ok.all() for done in plane.drain())
