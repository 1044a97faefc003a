"""RedisStore over a real server: all answers, a server that hangs, dies, or is full, and secrets."""

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from calls import FAILED, HIT, MISSING, NO, UNKNOWN, YES, Objects, soon
from redis_server import RedisServer, free_port

pytest.importorskip("redis", reason="needs the package redis: pip install 'redis[hiredis]>=8'")
pytest.importorskip("hiredis", reason="needs the package hiredis: pip install 'redis[hiredis]>=8'")

from purecache.stores.engines import redis
from purecache.stores.engines.redis import RedisStore
from purecache.stores.interface import Fetch, Presence
from purecache.stores.registry import open_store
from purecache.testing.stores import check_store

SIZE = 4096
SLACK = 0.5
"""Seconds a call may take beyond its deadline on a busy machine."""
SECRET = "open-sesame"
OBJECTS = Objects(SIZE)
page, put, get = OBJECTS.content, OBJECTS.put, OBJECTS.get


def exists(store: RedisStore, *keys: str) -> list[Presence]:
    return store.exists(keys, soon())


def connections(store: RedisStore) -> tuple[int, int]:
    """How many there are idle, and in use."""
    (idle, _), (used, _) = store._pool.get_connection_count()
    return idle, used


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.kill()


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    """Empty, and running."""
    shared.cli("FLUSHALL")
    return shared


@pytest.fixture
def own() -> Iterator[RedisServer]:
    """One that the test may kill."""
    server = RedisServer()
    yield server
    server.kill()


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore("127.0.0.1", server.port)
    yield store
    store.close()


def test_the_contract(server: RedisServer):
    numbers = itertools.count()
    check_store(lambda: open_store(f"redis://127.0.0.1:{server.port}?prefix=kit{next(numbers)}&db=1", SIZE))
    assert next(numbers) > 10
    assert server.cli("DBSIZE") == "0"  # of database 0


def test_holes_and_many_rounds(store: RedisStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis, "_ROUND_BYTES", 5 * SIZE)
    monkeypatch.setattr(redis, "_ROUND_KEYS", 7)
    keys = [f"k{i}" for i in range(50)]
    for size, lengths in (SIZE, [5, 5, 2]), (16, [7, 5]), (6 * SIZE, [1] * 12):
        assert [len(some) for some in redis._rounds([size] * 12)] == lengths
    assert put(store, *keys[1::2]) == [True] * 25
    assert exists(store, *keys) == [NO, YES] * 25
    assert get(store, *keys) == [MISSING, HIT] * 25
    assert store.delete(keys[:10], soon()) == [True] * 10
    assert exists(store, *keys[8:12]) == [NO, NO, NO, YES]


def test_objects_larger_than_a_round_or_a_socket_buffer(store: RedisStore):
    size = 9 << 20
    assert put(store, "a", "b", size=size) == [True, True]
    assert get(store, "a", "none", "b", size=size) == [HIT, MISSING, HIT]


def test_other_lengths_and_other_types_fail_alone(server: RedisServer, store: RedisStore):
    for name, size in ("short", SIZE - 1), ("long", SIZE + 1), ("huge", 300_000):
        server.cli("SET", f"purecache:{name}", data=b"x" * size)
    server.cli("SET", "purecache:empty", "")
    server.cli("LPUSH", "purecache:list", "x")
    put(store, "a", "b")
    keys = ["a", "short", "list", "none", "huge", "empty", "long", "b"]
    assert get(store, *keys) == [HIT, FAILED, FAILED, MISSING, FAILED, FAILED, FAILED, HIT]
    assert exists(store, "list", "none") == [YES, NO]
    assert put(store, "list") == [True]
    assert get(store, "list") == [HIT]


@pytest.mark.parametrize("prefix", ["pages", "p*[a]?\\", "ü"])
def test_clear_and_stats_see_only_ours(server: RedisServer, prefix: str):
    store, deeper = (RedisStore("127.0.0.1", server.port, prefix=each) for each in (prefix, f"{prefix}:deeper"))
    theirs = ["p", "pages", "pagesa", "pxaya:k", "pages-x:k", f"{prefix}:not a key", f"{prefix}:"]
    for name in theirs:
        server.cli("SET", name, "theirs")
    assert put(store, "a", "b") + put(deeper, "c") == [True] * 3
    assert store.stats()["objects"] == 2
    store.clear()
    assert (store.stats()["objects"], deeper.stats()["objects"]) == (0, 1)
    assert sorted(server.cli("KEYS", "*").split("\n")) == sorted([*theirs, f"{prefix}:deeper:c"])
    store.close()
    deeper.close()


