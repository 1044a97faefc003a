import gc
import random

import numpy as np
import pytest
from session_engine import (
    Abort,
    Allocator,
    Engine,
    EvictParams,
    Key,
    LockResult,
    MatchParams,
    PlainTree,
    Req,
    Rows,
    Stop,
    Talk,
)

from purecache.adapters.build import UnsupportedError
from purecache.adapters.sessions import SessionCache, streaming_session
from purecache.adapters.sglang_jax_cache import SglangJaxCache


def engine(page_size: int = 4, ranks: int = 1, **options) -> Engine:
    inner = PlainTree(Rows(8, 512), Allocator(256 // page_size, page_size, ranks))
    return Engine(SessionCache(inner, **options))


def prompt(length: int, start: int = 1) -> list[int]:
    return list(range(start, start + length))


def held(ran: Engine) -> int:
    return ran.cache.session_held_tokens()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("chunk", [None, 3])
def test_next_turn_has_all_of_the_last_one_with_its_unaligned_tail(page_size, chunk):
    ran, talk = engine(page_size), Talk("a")
    history = prompt(10)
    assert ran.turn(Req(history, talk), [100, 101, 102], chunk=chunk) == 0
    for turn in range(4):
        ran.check_idle()
        history = [*history, 100, 101, 102, 50 + turn, 60 + turn]
        # The KV of the last output was not computed, everything before it was.
        assert ran.turn(Req(history, talk), [100, 101, 102], chunk=chunk) == len(history) - 3
    ran.check_idle()
    assert talk.told == ["finish"] * 5
    assert held(ran) > 0
    ran.cache.release_session("a")
    ran.check_idle()
    assert held(ran) == ran.cache.protected_size() == 0


def test_the_tree_and_eviction_leave_a_session_alone():
    ran, talk = engine(), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    free = ran.allocator.available_size(0)
    ran.cache.evict(EvictParams(1000))
    assert ran.allocator.available_size(0) == free
    assert ran.turn(Req([*prompt(10), 100, 101, 7], talk), [5]) == 11
    # Others find the prompt of the first turn, which the tree has, and no more.
    assert ran.match(Req([*prompt(10), 100, 101, 7, 8])) == 8
    ran.cache.release_session("a")
    ran.cache.evict(EvictParams(1000))
    assert ran.allocator.available_size(0) == ran.allocator.size_per_rank


@pytest.mark.parametrize("reason", [None, Abort()])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_turn_that_is_retracted_or_aborted_leaves_the_session_as_it_was(reason, page_size):
    ran, talk = engine(page_size), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    before, history = held(ran), [*prompt(10), 100, 101, 7, 8, 9, 10, 11]
    req = Req(history, talk)
    assert ran.match(req) == 11
    ran.start(req, chunk=2)
    ran.decode(req, [1, 2, 3])
    assert held(ran) == before
    ran.end(req, reason)
    assert held(ran) == before
    assert talk.told == ["finish", *(["abort"] if reason else [])]
    ran.check_idle()
    assert ran.turn(Req([*prompt(10), 100, 101, 77], talk), [5]) == 11
    ran.check_idle()


def test_a_first_turn_that_is_aborted_holds_nothing():
    ran, talk = engine(), Talk("a")
    req = Req(prompt(10), talk)
    ran.match(req)
    ran.start(req)
    ran.end(req, Abort())
    ran.check_idle()
    assert held(ran) == ran.cache.protected_size() == 0
    assert ran.turn(Req(prompt(10), talk), [3]) == 8
    assert held(ran) == 4


@pytest.mark.parametrize("matched", [False, True])
def test_a_request_that_is_aborted_before_it_began_says_nothing_about_its_session(matched):
    ran, talk = engine(), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    req = Req([*prompt(10), 100, 101, 7], talk)
    if matched:
        assert ran.match(req) == 11
    req.to_finish, req.origin_input_ids = Abort(), [0]
    assert ran.match(req) == 0
    ran.start(req)
    ran.end(req, Abort())
    ran.check_idle()
    assert ran.turn(Req([*prompt(10), 100, 101, 7], talk), [5]) == 11


def test_only_one_request_of_a_session_has_its_turn():
    ran, talk = engine(), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    history = [*prompt(10), 100, 101, 7]
    first, second = Req(history, talk), Req(history, talk)
    assert ran.match(first) == 11
    assert ran.match(second) == 8
    ran.start(first)
    ran.start(second)
    ran.decode(second, [70, 71])
    ran.decode(first, [80, 81])
    ran.end(second, Stop())
    ran.end(first, Stop())
    ran.check_idle()
    assert ran.turn(Req([*history, 80, 81, 9], talk), [5]) == 14


def test_a_request_that_vanished_from_the_queue_does_not_keep_its_turn():
    ran, talk = engine(), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    gone = Req([*prompt(10), 100, 101, 7], talk)
    assert ran.match(gone) == 11
    del gone
    gc.collect()
    assert ran.match(Req([*prompt(10), 100, 101, 7], talk)) == 11


def test_a_changed_history_costs_what_changed():
    ran, talk = engine(), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101, 102, 103, 104])
    assert held(ran) == 8
    assert ran.turn(Req([*prompt(10), 100, 66, 67], talk), [5]) == 11
    ran.check_idle()
    assert held(ran) == 8


