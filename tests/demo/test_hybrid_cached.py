from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from purecache.demo.conversations import Script, converse
from purecache.demo.hybrid_cached import HybridCachedMemory
from purecache.demo.hybrid_config import KV, STATE, WINDOW
from purecache.demo.hybrid_memory import HybridPlainMemory
from purecache.demo.scheduler import Engine, Request
from purecache.demo.weights import DemoError
from purecache.state import CacheConfig
from purecache.state.layout import Account, Tier

pytestmark = pytest.mark.xdist_group("hybrid")  # its programs are compiled once

PAGE, SNAPSHOT = 4, 16
DEVICE = {KV: 40, WINDOW: 28, STATE: 9}
HOST = {WINDOW: 40, STATE: 12}


@pytest.fixture
def memory_of(hybrid, hybrid_programs):
    """Build a memory whose cache checks all its laws after every call."""

    def build(check_laws=True, **options):
        config = CacheConfig(PAGE, DEVICE[KV], host_pages=64, load_back_threshold=1, **options)
        pools = hybrid_programs.pools(DEVICE)
        geometry = hybrid_programs.geometry
        return HybridCachedMemory.build(
            config, hybrid.config, geometry, pools, HOST, SNAPSHOT, longest=96, check_laws=check_laws
        )

    return build


@pytest.fixture(scope="module")
def plain(hybrid, hybrid_programs):
    return lambda: HybridPlainMemory(hybrid.config, hybrid_programs.geometry, hybrid_programs.pools(DEVICE))


def scripts(hybrid):
    """Four users, two documents of 40 tokens, three turns: about 350 tokens of distinct keys and values."""
    result = []
    for user in range(4):
        document = hybrid.prompt(40, seed=user % 2)
        pieces = [np.concatenate([document, hybrid.prompt(5, seed=10 + user)])]
        pieces += [hybrid.prompt(7, seed=20 + 3 * user + turn) for turn in range(2)]
        result.append(Script(f"user {user}", tuple(pieces), (6, 6, 6), cumulative=True))
    return result


def outcome(requests):
    """Answers, and the bits that the requests ended with."""
    assert all(request.digest for request in requests)
    return {request.name: (request.answer, request.digest) for request in requests}


def serve(engine, *asked):
    for request in asked:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    return list(asked)


def assert_drained(memory):
    """Every device page of every pool is free or in the tree and evictable."""
    memory.settle()
    for name, size in memory.sizes.items():
        held = {account: memory.cache.pages(account, pool=name) for account in (Account.FREE, Account.EVICTABLE)}
        assert sum(held.values()) == size, (name, held)


@pytest.fixture(scope="module")
def expected(hybrid, hybrid_programs, plain):
    memory = plain()
    requests = converse(Engine(hybrid_programs, memory, stop=-1), scripts(hybrid), lambda request: None)
    assert all(memory.free(name) == size for name, size in DEVICE.items())
    assert all(len(set(request.answer)) > 3 for request in requests), "answers too dull to show a mistake"
    return outcome(requests)


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_answers_and_states_equal_those_without_cache(hybrid, hybrid_programs, memory_of, expected, write):
    """With pools for two conversations: kv, windows and states come back from host memory."""
    memory = memory_of(write=write)
    requests = converse(Engine(hybrid_programs, memory, stop=-1), scripts(hybrid), lambda request: None)
    assert outcome(requests) == expected
    assert sum(request.hit for request in requests) > 0
    assert sum(request.loaded for request in requests) > 0
    for request in requests:
        if not request.preempted:
            assert request.computed + request.hit + request.loaded == len(request.prompt)
            assert request.repeated == 0
    assert_drained(memory)
    assert memory.cache.pages(Account.EVICTABLE, Tier.HOST, pool=STATE) > 0
    assert memory.cache.pages(Account.EVICTABLE, Tier.HOST, pool=WINDOW) > 0