def test_clear_and_stats_of_many(store: RedisStore, monkeypatch: pytest.MonkeyPatch):
    keys = [f"k{i}" for i in range(3000)]  # several pieces of a walk
    assert all(store.put(keys, [page("x", 16)] * 3000, soon()))
    assert store.stats()["objects"] == 3000
    monkeypatch.setattr(redis, "COUNTED", 50)
    assert store.stats()["objects"] == 50
    store.clear()
    assert store.stats()["objects"] == 0


def check_failures_in_time(store: RedisStore, seconds: float, number: int = 40) -> None:
    """Only failures, by the deadline."""
    keys, buffers = [f"k{i}" for i in range(number)], [page("x") for _ in range(number)]
    for call, failed in (
        (lambda until: store.exists(keys, until), UNKNOWN),
        (lambda until: store.get(keys, buffers, until), FAILED),
        (lambda until: store.put(keys, buffers, until), False),
        (lambda until: store.delete(keys, until), False),
    ):
        before = time.monotonic()
        assert call(before + seconds) == [failed] * number
        assert time.monotonic() - before < seconds + SLACK
        assert call(before) == [failed] * number


def test_a_server_that_hangs_and_goes_on(server: RedisServer, store: RedisStore):
    put(store, "a", "b")
    buffer = memoryview(bytearray(SIZE))
    try:
        server.stop()
        check_failures_in_time(store, 0.3)
        assert store.get(["a"], [buffer], soon(0.1)) == [FAILED]
        large = [page("x", 8 << 20)] * 8  # more than the sockets take
        before = time.monotonic()
        assert store.put([f"large{i}" for i in range(8)], large, before + 0.3) == [False] * 8
        assert time.monotonic() - before < 0.3 + SLACK
        # A call that begins now waits. Answers to those that were given up must not be taken for its own.
        answers: list[list[Fetch]] = []
        call = threading.Thread(target=lambda: answers.append(get(store, "b", "none", "a")), daemon=True)
        call.start()
        while not connections(store)[1] and time.monotonic() < before + 10:
            time.sleep(0.001)
    finally:
        server.go_on()
    call.join(10)
    assert answers == [[HIT, MISSING, HIT]]
    assert buffer == bytes(SIZE)


def test_a_server_that_is_killed_and_comes_back(own: RedisServer):
    store = RedisStore("127.0.0.1", own.port)
    put(store, "a")
    own.kill()
    before = time.monotonic()
    check_failures_in_time(store, 10.0)
    assert time.monotonic() - before < 1  # refused: nothing is tried again and again until the deadline
    assert store.stats()["objects"] == -1
    store.clear()
    own.start()
    assert exists(store, "a") == [NO]
    assert (put(store, "a", "b"), get(store, "b", "c", "a")) == ([True, True], [HIT, MISSING, HIT])
    store.close()


def test_a_server_that_is_restarted_between_calls(own: RedisServer):
    """The connection that is kept is dead, which costs no call."""
    store = RedisStore("127.0.0.1", own.port)
    put(store, "a")
    own.kill()
    own.start()
    assert put(store, "a") == [True]
    assert get(store, "a") == [HIT]
    store.close()


@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_running_call_ends_with_server_or_store(own: RedisServer, end: str):
    store = RedisStore("127.0.0.1", own.port)
    own.stop()
    answers: list[list[Presence]] = []
    call = threading.Thread(target=lambda: answers.append(exists(store, "a", "b")))
    call.start()
    until = soon()
    while not connections(store)[1] and time.monotonic() < until:
        time.sleep(0.001)
    (own.kill if end == "kill" else store.close)()
    call.join(5)
    assert answers == [[UNKNOWN, UNKNOWN]]
    store.close()


def used_memory(server: RedisServer) -> int:
    lines = server.cli("INFO", "memory").split()
    return int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])


def test_a_full_server_that_evicts_nothing(own: RedisServer):
    store, keys, size = RedisStore("127.0.0.1", own.port), [f"k{i}" for i in range(40)], 65_000
    put(store, "x")
    own.cli("CONFIG", "SET", "maxmemory-policy", "noeviction")
    own.cli("CONFIG", "SET", "maxmemory", str(used_memory(own) + (1 << 20)))
    answers = put(store, *keys, size=size)
    assert 4 < answers.count(True) < 20
    assert get(store, *keys, size=size) == [HIT if answer else MISSING for answer in answers]
    assert not any(put(store, *(key for key, answer in zip(keys, answers, strict=True) if not answer), size=size))
    assert store.delete(keys, soon()) == [True] * 40
    assert put(store, "k39", size=size) == [True]
    store.close()


