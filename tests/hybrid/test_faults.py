"""What went wrong in other caches with windows, recurrent states and side pools, as what must hold here."""

import numpy as np
import pytest
from hybrid_scheduling import (
    PAGE,
    ask,
    check_match,
    compute,
    conserved,
    drained_all,
    free,
    law_places,
    lent_pages,
    prompt,
    serve_hybrid,
)
from hybrid_support import check_value, new_hybrid, wide_pages, window_and_state, write_values
from support import path_of

from purecache.answers import CacheError, Load, Refusal
from purecache.state import NONE, WritePolicy
from purecache.state.layout import Account
from purecache.transitions import Status

EVERYWHERE = {"window": range(4), "state": range(4)}

# ---- slots of states: who holds one --------------------------------------------------------------------------------


def test_a_match_takes_no_state_and_a_request_aborted_in_the_queue_holds_none():
    cache, _ = new_hybrid(window_and_state())
    serve_hybrid(cache, prompt(1, 3))
    before = {pool: free(cache, pool) for pool in ("kv", "window", "state")}
    for _ in range(10):
        cache.match(prompt(1, 3))
        _, receipt = cache.admit(prompt(1, 3))
        cache.abort([], receipt, values={})
    assert {pool: free(cache, pool) for pool in before} == before
    assert lent_pages(cache) == {}
    drained_all(cache)


def test_a_state_taken_before_scheduling_fails_goes_back():
    cache, _ = new_hybrid(window_and_state())
    serve_hybrid(cache, prompt(1, 3))
    for _ in range(10):
        match, receipt = cache.admit(prompt(1, 8))
        slot = cache.fork(match.device_node, "state")
        assert cache.allocate(6) is None
        cache.abort([], receipt, values={"state": np.array([slot], np.int32)})
    assert lent_pages(cache) == {}
    assert ask(cache, prompt(1, 3)) == 3 * PAGE
    drained_all(cache)


@pytest.mark.parametrize("stage", ["admitted", "forked", "loaded", "computed", "between chunks"])
def test_abort_at_any_stage_leaves_nothing_in_any_pool(stage):
    cache, _ = new_hybrid(window_and_state())
    serve_hybrid(cache, prompt(1, 2))
    cache.drain()
    cache.evict(1, rank=0)
    tokens, mine = prompt(1, 4), {"window": [], "state": []}
    match, receipt = cache.admit(tokens)
    lent = np.zeros(0, np.int32)
    if stage == "loaded":
        assert isinstance(cache.load_back(match), Load)
    if stage == "forked":
        answer = cache.load_back(match)
        assert isinstance(answer, Load)
        mine["state"] = [cache.fork(match.node, "state")]
    if stage in ("computed", "between chunks"):
        pages, rows = compute(cache, tokens, match, {"window": [1, 2, 3], "state": [2, 3]})
        lent = pages[len(match.device_pages) :]
        mine = {pool: row[row != NONE] for pool, row in rows.items()}
    if stage == "between chunks":
        shorter = {pool: row[:3] for pool, row in rows.items()}
        done = cache.checkpoint(tokens[: 3 * PAGE], pages[:3], receipt, values=shorter)
        assert done.length == 3 * PAGE
        lent = pages[3:]
        mine = {pool: row[3:] for pool, row in rows.items()}
    own = {pool: np.array(ids, np.int32) for pool, ids in mine.items()}
    cache.abort(lent, receipt, values=own)
    assert lent_pages(cache) == {}
    conserved(cache)
    drained_all(cache)


def test_a_copy_of_a_state_is_the_request_s_own():
    cache, _ = new_hybrid(window_and_state())
    tokens = prompt(1, 3)
    serve_hybrid(cache, tokens)
    match, receipt = cache.admit(tokens)
    slot = cache.fork(match.device_node, "state")
    path = path_of(cache.config, tokens)
    check_value(cache, "state", 0, slot, path)
    write_values(cache, "state", 0, [slot], [("the request", "went on")])
    check_match(cache, tokens, cache.peek(tokens))
    cache.abort([], receipt, values={"state": np.array([slot], np.int32)})
    drained_all(cache)