@pytest.mark.parametrize("change", ["tokens", "namespace", "rank", "shorter"])
def test_a_session_whose_prefix_is_another_starts_anew(change):
    ran, talk = engine(ranks=2), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    assert ran.cache.session_rank("a") == 0
    history = [*prompt(10), 100, 101, 7]
    changed = {
        "tokens": Req([9, *history[1:]], talk),
        "namespace": Req(history, talk, extra_key="lora"),
        "rank": Req(history, talk, dp_rank=1),
        "shorter": Req(history[:7], talk),
    }[change]
    assert ran.turn(changed, [5]) == (4 if change == "shorter" else 0)
    ran.check_idle()
    assert ran.cache.session_rank("a") == (1 if change == "rank" else 0)
    again = Req([*changed.origin_input_ids, 5, 6], talk, changed.extra_key, changed.dp_rank)
    assert ran.turn(again, [5]) == len(changed.origin_input_ids)
    ran.check_idle()


@pytest.mark.parametrize("turns", [0, 1])
def test_closing_waits_for_the_turn_that_runs(turns):
    ran, talk = engine(), Talk("a")
    history = prompt(10)
    if turns:
        ran.turn(Req(history, talk), [100, 101])
        history = [*history, 100, 101, 7]
    req = Req(history, talk)
    ran.match(req)
    ran.start(req)
    ran.cache.release_session("a")
    ran.decode(req, [5, 6])
    ran.end(req, Stop())
    ran.check_idle()
    assert held(ran) == ran.cache.protected_size() == 0
    ran.cache.release_session("a")
    assert ran.turn(Req(history, Talk("a")), [5]) == 8


def test_closing_a_session_whose_next_request_waits_frees_it_at_once():
    ran, talk = engine(), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    req = Req([*prompt(10), 100, 101, 7], talk)
    assert ran.match(req) == 11
    ran.cache.release_session("a")
    ran.check_idle()
    assert ran.turn(req, [5]) == 8


def test_a_session_that_is_closed_before_its_first_turn_began_holds_nothing():
    ran = engine()
    req, gone = Req(prompt(10), Talk("a")), Req(prompt(10), Talk("b"))
    ran.match(req)
    ran.match(gone)
    ran.cache.release_session("a")
    ran.cache.release_session("b")
    del gone
    gc.collect()
    ran.start(req)
    ran.end(req, Stop())
    ran.check_idle()
    assert held(ran) == ran.cache.protected_size() == 0
    assert not ran.cache._sessions


def test_a_prefix_is_the_request_s_own_copy():
    ran, talk = engine(), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    req = Req([*prompt(10), 100, 101, 7], talk)
    assert ran.match(req) == 11
    req.prefix_indices[:] = 0
    assert ran.match(req) == 11


def test_the_allocator_gets_copies_of_rows():
    ran, talk = engine(), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    req, freed = Req([*prompt(10), 100, 101, *prompt(9)], talk), []
    ran.match(req)
    ran.start(req)
    take_back = ran.allocator.free
    ran.allocator.free = lambda slots, dp_rank: (freed.append(slots), take_back(slots, dp_rank))
    req.finished_reason = Abort()
    ran.cache.cache_finished_req(req)
    assert [len(slots) for slots in freed] == [9]
    assert not np.shares_memory(freed[0], ran.rows.req_to_token)