def test_a_full_server_that_evicts(own: RedisServer):
    """The kit's check of a bound is too strict: Redis picks the oldest out of a few, to the second."""
    store, size, capacity = RedisStore("127.0.0.1", own.port), 65_000, (8 << 20)
    own.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    own.cli("CONFIG", "SET", "maxmemory", str(capacity))
    for first in range(0, 512, 16):
        keys = [f"k{i}" for i in range(first, first + 16)]
        assert put(store, *keys, size=size) == [True] * 16
        assert FAILED not in get(store, *keys, *(f"k{i}" for i in range(0, first, 16)), size=size)
    numbers = store.stats()
    assert numbers["server_capacity"] == capacity
    assert numbers["server_bytes"] < capacity + 2 * size
    assert numbers["server_evictions"] > 300
    assert 32 < numbers["objects"] < 512 - 300
    store.close()


def test_many_threads(server: RedisServer, store: RedisStore):
    barrier, wrong = threading.Barrier(12), []

    def work(number: int) -> None:
        mine, common = [f"own{number}-{i}" for i in range(5)], [f"common{i}" for i in range(5)]
        barrier.wait()
        for _ in range(5):
            wrong.extend(each for each in put(store, *mine, *common) if each is not True)
            wrong.extend(each for each in get(store, *common, *mine) if each is not HIT)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    idle, used = connections(store)
    assert 1 <= idle <= 12
    assert used == 0
    assert store.stats()["objects"] == 12 * 5 + 5


# --- Secrets and options ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[RedisServer]:
    server = RedisServer(password=SECRET)
    server.cli("ACL", "SETUSER", "pages", "on", f">{SECRET}2", "~*", "+@all")
    yield server
    server.kill()


def test_passwords(locked: RedisServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGES_PASSWORD", SECRET)
    url = f"redis://127.0.0.1:{locked.port}"
    for query, options in (
        ("", {"password": SECRET}),
        ("?password_env=PAGES_PASSWORD&db=3", {}),
        ("?username=pages", {"password": f"{SECRET}2"}),
    ):
        store = open_store(url + query, SIZE, **options)
        assert put(store, "a") == [True]
        assert get(store, "a", "b") == [HIT, MISSING]
        store.close()


def test_wrong_passwords_are_refused_and_not_told(locked: RedisServer, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    url = f"redis://127.0.0.1:{locked.port}"
    stores = [open_store(url, SIZE), open_store(url, SIZE, password="wrong-secret")]
    for store in stores:
        before = time.monotonic()
        check_failures_in_time(store, 10.0)
        assert time.monotonic() - before < 5
        store.clear()
        assert store.stats()["objects"] == -1
        assert "secret" not in repr(store)
        store.close()
    assert "WRONGPASS" in caplog.text
    assert "wrong-secret" not in caplog.text


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("redis://", {}, "say which host"),
        ("redis://host/1", {}, "only host and port"),
        ("redis://me@host", {}, "only host and port"),
        ("redis://host?colour=1", {}, "unknown option colour"),
        ("redis://host?db=-1", {}, "db must not be negative"),
        ("redis://host?prefix=", {}, "prefix must not be empty"),
        ("redis://host?username=me", {}, "needs a password"),
        ("redis://host?password_env=NO_SUCH_VARIABLE", {}, "no environment variable NO_SUCH_VARIABLE"),
        ("redis://host?password_env=X", {"password": SECRET}, "not both"),
        (f"redis://me:{SECRET}@host", {}, "a password doesn't belong into the URL"),
        ("redis://host?db=x", {"password": SECRET}, "db"),
    ],
)
def test_mistakes(url: str, options: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message) as error:
        open_store(url, SIZE, **options)
    assert SECRET not in str(error.value)


# --- A fake server: what a real one does only on a bad day ------------------------------------------------------------


class FakeServer:
    """Sends every connection the same bytes, with pauses between, and then ends it, or waits for its end."""

    def __init__(self, *answers: bytes, pause: float = 0.0, end: bool = True) -> None:
        self._answers, self._pause, self._end, self._done = answers, pause, end, threading.Event()
        self._running: socket.socket | None = None
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                if self._done.is_set():
                    return
                self._running = connection
                self.connections += 1
                try:
                    connection.recv(1 << 16)
                    for answer in self._answers:
                        connection.sendall(answer)
                        self._done.wait(self._pause)
                    while not self._end and connection.recv(1 << 16):
                        pass
                except OSError:
                    pass

    def close(self) -> None:
        self._done.set()
        if self._running is not None:
            with contextlib.suppress(OSError):
                self._running.shutdown(socket.SHUT_RDWR)
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join()
        self._listener.close()


