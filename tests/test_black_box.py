"""Cases that broke other caches, through the facade with a real interpreter and recognisable bytes."""

import numpy as np
import pytest
from scheduling import PAGE, ask, dirty, drained, prompt
from support import new_cache, path_of, serve, settle, tiny, write_pages

from purecache.answers import CacheError, Load, Refusal
from purecache.state import Policy, Tier, WritePolicy
from purecache.state.layout import Account
from purecache.transitions import Status, TransferKind

# ---- T1, T4: the load back under pressure --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.name)
def test_a_load_back_does_not_eat_its_source(policy):
    cache, _ = new_cache(tiny(policy=policy, write=WritePolicy.WRITE_BACK))
    serve(cache, prompt(1, 6))
    cache.evict(6)
    cache.drain()
    assert cache.pages(Account.FREE, Tier.HOST) == 0
    for first in (2, 3):
        serve(cache, prompt(first, 4))
    dirty(cache)
    assert cache.free_pages() == 0
    assert ask(cache, prompt(1, 6)) == 6 * PAGE
    drained(cache)


def test_a_host_hit_is_worth_something_under_pressure():
    write = WritePolicy.WRITE_THROUGH_SELECTIVE  # so that what fills the device does not push A off the host
    cache, _ = new_cache(tiny(load_back_threshold=8, write=write))
    for first in (1, 1, 2, 3):
        serve(cache, prompt(first, 4))
        cache.drain()
    assert (cache.free_pages(), cache.evictable_pages()) == (0, 8)
    match = cache.match(prompt(1, 4))
    assert (match.device_length, match.length) == (0, 8)
    assert ask(cache, prompt(1, 4)) == 8
    drained(cache)


def test_below_the_threshold_a_prefix_is_computed_again():
    cache, _ = new_cache(tiny(load_back_threshold=8))
    serve(cache, prompt(1, 3))
    cache.drain()
    cache.evict(3)
    answer = cache.load_back(cache.match(prompt(1, 3)))
    assert isinstance(answer, Refusal)
    assert answer.status == Status.BELOW_THRESHOLD


# ---- T3: failures --------------------------------------------------------------------------------------------------

