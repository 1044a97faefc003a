from __future__ import annotations

import numpy as np
import pytest

from purecache.demo.cached import CachedMemory
from purecache.demo.conversations import Script, converse
from purecache.demo.memory import PlainMemory
from purecache.demo.scheduler import Engine, Request
from purecache.state.config import CacheConfig

PAGE = 4
DEVICE_PAGES = 20


@pytest.fixture
def memory_of(programs):
    """Build a memory whose cache checks all its laws after every call."""

    def build(**options):
        config = CacheConfig(PAGE, DEVICE_PAGES, host_pages=64, load_back_threshold=1, **options)
        return CachedMemory.build(config, programs.pool(DEVICE_PAGES), longest=96, check_laws=True)

    return build


def scripts(small):
    """Four users, two documents of 40 tokens, three turns: about 350 tokens of distinct keys and values."""
    result = []
    for user in range(4):
        document = small.prompt(40, seed=user % 2)
        pieces = [np.concatenate([document, small.prompt(5, seed=10 + user)])]
        pieces += [small.prompt(7, seed=20 + 3 * user + turn) for turn in range(2)]
        result.append(Script(f"user {user}", tuple(pieces), (6, 6, 6), cumulative=True))
    return result


def answers(requests):
    return {request.name: request.answer for request in requests}


def assert_drained(memory):
    """Every device page is free or in the tree and evictable: nobody holds a lock or a lent page."""
    memory.settle()
    assert memory.cache.free_pages() + memory.cache.evictable_pages() == memory.pages
    assert memory.cache.protected_pages() == 0


@pytest.fixture
def expected(small, programs):
    engine = Engine(programs, PlainMemory(programs.pool(64)), stop=-1)
    return answers(converse(engine, scripts(small), lambda request: None))


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_answers_equal_those_without_cache(small, programs, memory_of, expected, write):
    """With an L1 of 80 tokens, so that documents come back from L2."""
    memory = memory_of(write=write)
    requests = converse(Engine(programs, memory, stop=-1), scripts(small), lambda request: None)
    assert answers(requests) == expected
    assert sum(request.hit for request in requests) > 0
    assert sum(request.loaded for request in requests) > 0
    assert memory.bytes_to_device >= sum(request.loaded for request in requests) // PAGE * memory.page_bytes > 0
    for request in requests:
        if not request.preempted:
            assert request.computed + request.hit + request.loaded == len(request.prompt)
    assert_drained(memory)


def test_preempted_requests_give_the_same_answers(small, programs, memory_of):
    def served(memory):
        asked = [Request(str(seed), small.prompt(length, seed), 25) for seed, length in enumerate((23, 41, 6, 34))]
        engine = Engine(programs, memory, stop=-1)
        for request in asked:
            engine.submit(request)
        while not engine.idle:
            engine.step()
        return asked

    # Room for the first two prompts (6 and 11 pages) and for three pages of their answers, which need twelve.
    memory = memory_of()
    requests = served(memory)
    assert sum(request.preempted for request in requests) > 0
    assert answers(requests) == answers(served(PlainMemory(programs.pool(64))))
    assert_drained(memory)


def test_requests_of_the_same_step_share_their_prefix(small, programs, memory_of):
    prompt = small.prompt(42)
    asked = [Request(str(index), prompt, 4) for index in range(3)]
    engine = Engine(programs, memory_of(), stop=-1)
    for request in asked:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    assert [request.hit for request in asked] == [0, 40, 40]
    assert asked[0].answer == asked[1].answer == asked[2].answer


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_one_token_is_left_to_compute(small, programs, memory_of, length):
    memory, prompt = memory_of(), small.prompt(length)
    first, again = Request("first", prompt, 3), Request("again", prompt, 3)
    for request in (first, again):
        engine = Engine(programs, memory, stop=-1)
        engine.submit(request)
        while not engine.idle:
            engine.step()
    assert again.hit == (length - 1) // PAGE * PAGE
    assert again.computed == length - again.hit >= 1
    assert again.answer == first.answer


def test_a_conversation_finds_its_own_answers(small, programs, memory_of):
    """The pages of a finished answer are in the cache, without the token that was sampled last."""
    memory = memory_of()
    script = Script("a", (small.prompt(10, 1), small.prompt(5, 2)), (7, 2), cumulative=True)
    first, second = converse(Engine(programs, memory, stop=-1), [script], lambda request: None)
    assert first.filled == 16
    assert second.hit == 16


def test_cancelled_requests_leave_nothing_behind(small, programs, memory_of):
    memory = memory_of()
    lease = memory.open(small.prompt(30), spare=0)
    assert lease is not None
    memory.cancel(lease)
    assert_drained(memory)


def test_admission_counts_free_and_evictable_pages(small, programs, memory_of):
    memory = memory_of()
    lease = memory.open(small.prompt(72), spare=0)
    assert lease is not None
    assert memory.open(small.prompt(9, 5), spare=0) is None
    assert memory.open(small.prompt(8, 5), spare=1) is None
    memory.close(lease, small.prompt(72))
    other = memory.open(small.prompt(73, 5), spare=1)
    assert other is not None
    memory.cancel(other)
    assert_drained(memory)
