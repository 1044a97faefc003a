"""A failed transfer is a completion with ok False: a miss, never wrong bytes, never a deleted pool."""

import dataclasses
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from pool_samples import FORMS, after, backup, load_back, run, simple

from purecache.effects import Gate, PoolLostError
from purecache.effects.programs import ProgramTable


class Failing(Gate):
    """Fails the targets in `pages`; None fails nothing, "all" raises."""

    pages = ()

    def failing(self, transfer):
        if self.pages == "all":
            raise OSError("the link is down")
        return np.isin(transfer.target, self.pages)


@pytest.fixture
def broken(monkeypatch):
    """`broken(deleting)`: every program raises, with its donated arrays deleted or not. `broken(None)` ends that."""
    original = ProgramTable.get

    def switch(deleting):
        def get(self, name, variant, lower):
            program = original(self, name, variant, lower)

            def call(*arguments):
                if deleting and "backup to arrays" not in name:
                    for array in arguments[0]:
                        array.delete()
                raise MemoryError("no memory for the program")

            return dataclasses.replace(program, compiled=call)

        monkeypatch.setattr(ProgramTable, "get", original if deleting is None else get)

    return switch


def fail():
    raise ZeroDivisionError


@pytest.mark.parametrize("form", FORMS)
def test_single_pages_fail(form):
    gate = Failing()
    plane = simple(gate=gate, **FORMS[form])
    gate.pages = (2,)
    assert run(plane, backup([0, 1, 2, 3], [1, 2, 3, 4])) == [True, False, True, True]
    gate.pages = (6,)
    before = np.array(plane.pool)
    # Host page 2 never arrived, device page 6 fails; the others are copied.
    assert run(plane, load_back([1, 2, 3], [5, 7, 6])) == [True, False, False]
    expected = before.copy()
    expected[5] = before[0]
    np.testing.assert_array_equal(np.array(plane.pool), expected)
    counts = plane.counters()
    assert (counts["pages_failed"], counts["transfers_failed"]) == (3, 2)
    assert (counts["pages_backed_up"], counts["pages_loaded_back"]) == (3, 1)


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_transfer_fails(form):
    gate = Failing()
    plane = simple(gate=gate, **FORMS[form])
    gate.pages = "all"
    assert run(plane, backup([0, 1], [0, 1])) == [False, False]
    gate.pages = ()
    assert run(plane, load_back([0, 1], [4, 5])) == [False, False]


@pytest.mark.parametrize("form", FORMS)
def test_a_program_that_cannot_start_leaves_both_tiers_as_they_were(form, broken):
    plane = simple(**FORMS[form])
    assert run(plane, backup([1], [1])) == [True]
    before = np.array(plane.pool)
    broken(deleting=False)
    assert run(plane, backup([2], [2])) == [False]
    assert run(plane, load_back([1], [5])) == [False]
    np.testing.assert_array_equal(np.array(plane.pool), before)
    broken(None)
    assert run(plane, load_back([1, 2], [5, 6])) == [True, False]
    assert np.array(plane.pool)[5].tolist() == before[1].tolist()


def test_a_failed_backup_that_takes_the_slots_along(broken):
    plane = simple(host_form="slots")
    assert run(plane, backup([1], [1])) == [True]
    plane.start(backup([2], [2], operation=1))
    broken(deleting=True)
    plane.start(backup([3], [3], operation=2))
    broken(None)
    # Whatever was in the slots is gone, finished or not: misses, not zeros.
    assert [done.ok.tolist() for done in plane.drain()] == [[False], [False]]
    before = np.array(plane.pool)
    assert run(plane, load_back([1, 2, 3], [5, 6, 7])) == [False, False, False]
    np.testing.assert_array_equal(np.array(plane.pool), before)
    assert run(plane, backup([1], [1])) == [True]
    assert run(plane, load_back([1], [5])) == [True]
    assert np.array(plane.pool)[5].tolist() == before[1].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_failed_load_back_that_takes_the_pool_along(form, broken):
    plane = simple(**FORMS[form])
    values = np.array(plane.pool)
    assert run(plane, backup([1], [1])) == [True]
    broken(deleting=True)
    assert run(plane, load_back([1], [5])) == [False]
    broken(None)
    with pytest.raises(PoolLostError, match="assign a new pool"):
        _ = plane.pool
    assert run(plane, backup([1], [2])) == [False]
    assert run(plane, load_back([1], [5])) == [False]
    plane.pool = jnp.array(np.zeros_like(values), copy=True)
    assert run(plane, load_back([1], [5])) == [True]
    assert np.array(plane.pool)[5].tolist() == values[1].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_backup_that_fails_while_it_runs(form):
    plane = simple(**FORMS[form])
    values = np.array(plane.pool)
    assert run(plane, backup([1], [1])) == [True]
    plane.pool = after(values, fail)
    assert run(plane, backup([2, 3], [2, 3])) == [False, False]
    plane.pool = jnp.array(values, copy=True)
    # Slots are one chain of donations, so the pages before the failure are lost too; arrays keep them.
    assert run(plane, load_back([1, 2], [5, 6])) == [form != "slots", False]
    assert run(plane, backup([4], [4])) == [True]
    assert run(plane, load_back([4], [6])) == [True]
    assert np.array(plane.pool)[6].tolist() == values[4].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_pages_never_written_are_misses(form):
    assert run(simple(**FORMS[form]), load_back([0, 3], [1, 2])) == [False, False]


def test_an_interrupt_does_not_lose_the_pool(monkeypatch):
    plane = simple()
    assert run(plane, backup([1], [1])) == [True]
    original = ProgramTable.get

    def get(self, name, variant, lower):
        program = original(self, name, variant, lower)

        def call(*arguments):
            result = program.compiled(*arguments)
            signal.raise_signal(signal.SIGINT)
            return result

        return dataclasses.replace(program, compiled=call)

    monkeypatch.setattr(ProgramTable, "get", get)
    with pytest.raises(KeyboardInterrupt):
        plane.start(load_back([1], [5], operation=9))
    assert np.array(plane.pool)[5].tolist() == [10, 11, 12, 13]
    assert [done.operation for done in plane.drain()] == [9]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
