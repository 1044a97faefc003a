"""Recordings of every kind of life are repeated bit for bit, in this process and in others; nothing stops a cache."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import comparison
import numpy as np
import pytest
import test_against_oracle
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from recordings import AB, live, recorded, recording, same_arrays, verified
from support import new_cache, new_plane, serve, settle, tiny

import purecache.replay.recorder as recorder_module
from purecache.cache import PrefixCache
from purecache.namespaces import namespace_digest
from purecache.programs import Program
from purecache.replay import Recorder, Recording
from purecache.state import Policy, WritePolicy

BOTH = pytest.mark.parametrize("tokens", ["hashed", "plain"])


@BOTH
@pytest.mark.parametrize("write", WritePolicy)
def test_a_life_is_repeated_bit_for_bit(tmp_path, tokens, write):
    cache, found = recorded(tmp_path / "life", tiny(write=write), tokens=tokens, state_every=1)
    player = verified(found)
    assert player.verify().states == len(found) + 1
    assert (found.damage, found.end["stopped"]) == (None, None)
    same_arrays(player.state, cache.state, tokens == "hashed")
    assert player.violations() == []
    names = {event.name for event in found}
    assert {"admit", "finish", "evict_device", "begin_load_back", "finish_backup", "reset", "match_16"} <= names


@BOTH
def test_a_cache_is_given_its_recorder_when_it_is_made(tmp_path, tokens):
    config = tiny(policy=Policy.LFU, seed=7)
    recorder = Recorder(tmp_path / "life", tokens=tokens)
    cache = PrefixCache(config, new_plane(config), record=recorder)
    live(cache)
    assert recorder.close()
    found = Recording(tmp_path / "life")
    assert found.config == (replace(config, seed=0) if tokens == "hashed" else config)
    same_arrays(verified(found).state, cache.state, tokens == "hashed")


@pytest.mark.parametrize("config", [{"external_pages": True}, {"bigrams": True}, {"page_size": 1, "ranks": 1}])
@BOTH
def test_other_kinds_of_trees(tmp_path, tokens, config):
    config = tiny(**config)
    cache, _ = new_cache(config, check_laws=False)
    recorder = recording(cache, Recorder(tmp_path / "life", tokens=tokens, state_every=2))
    for number in range(8):
        prompt = np.array([*AB, number % 3, 3, 5], np.int32)
        width = len(prompt) // config.page_size
        match, receipt = cache.admit(prompt)
        # The allocator outside hands out whichever it likes; here, those that the tree does not hold.
        state = cache.state
        lent = np.flatnonzero(np.asarray(state.shelves)[1, : config.device_pages] == -2).astype(np.int32)
        new = lent if config.external_pages else cache.allocate(max(0, width - len(match.device_pages)))
        if new is None or len(match.device_pages) + len(new) < width:
            cache.abort([], receipt)
            cache.evict(4)
            continue
        pages = np.concatenate([match.device_pages, new])[:width]
        cache.finish(prompt, pages, receipt)
        settle(cache)
        cache.tick()
    assert recorder.close()
    player = verified(Recording(tmp_path / "life"))
    same_arrays(player.state, cache.state, tokens == "hashed")
    assert player.recording.programs() >= {("finish", 16)}


def test_random_lives(tmp_path, monkeypatch):
    """The lives of the test against the oracle, with transfers held, failed and cut short, mistakes and resets."""
    new, numbers = comparison.new_cache, iter(range(10**6))

    def new_and_recorded(config, **options):
        cache, gate = new(config, **options)
        number = next(numbers)
        tokens = ("hashed", "plain")[number % 2]
        cache.recorder = recording(cache, Recorder(tmp_path / str(number), tokens=tokens, state_every=3))
        return cache, gate

    class Recorded(test_against_oracle.AgainstOracle):
        def teardown(self):
            if hasattr(self, "cache"):
                super().teardown()
                assert self.cache.recorder.close()
                found = Recording(self.cache.recorder.path)
                same_arrays(verified(found).state, self.cache.state, found.hashed)

    monkeypatch.setattr(comparison, "new_cache", new_and_recorded)
    run_state_machine_as_test(Recorded, settings=settings(max_examples=8, stateful_step_count=30))
    assert next(numbers) >= 8


@BOTH
def test_another_process_repeats_it(tmp_path, tokens):
    recorded(tmp_path / "life", tokens=tokens, state_every=4)
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-m", "purecache", "replay", str(tmp_path / "life"), "--quiet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "equal: every answer and every state" in done.stdout


def test_caches_of_one_process_have_recordings_of_their_own(tmp_path):
    caches = [new_cache(tiny(), plane=False)[0] for _ in range(3)]
    recorders = [recording(cache, Recorder(tmp_path / str(n))) for n, cache in enumerate(caches)]
    for number in range(12):
        cache = caches[number % 3]
        lent = cache.allocate(1 + number % 2, rank=number % 2)
        cache.release(lent, rank=number % 2)
    for recorder, cache in zip(recorders, caches, strict=True):
        assert recorder.close()
        same_arrays(verified(Recording(recorder.path)).state, cache.state, True)


# ---- interrupts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after", "answer"])
def test_an_interrupt_at_any_moment_leaves_the_recording_right(tmp_path, monkeypatch, moment):
    cache, _ = new_cache(tiny(), check_laws=False)
    recorder = recording(cache, Recorder(tmp_path / "life", state_every=1))
    serve(cache, AB)
    cache.peek(AB), cache.match(AB)  # a program is guarded otherwise when it runs for the first time
    driver = cache._driver

    def interrupted(call):
        def wrapped(*arguments):
            if moment != "before":
                found = call(*arguments)
            signal.raise_signal(signal.SIGINT)
            return call(*arguments) if moment == "before" else found

        return wrapped

    owner, name = (Program, "answer") if moment == "answer" else (driver, "_step")
    for turn in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted(getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                (cache.match if turn % 2 else cache.peek)(AB)
        if turn > 1:
            cache.evict(1)  # two interrupts in a row, or none between two calls
    settle(cache)
    cache.drain()
    assert recorder.close()
    found = Recording(tmp_path / "life")
    same_arrays(verified(found).state, cache.state, True)
    happened = [event.name for event in found if event.name in ("match", "peek")]
    # Whoever is interrupted while the transfers of the call before are started has not begun.
    assert len(happened) == 2 + {"before": 0, "after": 4, "answer": 2}[moment]


# ---- disks ---------------------------------------------------------------------------------------------------------


class Disk:
    """A file that does what a disk may do."""

    def __init__(self, file, most=0, hangs=None):
        self.file, self.most, self.hangs = file, most, hangs

    def write(self, content):
        if self.hangs is not None:
            self.hangs.wait(60)
        if self.file.tell() + len(content) > self.most:
            raise OSError(28, "No space left on device")
        return self.file.write(content)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.file.close()


@pytest.mark.parametrize("part", [0, 0.75, 0.9])
def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, monkeypatch, part):
    monkeypatch.setattr(recorder_module, "FRAME_EVENTS", 4)
    recorded(tmp_path / "whole")
    recorder = Recorder(tmp_path / "life")
    recorder._file = Disk(recorder._file, part * os.stat(tmp_path / "whole").st_size)
    cache, _ = new_cache(tiny(), check_laws=True)
    recording(cache, recorder)
    live(cache)
    end = time.monotonic() + 60
    while recorder.stopped is None and time.monotonic() < end:
        time.sleep(0.01)
    assert "No space left" in recorder.stopped
    before = recorder.lost
    serve(cache, AB)
    assert recorder.lost > before
    assert not recorder.close()
    if part:
        found = Recording(tmp_path / "life")
        assert found.end is None
        assert found.damage
        assert len(found) == recorder.events > 0
        verified(found)


def test_a_disk_that_hangs_costs_a_bounded_memory_and_no_time(tmp_path):
    released = threading.Event()
    recorder = Recorder(tmp_path / "life", most_waiting=20_000)
    recorder._file = Disk(recorder._file, 1 << 30, released)
    cache, _ = new_cache(tiny(), check_laws=False)
    recording(cache, recorder)
    for _ in range(40):
        cache.peek(AB)
    assert recorder.stopped == "the writer could not follow"
    assert recorder.lost > 0
    assert len(recorder._queue) * 1000 < 40_000
    begin = time.monotonic()
    assert not recorder.close(timeout=0.1)
    assert time.monotonic() - begin < 10
    released.set()
    recorder._thread.join(60)
    verified(Recording(tmp_path / "life"))


def test_a_recording_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "FRAME_EVENTS", 1)
    recorder = Recorder(tmp_path / "life", most_bytes=6000)
    cache, _ = new_cache(tiny(), check_laws=False)
    recording(cache, recorder)
    end = time.monotonic() + 60
    while recorder.stopped is None and time.monotonic() < end:
        cache.peek(AB)
        time.sleep(0.001)
    assert not recorder.close()
    found = Recording(tmp_path / "life")
    assert found.end["stopped"] == "the file has reached its size"
    verified(found)


def test_recorders_are_closed_once_and_used_once(tmp_path):
    recorder = Recorder(tmp_path / "life")
    cache, _ = new_cache(tiny(), check_laws=False)
    recording(cache, recorder)
    cache.peek(AB)
    assert recorder.close()
    assert recorder.close()
    cache.peek(AB)
    assert (recorder.events, recorder.lost) == (1, 0)
    with pytest.raises(ValueError, match="one cache"):
        recorder.begin(cache.config, 16, lambda: cache._driver._current[0])
    with pytest.raises(FileExistsError):
        Recorder(tmp_path / "life")
    never = Recorder(tmp_path / "never")
    assert not never.close()
    with pytest.raises(ValueError, match="one cache"):
        never.begin(cache.config, 16, lambda: cache._driver._current[0])
    with pytest.raises(ValueError, match="tokens must be"):
        Recorder(tmp_path / "third", tokens="some")
    assert os.stat(tmp_path / "life").st_mode & 0o077 == 0


def test_a_process_that_forgets_to_close_leaves_a_whole_file(tmp_path):
    text = (
        "import sys; from purecache import CacheConfig, PrefixCache; from purecache.replay import Recorder\n"
        "config = CacheConfig(page_size=2, device_pages=8, host_pages=6, ranks=2, levels=4, max_operations=4,"
        " max_receipts=6, load_back_threshold=0)\n"
        "cache = PrefixCache(config, record=Recorder(sys.argv[1]))\n"
        "cache.release(cache.allocate(3))"
    )
    subprocess.run([sys.executable, "-c", text, str(tmp_path / "life")], timeout=300, check=True)
    found = Recording(tmp_path / "life")
    assert (len(found), found.damage, found.end) == (2, None, {"events": 2, "stopped": None})
    verified(found)


@BOTH
def test_what_is_forgotten_is_forgotten_again(tmp_path, tokens):
    """A namespace is an argument by itself there, outside of any prompt."""

    def life(cache):
        serve(cache, AB, namespace="a")
        serve(cache, AB)
        assert cache.forget_namespace("a").device_pages == 2
        assert cache.forget(AB, keep=2).device_pages == 1

    cache, found = recorded(tmp_path / "life", life=life, tokens=tokens, state_every=1)
    same_arrays(verified(found).state, cache.state, tokens == "hashed")
    (command,) = (event.command for event in found if event.name == "forget_namespace" and event.command[-1] == 0)
    told = namespace_digest("a", rank=0)
    assert (command[:4].tolist() == told.tolist()) is (tokens == "plain")
