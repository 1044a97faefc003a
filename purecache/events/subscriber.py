"""A subscriber to KV events that never misses one: it asks for a replay where the numbers have a gap."""

import zmq

from purecache.events.fold import Fold
from purecache.events.publisher import END
from purecache.events.wire import decode

_REPLAY = 10_000
"""Milliseconds to wait for the next batch of a replay."""


class Subscriber:
    """Keeps a `fold` of one publisher up to date. For one thread. Works with vLLM's and sglang's publishers, too."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "") -> None:
        """Connect to the endpoints of a publisher. Without that for replays, what is missed stays missed."""
        self.fold = Fold()
        self.counts = dict.fromkeys(("batches", "gaps", "replayed", "lost", "restarts", "bad"), 0)
        """Batches applied, gaps found, batches that came by a replay, batches lost for good, restarts of the
        publisher that were noticed, and batches that could not be read."""
        self._expected = 0
        self._live = -1
        """Number of the last batch that came by itself: these only grow, but for a restart."""
        context = zmq.Context.instance()
        self._sub, self._ask = context.socket(zmq.SUB), None
        self._sub.set_hwm(0)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._sub.connect(endpoint)
        if replay_endpoint is not None:
            self._ask = context.socket(zmq.DEALER)
            self._ask.set_hwm(0)
            self._ask.connect(replay_endpoint)

    def receive(self, seconds: float) -> int:
        """Wait up to `seconds` for a batch, and take in all that has come; returns how many were applied."""
        before, wait = self.counts["batches"], int(seconds * 1000)
        while self._sub.poll(wait):
            frames = self._sub.recv_multipart()
            wait = 0
            if len(frames) == 3 and len(frames[1]) == 8:
                self._arrived(int.from_bytes(frames[1], "big"), frames[2])
        return self.counts["batches"] - before

    def catch_up(self) -> None:
        """Ask for what was sent before this subscriber was connected, without waiting for the next batch."""
        self._replay(self._expected)

    def close(self) -> None:
        """Close the sockets."""
        for socket in (self._sub, self._ask):
            if socket is not None:
                socket.close(linger=0)

    def _arrived(self, number: int, payload: bytes) -> None:
        if number <= self._live:
            self.counts["restarts"] += 1
            self.fold.clear()
            self._expected = 0
        self._live = number
        if number > self._expected:
            self.counts["gaps"] += 1
            self._replay(self._expected)
            if number > self._expected:
                self.counts["lost"] += number - self._expected
        if number >= self._expected:
            self._apply(number, payload)

    def _replay(self, start: int) -> None:
        if self._ask is None:
            return
        self._ask.send_multipart((b"", start.to_bytes(8, "big")))
        while self._ask.poll(_REPLAY):
            frames = self._ask.recv_multipart()
            if frames[-2] == END:
                return
            self._apply(int.from_bytes(frames[-2], "big"), frames[-1])
            self.counts["replayed"] += 1

    def _apply(self, number: int, payload: bytes) -> None:
        try:
            self.fold.apply(decode(payload))
            self.counts["batches"] += 1
        except ValueError:
            self.counts["bad"] += 1
        self._expected = number + 1
