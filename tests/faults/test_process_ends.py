"""Processes that end, fork or are interrupted with operations in flight: nothing hangs, and the store is whole."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import ABCD, EFGH, OBJECT, attached, emptied, prefetched

from purecache.stores.local import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore:a page is 2 tokens")
WORKER = Path(__file__).with_name("life_worker.py")
SECONDS = 10
"""In which a process must be gone once its work has ended, on a busy machine."""


def ended(how, directory):
    """Exit code, lines and errors of a process, and how long it took from its last word to its end."""
    command = [sys.executable, str(WORKER), how, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stdout:
                lines.append(line.strip())
                last = time.monotonic()
            errors = process.stderr.read()
            code = process.wait(SECONDS)
        finally:
            process.kill()
    assert lines, errors
    return code, lines, errors, time.monotonic() - last


def is_whole(directory):
    """What was stored before is read by the next process, and nothing is half there."""
    store = LocalStore(directory, OBJECT, 64 * 4096)
    counts = store.stats()
    assert counts["pending"] == 0
    assert counts["objects"] + counts["free"] == 64
    cache, tier, _ = attached(store)
    for tokens in ABCD, EFGH:
        emptied(cache)
        assert prefetched(tier, cache, tokens) == 8
    tier.detach()
    emptied(cache)


@pytest.mark.parametrize(
    ("how", "code", "last_words"),
    [
        ("leave", 3, ""),
        ("fail", 1, "LookupError: the engine failed with 2 things in flight"),
        ("interrupted", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_a_process_ends_at_once_whatever_is_in_flight(tmp_path, how, code, last_words):
    """Also with a store that never answers. Of errors there are those of the process itself."""
    ends, lines, errors, seconds = ended(how, tmp_path)
    assert (ends, lines) == (code, ["in flight"]), errors
    assert seconds < SECONDS
    assert errors.count("Traceback") == bool(last_words), errors
    assert "Fatal" not in errors
    if last_words:
        assert errors.strip().splitlines()[-1] == last_words
    is_whole(tmp_path)


def test_a_forked_child_gets_clear_errors_and_its_parent_goes_on(tmp_path):
    code, lines, errors, _ = ended("fork", tmp_path)
    touched = [f"{name} True" for name in ("match", "tick", "drain", "prefetch", "counters", "guard")]
    assert lines == [*touched, "closed True", "child 0", "parent is sound"], errors
    assert code == 0
    is_whole(tmp_path)
