"""Order, completion, ownership and caller mistakes; failures are in test_failed_transfers.py."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pool_samples import FORMS, after, backup, load_back, run, simple

from purecache.effects import Gate, Interpreter, PoolGoneError, TransferKind


def pending(values, event):
    """`values` as the result of a program that runs until `event` is set."""
    return after(values, lambda: event.wait(10))


class Holding(Gate):
    def __init__(self):
        self.operations = set()

    def held(self, transfer):
        return transfer.operation in self.operations


@pytest.mark.parametrize("form", FORMS)
def test_a_backup_is_reported_when_its_bytes_are_there(form):
    plane = simple(**FORMS[form])
    plane.warm()
    event = threading.Event()
    plane.pool = pending(np.array(plane.pool), event)
    plane.start(backup([1, 2], [3, 4], operation=5, generation=7))
    assert plane.poll() == []
    assert plane.in_flight == 1
    event.set()
    (done,) = plane.drain()
    assert (done.operation, done.generation, done.kind, done.ok.tolist()) == (5, 7, TransferKind.BACKUP, [True, True])
    assert plane.in_flight == 0
    assert plane.poll() == []


@pytest.mark.parametrize("form", FORMS)
def test_a_backup_reads_the_pool_as_it_was_at_start(form):
    plane = simple(**FORMS[form])
    plane.warm()
    event = threading.Event()
    plane.pool = pending(np.array(plane.pool), event)
    plane.start(backup([1], [0]))
    plane.pool = jax.jit(lambda pool: pool.at[1].set(-1), donate_argnums=0)(plane.pool)
    event.set()
    plane.drain()
    assert run(plane, load_back([0], [5])) == [True]
    pool = np.array(plane.pool)
    assert pool[1].tolist() == [-1] * 4
    assert pool[5].tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("form", FORMS)
def test_a_load_back_is_complete_when_dispatched(form):
    plane = simple(**FORMS[form])
    assert run(plane, backup([1], [0])) == [True]
    event = threading.Event()
    plane.pool = pending(np.array(plane.pool), event)
    plane.start(load_back([0], [6]))
    plane.settle()  # the bytes of staged pages, which the pool is not needed for
    (done,) = plane.poll()
    event.set()
    assert done.ok.tolist() == [True]
    assert np.array(plane.pool)[6].tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_copied_at_start(form):
    plane = simple(**FORMS[form])
    plane.warm()
    event = threading.Event()
    plane.pool = pending(np.array(plane.pool), event)
    transfer = backup([1, 2], [3, 4])
    plane.start(transfer)
    transfer.source[:] = 7
    transfer.target[:] = 0
    event.set()
    assert plane.drain()[0].ok.tolist() == [True, True]
    assert run(plane, load_back([3, 4], [5, 6])) == [True, True]
    assert np.array(plane.pool)[5:7].tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]


@pytest.mark.parametrize("wrap", [np.asarray, jax.device_put], ids=["NumPy", "JAX over NumPy memory"])
def test_the_callers_memory_is_never_written(wrap):
    values = np.arange(8 * 1024, dtype=np.int32).reshape(8, 1024)
    plane = Interpreter(wrap(values), host_pages=8, device_pages=8)
    assert run(plane, backup([1], [0])) == [True]
    assert run(plane, load_back([0], [5])) == [True]
    assert np.array(plane.pool)[5].tolist() == list(range(1024, 2048))
    assert values[5, 0] == 5 * 1024


def test_a_numpy_pool_is_copied_in():
    values = np.zeros((8, 1024), np.int32)
    plane = Interpreter(values, host_pages=8, device_pages=8)
    values[:] = 1
    assert not np.array(plane.pool).any()


def test_completions_keep_the_order_of_their_kind():
    gate = Holding()
    plane = simple(gate=gate)
    gate.operations = {1}
    plane.start(backup([0], [0], operation=1))
    plane.start(backup([1], [1], operation=2))
    jax.block_until_ready(plane.pool)
    plane.start(load_back([0], [4], operation=3))
    assert [done.operation for done in plane.poll()] == [3]
    gate.operations = set()
    done = plane.poll()
    while len(done) < 2:
        done += plane.poll()
    assert [one.operation for one in done] == [1, 2]


def test_drain_reports_in_order_and_does_not_ask_the_gate():
    gate = Holding()
    gate.operations = {1}
    plane = simple(gate=gate)
    plane.start(backup([0], [0], operation=1))
    plane.start(load_back([0], [4], operation=2))
    plane.start(backup([1], [1], operation=3))
    assert [done.operation for done in plane.drain()] == [1, 2, 3]
    assert plane.drain() == []


@pytest.mark.parametrize("form", FORMS)
def test_long_and_empty_transfers(form):
    plane = simple(40, host_pages=40, **FORMS[form], batch_pages=6)
    before = np.array(plane.pool)
    assert run(plane, backup([], [])) == []
    assert run(plane, backup(np.arange(40), np.arange(40)[::-1])) == [True] * 40
    assert run(plane, load_back(np.arange(40), np.arange(40))) == [True] * 40
    np.testing.assert_array_equal(np.array(plane.pool), before[::-1])
    counts = plane.counters()
    assert counts["pages_backed_up"] == counts["pages_loaded_back"] == 40
    assert counts["bytes_backed_up"] == counts["bytes_loaded_back"] == 40 * 16
    assert counts["pages_failed"] == counts["transfers_failed"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_ranks_have_their_own_pages(form):
    plane = simple(8, ranks=2, host_pages=3, **FORMS[form])
    assert run(plane, backup([1], [2], rank=0)) == [True]
    assert run(plane, backup([1], [2], rank=1)) == [True]
    assert run(plane, load_back([2], [3], rank=0)) == [True]
    assert run(plane, load_back([2], [0], rank=1)) == [True]
    assert np.array(plane.pool)[:, 0].tolist() == [0, 10, 20, 10, 50, 50, 60, 70]


def test_pages_beyond_those_of_the_ranks_belong_to_the_engine():
    plane = simple(8, device_pages=6)
    with pytest.raises(ValueError, match="source device page id 6 is out of range"):
        plane.start(backup([6], [0]))


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (backup([8], [0]), "source device page id 8 is out of range"),
        (backup([-1], [0]), "source device page id -1 is out of range"),
        (backup([0], [5]), "target host page id 5 is out of range"),
        (load_back([5], [0]), "source host page id 5 is out of range"),
        (load_back([0], [8]), "target device page id 8 is out of range"),
        (backup([0, 1], [2, 2]), "target host page 2 is given twice"),
        (backup([0, 1], [2]), "as many sources as targets, found 2 and 1"),
        (backup([0.5], [2]), "vector of integers"),
        (backup([[0]], [2]), "vector of integers"),
        (backup([0], [0], rank=1), "rank 1 is out of range: there are 1"),
        (backup([2**32], [0]), "out of range"),
    ],
)
def test_mistakes_raise_before_anything_is_dispatched(transfer, message):
    plane = simple(host_pages=5)
    with pytest.raises(ValueError, match=message):
        plane.start(transfer)
    assert plane.in_flight == 0
    assert plane.drain() == []


@pytest.mark.parametrize(
    ("pool", "options", "message"),
    [
        ({}, {}, "the pool has no arrays"),
        ({"k": jnp.zeros((4, 2)), "n": jnp.zeros(())}, {}, r"pool\['n'\] has shape \(\): it has no page axis 0"),
        (jnp.zeros((4, 2)), {"page_axis": 2}, "it has no page axis 2"),
        ([jnp.zeros((4, 2))], {"page_axis": [0, 0]}, "page_axis is neither"),
        (jnp.zeros((3, 2)), {}, r"3 pages on axis 0, but ranks \* device_pages is 4"),
        (jnp.zeros((4, 2)), {"ranks": 2}, r"ranks \* device_pages is 8"),
        (jnp.zeros((4, 2), jnp.int4), {}, "below one byte"),
        ([7], {}, r"pool\[0\] is a int, not an array"),
        (jnp.zeros((4, 2)), {"host_pages": 0}, "host_pages is 0"),
        (jnp.zeros((4, 2)), {"batch_pages": -1}, "batch_pages is -1"),
        (jnp.zeros((4, 2)), {"host_form": "shared"}, "host_form is 'shared'"),
    ],
)
def test_pools_and_numbers_that_do_not_fit(pool, options, message):
    with pytest.raises(ValueError, match=message):
        Interpreter(pool, **({"host_pages": 4, "device_pages": 4} | options))


def test_a_pool_put_back_is_checked():
    plane = simple()
    kept = plane.pool
    for wrong, message in [
        ([kept], "structure"),
        (jnp.zeros((8, 5), jnp.int32), r"expected int32\[8, 4\]"),
        (jnp.zeros((8, 4), jnp.float32), r"is float32\[8, 4\], expected int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            plane.pool = wrong
    assert plane.pool is kept


def test_a_pool_donated_and_not_put_back():
    plane = simple()
    old = plane.pool
    new = jax.jit(lambda pool: pool + 1, donate_argnums=0)(old)
    with pytest.raises(PoolGoneError, match="assign the pool that came out of it"):
        plane.start(backup([0], [0]))
    with pytest.raises(PoolGoneError, match="put in the pool that came out of it"):
        plane.pool = old
    plane.pool = new
    assert run(plane, backup([0], [0])) == [True]


def test_one_thread_dispatches():
    plane = simple()
    plane.start(backup([0], [0]))
    caught = []

    def other():
        try:
            plane.start(backup([1], [1]))
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert "second thread" in caught[0]
    assert len(plane.drain()) == 1