FAILURES = {
    "all": lambda number: [True] * number,
    "deepest": lambda number: [index == 0 for index in range(number)],
    "shallowest": lambda number: [index == number - 1 for index in range(number)],
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_load_back_is_a_miss_and_success_comes_later(failure):
    cache, gate = new_cache(tiny())
    tokens = prompt(1, 3)
    serve(cache, tokens)
    cache.drain()
    cache.evict(3)
    dirty(cache)
    gate.fails = lambda kind, number: FAILURES[failure](number)
    match = cache.match(tokens)
    assert isinstance(cache.load_back(match), Refusal)
    arrived = cache.peek(tokens).device_length
    assert arrived == (0 if failure != "deepest" else 2 * PAGE)
    gate.fails = lambda kind, number: [False] * number
    assert ask(cache, tokens) == 3 * PAGE
    drained(cache)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("write", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_a_failed_backup_is_never_served(write, failure):
    cache, gate = new_cache(tiny(write=write))
    tokens = prompt(1, 3)
    gate.fails = lambda kind, number: FAILURES[failure](number)
    serve(cache, tokens)
    cache.evict(3)
    cache.drain()
    dirty(cache)
    gate.fails = lambda kind, number: [False] * number
    usable = ask(cache, tokens)
    assert usable == (2 * PAGE if failure == "deepest" else 0)
    assert cache.counters()["backup_failed_pages"] == 3 - usable // PAGE
    serve(cache, tokens)
    cache.drain()
    cache.evict(3)
    cache.drain()
    dirty(cache)
    assert ask(cache, tokens) == 3 * PAGE
    drained(cache)


def test_a_backup_that_does_not_answer_blocks_nothing():
    cache, gate = new_cache(tiny())
    gate.holding = {TransferKind.BACKUP}
    for first in range(1, 9):
        serve(cache, prompt(first, 2))
        assert cache.tick() == 0
    assert ask(cache, prompt(8, 2)) == 2 * PAGE
    assert cache.counters()["backup_refused_pages"] > 0
    gate.holding = set()
    drained(cache)


def test_a_reset_makes_everything_in_flight_stale():
    cache, gate = new_cache(tiny())
    gate.holding = set(TransferKind)
    serve(cache, prompt(1, 3))
    lent, receipt = cache.allocate(2), cache.lock(cache.match(prompt(1, 3)).node)
    cache.reset()
    gate.holding = set()
    settle(cache)
    assert cache.drain() == 0
    assert cache.peek(prompt(1, 3)).length == 0
    with pytest.raises(CacheError):
        cache.unlock(receipt)
    assert cache.lent_pages() == 2
    cache.release(lent)
    serve(cache, prompt(1, 3))
    assert ask(cache, prompt(1, 3)) == 3 * PAGE
    drained(cache)


# ---- T5: whole multiples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("pages", [1, 2, 3])
def test_whole_multiples_are_as_their_neighbours(pages, extra):
    cache, _ = new_cache(tiny())
    tokens = prompt(1, 4)[: pages * PAGE + extra]
    whole = len(tokens) // PAGE * PAGE
    serve(cache, tokens)
    cache.drain()
    assert ask(cache, tokens) == whole
    assert ask(cache, tokens[:-1]) == (len(tokens) - 1) // PAGE * PAGE  # a scheduler keeps a token back
    cache.evict(8)
    dirty(cache)
    assert ask(cache, tokens) == whole
    drained(cache)


def test_bigrams_need_one_token_more_than_pages():
    cache, _ = new_cache(tiny(bigrams=True))
    pages = cache.allocate(2)
    for tokens, length in (([5, 1, 2, 3], 2), ([5, 1, 2, 3, 4], 4), ([5], 0), ([], 0)):
        assert cache.peek(tokens).length == 0
        assert len(pages) * PAGE >= length
    done = cache.insert([5, 1, 2, 3, 4], pages)
    assert (done.length, done.pages.tolist()) == (4, pages.tolist())
    assert cache.peek([5, 1, 2, 3, 4]).length == 4
    assert cache.peek([5, 1, 2, 3]).length == 2
    assert cache.peek([6, 1, 2, 3, 4]).length == 0  # another first token is another first bigram
    assert cache.peek([1, 2, 3, 4]).length == 0


# ---- T8: abort everywhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage", ["matched", "loading", "loaded", "allocated", "between chunks", "backing up", "finished"]
)
@pytest.mark.parametrize("fails", [False, True])
def test_abort_at_any_stage_leaves_nothing(stage, fails):
    cache, gate = new_cache(tiny())
    tokens = prompt(1, 4)
    serve(cache, tokens[: 2 * PAGE])
    cache.drain()
    cache.evict(1)
    gate.fails = lambda kind, number: [fails] * number
    match, receipt = cache.admit(tokens)
    pages = match.device_pages
    lent = np.zeros(0, np.int32)
    if stage == "loading":
        gate.holding = {TransferKind.LOAD_BACK}
        assert isinstance(cache.load_back(match), Refusal)
    elif stage != "matched" and isinstance(answer := cache.load_back(match), Load):
        pages = np.concatenate([pages, answer.pages])
    if stage in ("allocated", "between chunks", "backing up", "finished"):
        gate.holding = {TransferKind.BACKUP}
        lent = cache.allocate(4 - len(pages))
        pages = np.concatenate([pages, lent])
        paths = path_of(cache.config, tokens)
        write_pages(cache, 0, lent, [paths[: depth + 1] for depth in range(5 - len(lent), 5)])
    if stage in ("between chunks", "backing up"):
        done = cache.checkpoint(tokens[: 3 * PAGE], pages[:3], receipt)
        lent = np.setdiff1d(lent, done.pages)
    if stage == "finished":
        cache.finish(tokens, pages, receipt)
        with pytest.raises(CacheError):
            cache.abort([], receipt)
    else:
        cache.abort(lent, receipt)
    assert cache.lent_pages() == 0
    gate.holding = set()
    settle(cache)
    cache.tick()
    drained(cache)
