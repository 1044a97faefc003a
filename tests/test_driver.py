"""Interrupts at the worst moments: the state is never lost, and every transfer is started once."""

import signal

import numpy as np
import pytest
from support import content, new_cache, path_of, read_page, serve, settle, tiny

from purecache.programs import Program

AB, CD = [1, 1, 2, 2], [3, 3, 4, 4]


def test_an_interrupt_during_a_transition_does_not_lose_the_state(monkeypatch):
    cache, _ = new_cache(tiny())
    serve(cache, AB)
    answer = Program.answer

    def interrupted(self, vector):
        signal.raise_signal(signal.SIGINT)
        return answer(self, vector)

    monkeypatch.setattr(Program, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.match(AB)
    monkeypatch.undo()
    assert cache.match(AB).device_length == 4


def test_an_interrupt_before_the_transfers_starts_them_with_the_next_call(monkeypatch):
    cache, _ = new_cache(tiny())
    serve(cache, CD)
    cache.drain()
    before, answer = cache.counters(), Program.answer

    def interrupted(self, vector):
        effects, reply = answer(self, vector)
        if any((transfers.operation >= 0).any() for transfers in effects):
            raise KeyboardInterrupt
        return effects, reply

    monkeypatch.setattr(Program, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve(cache, AB)
    monkeypatch.undo()
    cache.peek(AB)
    settle(cache)
    cache.drain()
    for name in ("backup_pages", "pages_backed_up"):
        assert cache.counters()[name] - before[name] == 2
    assert cache.evict(4) == 4
    match = cache.match(AB)
    assert (match.device_length, match.host_length) == (0, 4)
    load = cache.load_back(match)
    for page, depth in zip(load.pages, (1, 2), strict=True):
        np.testing.assert_array_equal(read_page(cache, 0, page), content(path_of(cache.config, AB)[: depth + 1]))
    assert cache.violations() == []


def test_an_interrupt_while_completions_are_dealt_with_loses_none(monkeypatch):
    cache, _ = new_cache(tiny())
    serve(cache, AB)
    settle(cache)
    poll = cache._driver.plane.poll

    def interrupted():
        found = poll()
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(cache._driver.plane, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.tick()
    monkeypatch.undo()
    assert cache.evict(4) == 2
    assert cache.peek(AB).length == 4
    assert cache.violations() == []