def test_a_state_can_be_forked_where_it_is_the_only_one_that_can_go():
    cache, _ = new_hybrid(window_and_state(write=WritePolicy.WRITE_THROUGH_SELECTIVE))
    tokens = prompt(1, 2)
    serve_hybrid(cache, tokens)
    others = cache.allocate(3, pool="state")
    assert free(cache, "state") == 0
    match, receipt = cache.admit(tokens)
    slot = cache.fork(match.device_node, "state")
    check_value(cache, "state", 0, slot, path_of(cache.config, tokens))
    conserved(cache)
    assert cache.peek(tokens).device_length == 0
    refusal = cache.fork(match.device_node, "state")
    assert isinstance(refusal, Refusal)
    assert refusal.status == Status.NOTHING
    cache.abort([], receipt, values={"state": np.array([*others, slot], np.int32)})
    drained_all(cache)


def test_a_state_that_another_one_pushed_out_was_not_the_one_that_is_forked():
    cache, _ = new_hybrid(window_and_state())
    for first in (1, 2, 3, 4):
        serve_hybrid(cache, prompt(first, 1), {"window": [0], "state": [0]})
    assert free(cache, "state") == 0
    oldest = cache.peek(prompt(1, 1))
    slot = cache.fork(oldest.device_node, "state")
    check_value(cache, "state", 0, slot, path_of(cache.config, prompt(1, 1)))
    assert cache.peek(prompt(1, 1)).device_length == PAGE
    assert cache.peek(prompt(2, 1)).device_length == 0
    cache.release(np.array([slot], np.int32), pool="state")
    drained_all(cache)


# ---- values that are absent ----------------------------------------------------------------------------------------


def test_a_page_that_a_prefix_lost_is_not_freed_where_it_lives_now():
    """The map from full to window pages of an absent value went stale, and its slot was freed under somebody else."""
    cache, _ = new_hybrid(window_and_state(write=WritePolicy.WRITE_THROUGH_SELECTIVE))
    first, second = prompt(1, 2), prompt(2, 2)
    old = serve_hybrid(cache, first).values["window"].tolist()
    assert cache.evict(2, rank=0, pool="window") == 2
    rest = np.setdiff1d(cache.allocate(5, pool="window"), old)
    cache.release(np.array(old, np.int32), pool="window")
    new = serve_hybrid(cache, second).values["window"].tolist()
    cache.release(rest, pool="window")
    assert set(old) == set(new)
    # The prefix that lost its values offers their old pages: refused, and its pages of KV go without them.
    assert (cache.peek(first).length, cache.peek(first).full_length) == (0, 2 * PAGE)
    lent = cache.allocate(2)
    with pytest.raises(CacheError) as error:
        cache.insert(first, lent, values={"window": np.array(old, np.int32)})
    assert error.value.status == Status.BAD_PAGE
    cache.release(lent)
    receipt = cache.lock(cache.peek(second).node)
    assert cache.evict(2, rank=0) == 2
    assert cache.peek(first).full_length == 0
    check_match(cache, second, cache.peek(second))
    assert cache.peek(second).device_length == 2 * PAGE
    conserved(cache)
    cache.unlock(receipt)
    drained_all(cache)


@pytest.mark.parametrize("ends", [False, True], ids=["unfinished", "finished"])
def test_what_slid_out_of_the_window_is_not_in_the_tree(ends):
    cache, _ = new_hybrid(window_and_state())
    tokens = prompt(1, 4)
    match, receipt = cache.admit(tokens)
    pages, rows = compute(cache, tokens, match, {"window": range(4), "state": [1, 3]})
    cache.release(rows["window"][:2], pool="window")
    rows["window"][:2] = NONE
    call = cache.finish if ends else cache.checkpoint
    done = call(tokens, pages, receipt, values=rows)
    assert done.length == 4 * PAGE
    assert done.values["window"][:2].tolist() == [NONE, NONE]
    assert cache.peek(tokens).device_length == 4 * PAGE
    short = cache.peek(tokens[: 2 * PAGE])  # a state is there, but no window
    assert (short.length, short.full_length) == (0, 2 * PAGE)
    conserved(cache)
    if not ends:
        cache.abort([], receipt, values={})
    assert lent_pages(cache) == {}
    drained_all(cache)


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_a_page_that_is_wider_than_the_window_still_needs_its_value(extra):
    """A leaf whose values are all absent could neither be served nor evicted."""
    cache, _ = new_hybrid(wide_pages())
    tokens = prompt(1, 3, 4) + [7] * extra
    serve_hybrid(cache, tokens[:12], {"window": [2]})
    assert [cache.peek(tokens[: 4 * pages]).length for pages in (1, 2, 3)] == [0, 0, 12]
    assert cache.peek(tokens).length == 12
    cache.drain()
    assert cache.evict(1, rank=0, pool="window") == 1
    assert cache.evict_host(1, rank=0, pool="window") == 1
    nothing = cache.peek(tokens)
    assert (nothing.length, nothing.full_length) == (0, 12)
    assert cache.pages(Account.EVICTABLE) == 3
    serve_hybrid(cache, tokens, {"window": [2]})
    assert cache.peek(tokens).device_length == 12
    conserved(cache)
    drained_all(cache)


