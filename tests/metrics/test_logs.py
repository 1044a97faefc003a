"""Structured logs: one JSON line per event, with the id of the request, and never a token or a secret."""

import json
import logging
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support import new_cache, serve, settle, tiny

from purecache.adapters.prefetches import Prefetches
from purecache.adapters.slot_cache import Owner
from purecache.logs import NAME, log
from purecache.metrics import TroubleLog
from purecache.storage import EndPolicy, StorageOptions
from purecache.transitions import TransferKind

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from tiers import DEADLINE, RECORD, LastingStore, attached, emptied, stored

pytestmark = pytest.mark.filterwarnings("ignore:a page is 2 tokens")
SALT, TOKENS = "salt-of-tenant-seven", [7654321, 7654321, 7654322, 7654322, 7654323, 7654323]
SPACE = (("salt", SALT), ("adapter", "a"))


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, NAME)
    return lambda: [json.loads(record.getMessage()) for record in caplog.records if record.name == NAME]


def test_a_line_is_json_and_has_numbers_and_words_only(lines):
    log("loaded", "req-1", tokens=512, seconds=0.25, whole=True, reason="no_room")
    log("odd", 'quotes " and\nlines', secret="Jhsecret+key/value", salt=SALT)
    log("long", "x" * 1000)
    log("broken", "r", tokens=object())  # type: ignore[arg-type]
    first, second, third, fourth = lines()
    assert first == {
        "event": "loaded",
        "request": "req-1",
        "tokens": 512,
        "seconds": 0.25,
        "whole": True,
        "reason": "no_room",
    }
    assert second == {"event": "odd", "request": 'quotes " and\nlines'}
    assert len(third["request"]) == 128
    assert fourth == {"event": "not_json"}


def test_nothing_is_made_of_an_event_that_nobody_wants(caplog):
    caplog.set_level(logging.WARNING, NAME)
    log("loaded", "req-1", tokens=1)
    assert not caplog.records


def test_requests_that_prefetch_are_told_by_id_and_nothing_of_their_prompts(lines, caplog):
    caplog.set_level(logging.DEBUG)
    store = LastingStore()
    cache, tier, _ = attached(store)
    tier.warm(8)  # before anything waits for it
    stored(cache, tier, TOKENS, namespace=SPACE)
    emptied(cache)
    tier.detach()
    prefetches = Prefetches(cache)
    prefetches.attach(store, RECORD, StorageOptions(threshold=2, staging_pages=8, policy=EndPolicy.WAIT_COMPLETE))
    owner = Owner(SPACE, 0, 0)
    prefetches.start("req-1", np.array(TOKENS, "int32"), owner)
    prefetches.start("req-2", np.array(TOKENS[:1], "int32"), owner)
    end = time.monotonic() + DEADLINE
    while not prefetches.done("req-1"):
        cache.tick()
        assert time.monotonic() < end
    prefetches.detach()
    assert lines() == [
        {"event": "prefetch_started", "request": "req-1", "prompt_tokens": 6},
        {"event": "prefetch_refused", "request": "req-2", "reason": "below_threshold"},
        {"event": "prefetch_ended", "request": "req-1", "tokens": 6},
    ]
    assert SALT not in caplog.text
    assert not any(str(token) in caplog.text for token in TOKENS)


def test_trouble_is_told_once_per_period(lines):
    now = [0.0]
    cache, gate = new_cache(tiny(), check_laws=False)
    cache.observe(TroubleLog(period=1.0, clock=lambda: now[0]))
    cache.tick()
    gate.fails = lambda kind, number: [kind is TransferKind.BACKUP] * number
    for begin in (1, 3):
        serve(cache, [begin, begin, begin + 1, begin + 1])
        settle(cache)
        cache.tick()
    assert lines() == []
    now[0] = 1.0
    cache.tick()
    cache.tick()
    now[0] = 2.0
    cache.tick()
    assert lines() == [{"event": "trouble", "backup_failed_pages": 4}]


def test_a_store_that_is_left_alone_is_told(lines):
    class Broken(LastingStore):
        def exists(self, keys, deadline):
            raise OSError("the cable is out")

    cache, tier, _ = attached(Broken())
    cache.observe(TroubleLog(period=0.0))
    cache.tick()
    for number in range(5):
        tier.prefetch([number] * 4)
        assert tier.guard.wait(DEADLINE)
        cache.tick()
    assert [line["event"] for line in lines()] == ["storage_left_alone"]
    tier.detach()
