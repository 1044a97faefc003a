"""LmcacheServer with a real `lmcache server`: in an environment of its own, see environments.py."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from purecache.stores.breaker import Breaker
from purecache.stores.keys import seed_of
from purecache.stores.names import ObjectRecord

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed here: make test-stores runs this where it is", allow_module_level=True)
from purecache.adapters import lmcache_connection
from purecache.adapters.lmcache_connection import SLACK
from purecache.adapters.lmcache_server import LmcacheServer

PAGE_TOKENS, CHUNK_PAGES = 16, 4
CHUNK = PAGE_TOKENS * CHUNK_PAGES
PAGE = 8192
MEMORY_GB = 0.0625
BUSY = 1.0
"""Seconds that a call may take beyond its time on a busy machine."""


class Server:
    """A process of `lmcache server` on free ports, with pages on disk below `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, self.http = free_port(), free_port()
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--http-host", "127.0.0.1", "--http-port", str(self.http)]
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"purecache_test_{self.port}"]
        command += ["--no-l1-use-lazy", "--l1-size-gb", str(MEMORY_GB), "--eviction-policy", "LRU"]
        command += ["--chunk-size", str(CHUNK), "--disable-observability"]
        command += ["--l2-adapter", '{"type":"fs_native","base_path":"%s","num_workers":2}' % (self.directory / "l2")]
        with (self.directory / "server.log").open("ab") as log:
            environment = dict(os.environ, LMCACHE_TRACK_USAGE="false")
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        until = time.monotonic() + 120
        while time.monotonic() < until and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        self.kill()
        pytest.fail(f"the server doesn't start: {(self.directory / 'server.log').read_text()[-2000:]}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            until = time.monotonic() + 10  # the tracker of its shared memory is a process of its own, and ends after it
            while self.memory().exists() and time.monotonic() < until:
                time.sleep(0.05)
            self.memory().unlink(missing_ok=True)

    def memory(self) -> Path:
        return Path("/dev/shm") / f"lmcache_l1_pool_purecache_test_{self.port}"

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("lmcache"))
    yield server
    server.kill()


@pytest.fixture
def server(servers: Server) -> Server:
    """One for all tests, started again after the test that killed it."""
    if servers.process is None or servers.process.poll() is not None:
        servers.start()
    return servers


def record(page_size: int = PAGE_TOKENS, revision: str = "1") -> ObjectRecord:
    return ObjectRecord("test", revision, "uint8", "bytes", page_size, (0, 1))


@pytest.fixture
def client(server: Server) -> Iterator[LmcacheServer]:
    opened = connect(server)
    yield opened
    opened.close()


def connect(server: Server, **options: Any) -> LmcacheServer:
    return LmcacheServer(server.url, options.pop("record", record()), PAGE, **{"timeout": 10.0} | options)


def prompt(number: int, pages: int) -> list[int]:
    """Tokens that begin like no other prompt's."""
    return list(range(number * 100_000, number * 100_000 + pages * PAGE_TOKENS))


def pages_of(tokens: list[int]) -> list[memoryview]:
    pages = len(tokens) // PAGE_TOKENS
    return [memoryview(bytearray(f"{tokens[0]}:{i}|".encode() * PAGE)[:PAGE]) for i in range(pages)]


def empty(pages: int) -> list[memoryview]:
    return [memoryview(bytearray(PAGE)) for _ in range(pages)]


def test_what_is_stored_is_found_by_another_client(client: LmcacheServer, server: Server):
    tokens = prompt(1, 8 * CHUNK_PAGES)
    assert (client.lookup(tokens), client.retrieve(tokens, empty(32))) == (0, 0)
    assert client.store(tokens, pages_of(tokens)) == 32
    other = connect(server)
    buffers = empty(32)
    assert other.lookup(tokens) == len(tokens)
    assert other.retrieve(tokens, buffers) == 32
    assert buffers == pages_of(tokens)
    assert other.store(tokens, pages_of(tokens)) == 32  # it is there
    other.close()
    assert client.stats() == {"calls": 3, "failures": 0, "skipped": 0, "damaged": 0}


def test_prefixes_and_tails(client: LmcacheServer):
    """Whole chunks only; a prompt that goes another way shares what comes before."""
    tokens = prompt(2, 3 * CHUNK_PAGES)
    assert client.store(tokens + [7] * (CHUNK - 1), pages_of(tokens) + empty(3)) == 12
    assert client.lookup(tokens[: CHUNK - 1]) == 0
    assert client.lookup(tokens[: 2 * CHUNK + 5]) == 2 * CHUNK
    assert client.lookup(tokens[:CHUNK] + prompt(3, 4)) == CHUNK
    buffers = empty(12)
    assert client.retrieve(tokens[:CHUNK] + prompt(3, 8), buffers) == 4
    assert buffers[:4] == pages_of(tokens)[:4]
    assert client.lookup([0, *tokens[1:]]) == 0


def test_fewer_buffers_and_pages_that_are_not_wanted(client: LmcacheServer):
    tokens = prompt(4, 3 * CHUNK_PAGES)
    assert client.store(tokens, pages_of(tokens)[:9]) == 8
    buffers: list[Any] = [None, None, *empty(4)]
    assert client.retrieve(tokens, buffers) == 6
    assert buffers[2:] == pages_of(tokens)[2:6]
    assert client.retrieve(tokens, []) == 0
    assert client.store(tokens, []) == 0


def test_namespaces_and_other_weights_share_nothing(client: LmcacheServer, server: Server):
    tokens, seed = prompt(5, CHUNK_PAGES), seed_of(("adapter", "x"))
    assert client.store(tokens, pages_of(tokens), seed) == 4
    assert [client.lookup(tokens, each) for each in (seed, None, seed_of(("adapter", "y")))] == [CHUNK, 0, 0]
    other = connect(server, record=record(revision="2"))
    assert other.lookup(tokens, seed) == 0
    other.close()


def test_a_damaged_page_ends_the_prefix(client: LmcacheServer, server: Server):
    tokens = prompt(6, 2 * CHUNK_PAGES)
    assert client.store(tokens, pages_of(tokens)) == 8
    content = server.memory().read_bytes()
    where = content.index(bytes(pages_of(tokens)[5][:512]))
    with server.memory().open("r+b") as memory:
        memory.seek(where + 100)
        memory.write(b"!")
    buffers = empty(8)
    assert client.retrieve(tokens, buffers) == 5
    assert buffers[:5] == pages_of(tokens)[:5]
    assert client.stats()["damaged"] == 1


def test_more_than_its_memory_holds(client: LmcacheServer):
    """It moves chunks to disk, refuses some, and never hands out wrong ones."""
    prompts = [prompt(100 + i, 16 * CHUNK_PAGES) for i in range(int(MEMORY_GB * 2**30) // (64 * PAGE) + 40)]
    stored = [client.store(tokens, pages_of(tokens)) for tokens in prompts]
    assert stored.count(64) > len(prompts) // 2
    for tokens, pages in list(zip(prompts, stored, strict=True))[::16]:
        buffers = empty(64)
        came = client.retrieve(tokens, buffers)
        assert came <= 64
        assert came % CHUNK_PAGES == 0
        assert buffers[:came] == pages_of(tokens)[:came]
        assert pages <= 64
    assert client.stats()["failures"] == client.stats()["damaged"] == 0


def test_threads_take_turns(client: LmcacheServer):
    prompts = [prompt(50 + i, 2 * CHUNK_PAGES) for i in range(4)]
    came: dict[int, tuple[int, bool]] = {}

    def work(index: int) -> None:
        buffers = empty(8)
        client.store(prompts[index], pages_of(prompts[index]))
        came[index] = client.retrieve(prompts[index], buffers), buffers == pages_of(prompts[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert came == dict.fromkeys(range(4), (8, True))


def test_chunks_that_are_no_whole_pages_are_told(server: Server):
    other = connect(server, record=record(page_size=48))
    assert other.lookup(prompt(1, 32)) == 0
    assert "chunks of 64 tokens are not whole pages of 48" in other.last_error
    other.close()


def test_wrong_arguments_are_told(client: LmcacheServer):
    with pytest.raises(ValueError, match="has 5 bytes, but a page has 8192"):
        client.retrieve(prompt(1, 4), [memoryview(bytearray(5))])
    with pytest.raises(ValueError, match="one axis of integers"):
        client.lookup([0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="timeout"):
        LmcacheServer("tcp://127.0.0.1:1", record(), PAGE, timeout=0)
    assert client.lookup([]) == 0


def test_a_closed_client_answers_nothing(server: Server):
    other = connect(server)
    tokens = prompt(7, CHUNK_PAGES)
    assert other.store(tokens, pages_of(tokens)) == 4
    other.close()
    other.close()
    assert (other.lookup(tokens), other.retrieve(tokens, empty(4)), other.store(tokens, pages_of(tokens))) == (0, 0, 0)


def timed(call: Any, *arguments: Any) -> tuple[int, float]:
    begin = time.monotonic()
    return call(*arguments), time.monotonic() - begin


def test_a_server_that_stands_still_is_a_miss_in_time(server: Server):
    other = connect(server, timeout=0.3, breaker=Breaker(100, 0.0))
    tokens = prompt(8, CHUNK_PAGES)
    stored_until(other, tokens)
    server.signal(signal.SIGSTOP)
    try:
        for call, arguments in ((other.lookup, ()), (other.retrieve, (empty(4),)), (other.store, (pages_of(tokens),))):
            answer, seconds = timed(call, tokens, *arguments)
            assert answer == 0
            assert seconds < 0.3 + SLACK + BUSY
            assert other._server is None  # and with it what it was to be asked
        assert "no answer in time" in other.last_error
    finally:
        server.signal(signal.SIGCONT)
    stored_until(other, tokens)
    other.close()


def stored_until(client: LmcacheServer, tokens: list[int]) -> None:
    """Store and read, as soon as the server is there."""
    until = time.monotonic() + 60
    while client.store(tokens, pages_of(tokens)) != len(tokens) // PAGE_TOKENS:
        assert time.monotonic() < until, client.last_error
    buffers = empty(len(tokens) // PAGE_TOKENS)
    while client.retrieve(tokens, buffers) != len(buffers):
        assert time.monotonic() < until, client.last_error
    assert buffers == pages_of(tokens)


def test_the_server_is_killed_and_comes_back_with_its_pages(server: Server):
    """Killed: misses in time, then at once. Back on the same port: found again, from its disk, without help."""
    clock = [0.0]
    other = connect(server, timeout=0.5, breaker=Breaker(2, 100.0, lambda: clock[0]))
    tokens = prompt(9, 4 * CHUNK_PAGES)
    stored_until(other, tokens)
    until = time.monotonic() + 30  # it writes to disk when it comes to it
    while len(on_disk(server, other)) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    server.kill()
    failed = other.stats()["failures"]
    for expected in (1, 2, 2, 2):
        answer, seconds = timed(other.lookup, tokens)
        assert answer == 0
        assert seconds < (0.5 + SLACK if other.stats()["failures"] > failed else 0) + BUSY
        assert other.stats()["failures"] - failed == expected
    assert other.breaker.is_open
    server.start()
    assert other.lookup(tokens) == 0  # the breaker is still open
    clock[0] = 101.0
    until, buffers = time.monotonic() + 60, empty(16)
    while other.retrieve(tokens, buffers) != 16 and time.monotonic() < until:
        clock[0] += 101.0
    assert buffers == pages_of(tokens)
    assert not other.breaker.is_open
    other.close()
    patient, buffers = connect(server, timeout=30.0), empty(16)
    assert patient.retrieve(tokens, buffers) == 16
    server.kill()
    server.start()  # and no call meanwhile that would notice
    buffers = empty(16)
    assert patient.retrieve(tokens, buffers) == 16
    assert buffers == pages_of(tokens)
    others, buffers = prompt(12, CHUNK_PAGES), empty(4)
    assert patient.store(others, pages_of(others)) == 4
    assert patient.stats()["failures"] == 0
    patient.close()
    reader = connect(server)  # memory of the server that is gone would hold these pages for nobody else
    assert reader.retrieve(others, buffers) == 4
    assert buffers == pages_of(others)
    reader.close()


def test_a_server_that_forgot_a_silent_client(client: LmcacheServer):
    """It would answer that there is nothing, for ever."""
    tokens = prompt(11, CHUNK_PAGES)
    assert client.store(tokens, pages_of(tokens)) == 4
    assert client._server is not None
    client._server.client.unregister_kv_cache_engine_driven_context(client._server.instance).result(10)
    assert client.lookup(tokens) == CHUNK


def on_disk(server: Server, client: LmcacheServer) -> list[Path]:
    marks = [bytes(page[:64]) for page in pages_of(prompt(9, 4 * CHUNK_PAGES))]
    files = (server.directory / "l2").glob("*.data")
    return [path for path in files if any(path.read_bytes().startswith(mark) for mark in marks)]


def test_an_exception_of_the_client_is_a_miss(client: LmcacheServer, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("no sockets")

    with monkeypatch.context() as patch:
        patch.setattr(lmcache_connection.RequestClientFactory, "create", fail)
        assert client.lookup(prompt(1, 4)) == 0
    assert client.last_error.endswith("OSError: no sockets")
    assert client.store(prompt(10, 4), pages_of(prompt(10, 4))) == 4