def test_a_lock_on_absent_values_is_undone_as_it_was_done():
    """The release walked over values that had come or gone since, and found other counts than the lock had left."""
    cache, _ = new_hybrid(window_and_state())
    tokens = prompt(1, 4)
    match, receipt = cache.admit(tokens)
    pages, rows = compute(cache, tokens, match, EVERYWHERE | {"window": [2, 3]})
    cache.checkpoint(tokens, pages, receipt, values=rows)  # the pages before the window have none
    again = cache.lock(cache.peek(tokens).node)
    match, other = cache.admit(tokens[: 2 * PAGE])
    assert match.device_length == 0
    pages, rows = compute(cache, tokens[: 2 * PAGE], match, {"window": [0, 1]})
    done = cache.finish(tokens[: 2 * PAGE], pages, other, values=rows)
    assert done.length == 2 * PAGE
    evictable = cache.pages(Account.EVICTABLE, pool="window")
    assert (evictable, cache.pages(Account.PROTECTED, pool="window")) == (2, 2)
    cache.unlock(receipt)
    assert cache.pages(Account.PROTECTED, pool="window") == 2
    cache.unlock(again)
    assert cache.pages(Account.PROTECTED, pool="window") == 0
    conserved(cache)
    assert cache.evict(9, rank=0, pool="window") == 4
    drained_all(cache)


@pytest.mark.parametrize("pool", ["window", "state"])
def test_a_load_back_of_a_value_that_has_gone_is_refused(pool):
    cache, _ = new_hybrid(window_and_state())
    tokens = prompt(1, 3)
    serve_hybrid(cache, tokens)
    cache.drain()
    cache.evict(3, rank=0)
    match = cache.match(tokens)
    assert match.host_length == 3 * PAGE
    assert cache.evict_host(4, rank=0, pool=pool) > 0
    answer = cache.load_back(match)
    assert isinstance(answer, Refusal)
    assert cache.peek(tokens).length == 0
    conserved(cache)
    cache.drain()
    drained_all(cache)


# ---- locks ---------------------------------------------------------------------------------------------------------


def test_an_unlock_does_not_take_the_lock_of_another_request():
    cache, _ = new_hybrid(window_and_state())
    tokens = prompt(1, 3)
    serve_hybrid(cache, tokens)
    _, mine = cache.admit(tokens)
    match, other = cache.admit(tokens)
    cache.abort([], other, values={})
    for _ in range(3):
        with pytest.raises(CacheError):
            cache.abort([], other, values={})
        with pytest.raises(CacheError):
            cache.unlock(other)
    assert cache.evict(9, rank=0, pool="window") == 0
    assert cache.evict(9, rank=0) == 0
    check_match(cache, tokens, match)
    cache.unlock(mine)
    conserved(cache)
    drained_all(cache)


def test_an_unlock_stays_within_its_own_window():
    cache, _ = new_hybrid(window_and_state())
    tokens = prompt(1, 4)
    serve_hybrid(cache, tokens, EVERYWHERE)
    upper = cache.lock(cache.peek(tokens[: 2 * PAGE]).node)
    lower = cache.lock(cache.peek(tokens).node)
    assert cache.pages(Account.PROTECTED, pool="window") == 4
    cache.unlock(lower)
    assert cache.pages(Account.PROTECTED, pool="window") == 2
    assert cache.evict(9, rank=0, pool="window") == 2
    assert cache.peek(tokens[: 2 * PAGE]).device_length == 2 * PAGE
    cache.unlock(upper)
    assert cache.evict(9, rank=0, pool="window") == 2
    conserved(cache)
    drained_all(cache)