def test_a_key_may_be_shorter_than_its_tokens():
    class Limited(Key):
        def __len__(self):
            return 9

    ran, talk = engine(), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    req = Req([*prompt(10), 100, 101, 7], talk)
    found = ran.cache.match_prefix(MatchParams(Limited(req.origin_input_ids), req))
    assert len(found.device_indices) == 9


def test_a_slot_that_is_protected_but_was_not_matched_is_the_session_s():
    ran, talk = engine(page_size=1), Talk("a")
    req = Req(prompt(10), talk)
    ran.match(req)
    ran.start(req)
    req.last_matched_prefix_len -= 1
    last = (0, None, tuple(prompt(10)))
    del ran.cache._inner.pages[last]
    ran.cache._inner.dec_lock_ref(last, req)
    req.last_node = (0, None, tuple(prompt(9)))
    req.swa_uuid_for_lock = ran.cache.inc_lock_ref(req.last_node).swa_uuid_for_lock
    ran.end(req, Stop())
    ran.check_idle()
    ran.cache.release_session("a")
    ran.check_idle()


def test_flush_forgets_sessions_and_frees_no_slot():
    ran, talk = engine(), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    free = ran.allocator.available_size(0)
    ran.cache.reset()
    assert ran.allocator.available_size(0) == free
    ran.allocator.free_pages[0] = set(range(1, 65))
    ran.check_idle()
    assert ran.turn(Req([*prompt(10), 100, 101, 7], talk), [5]) == 0
    ran.check_idle()


def test_what_was_committed_beyond_the_answer_is_freed():
    ran, talk = engine(), Talk("a")
    req = Req(prompt(10), talk)
    ran.match(req)
    ran.start(req)
    ran.decode(req, [100, 101, 102, 103, 104, 105, 106, 107])
    req.output_ids = req.output_ids[:1]
    ran.end(req, Stop())
    ran.check_idle()
    assert held(ran) == 4
    # Position 10 has KV of the output that stayed, so it counts as prefix.
    assert ran.turn(Req([*prompt(10), 100, 7, 8], talk), [5]) == 11


def test_accounting_apart_for_schedulers_that_ask_for_it():
    ran, talk = engine(held_as_protected=False), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    assert ran.cache.protected_size() == 8
    assert ran.cache.session_held_full_tokens() == 4
    assert ran.cache.session_held_req_count() == ran.cache.session_held_swa_tokens() == 0
    req = Req([*prompt(10), 100, 101, 7], talk)
    ran.match(req)
    ran.start(req)
    assert ran.cache.session_held_tokens({req.req_pool_idx}) == 0
    assert ran.cache.session_held_tokens({req.req_pool_idx + 1}) == 4
    assert ran.cache.session_held_tokens(dp_rank=1) == 0


def test_everything_else_is_the_wrapped_cache_s():
    ran = engine()
    cache, inner = ran.cache, ran.cache._inner
    cache._donation_barrier = barrier = object()
    assert inner._donation_barrier is barrier
    assert cache._donation_barrier is barrier
    assert cache.page_size == 4
    assert not hasattr(cache, "hicache_enabled")
    inner.hicache_enabled = True
    assert cache.hicache_enabled
    assert cache
    with pytest.raises(TypeError):
        len(cache)
    assert cache.supports_streaming_session()
    found = ran.match(Req(prompt(3)))
    assert found == 0


def test_sanity_check_waits_until_no_session_holds_locks():
    ran, talk, checks = engine(), Talk("a"), []
    ran.cache._inner.sanity_check = lambda: checks.append(1)
    ran.turn(Req(prompt(10), talk), [100, 101])
    ran.cache.sanity_check()
    assert not checks
    ran.cache.release_session("a")
    ran.cache.sanity_check()
    assert checks


@pytest.mark.parametrize("part", ["supports_swa", "supports_mamba", "supports_recurrent"])
def test_caches_of_other_layers_are_refused(part):
    inner = PlainTree(Rows(8, 512), Allocator(64, 4, 1))
    setattr(inner, part, lambda: True)
    with pytest.raises(UnsupportedError, match="switch streaming sessions off"):
        SessionCache(inner)