def test_a_fake_server_that_stops_in_an_object_is_left_at_the_deadline():
    """What came whole before stands, and the connection is not used again."""
    whole = b"$4096\r\n" + page("a").tobytes() + b"\r\n"
    with FakeServer(b"$-1\r\n" + whole + whole[:-10], end=False) as server:
        store = RedisStore("127.0.0.1", server.port)
        for attempt in 1, 2:
            buffers = [memoryview(bytearray(SIZE)) for _ in range(4)]
            before = time.monotonic()
            assert store.get(["none", "a", "b", "c"], buffers, before + 0.3) == [MISSING, HIT, FAILED, FAILED]
            assert 0.25 < time.monotonic() - before < 0.3 + SLACK
            assert [bytes(buffer) for buffer in buffers[1:3]] == [page("a"), bytes(SIZE)]
            assert server.connections == attempt
        store.close()


def test_a_fake_server_that_is_slow_is_left_at_the_deadline():
    """Each answer comes in time, the batch does not."""
    with FakeServer(*[b"$-1\r\n"] * 20, pause=0.2) as server:
        store = RedisStore("127.0.0.1", server.port)
        buffers = [memoryview(bytearray(SIZE)) for _ in range(20)]
        before = time.monotonic()
        answers = store.get([f"k{i}" for i in range(20)], buffers, before + 0.5)
        assert time.monotonic() - before < 0.5 + SLACK
        assert 1 <= answers.count(MISSING) <= 3
        assert answers[3:] == [FAILED] * 17
        store.close()


def test_a_fake_server_that_takes_no_connection():
    """Its queue is full: connecting gets no answer."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            crowd = stack.enter_context(socket.socket())
            crowd.setblocking(False)
            crowd.connect_ex(listener.getsockname())
        store = RedisStore("127.0.0.1", listener.getsockname()[1])
        check_failures_in_time(store, 0.2)
        store.close()


def test_a_fake_server_that_hangs_up_is_asked_once():
    with FakeServer() as server:
        store = RedisStore("127.0.0.1", server.port, password=SECRET)
        assert exists(store, "a") == [UNKNOWN]
        assert server.connections == 1
        assert store.stats()["objects"] == -1
        assert server.connections == 2
        store.close()
        assert exists(store, "a") == [UNKNOWN]
        assert store.delete(["a"], soon()) == [False]
        assert server.connections == 2


def test_a_call_that_is_broken_off_between_answers_drops_its_connection(server: RedisServer, store: RedisStore):
    put(store, "a", "b")
    known = server.cli("CLIENT", "LIST").count("addr=")  # one of the store, and the command itself
    answer = memoryview(bytearray(SIZE))
    assert store.get(["a", "b"], [memoryview(bytes(SIZE)), answer], soon()) == [FAILED, FAILED]  # read-only
    assert answer == bytes(SIZE)
    until = soon()
    while server.cli("CLIENT", "LIST").count("addr=") >= known:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert get(store, "b", "none") == [HIT, MISSING]


def test_each_call_has_a_deadline_of_its_own(server: RedisServer, store: RedisStore):
    """A connection that was made in haste takes a large object in the next call, which has time."""
    assert store.exists(["a"], time.monotonic() + 0.05) == [NO]
    answers: list[list[bool]] = []
    call = threading.Thread(target=lambda: answers.append(put(store, "a", size=64 << 20)), daemon=True)
    server.stop()
    try:
        call.start()
        call.join(0.3)  # longer than the first call had
        assert not answers
    finally:
        server.go_on()
    call.join(20)
    assert answers == [[True]]
    assert connections(store) == (1, 0)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$4096\r\nshort", b"$x\r\n", b":\r\n", b"*1\r\n:1\r\n", b"+\r\n", b"\r\n"],
)
def test_a_fake_server_that_answers_nonsense(answer: bytes):
    with FakeServer(answer) as server:
        store = RedisStore("127.0.0.1", server.port)
        check_failures_in_time(store, 5.0, number=2)
        assert store.stats()["objects"] == -1
        store.clear()
        store.close()


def test_odd_numbers_of_a_fake_server_are_no_answers():
    with FakeServer(b":2\r\n:-1\r\n$1\r\n1\r\n:1\r\n:0\r\n") as server:
        store = RedisStore("127.0.0.1", server.port)
        assert exists(store, "a", "b", "c", "d", "e") == [UNKNOWN, UNKNOWN, UNKNOWN, YES, NO]
        assert store.delete(list("abcde"), soon()) == [False, False, False, True, True]
        store.close()


def test_a_fake_server_that_repeats_the_password(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    with FakeServer(f"-ERR unknown command 'AUTH', with args beginning with: '{SECRET}'\r\n".encode()) as server:
        store = RedisStore("127.0.0.1", server.port, password=SECRET)
        assert exists(store, "a") == [UNKNOWN]
        assert "failed (more at level DEBUG): ResponseError" in caplog.text
        assert SECRET not in caplog.text
        store.close()


def test_a_port_where_nobody_listens():
    store = RedisStore("127.0.0.1", free_port())
    before = time.monotonic()
    check_failures_in_time(store, 10.0)
    assert time.monotonic() - before < 1
    store.close()
