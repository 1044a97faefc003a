"""Recordings of caches with tail pools."""

import hybrid_comparison
import hybrid_support
import pytest
import test_hybrid_oracle
from hybrid_scheduling import prompt, serve_hybrid
from hybrid_support import new_hybrid, settle_all, three_tails, window_and_state
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from recordings import recording, same_arrays, verified

from purecache.replay import Recorder, Recording, Unusable

LAWS = {"LastHalf": hybrid_support.LastHalf}


@pytest.mark.parametrize("tokens", ["hashed", "plain"])
def test_pools_are_recorded(tmp_path, tokens):
    cache, _ = new_hybrid(window_and_state())
    recorder = recording(cache, Recorder(tmp_path / "life", tokens=tokens, state_every=1))
    for number in range(5):
        serve_hybrid(cache, prompt(1 + number % 2, 2 + number % 3))
        settle_all(cache)
        cache.tick()
        slot = cache.fork(cache.match(prompt(1, 2)).device_node, "state")
        if isinstance(slot, int):
            cache.release([slot], pool="state")
    assert recorder.close()
    found = Recording(tmp_path / "life")
    same_arrays(verified(found).state, cache.state, tokens == "hashed")
    assert {"fork@2", "allocate@1", "finish_backup@2"} <= {event.name for event in found}
    assert found.config.pools == cache.config.pools


def test_laws_of_others_are_named(tmp_path):
    cache, _ = new_hybrid(three_tails())
    recorder = recording(cache, Recorder(tmp_path / "life"))
    cache.release(cache.allocate(2, pool="half"), pool="half")
    assert recorder.close()
    with pytest.raises(Unusable, match="LastHalf"):
        Recording(tmp_path / "life")
    found = Recording(tmp_path / "life", laws=LAWS)
    assert found.config == cache.config
    verified(found)


def test_random_lives_with_pools(tmp_path, monkeypatch):
    new, numbers = hybrid_comparison.new_hybrid, iter(range(10**6))

    def new_and_recorded(config, **options):
        cache, gates = new(config, **options)
        number = next(numbers)
        tokens = ("hashed", "plain")[number % 2]
        cache.recorder = recording(cache, Recorder(tmp_path / str(number), tokens=tokens, state_every=5))
        return cache, gates

    class Recorded(test_hybrid_oracle.HybridAgainstOracle):
        def teardown(self):
            if hasattr(self, "cache"):
                super().teardown()
                assert self.cache.recorder.close()
                found = Recording(self.cache.recorder.path, laws=LAWS)
                same_arrays(verified(found).state, self.cache.state, found.hashed)

    monkeypatch.setattr(hybrid_comparison, "new_hybrid", new_and_recorded)
    run_state_machine_as_test(Recorded, settings=settings(max_examples=4, stateful_step_count=20))
    assert next(numbers) >= 4