def test_a_prefix_is_taken_up_at_a_state(hybrid, hybrid_programs, memory_of):
    """At the last page of the same prompt, at a multiple, and where a third prompt has left the first."""
    memory, first = memory_of(), hybrid.prompt(45)
    engine = Engine(hybrid_programs, memory, stop=-1)
    other, third = (np.concatenate([first[:39], hybrid.prompt(6, seed)]) for seed in (1, 2))
    asked = [Request(name, prompt, 3) for name, prompt in zip("abcd", (first, first, other, third), strict=True)]
    for request in asked:
        serve(engine, request)
    # Pages of 4: the prompts part within page 9, of which `b` has a state at 32 (and 44); `c` leaves one at 36 for `d`.
    assert [request.hit for request in asked] == [0, 44, 32, 36]
    assert_drained(memory)


def test_a_lost_state_shortens_a_match_and_is_made_again(hybrid, hybrid_programs, memory_of):
    memory, prompt = memory_of(write="write_back"), hybrid.prompt(45)
    engine = Engine(hybrid_programs, memory, stop=-1)
    (first,) = serve(engine, Request("a", prompt, 2))
    memory.settle()
    while memory.cache.evict(8, pool=STATE) + memory.cache.evict_host(8, pool=STATE):
        memory.cache.drain()
    assert memory.cache.match(prompt[:44]).full_length == 44
    second, third = serve(engine, Request("b", prompt, 2)) + serve(engine, Request("c", prompt, 2))
    assert (second.hit + second.loaded, third.hit) == (0, 44)
    assert first.answer == second.answer == third.answer
    assert first.digest == second.digest == third.digest
    assert_drained(memory)


def test_lost_windows_come_back_from_host(hybrid, hybrid_programs, memory_of):
    memory, prompt = memory_of(), hybrid.prompt(45)
    engine = Engine(hybrid_programs, memory, stop=-1)
    (first,) = serve(engine, Request("a", prompt, 2))
    memory.cache.drain()
    assert memory.cache.evict(DEVICE[WINDOW], pool=WINDOW) > 0
    assert memory.cache.evict(DEVICE[STATE], pool=STATE) > 0
    match = memory.cache.match(prompt[:44])
    assert (match.device_length, match.length) == (0, 44)
    (second,) = serve(engine, Request("b", prompt, 2))
    assert (second.hit, second.loaded) == (0, 44)
    assert (first.answer, first.digest) == (second.answer, second.digest)
    assert_drained(memory)


def test_preempted_requests_give_the_same_answers(hybrid, hybrid_programs, memory_of, plain):
    def served(memory):
        prompts = [hybrid.prompt(length, seed) for seed, length in enumerate((23, 41, 6, 34))]
        asked = [Request(str(index), prompt, 50) for index, prompt in enumerate(prompts)]
        return serve(Engine(hybrid_programs, memory, stop=-1), *asked)

    # Room for the prompts (28 pages) and twelve pages of the answers, which need 50.
    memory = memory_of(check_laws=False)
    requests, cold = served(memory), served(plain())
    assert sum(request.preempted for request in requests) > 0
    assert outcome(requests) == outcome(cold)
    assert_drained(memory)


def test_requests_keep_windows_no_longer_than_needed(hybrid, hybrid_programs, memory_of):
    memory = memory_of()
    engine = Engine(hybrid_programs, memory, stop=-1)
    engine.submit(Request("a", hybrid.prompt(60), 20))
    held = []
    while not engine.idle:
        engine.step()
        for request in engine.running:
            held.append(int((request.lease.windows >= 0).sum()))
            assert (request.lease.windows[: memory.first_window(request.filled)] < 0).all()
    assert 0 < max(held) <= 12 // PAGE + 2
    assert_drained(memory)


def test_cancelled_requests_leave_nothing_behind(hybrid, memory_of, hybrid_programs):
    memory = memory_of()
    for reserve in (0, 1, 30):
        lease = memory.open(hybrid.prompt(30), spare=0)
        assert lease is not None
        assert memory.reserve(lease, reserve)
        memory.cancel(lease)
        assert_drained(memory)


def test_sizes_that_cannot_serve_a_request_are_refused(hybrid, hybrid_programs):
    build = partial(HybridPlainMemory, hybrid.config, hybrid_programs.geometry)
    with pytest.raises(DemoError, match="--window-tokens"):
        build(hybrid_programs.pools(DEVICE | {WINDOW: 7}))
    with pytest.raises(DemoError, match="--states"):
        build(hybrid_programs.pools(DEVICE | {STATE: 3}))