def test_a_lock_keeps_the_window_but_not_the_states():
    """A request takes a copy of a state, so the state itself may go while the request runs."""
    cache, _ = new_hybrid(window_and_state(write=WritePolicy.WRITE_THROUGH_SELECTIVE))
    tokens = prompt(1, 3)
    serve_hybrid(cache, tokens)
    match, receipt = cache.admit(tokens)
    assert cache.evict(9, rank=0, pool="state") == 1
    assert cache.evict(9, rank=0, pool="window") == 0
    check_window = {"window": match.values["window"].tolist()}
    again = cache.peek(tokens)
    assert (again.device_length, again.full_length) == (0, 3 * PAGE)
    for place in law_places(cache.config, "window", 3):
        check_value(cache, "window", 0, check_window["window"][place], path_of(cache.config, tokens)[: place + 2])
    cache.abort([], receipt, values={})
    drained_all(cache)


# ---- progress ------------------------------------------------------------------------------------------------------


def test_an_insert_that_keeps_nothing_still_says_so_and_nothing_is_taken_twice():
    """Without an insert the progress was not noted, so that each chunk took its pages anew until none were left."""
    cache, _ = new_hybrid(window_and_state())
    tokens = prompt(1, 6)
    match, receipt = cache.admit(tokens)
    pages, rows = compute(cache, tokens, match, {})
    for chunk in (2, 4, 6):
        done = cache.checkpoint(tokens[: chunk * PAGE], pages[:chunk], receipt, values=rows)
        assert (done.length, len(done.pages), len(done.duplicates)) == (0, 0, 0)
        assert lent_pages(cache) == {("kv", 0): 6}
        conserved(cache)
    cache.finish(tokens, pages, receipt, values=rows)
    assert lent_pages(cache) == {}
    assert cache.free_pages() == cache.config.device_pages
    drained_all(cache)


def test_an_insert_keeps_what_is_valid_and_leaves_the_rest_to_the_request():
    cache, _ = new_hybrid(window_and_state())
    tokens = prompt(1, 4)
    match, receipt = cache.admit(tokens)
    pages, rows = compute(cache, tokens, match, {"window": range(4), "state": [1]})
    done = cache.checkpoint(tokens, pages, receipt, values=rows)
    assert done.length == 2 * PAGE
    assert done.pages.tolist() == pages[:2].tolist()
    assert lent_pages(cache) == {("kv", 0): 2, ("window", 0): 2}
    # The state at the end comes later, and then the rest is kept.
    slot = cache.allocate(1, pool="state")
    write_values(cache, "state", 0, slot, [path_of(cache.config, tokens)])
    rows["state"][3] = slot[0]
    rows["window"][:2] = NONE
    done = cache.finish(tokens, pages, receipt, values={pool: rows[pool] for pool in rows})
    assert done.length == 4 * PAGE
    assert lent_pages(cache) == {}
    check_match(cache, tokens, cache.peek(tokens))
    drained_all(cache)


def test_where_prompts_branch_a_state_is_worth_taking():
    """Two prompts share pages but no state: a match says how far, so that the next request can leave one there."""
    cache, _ = new_hybrid(window_and_state())
    shared = prompt(1, 2)
    serve_hybrid(cache, shared + prompt(2, 1), {"window": range(3), "state": [2]})
    match, receipt = cache.admit(shared + prompt(3, 1))
    assert (match.length, match.full_length) == (0, 2 * PAGE)
    pages, rows = compute(cache, shared + prompt(3, 1), match, {"window": range(3), "state": [1, 2]})
    done = cache.finish(shared + prompt(3, 1), pages, receipt, values=rows)
    assert done.length == 3 * PAGE
    match = cache.match(shared + prompt(4, 1))
    assert (match.device_length, match.full_length) == (2 * PAGE, 2 * PAGE)
    check_match(cache, shared, match)
    conserved(cache)
    drained_all(cache)
