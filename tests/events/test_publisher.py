"""KV events over real sockets: a subscriber in another process, replays, a publisher that nobody keeps waiting."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from resident import resident
from support import new_cache, tiny

from purecache import CacheConfig
from purecache.events import KvEvents, Subscriber, block_hashes
from purecache.events.publisher import END
from purecache.events.wire import decode

HERE = Path(__file__).parent
FREE = "tcp://127.0.0.1:*"


class Follower:
    """The process of `follower.py`."""

    def __init__(self, events):
        path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "follower.py"), events.address, events.replay_address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert json.loads(self.process.stdout.readline()) == "ready"

    def say(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        answer["blocks"] = {(rank, medium): dict(blocks) for rank, medium, blocks in answer["blocks"]}
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)


class Server:
    """A cache that tells its events, and what is said of it."""

    def __init__(self, **options):
        self.cache, _ = new_cache(tiny(), check_laws=False, plane=False)
        options = {"endpoint": FREE, "replay_endpoint": FREE, "share": 1.0} | options
        self.events = KvEvents(self.cache.config, **options)
        self.cache.observe(self.events)

    def serve(self, *pages, rank=0):
        tokens = [page for page in pages for _ in range(2)]
        match, receipt = self.cache.admit(tokens, rank=rank)
        new = self.cache.allocate(len(pages) - len(match.device_pages), rank=rank)
        self.cache.finish(tokens, np.concatenate([match.device_pages, new]), receipt, rank=rank)
        self.cache.tick()
        assert self.events.flush(self.cache)

    def sent(self):
        return self.events.counters()["batches"]


@pytest.fixture
def server():
    made = []

    def make(**options):
        made.append(Server(**options))
        return made[-1]

    yield make
    for each in made:
        assert each.events.close()


@pytest.fixture
def follower():
    made = []

    def make(server):
        made.append(Follower(server.events))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_process_that_comes_late_and_misses_some_knows_exactly_what_is_there(server, follower):
    """It comes when events were sent already, goes off line in between, and asks for both gaps."""
    one = server()
    one.serve(1, 2, 3)
    one.serve(1, 2, 4, rank=1)
    router = follower(one)
    router.say("ask")
    one.serve(1, 5)
    known = router.say(f"until {one.sent()}")
    assert known["blocks"] == resident(one.cache, [None])
    router.say("deaf")
    one.serve(6, 7, 8, 9, 10)
    one.cache.reset()
    one.serve(1, 2)
    one.cache.evict(1)
    missed = one.sent()
    router.say("hear")
    for number in range(100):  # until the connection is there
        one.serve(20 + number % 2)
        known = router.say(f"until {missed if number < 99 else one.sent()}")
        if known["next"] >= one.sent():
            break
    assert known["blocks"] == resident(one.cache, [None])
    assert known["counts"]["gaps"] >= 1
    assert known["counts"]["lost"] == known["counts"]["bad"] == known["counts"]["restarts"] == 0


def test_what_is_too_old_for_a_replay_comes_as_a_whole(server, follower):
    one = server(history=2)
    for number in range(6):
        one.serve(1, number, rank=number % 2)
    router = follower(one)
    known = router.say("ask")
    assert known["blocks"] == resident(one.cache, [None])
    assert known["next"] == one.sent() > 6
    assert one.events.counters()["snapshots"] == 1


def test_the_frames_on_the_wire(server):
    """Topic, number, payload; a replay by a REQ socket, whose end is the number -1 with nothing."""
    one = server(topic="kv", first_rank=4)
    context = zmq.Context.instance()
    heard, ask = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    heard.setsockopt(zmq.SUBSCRIBE, b"kv")
    heard.connect(one.events.address)
    ask.connect(one.events.replay_address)
    time.sleep(0.2)
    one.serve(1, 2, rank=1)
    assert heard.poll(5000)
    frames = heard.recv_multipart()
    while heard.poll(200):
        frames = heard.recv_multipart()
    assert (frames[0], frames[1]) == (b"kv", (one.sent() - 1).to_bytes(8, "big"))
    ts, events, rank = msgspec.msgpack.decode(frames[2])
    assert abs(ts - time.time()) < 600
    assert rank == 5
    assert events[-1]["type"] == "BlockStored"
    assert events[-1]["block_hashes"] == block_hashes([1, 1, 2, 2], 2)
    ask.send_multipart([b"", (1).to_bytes(8, "big")])
    answers = []
    while not answers or answers[-1][1] != END:
        assert ask.poll(5000)
        answers.append(ask.recv_multipart())
    assert [int.from_bytes(each[1], "big") for each in answers[:-1]] == list(range(1, one.sent()))
    assert answers[-1] == [b"", END, b""]
    assert all(decode(each[2]).events for each in answers[:-1])
    ask.send_multipart([b"", b"nonsense of another length"])  # not answered, and nothing breaks
    assert not ask.poll(200)
    ask.close()
    heard.close()


def test_a_publisher_that_can_not_follow_keeps_nobody_waiting_and_loses_nothing(server):
    """Its thread is held up: looks are deferred, and later all of it is told in one go."""
    one = server()
    held, apply = [], one.events._table.apply

    def slow(changes):
        while held:
            time.sleep(0.001)
        return apply(changes)

    one.events.flush(one.cache)
    one.events._table.apply = slow
    held.append(True)
    follower = Subscriber(one.events.address, one.events.replay_address)
    for number in range(12):
        one.cache.insert([number] * 2, one.cache.allocate(1))
        one.cache.tick()
    assert one.events.counters()["deferred"] > 0
    held.clear()
    assert one.events.flush(one.cache)
    follower.catch_up()
    assert follower.fold.blocks("GPU") == {
        name: follower.fold.blocks("GPU")[name] for name in resident(one.cache, [None])[0, "GPU"]
    }
    follower.close()


def test_after_an_error_everything_is_told_anew(server, caplog):
    one = server()
    one.serve(1, 2)
    apply, fails = one.events._table.apply, [True]

    def broken(changes):
        if fails.pop() if fails else False:
            raise RuntimeError("broken")
        return apply(changes)

    one.events._table.apply = broken
    one.cache.insert([3, 3], one.cache.allocate(1))
    one.events.flush(one.cache)
    assert one.events.counters()["failed"] == 1
    assert "told anew" in caplog.text
    one.cache.tick()
    assert one.events.flush(one.cache)
    follower = Subscriber(one.events.address, one.events.replay_address)
    follower.catch_up()
    assert set(follower.fold.blocks("GPU")) == set(resident(one.cache, [None])[0, "GPU"])
    follower.close()


def test_looks_keep_to_their_share_of_the_time():
    """A look that takes 1 of 100 s by this clock is followed by the next one 100 s later."""
    now = [0.0]

    def clock():
        now[0] += 0.5
        return now[0]

    cache, _ = new_cache(tiny(), check_laws=False, plane=False)
    events = KvEvents(cache.config, FREE, share=0.01, clock=clock)
    cache.observe(events)
    looks = []
    for number in range(250):
        cache.match([number, number])
        cache.tick()
        looks.append(events.counters()["looks"])
    assert looks[0] == 1
    assert looks[-1] == 3
    assert events.close()


def test_a_restarted_publisher_is_noticed(server):
    one = server()
    follower = Subscriber(one.events.address, one.events.replay_address)
    for number in range(3):
        one.serve(number)
    follower.catch_up()
    assert follower._expected == one.sent()
    follower._live = one.sent() - 1
    follower._arrived(0, b"not msgpack")
    assert follower.counts["restarts"] == follower.counts["bad"] == 1
    assert follower.fold.places == []
    follower.close()


def test_mistakes():
    config = CacheConfig(page_size=2, device_pages=4)
    with pytest.raises(ValueError, match="share"):
        KvEvents(config, FREE, share=0)
    with pytest.raises(zmq.ZMQError):
        KvEvents(config, "tcp://nowhere")
