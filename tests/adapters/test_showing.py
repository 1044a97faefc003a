"""What a server shows of its cache: metrics, KV events and an operator's commands reach another thread."""

import logging
import socket
import threading
import urllib.request
from contextlib import ExitStack

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
def begun(slots, caplog):
    """Starts what a `Showing` asks for, returns where it answers, and ends it."""
    caplog.set_level(logging.INFO)
    with ExitStack() as all_of_it:

        def begin(show):
            all_of_it.enter_context(show.begin(slots, model_name="m"))
            return [record.getMessage().split(" on ")[1] for record in caplog.records if " on " in record.getMessage()]

        yield begin


def insert(slots):
    prompt = np.arange(4, dtype=np.int32)
    slots.insert(prompt, prompt + 1, Owner(None, 0))
    slots.cache.tick()


def began(show, slots):
    """What was started, besides the cache."""
    before = set(threading.enumerate())
    with show.begin(slots):
        return [thread.name for thread in threading.enumerate() if thread not in before]


def test_nothing_is_shown_unasked(slots):
    assert not Showing().wanted
    assert began(Showing(), slots) == []


def test_metrics_are_served(slots, begun):
    (url,) = begun(Showing(metrics=0))
    insert(slots)
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert 'purecache:inserted_tokens_total{model_name="m"} 4.0' in text


def test_events_are_published(slots, begun):
    (address,) = begun(Showing(events="tcp://127.0.0.1:*"))
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    reader.connect(address)
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
    (url,) = begun(Showing(admin=0))
    insert(slots)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(AdminClient(url, "a" * 32).get("/v1/stats")))
    asking.start()
    while asking.is_alive():
        slots.cache.tick()
        asking.join(0.01)
    assert answers[0]["counters"]["inserted_pages"] == 4


def test_of_several_processes_only_the_first_shows_anything(slots, monkeypatch):
    monkeypatch.setattr(showing.jax, "process_index", lambda: 1)
    assert began(Showing(metrics=0), slots) == []


def test_where_one_cannot_listen_the_others_are_ended(slots):
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(zmq.ZMQError):
        began(Showing(metrics=0, events=f"tcp://127.0.0.1:{taken.getsockname()[1]}"), slots)
    for thread in threading.enumerate():
        if "serve_forever" in thread.name:
            thread.join(10)
            assert not thread.is_alive()
