"""NixlObjectStore with a real NIXL agent, over a real S3 server (SeaweedFS) and over one that never answers."""

import importlib
import itertools
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from calls import FAILED, HIT, MISSING, NO, UNKNOWN, YES, Objects, soon

from purecache.stores.registry import open_store
from purecache.testing.stores import check_store

try:
    from purecache.stores.engines.nixl_objects import NixlObjectStore
except ImportError as error:
    pytest.skip(f"needs NIXL ({error}): pip install --no-deps nixl-cu12==1.5.1", allow_module_level=True)

SIZE = 5000
SLACK = 0.5
"""Seconds a call may take beyond its deadline on a busy machine."""
SECRET = "open-sesame"
OBJECTS = Objects(SIZE)
page, put, get = OBJECTS.content, OBJECTS.put, OBJECTS.get


def connect(endpoint: str, prefix: str = "", **options: Any) -> NixlObjectStore:
    keys = {"access_key": "any", "secret_key": "any"}
    return NixlObjectStore("kvpages", prefix, object_bytes=SIZE, endpoint=endpoint, **{**keys, **options})


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = str(Path(__file__).parents[1])
    if folder not in sys.path:
        sys.path.append(folder)
    server = importlib.import_module("test_object_store").Weed(tmp_path_factory.mktemp("weed"))
    yield server
    server.kill()


def test_the_contract(weed: Any):
    numbers = itertools.count()
    check_store(
        lambda: open_store(
            f"nixl+s3://kvpages/kit{next(numbers)}?endpoint={weed.url}", SIZE, access_key="any", secret_key="any"
        ),
        SIZE,
    )


def test_holes_and_more_objects_than_slots(weed: Any):
    store = connect(weed.url, "holes", concurrency=4)
    keys = [f"k{i}" for i in range(30)]
    assert put(store, *keys[1::2]) == [True] * 15
    assert get(store, *keys) == [MISSING, HIT] * 15
    assert store.exists(keys, soon()) == [NO, YES] * 15
    assert store.delete(keys[:10], soon()) == [True] * 10
    assert store.stats()["objects"] == 10
    store.clear()
    assert (store.stats()["objects"], store.stats()["late"]) == (0, 0)
    store.close()


def test_lengths(weed: Any):
    """NIXL itself calls a read whole whose object is shorter or longer."""
    store = connect(weed.url, "lengths")
    for name, size in ("short", SIZE - 1), ("long", SIZE + 1), ("empty", 0):
        obstore.put(store._store, f"lengths/{name}.page", bytes(size))
    put(store, "good")
    assert get(store, "short", "good", "none", "long", "empty") == [FAILED, HIT, MISSING, FAILED, FAILED]
    assert store.put(["a", "b"], [page("a", SIZE + 1), page("b")], soon()) == [False, True]  # no room for the first
    store.close()


def test_an_object_that_goes_away_during_a_get_fails_alone(weed: Any, monkeypatch: pytest.MonkeyPatch):
    store = connect(weed.url, "gone")
    put(store, "a", "b", "c")
    carry = store._courier.carry

    def deletes(*arguments: Any) -> list[bool]:
        obstore.delete(store._store, "gone/b.page")
        return carry(*arguments)

    monkeypatch.setattr(store._courier, "carry", deletes)
    assert get(store, "a", "b", "c") == [HIT, FAILED, HIT]
    store.close()


def test_an_object_store_sees_the_same_objects(weed: Any):
    store = connect(weed.url, "same")
    config = {"region": "us-east-1", "access_key_id": "any", "secret_access_key": "any"}
    other = open_store(f"s3://kvpages/same?endpoint={weed.url}", SIZE, virtual_hosted_style_request="false", **config)
    assert put(store, "a") == [True]
    assert put(other, "b") == [True]  # type: ignore[arg-type]
    assert get(store, "a", "b") == get(other, "a", "b") == [HIT, HIT]  # type: ignore[arg-type]
    store.close()
    other.close()


