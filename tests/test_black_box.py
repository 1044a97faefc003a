"""Cases that broke other caches, through the facade with a real interpreter and recognisable bytes."""

import numpy as np
import pytest
from support import content, new_cache, path_of, read_page, serve, settle, tiny, write_pages

from purecache.answers import CacheError, Load, Refusal
from purecache.state import Policy, Tier, WritePolicy
from purecache.state.layout import Account
from purecache.transitions import Status, TransferKind

PAGE = 2


def prompt(first, pages):
    """`pages` pages of tokens that no other `first` shares."""
    return [100 * first + index for index in range(pages * PAGE)]


def bytes_are_right(cache, tokens, pages, skip=0, **space):
    path = path_of(cache.config, tokens, **space)
    for depth, page in enumerate(pages, skip + 2):
        np.testing.assert_array_equal(read_page(cache, path[0], page), content(path[:depth]))


def ask(cache, tokens, **space):
    """Ask for a prompt as a scheduler does: admit, load back, check the bytes. Returns tokens that need no computing."""
    match, receipt = cache.admit(tokens, **space)
    bytes_are_right(cache, tokens, match.device_pages, **space)
    served = match.device_length
    if match.host_length:
        answer = cache.load_back(match)
        if isinstance(answer, Load):
            assert len(answer.pages) * PAGE == match.host_length
            bytes_are_right(cache, tokens, answer.pages, len(match.device_pages), **space)
            served = match.length
    cache.abort([], receipt, rank=space.get("rank", 0))
    return served


def drained(cache):
    """P3: everything has ended, so evicting everything leaves nothing but free pages."""
    for _ in range(2):
        cache.drain()
        cache.evict(100)
        cache.evict_host(100)
    assert cache.violations() == []
    for rank in range(cache.config.ranks):
        assert cache.free_pages(rank) == cache.config.device_pages
        assert cache.pages(Account.FREE, Tier.HOST, rank) == cache.config.host_pages
    assert cache.counters()["stale_completions"] == 0


def dirty(cache):
    """Overwrite every free device page, so that bytes which were not copied are not there by luck."""
    lent = cache.allocate(cache.free_pages())
    write_pages(cache, 0, lent, [("dirt", page) for page in lent.tolist()])
    cache.release(lent)


# ---- T1, T4: the load back under pressure --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.name)
def test_a_load_back_does_not_eat_its_source(policy):
    cache, _ = new_cache(tiny(device_pages=8, host_pages=4, policy=policy, write=WritePolicy.WRITE_BACK))
    serve(cache, prompt(1, 4))
    cache.evict(4)
    cache.drain()
    assert cache.pages(Account.FREE, Tier.HOST) == 0
    for first in (2, 3):
        serve(cache, prompt(first, 4))
    dirty(cache)
    assert cache.free_pages() == 0
    assert ask(cache, prompt(1, 4)) == 4 * PAGE
    drained(cache)


def test_a_host_hit_is_worth_something_under_pressure():
    cache, _ = new_cache(tiny(device_pages=8, host_pages=4, load_back_threshold=8))
    serve(cache, prompt(1, 4))
    cache.drain()
    for first in (2, 3):
        serve(cache, prompt(first, 4))
    cache.drain()
    assert (cache.free_pages(), cache.evictable_pages()) == (0, 8)
    match = cache.match(prompt(1, 4))
    assert (match.device_length, match.length) == (0, 8)
    assert ask(cache, prompt(1, 4)) == 8
    drained(cache)


def test_below_the_threshold_a_prefix_is_computed_again():
    cache, _ = new_cache(tiny(device_pages=8, host_pages=4, load_back_threshold=8))
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
    cache, gate = new_cache(tiny(host_pages=4, max_operations=2))
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


# ---- T9, T10: namespaces, and callers that use their arrays again -----------------------------------------------------

SPACES = (
    {},
    {"rank": None},
    {"rank": 1},
    {"namespace": "a"},
    {"namespace": ("a",)},
    {"namespace": b"a"},
    {"namespace": (("adapter", "a"),)},
    {"namespace": (("salt", "a"),)},
)


def test_namespaces_never_share_and_always_find_their_own():
    cache, _ = new_cache(tiny(device_pages=8, host_pages=6))
    tokens = prompt(1, 1)
    for number, space in enumerate(SPACES):
        for other in SPACES[number:]:
            assert cache.peek(tokens, **other).length == 0
        serve(cache, tokens, **space)
    cache.drain()
    for space in SPACES:
        assert ask(cache, tokens, **space) == PAGE
    cache.evict(16)
    for space in SPACES[:2] + SPACES[2:5]:
        length = cache.peek(tokens, **space).length
        assert ask(cache, tokens, **space) == length
    assert any(cache.peek(tokens, **space).device_length for space in SPACES)
    drained(cache)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_caller_may_use_its_arrays_again_at_once(offset):
    cache, gate = new_cache(tiny(page_size=64, ranks=1, max_receipts=8), smallest=16)
    gate.holding = set(TransferKind)
    buffer = np.zeros(512 + offset, np.int32)
    tokens = buffer[offset:][: 3 * 64]
    tokens[:] = np.arange(3 * 64)
    wanted = tokens.tolist()
    paths = path_of(cache.config, wanted)
    pages = np.array(cache.allocate(3))
    write_pages(cache, 0, pages, [paths[: depth + 2] for depth in range(3)])
    done = cache.insert(tokens, pages)
    tokens[:], pages[:] = -1, 0
    gate.holding = set()
    cache.drain()
    match = cache.match(wanted)
    assert match.device_length == 3 * 64
    kept = match.device_pages.tolist()
    assert done.pages.tolist() == kept
    cache.evict(3)
    cache.drain()
    dirty(cache)
    assert match.device_pages.tolist() == kept  # a reply is no view of the state
    answer = cache.load_back(cache.match(wanted))
    assert isinstance(answer, Load)
    for depth, page in enumerate(answer.pages, 2):
        np.testing.assert_array_equal(read_page(cache, 0, page), content(paths[:depth]))
    lent = np.array(cache.allocate(2))
    given = lent.copy()
    cache.release(given)
    given[:] = 99
    assert cache.violations() == []
