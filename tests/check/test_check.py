"""The model checker: that it sees everything in the smallest world, and that it finds what is there to find.

The tests share the programs of that world; those of mutants, which drop them, come last.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.check import WORLDS, Explorer, World, event, follow, state_after
from purecache.check.fingerprints import fingerprints
from purecache.check.mutants import MUTANTS
from purecache.check.packing import UNREAD, Packing
from purecache.check.views import view_of
from purecache.check.visited import Visited
from purecache.cli import main
from purecache.state import NONE, CacheConfig
from purecache.state.laws import violations
from purecache.state.layout import Column, Scalar, Shelf

LEAST = WORLDS["least"]
ALLOCATE = event("allocate", rank=0, number=2, flaw=0)
LIFE_OF_A_PAGE = replace(
    LEAST,
    events=(
        *("allocate", "insert", "begin_backup", "finish_backup", "evict_device"),
        *("begin_load_back", "finish_load_back"),
    ),
)
"""What must happen for a load back to end, and little else: fewer programs to compile."""
BOTH = event("insert", prompt=2, offer=0, values=0, priority=0, flaw=0)
"""A prompt of two pages."""


def marks_of(state):
    return np.asarray(_fingerprints(jax.tree.map(jnp.asarray, state))).tolist()


@jax.jit
def _fingerprints(state):
    return fingerprints(view_of(state, LEAST.depth), LEAST.depth, exact=False)[0]


pytestmark = pytest.mark.xdist_group("check")


@pytest.fixture(scope="module")
def explored():
    return Explorer(LEAST).run()


def test_every_state_of_the_smallest_world_is_sound(explored):
    assert explored.failure is None, explored.failure.as_test()
    assert explored.complete
    assert explored.states == sum(explored.per_depth) == 6632
    assert explored.events == sum(explored.happened.values())
    assert set(explored.happened) == {kind.name for kind in Explorer(LEAST).programs.kinds}
    assert min(explored.happened.values()) > 0


def test_bounds_stop_an_exploration():
    found = Explorer(LEAST).run(most_depth=3)
    assert (found.depth, found.per_depth, found.complete) == (3, [1, 3, 10, 54], False)
    assert not Explorer(LEAST).run(most_states=5).complete


def test_following_a_way():
    state = state_after(LEAST, [ALLOCATE, BOTH])
    assert np.count_nonzero(state.nodes[Column.DEVICE_PAGE] >= 0) == 2
    assert violations(state) == []
    with pytest.raises(ValueError, match="cannot happen then"):
        follow(LEAST, [BOTH])
    with pytest.raises(ValueError, match="has no fork"):
        follow(LEAST, [event("fork", node=0, flaw=0)])
    with pytest.raises(ValueError, match="has the parameters"):
        follow(LEAST, [event("allocate", rank=0)])


def test_names_make_no_difference_but_order_does():
    one = event("insert", prompt=0, offer=0, values=0, priority=0, flaw=0)
    other = event("insert", prompt=1, offer=0, values=0, priority=0, flaw=0)
    first, second = (state_after(LEAST, [ALLOCATE, *way]) for way in ((one, other), (other, one)))
    assert marks_of(first) != marks_of(second)
    touched = state_after(LEAST, [ALLOCATE, other, one, event("match", prompt=1, flaw=0)])
    assert (first.tokens != touched.tokens).any()  # other nodes, and pages, under the same prefixes
    assert marks_of(first) == marks_of(touched)


def test_packing_keeps_all_that_makes_a_difference():
    packing = Packing(LEAST)
    state = state_after(LEAST, [ALLOCATE, BOTH, event("begin_backup", node=1, flaw=0)])
    packed = packing.pack(jax.tree.map(jnp.asarray, state))
    again = packing.unpack(packed, jnp.asarray(packing.settings))
    for name in ("tokens", "nodes", "links", "orders", "shelves", "ledger", "books"):
        np.testing.assert_array_equal(getattr(again, name), getattr(state, name), err_msg=name)
    dead = (state.nodes[Column.PARENT] == NONE) & (np.arange(LEAST.config.layout.rows) < LEAST.config.layout.nodes)
    assert (state.nodes[Column.NEXT_SIBLING][dead] == UNREAD).all()
    assert UNREAD in state.shelves[Shelf.FREE_PAGES]
    assert state.books[Scalar.CLOCK] == 1


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=20), max_size=12))
def test_the_set_of_what_was_seen(batches):
    seen, visited = set(), Visited()
    for batch in batches:
        marks = np.unique(np.array(batch, np.uint64))
        new = visited.are_new(marks)
        assert [int(mark) for mark in marks[new]] == sorted(set(batch) - seen)
        visited.add(marks[new])
        seen |= set(batch)
        assert len(visited) == len(seen)


def test_worlds_that_cannot_be_packed_are_refused():
    with pytest.raises(ValueError, match="too large"):
        World("big", "", CacheConfig(page_size=1, device_pages=100, host_pages=10))
    with pytest.raises(ValueError, match="must have 2 tokens"):
        World("pages", "", CacheConfig(page_size=2, device_pages=2))


def test_the_command(capsys):
    assert main(["check", "--list"]) == 0
    assert "least" in capsys.readouterr().out
    assert main(["check", "least", "--depth", "2", "--json", "--quiet"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["world"], row["states"], row["failure"]) == ("least", 14, None)
    with pytest.raises(ValueError, match="no events named"):
        Explorer(replace(LEAST, events=("fly",)))
    assert main(["check", "nowhere"]) == 2
    assert main(["check", "--mutants", "none"]) == 2
    assert main(["check", "least", "--events", "fly"]) == 2
    assert main(["check", "storage", "least", "--events", "begin_prefetch"]) == 2
    assert main(["check", "--mutants", "receipt-twice", "--events", "fly"]) == 2


def mutant(name):
    return next(each for each in MUTANTS if each.name == name)


def test_a_known_fault_is_found_by_its_shortest_way():
    """`purecache check --mutants` tries all of them."""
    with mutant("load-publishes-all").applied():
        failure = Explorer(LIFE_OF_A_PAGE, give_back_every=10**9).run(most_depth=9).failure
        assert failure is not None
        assert failure.events[-1].kind == "finish_load_back"
        assert follow(LEAST, failure.events) == failure.broken
    assert follow(LEAST, failure.events) == []


def test_a_failure_is_told_as_a_test_that_fails(capsys):
    with mutant("receipt-twice").applied():
        assert (
            main(["check", "least", "--quiet", "--depth", "4", "--events", "allocate", "insert", "lock", "unlock"]) == 1
        )
        told, namespace = capsys.readouterr().out, {}
        assert "BROKEN: a flaw is answered as documented" in told
        exec(told[told.index("from purecache.check") :], namespace)
        with pytest.raises(AssertionError):
            namespace["test_the_way_that_the_model_checker_found"]()
    namespace["test_the_way_that_the_model_checker_found"]()


def test_a_mutant_is_gone_afterwards():
    from purecache.transitions import load_back

    right = load_back.leading_run
    with mutant("load-publishes-all").applied():
        assert load_back.leading_run is not right
    assert load_back.leading_run is right