def test_keys_of_the_environment_and_wrong_ones(weed: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGES_KEY", "any")
    url = f"nixl+s3://kvpages/rights?endpoint={weed.url}"
    store = open_store(f"{url}&access_key_env=PAGES_KEY&secret_key_env=PAGES_KEY", SIZE)
    assert put(store, "a") == [True]  # type: ignore[arg-type]
    store.close()
    store = open_store(url, SIZE, access_key="any", secret_key="wrong")
    assert store.put(["b"], [page("b")], soon()) == [False]
    assert store.get(["a"], [page("")], soon()) == [FAILED]
    assert store.exists(["a"], soon()) == [UNKNOWN]
    store.close()


def check_failures_in_time(store: NixlObjectStore, seconds: float) -> None:
    """Only failures, by the deadline."""
    keys, buffers = [f"k{i}" for i in range(20)], [page("x") for _ in range(20)]
    for call, failed in (
        (lambda until: store.exists(keys, until), UNKNOWN),
        (lambda until: store.get(keys, buffers, until), FAILED),
        (lambda until: store.put(keys, buffers, until), False),
        (lambda until: store.delete(keys, until), False),
    ):
        before = time.monotonic()
        assert call(before + seconds) == [failed] * 20
        assert time.monotonic() - before < seconds + SLACK
        assert call(before) == [failed] * 20


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_that_never_answers_and_deadlines(silent: str):
    store = connect(silent, concurrency=8)
    check_failures_in_time(store, 0.3)
    assert (store.stats()["objects"], store.stats()["late"]) == (-1, 8)
    store.close()


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_that_ends_while_transfers_run(silent: str, closes: bool):
    """NIXL waits on in the process, which must end by itself nevertheless, soon, and not by a crash."""
    text = (
        f"import sys, time; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "from test_nixl_objects import check_failures_in_time, connect, page, soon\n"
        f"store = connect({silent!r}, concurrency=8)\n"
        "assert store.put([str(i) for i in range(20)], [page('a')] * 20, soon(0.3)) == [False] * 20\n"
        "assert store._courier.late() == 8\n"
        "assert store.put(['a'], [page('a')], soon(0.2)) == [False]\n"  # no slot is left
        f"{'store.close(); store.close()' if closes else ''}\n"
        "print('done', time.monotonic(), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - float(done.stdout.split()[-1]) < 5


def test_a_late_transfer_reaches_no_buffer(weed: Any, monkeypatch: pytest.MonkeyPatch):
    """It is given up at the deadline, its slot is lent until it has ended, and is used again then."""
    store = connect(weed.url, "late", concurrency=2)
    put(store, "a", "b", "c")
    held, has_ended = threading.Event(), store._courier._agent.has_ended
    monkeypatch.setattr(store._courier._agent, "has_ended", lambda handle: held.is_set() and has_ended(handle))
    buffers = [memoryview(bytearray(SIZE)) for _ in range(3)]
    assert store.get(["a", "b", "c"], buffers, soon(0.5)) == [FAILED] * 3
    assert store.stats()["late"] == 2
    held.set()
    assert get(store, "a", "b", "c") == [HIT] * 3
    assert all(bytes(buffer) == bytes(SIZE) for buffer in buffers)
    assert store.stats()["late"] == 0
    store.close()


def test_threads(weed: Any):
    store, wrong = connect(weed.url, "threads", concurrency=3), []

    def work(number: int) -> None:
        keys = [f"{number}-{i}" for i in range(8)]
        wrong.extend(each for each in put(store, *keys) if each is not True)
        wrong.extend(each for each in get(store, *keys) if each is not HIT)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.stats()["objects"] == 32
    store.close()


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("nixl+s3:///path", {}, "say which bucket"),
        ("nixl+s3://me@bucket/path", {}, "say which bucket"),
        ("nixl+s3://bucket?colour=1", {}, "unknown option colour"),
        ("nixl+s3://bucket?endpoint=host:80", {}, "must begin with http"),
        ("nixl+s3://bucket?concurrency=0", {}, "must be positive"),
        ("nixl+s3://bucket", {"secret_key": SECRET}, "give both"),
        ("nixl+s3://bucket?secret_key_env=NO_SUCH_VARIABLE", {"access_key": SECRET}, "no environment variable"),
        ("nixl+s3://bucket?access_key_env=X", {"access_key": SECRET}, "not both"),
    ],
)
def test_mistakes(url: str, options: dict[str, str], message: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ValueError, match=message) as error:
        open_store(url, SIZE, **options)
    assert SECRET not in str(error.value) + caplog.text


def test_secrets_are_not_told(silent: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    caplog.set_level(logging.DEBUG)
    store = connect(silent, access_key=SECRET, secret_key=SECRET)
    assert store.exists(["a"], soon(0.1)) == [UNKNOWN]
    told = capfd.readouterr()
    assert SECRET not in caplog.text + repr(store) + told.out + told.err
    store.close()


def test_the_server_is_killed(weed: Any):
    """The last test of this server."""
    store = connect(weed.url, "killed")
    put(store, "a")
    weed.kill()
    assert get(store, "a") == [FAILED]
    assert store.exists(["a"], soon()) == [UNKNOWN]
    before = time.monotonic()
    assert store.put(["a"], [page("a")], before + 0.5) == [False]
    assert time.monotonic() - before < 0.5 + SLACK
    assert store.stats()["late"] == 1
    store.close()
