"""What went wrong in other caches when values of several pools went to host and back, as what must hold here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_scheduling import (
    PAGE,
    ask,
    check_match,
    compute,
    conserved,
    dirty_all,
    drained_all,
    free,
    lent_pages,
    prompt,
    serve_hybrid,
)
from hybrid_support import new_hybrid, settle_all, wide_pages, window_and_state

from purecache.answers import Load, Refusal
from purecache.effects import PoolGoneError
from purecache.state import NONE, Tier, WritePolicy
from purecache.state.layout import Account
from purecache.transitions import Status, TransferKind

# ---- side pools ----------------------------------------------------------------------------------------------------

PATTERNS = {
    "all": (lambda number: [True] * number, 0),
    "deepest": (lambda number: [index == 0 for index in range(number)], 2),
    "shallowest": (lambda number: [index == number - 1 for index in range(number)], 0),
    "middle": (lambda number: [index == number // 2 for index in range(number)], 1),
}
"""Which pages fail, deepest first, and the leading run that is left of three."""


@pytest.mark.parametrize("pool", ["kv", "indexer"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_side_pool_with_a_gap_makes_the_copy_on_host_end_at_the_gap(pattern, pool):
    """What had arrived was summed, so that a gap in the middle passed, and the side pool came back shorter."""
    cache, gates = new_hybrid(window_and_state())
    tokens, (fails, left) = prompt(1, 3), PATTERNS[pattern]
    gates[pool].fails = lambda kind, number: fails(number)
    serve_hybrid(cache, tokens, {"window": range(3), "state": range(3)})
    cache.drain()
    cache.evict(3, rank=0)
    dirty_all(cache)
    assert cache.peek(tokens).full_length == left * PAGE
    gates[pool].fails = lambda kind, number: [False] * number
    match = cache.match(tokens)
    assert match.length == left * PAGE
    if left:
        answer = cache.load_back(match)
        assert isinstance(answer, Load)
        check_match(cache, tokens, match, answer)
    conserved(cache)
    drained_all(cache)


@pytest.mark.parametrize("pool", ["kv", "indexer", "window", "state"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_load_that_one_pool_fails_is_a_miss_and_success_comes_later(pattern, pool):
    cache, gates = new_hybrid(window_and_state())
    tokens, (fails, _) = prompt(1, 3), PATTERNS[pattern]
    serve_hybrid(cache, tokens, {"window": range(3), "state": range(3)})
    cache.drain()
    cache.evict(3, rank=0)
    dirty_all(cache)
    gates[pool].fails = lambda kind, number: fails(number)
    answer = cache.load_back(cache.match(tokens))
    assert isinstance(answer, Refusal)
    assert answer.status == Status.STALE
    check_match(cache, tokens, cache.peek(tokens))
    conserved(cache)
    gates[pool].fails = lambda kind, number: [False] * number
    assert ask(cache, tokens) == 3 * PAGE
    drained_all(cache)


# ---- to host and back ----------------------------------------------------------------------------------------------


def test_write_back_keeps_the_windows_of_inner_nodes():
    cache, _ = new_hybrid(window_and_state(write=WritePolicy.WRITE_BACK))
    tokens = prompt(1, 3)
    serve_hybrid(cache, tokens, {"window": range(3), "state": range(3)})
    assert cache.evict(3, rank=0) == 3
    cache.drain()
    dirty_all(cache)
    for pages in (1, 2, 3):
        match = cache.peek(tokens[: pages * PAGE])
        assert (match.device_length, match.length) == (0, pages * PAGE)
    assert ask(cache, tokens[: 2 * PAGE]) == 2 * PAGE
    assert ask(cache, tokens) == 3 * PAGE
    drained_all(cache)


@pytest.mark.parametrize("pool", ["window", "state"])
def test_write_back_keeps_a_value_whose_page_stays_on_device(pool):
    cache, _ = new_hybrid(window_and_state(write=WritePolicy.WRITE_BACK))
    tokens = prompt(1, 3)
    serve_hybrid(cache, tokens, {"window": range(3), "state": range(3)})
    assert cache.evict(9, rank=0, pool=pool) == 3
    assert cache.evictable_pages() == 3
    cache.drain()
    dirty_all(cache)
    for pages in (1, 2, 3):
        match = cache.match(tokens[: pages * PAGE])
        assert (match.device_length, match.length) == (0, pages * PAGE)
    answer = cache.load_back(match)
    assert isinstance(answer, Load)
    check_match(cache, tokens, match, answer)
    assert cache.peek(tokens).device_length == 3 * PAGE
    conserved(cache)
    drained_all(cache)


@pytest.mark.parametrize("pool", ["kv", "indexer", "window", "state"])
def test_a_load_back_in_steps_has_ended_when_all_pools_have(pool):
    cache, gates = new_hybrid(window_and_state())
    tokens = prompt(1, 3)
    serve_hybrid(cache, tokens, {"window": range(3), "state": range(3)})
    cache.drain()
    cache.evict(3, rank=0)
    dirty_all(cache)
    gates[pool].holding = {TransferKind.LOAD_BACK}
    match = cache.match(tokens)
    loading = cache.begin_load_back(match)
    cache.tick()
    assert cache.loaded(loading) is None
    gates[pool].holding = set()
    cache.tick()
    answer = cache.loaded(loading)
    assert isinstance(answer, Load)
    check_match(cache, tokens, match, answer)
    conserved(cache)
    drained_all(cache)


@pytest.mark.parametrize("write", WritePolicy)
def test_a_state_is_demoted_and_its_prefix_is_not_pruned(write):
    """Nodes were removed with their states instead of going to host; every stage is counted here."""
    cache, _ = new_hybrid(window_and_state(write=write))
    tokens = prompt(1, 3)
    for _ in range(3):  # so often that the selective policy has backed it up
        serve_hybrid(cache, tokens)
        cache.drain()
    assert free(cache, "state") == 3
    assert cache.evict(9, rank=0, pool="state") == 1
    cache.drain()
    assert free(cache, "state") == 4
    assert cache.evictable_pages() == 3
    assert cache.pages(Account.EVICTABLE, Tier.HOST, 0, pool="state") == 1
    assert cache.peek(tokens).length == 3 * PAGE
    dirty_all(cache)
    assert ask(cache, tokens) == 3 * PAGE
    assert free(cache, "state") == 3
    drained_all(cache)


def test_a_value_that_comes_later_than_its_page_is_backed_up_too():
    cache, _ = new_hybrid(window_and_state())
    tokens = prompt(1, 4)
    serve_hybrid(cache, tokens)
    cache.drain()
    serve_hybrid(cache, tokens[: 2 * PAGE], {"window": range(2), "state": [1]})
    cache.drain()
    cache.evict(9, rank=0)
    dirty_all(cache)
    assert ask(cache, tokens[: 2 * PAGE]) == 2 * PAGE
    assert ask(cache, tokens) == 4 * PAGE
    drained_all(cache)


@pytest.mark.parametrize("write", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("pool", ["window", "state"])
def test_a_backup_that_one_pool_failed_is_never_served(pool, write):
    cache, gates = new_hybrid(window_and_state(write=write))
    tokens = prompt(1, 3)
    gates[pool].fails = lambda kind, number: [True] * number
    serve_hybrid(cache, tokens)
    cache.evict(3, rank=0)
    cache.drain()
    dirty_all(cache)
    match = cache.peek(tokens)
    assert (match.length, match.full_length) == (0, 3 * PAGE)
    assert ask(cache, tokens) == 0
    conserved(cache)
    gates[pool].fails = lambda kind, number: [False] * number
    serve_hybrid(cache, tokens)
    cache.evict(3, rank=0)
    cache.drain()
    assert ask(cache, tokens) == 3 * PAGE
    drained_all(cache)


def test_a_load_back_does_not_eat_its_source_in_any_pool():
    cache, _ = new_hybrid(window_and_state(write=WritePolicy.WRITE_BACK))
    tokens = prompt(1, 3)
    serve_hybrid(cache, tokens, {"window": range(3), "state": range(3)})
    cache.evict(3, rank=0)
    cache.drain()
    assert free(cache, "state", Tier.HOST) == 0
    serve_hybrid(cache, prompt(2, 4))
    serve_hybrid(cache, prompt(3, 4))
    lent = {pool: cache.allocate(free(cache, pool), pool=pool) for pool in ("window", "state")}
    assert (free(cache, "kv"), free(cache, "window"), free(cache, "state")) == (0, 0, 0)
    assert ask(cache, tokens) == 3 * PAGE
    conserved(cache)
    for pool, pages in lent.items():
        cache.release(pages, pool=pool)
    drained_all(cache)


def test_a_load_back_for_which_one_pool_has_no_room_changes_nothing():
    cache, _ = new_hybrid(window_and_state())
    tokens = prompt(1, 3)
    serve_hybrid(cache, tokens)
    cache.drain()
    cache.evict(3, rank=0)
    lent = cache.allocate(4, pool="window")
    match = cache.match(tokens)
    before = np.array(cache.state.nodes)
    answer = cache.load_back(match)
    assert isinstance(answer, Refusal)
    assert answer.status == Status.NO_ROOM
    np.testing.assert_array_equal(before, np.array(cache.state.nodes))
    cache.release(lent[:1], pool="window")
    assert ask(cache, tokens) == 3 * PAGE
    cache.release(lent[1:], pool="window")
    drained_all(cache)


def test_transfers_that_do_not_answer_block_nothing():
    """P5: at the cap of open transfers a value is dropped or not backed up, and the drop is final and clean."""
    cache, gates = new_hybrid(wide_pages(write=WritePolicy.WRITE_BACK, max_operations=2))
    for gate in gates.values():
        gate.holding = {TransferKind.BACKUP}
    for first in range(1, 9):
        serve_hybrid(cache, prompt(first, 2, 4), {"window": [0, 1]})
        assert cache.tick() == 0
        conserved(cache)
    assert cache.peek(prompt(8, 2, 4)).device_length == 8
    for gate in gates.values():
        gate.holding = set()
    settle_all(cache)
    cache.tick()
    conserved(cache)
    drained_all(cache)


# ---- books ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WritePolicy)
def test_the_books_of_every_pool_balance_all_the_time(write):
    """The window pool of another cache was short of some pages, its full pool was not."""
    cache, gates = new_hybrid(window_and_state(write=write))
    gates["window"].holding = {TransferKind.BACKUP}
    for turn in range(12):
        tokens = prompt(turn % 4, 1 + turn % 3) + prompt(turn, 1)
        match, receipt = cache.admit(tokens)
        pages, rows = compute(cache, tokens, match)
        conserved(cache)
        half = len(pages) // 2
        first = {pool: row[:half] for pool, row in rows.items()}
        done = cache.checkpoint(tokens[: half * PAGE], pages[:half], receipt, values=first)
        conserved(cache)
        kept = len(done.pages)
        pages[:kept] = done.pages
        for row in rows.values():
            row[:kept] = NONE
        cache.evict(1, rank=0, pool="window" if turn % 2 else "state")
        conserved(cache)
        if turn % 3 == 2:
            lent = pages[max(kept, len(match.device_pages)) :]
            cache.abort(lent, receipt, values={pool: row[row != NONE] for pool, row in rows.items()})
        else:
            cache.finish(tokens, pages, receipt, values=rows)
        conserved(cache)
        settle_all(cache)
        cache.tick()
        conserved(cache)
    assert lent_pages(cache) == {}
    gates["window"].holding = set()
    drained_all(cache)


@pytest.mark.parametrize("gone", ["kv", "indexer", "window", "state"])
def test_transfers_that_met_a_donated_pool_are_started_once_it_is_back(gone):
    """Of several transfers, or several pools, some had been started when another pool was found to be gone."""
    cache, _ = new_hybrid(window_and_state())
    pool, plane, tokens = cache.pools[gone], cache.interpreters[gone], prompt(1, 3)
    before = {name: each.counters()["pages_backed_up"] for name, each in cache.interpreters.items()}
    for array in jax.tree.leaves(pool):
        array.delete()
    values = {name: cache.allocate(3, pool=name) for name in ("window", "state")}
    with pytest.raises(PoolGoneError):
        cache.insert(tokens, cache.allocate(3), values=values)
    plane.pool = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), pool)
    assert cache.peek(tokens).device_length == len(tokens)
    cache.drain()
    assert cache._driver.plane.in_flight == 0
    moved = {name: each.counters()["pages_backed_up"] - before[name] for name, each in cache.interpreters.items()}
    assert moved == dict.fromkeys(moved, 3)
    assert cache.evict(3) == 3
    assert cache.peek(tokens).length == len(tokens)
    assert cache.violations() == []


def test_a_running_request_keeps_the_value_it_computed_while_the_same_one_is_loaded():
    """Its value was taken for a duplicate of one that had not arrived: it was freed, and the request had none."""
    cache, gates = new_hybrid(window_and_state())
    tokens = prompt(1, 2)
    serve_hybrid(cache, tokens, {"window": range(2), "state": range(2)})
    cache.drain()
    cache.evict(2, rank=0, pool="window")  # kv stays on device, so that an insert reaches these pages
    dirty_all(cache)
    _, receipt = cache.admit([])
    match = cache.match(tokens)
    assert (match.device_length, match.length) == (0, 2 * PAGE)
    pages, values = compute(cache, tokens, cache.match([]), {"window": range(2), "state": [1]})
    gates["window"].holding = {TransferKind.LOAD_BACK}
    loading = cache.begin_load_back(match)
    inserted = cache.checkpoint(tokens, pages, receipt, values=values)
    assert inserted.length == 2 * PAGE
    assert inserted.values["window"].tolist() == values["window"].tolist()
    assert inserted.spare["window"].tolist() == []
    check_match(cache, tokens, cache.match(tokens))
    conserved(cache)
    gates["window"].holding = set()
    cache.tick()
    answer = cache.loaded(loading)
    assert not isinstance(answer, Load) or answer.values["window"].tolist() == values["window"].tolist()
    check_match(cache, tokens, cache.match(tokens))
    cache.abort([], receipt, values={})
    drained_all(cache)
