"""What a server shows of its cache: metrics, KV events and an operator's commands reach another thread."""

import threading
import urllib.request

import numpy as np
import pytest
import zmq
from test_nodes import Allocator

from purecache.adapters import showing
from purecache.adapters.showing import Showing
from purecache.adapters.slot_cache import Owner, SlotCache
from purecache.admin.client import AdminClient
from purecache.cache import PrefixCache
from purecache.state import CacheConfig


@pytest.fixture
def slots():
    return SlotCache(PrefixCache(CacheConfig(page_size=1, device_pages=64, ranks=2, external_pages=True)), Allocator())


@pytest.fixture
def begun(slots):
    """Starts what a `Showing` asks for, and ends it."""
    closers = []

    def begin(show):
        closers.extend(show.begin(slots, model_name="m"))
        return closers

    yield begin
    for each in closers:
        each.close()


def insert(slots):
    prompt = np.arange(4, dtype=np.int32)
    slots.insert(prompt, prompt + 1, Owner(None, 0))
    slots.cache.tick()


def test_nothing_is_shown_unasked(slots):
    assert not Showing().wanted
    assert Showing().begin(slots) == []


def test_metrics_are_served(slots, begun):
    (server,) = begun(Showing(metrics=0))
    insert(slots)
    text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
    assert 'purecache:inserted_tokens_total{model_name="m"} 4.0' in text


def test_events_are_published(slots, begun):
    (events,) = begun(Showing(events="tcp://127.0.0.1:*"))
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    reader.connect(events.address)
    try:
        for _ in range(100):  # a subscriber hears what is published after it has joined
            insert(slots)
            if reader.poll(100):
                break
            slots.cache.reset()
        assert len(reader.recv_multipart()) == 3
    finally:
        reader.close(0)


def test_an_operator_is_answered(slots, begun, monkeypatch):
    monkeypatch.setenv("PURECACHE_ADMIN_TOKEN", "a" * 32)
    server, _ = begun(Showing(admin=0))
    insert(slots)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(AdminClient(server.url, server.token).get("/v1/stats")))
    asking.start()
    while asking.is_alive():
        slots.cache.tick()
        asking.join(0.01)
    assert answers[0]["counters"]["inserted_pages"] == 4


def test_of_several_processes_only_the_first_shows_anything(slots, monkeypatch):
    monkeypatch.setattr(showing.jax, "process_index", lambda: 1)
    assert Showing(metrics=0).begin(slots) == []
