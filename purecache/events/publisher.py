"""Publishes the KV events of a cache over ZeroMQ, from a thread of its own."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

try:
    import zmq
except ImportError as error:
    raise ImportError("KV events need msgspec and pyzmq: pip install purecache[events]") from error

from purecache.cache import PrefixCache
from purecache.events.changes import DEVICE, HOST, STORAGE, Changes, Watch
from purecache.events.labels import Label, label_of
from purecache.events.table import BlockTable, Group, Told
from purecache.events.wire import Batch, Form, encode
from purecache.namespaces import Namespace
from purecache.state import CacheConfig

_LOG = logging.getLogger(__name__)
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number behind the last batch of a replay."""
_WAITING = 4
"""Changes that may wait for the thread. While there are more, the cache is not looked at: what happens meanwhile is
told in one go, since events are the difference of two states."""
_PATIENCE = 0.05
"""Seconds after which the thread looks for replay requests where there are no events."""


class KvEvents:
    """An observer that tells routers which blocks of a cache are where: `cache.observe(KvEvents(cache.config))`.

    The scheduler's thread compares the nodes with what they were, and nothing else; a thread names, encodes and sends.
    What it can't follow is joined, not dropped. Of several processes with one cache, only one should publish.
    """

    def __init__(
        self,
        config: CacheConfig,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        media: tuple[str | None, str | None, str | None] = ("GPU", "CPU_PINNED", None),
        form: Form = "maps",
        history: int = 10_000,
        first_rank: int = 0,
        share: float = 0.01,
        label: Callable[[Namespace], Label] = label_of,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Bind the endpoints (port `*`: any free one, see `address`) and begin.

        media: what device, host and storage are called; None: not told. form: "maps" as sglang 0.5.23 and vLLM now,
        "arrays" as vLLM before. history: batches that can be asked for again. first_rank: data-parallel rank of rank 0
        of this cache. share: most of the scheduler's time that looking for changes takes on average: after a look of
        t seconds the next one is t / share later. Raises ValueError for these, zmq.ZMQError for endpoints.
        """
        if not 0 < share <= 1 or history < 1:
            raise ValueError(f"need 0 < share <= 1 and history >= 1, not {share} and {history}")
        names = {bit: name for bit, name in zip((DEVICE, HOST, STORAGE), media, strict=True) if name is not None}
        self._watch = Watch(config, storage=STORAGE in names)
        self._table = BlockTable(config, names, label)
        self._form: Form = form
        self._topic, self._first_rank = topic.encode(), first_rank
        self._share, self._clock, self._next = share, clock, float("-inf")
        self._waiting: queue.SimpleQueue[Changes | None] = queue.SimpleQueue()
        self._history: deque[tuple[int, bytes]] = deque(maxlen=history)
        self._sequence = self._given = self._taken = 0
        self._begin_anew = threading.Event()
        self._counts = dict.fromkeys(("batches", "events", "looks", "deferred", "replays", "snapshots", "failed"), 0)
        context = zmq.Context.instance()
        self._publish, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.address, self.replay_address = "", ""
        """The endpoints as they were bound; "" without one."""
        try:
            self._publish.set_hwm(100_000)  # per subscriber: beyond that, it misses batches and can ask for them
            self._replay.set_hwm(0)  # a replay is never cut short
            self._publish.bind(endpoint)
            self.address = self._publish.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
            if replay_endpoint is not None:
                self._replay.bind(replay_endpoint)
                self.replay_address = self._replay.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
        except zmq.ZMQError:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._serve, name="purecache KV events", daemon=True)
        self._thread.start()

    # ---- on the thread of the cache ------------------------------------------------------------------------------

    def ticked(self, cache: PrefixCache) -> None:
        """Look for changes, unless the share of time is used up or the thread is behind. Never blocks."""
        now = self._clock()
        if now < self._next or (self._watch.is_idle(cache) and not self._begin_anew.is_set()):
            return
        if self._given - self._taken >= _WAITING:
            self._counts["deferred"] += 1
            return
        self._look(cache)
        self._next = now + (self._clock() - now) / self._share

    def _look(self, cache: PrefixCache) -> None:
        if self._begin_anew.is_set():
            self._begin_anew.clear()
            self._watch.forget()
        changes = self._watch.take(cache)
        self._counts["looks"] += 1
        if changes is not None:
            self._given += 1
            self._waiting.put(changes)

    def flush(self, cache: PrefixCache, seconds: float = 5.0) -> bool:
        """Tell all that has happened until now, and wait until it is sent; whether it was. For shutdown and tests."""
        self._look(cache)
        done = time.monotonic() + seconds
        while self._taken != self._given:
            if time.monotonic() > done:
                return False
            time.sleep(0.001)
        return True

    def counters(self) -> dict[str, int]:
        """Totals: batches and events sent, looks at the cache, looks deferred because the thread was behind, replays
        and those of them that were a snapshot, failed: rounds that failed (everything is told anew then); blocks that
        are told to be there, and nodes left out because the name of their namespace was forgotten (`unnamed`)."""
        return self._counts | {"blocks": self._table.blocks, "unnamed": self._table.unnamed}

    def close(self, seconds: float = 5.0) -> bool:
        """Send what was found and close the sockets; whether the thread ended in time."""
        self._waiting.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- on the publisher's thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                try:
                    changes = self._waiting.get(timeout=_PATIENCE)
                    if changes is None:
                        return
                    self._take(changes)
                except queue.Empty:
                    pass
                self._answer_all()
        finally:
            self._close_sockets()

    def _take(self, changes: Changes) -> None:
        try:
            self._tell(self._table.apply(changes))
        except Exception:
            _LOG.exception("KV events failed; everything is told anew")
            self._counts["failed"] += 1
            self._begin_anew.set()
        self._taken += 1

    def _answer_all(self) -> None:
        try:
            while self.replay_address and self._replay.poll(0):
                self._answer(self._replay.recv_multipart())
        except Exception:
            _LOG.exception("a replay of KV events failed")

    def _payloads(self, told: Told) -> list[bytes]:
        now = time.time()
        return [encode(Batch(now, events, self._rank(group)), self._form) for group, events in told]

    def _rank(self, group: Group) -> int | None:
        return None if group is None else group + self._first_rank

    def _tell(self, told: Told) -> None:
        for payload in self._payloads(told):
            number, self._sequence = self._sequence, self._sequence + 1
            self._history.append((number, payload))
            self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._counts["batches"] += len(told)
        self._counts["events"] += sum(len(events) for _, events in told)

    def _answer(self, request: list[bytes]) -> None:
        """A replay: all batches from a number on. What is too old for that is replaced by all that there is now, in
        batches that bear the number of the last one that was sent."""
        if len(request) != 3 or len(request[2]) != 8:
            return
        name, start = request[0], int.from_bytes(request[2], "big")
        self._counts["replays"] += 1
        if self._history and start < self._history[0][0]:
            self._counts["snapshots"] += 1
            answer = [(self._sequence - 1, payload) for payload in self._payloads(self._table.snapshot())]
        else:
            answer = [each for each in self._history if each[0] >= start]
        for number, payload in answer:
            self._replay.send_multipart((name, b"", number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((name, b"", END, b""))

    def _close_sockets(self) -> None:
        self._publish.close(linger=1000)
        self._replay.close(linger=1000)
