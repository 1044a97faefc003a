"""Whole lives of requests, in any order: chunk by chunk, cut short at every stage, on several ranks."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ours import HOST, TWO_RANKS, maker
from plain_cache import PlainCache

from purecache.testing import HostTier, Scheduling

PLAIN_HOST = HostTier(pages=lambda cache: (cache.host.count(None), len(cache.host)))


# A cache that compiles for its sizes may want fewer of them.
SHAPES = [
    {"page_size": page_size, "dp_size": ranks, "is_eagle": eagle, "tokens": pages * page_size}
    for page_size in (1, 4)
    for ranks in (1, 2)
    for eagle in (False, True)
    for pages in (10, 20)
]


def cache(name, make_cache, host=None, shapes=SHAPES):
    """A class of machines for a cache; `host` says how to look into its host tier."""
    kind = type(name, (RequestLives,), {"make_cache": staticmethod(make_cache), "host": host, "shapes": shapes})
    return pytest.param(kind, id=name)


def plain(name, **tier):
    return cache(name, lambda params: PlainCache(params, **tier), PLAIN_HOST if tier else None)


TOKENS = st.lists(st.integers(1, 3), max_size=6)
SPACE = st.sampled_from([(None, 0)] * 4 + [(None, 1), ("a", 0), ("a", 1), (None, None)])
ONE_OF = st.integers(0, 1 << 16)


class RequestLives(RuleBasedStateMachine):
    make_cache, host, shapes = None, None, SHAPES

    @initialize(
        shape=ONE_OF,
        seed=st.integers(0, 9),
        overlap=st.booleans(),
        chunk=st.sampled_from([None, 4, 7]),
        policy=st.sampled_from(["fcfs", "lpm", "dfs-weight"]),
    )
    def start(self, shape, **settings):
        settings |= self.shapes[shape % len(self.shapes)]
        self.run = Scheduling(self.make_cache, host=self.host, optimism=0.1, twice=0.3, **settings)
        self.longest, self.most = settings["tokens"] // 2, settings["tokens"] // 3

    @rule(
        tokens=TOKENS,
        times=st.integers(1, 4),
        new=st.integers(1, 6),
        space=SPACE,
        logprobs=st.none() | st.integers(0, 9),
    )
    def submit(self, tokens, times, new, space, logprobs):
        """Prompts of few different tokens, so that they share prefixes; some are longer than a chunk."""
        prompt = ([1, 2] + tokens * times)[: self.longest]
        rank = space[1] and space[1] % self.run.dp_size
        self.run.submit(prompt, min(new, self.most), extra_key=space[0], dp_rank=rank, logprob_start_len=logprobs)

    @precondition(lambda self: self.run.requests)
    @rule(which=ONE_OF, tokens=TOKENS, new=st.integers(1, 6))
    def answer(self, which, tokens, new):
        """A conversation goes on."""
        earlier = self.run.requests[which % len(self.run.requests)]
        prompt = (earlier.origin_input_ids + earlier.output_ids + tokens)[: self.longest]
        self.run.submit(prompt, min(new, self.most), extra_key=earlier.extra_key, dp_rank=earlier.dp_rank)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.run.step()
            self.run.check()

    @precondition(lambda self: self.run.requests)
    @rule(which=ONE_OF)
    def abort(self, which):
        self.run.abort(self.run.requests[which % len(self.run.requests)])

    @precondition(lambda self: any(self.run.chunked))
    @rule()
    def abort_between_chunks(self):
        for request in filter(None, self.run.chunked):
            self.run.abort(request)

    @precondition(lambda self: not self.run.idle())
    @rule(everything=st.booleans())
    def retract(self, everything):
        if everything:
            self.run.retract()
        else:
            self.run.step(retract=True)

    @rule(flush=st.booleans())
    def drain(self, flush):
        self.run.drain()
        assert self.run.idle()
        assert all(request.finished() for request in self.run.requests)
        if flush:
            assert self.run.flush()

    @invariant()
    def sound(self):
        self.run.check()

    def teardown(self):
        if hasattr(self, "run"):
            self.drain(flush=True)
            self.run.check()
            self.run.close()


CACHES = [
    plain("plain"),
    plain("plain_write_through", host_pages=6, write="write_through"),
    plain("plain_storage", host_pages=8, storage=True),
]


@pytest.mark.parametrize("kind", CACHES)
def test_lives(kind):
    run_state_machine_as_test(kind)


@pytest.mark.xdist_group("sglang-jax")
@pytest.mark.parametrize("kind", [cache("ours", maker(24, settled=True, write="write_through"), HOST, [TWO_RANKS])])
def test_lives_with_our_cache(kind):
    run_state_machine_as_test(kind)


@pytest.mark.parametrize("kind", CACHES)
def test_the_machine_reaches_every_stage(kind):
    """A fixed run through it: so that it is known to chunk, retract, abort, share, evict, and load from the host."""
    machine = type("Fixed", (kind,), {"shapes": [{"page_size": 1, "dp_size": 2, "is_eagle": False, "tokens": 20}]})()
    machine.start(shape=0, seed=0, overlap=True, chunk=4, policy="lpm")
    for rank in (0, 1):
        for last in (1, 2, 3, 1):
            machine.submit([last, 3, 1], 3, 6, (None, rank), None)
        machine.step(1)
        machine.abort_between_chunks()
        machine.step(3)
        machine.submit([], 1, 6, (None, rank), None)
        machine.submit([], 1, 6, (None, rank), None)
        machine.step(2)
        machine.retract(everything=False)
        machine.drain(flush=False)
    machine.answer(0, [1, 2], 2)
    machine.step(1)
    machine.retract(everything=True)
    machine.teardown()
    done = machine.run.tally
    happened = {name for name, number in vars(done).items() if number}
    assert happened >= {"finished", "aborted", "retracted", "chunks", "cached_tokens", "evictions", "flushes"}
    assert kind.host is None or done.loaded_tokens