def test_whose_session_a_request_has():
    assert streaming_session(Req([1], Talk("a"))) == "a"
    assert streaming_session(Req([1])) is None
    still = Talk("a")
    still.streaming = False
    assert streaming_session(Req([1], still)) is None


def test_locks_without_receipts():
    class Counting(PlainTree):
        def inc_lock_ref(self, node):
            super().inc_lock_ref(node)
            return LockResult(None)

        def dec_lock_ref(self, node, params=None):
            assert params is None or params.swa_uuid_for_lock is None
            del self.locks[next(receipt for receipt, other in self.locks.items() if other == node)]

    ran, talk = Engine(SessionCache(Counting(Rows(8, 512), Allocator(64, 4, 1)))), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    assert ran.turn(Req([*prompt(10), 100, 101, 7], talk), [5]) == 11
    ran.cache.release_session("a")
    assert not ran.cache._inner.locks


def test_around_purecache_s_own_adapter():
    """Another request locks the same node meanwhile: every lock is undone by its own receipt."""
    ran, talk = Engine(SessionCache(SglangJaxCache(Rows(8, 64), Allocator(16, 4, 1), 4))), Talk("a")
    ran.turn(Req(prompt(10), talk), [100, 101])
    turn, other = Req([*prompt(10), 100, 101, 7], talk), Req(prompt(10))
    assert (ran.match(turn), ran.match(other)) == (11, 8)
    ran.start(turn)
    ran.start(other)
    ran.decode(turn, [5])
    ran.end(turn, Stop())
    ran.end(other, Stop())
    ran.check_idle()
    assert held(ran) == 8
    ran.cache.release_session("a")
    ran.check_idle()
    assert ran.cache.protected_size() == 0


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_turns_ends_and_closings(seed):
    """Random schedules: the KV of every prefix is right (checked at every match) and nothing is lost or freed twice."""
    rng, page_size, ranks = random.Random(seed), (1, 4)[seed % 2], 1 + seed % 3 % 2
    ran = engine(page_size, ranks)
    talks, histories, running, waiting = {}, {}, [], []
    for _ in range(250):
        name, act = rng.choice("abc"), rng.random()
        if act < 0.3 and len(running) + len(waiting) < 5:
            talk = talks.setdefault(name, Talk(name))
            history = histories.setdefault(name, prompt(rng.randint(1, 12), rng.choice([1, 2])))
            if rng.random() < 0.1:
                history = history[: rng.randint(1, len(history))]
            req = Req([*history, rng.randint(1, 9)], talk, rng.choice([None, None, None, "x"]), rng.randrange(ranks))
            waiting.append(req)
        elif act < 0.6 and waiting:
            req = rng.choice(waiting)
            ran.match(req)
            if rng.random() < 0.7:
                waiting.remove(req)
                ran.start(req, rng.choice([None, 2]))
                ran.decode(req, [rng.randint(1, 9)])
                running.append(req)
        elif act < 0.7 and running:
            ran.decode(rng.choice(running), [rng.randint(1, 9) for _ in range(3)])
        elif act < 0.9 and running:
            req = running.pop(rng.randrange(len(running)))
            reason = rng.choice([None, Abort(), Stop(), Stop()])
            ran.end(req, reason)
            if reason is None:
                req.origin_input_ids, req.output_ids = [*req.origin_input_ids, *req.output_ids], []
                waiting.append(req)
            elif not reason.is_error:
                histories[req.session.session_id] = [*req.origin_input_ids, *req.output_ids][:40]
        elif act < 0.93 and waiting:
            waiting.pop().to_finish = Abort()
        elif act < 0.97:
            ran.cache.release_session(name)
        else:
            ran.cache.evict(EvictParams(3 * page_size, rng.randrange(ranks)))
        if not running:
            ran.check_idle()
    for req in running:
        ran.end(req, Stop())
    ran.check_idle()
    for name in "abc":
        ran.cache.release_session(name)
    ran.check_idle()
    for rank in range(ranks):
        assert ran.cache.protected_size(dp_rank=rank) == 0
        ran.cache.evict(EvictParams(1000, rank))
        assert ran.allocator.available_size(rank) == ran.allocator.size_per_rank
