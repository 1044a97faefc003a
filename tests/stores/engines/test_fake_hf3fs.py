"""The hf3fs store on a fake of 3FS' USRBIO and a fake of the metadata server: no 3FS can be had for tests."""

import errno
import gc
import importlib
import itertools
import json
import logging
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from calls import FAILED, HIT, MISSING, NO, UNKNOWN, YES, Objects, over_clients, soon
from fake_hf3fs import FakeMetadataServer, FakeMount

from purecache.stores.engines import hf3fs_index
from purecache.stores.envelope import TRAILER
from purecache.stores.guard import Guard, Kind, Request
from purecache.stores.registry import open_store
from purecache.testing import check_store

SIZE = 4000
PAGE = 4096
OBJECTS = Objects(SIZE)
content, put, get = OBJECTS.content, OBJECTS.put, OBJECTS.get
RINGS = "purecache.stores.engines.hf3fs_rings"
ENGINE = ("purecache.stores.engines.hf3fs", RINGS)


@pytest.fixture
def mount(tmp_path):
    fake = FakeMount(tmp_path / "3fs")
    with over_clients(fake.modules(), *ENGINE):
        yield fake
    if fake.vectors or fake.files:
        gc.collect()
    fake.check_let_go()


@pytest.fixture
def server():
    fake = FakeMetadataServer()
    yield fake
    fake.close()


@pytest.fixture
def opened(mount):
    """Open stores that are closed when the test ends."""
    stores = []

    def make(directory="kv", pages=40, size=SIZE, **options):
        store = open_store(f"hf3fs://{mount.root}/{directory}", size, capacity=pages * PAGE, **options)
        stores.append(store)
        return store

    yield make
    mount.release()
    for store in stores:
        store.close()


@pytest.mark.parametrize("options", [{}, {"entries": 3, "rings": 1}, {"entries": 5, "block": 2 * PAGE + 100}])
def test_fake_conformance(mount, options):
    numbers = itertools.count()

    def make():
        return open_store(f"hf3fs://{mount.root}/{next(numbers)}", SIZE, capacity=40 * PAGE, **options)

    check_store(make, SIZE, bounded=True)
    assert max(ring.most for ring in mount.rings) <= options.get("entries", 16)


def test_fake_conformance_with_a_metadata_server(mount, server):
    numbers = itertools.count()

    def make():
        number = next(numbers)
        url = f"hf3fs://{mount.root}/{number}?capacity={40 * PAGE}&metadata={server.url}&rank={number}&namespace=n"
        return open_store(url, SIZE)

    check_store(make, SIZE, bounded=True)


@pytest.mark.parametrize("shared", [False, True])
def test_holes_stay_where_they_are(opened, server, shared):
    OBJECTS.check_holes(opened(**({"metadata": server.url} if shared else {})))


def test_a_failed_read_in_the_middle(mount, opened):
    store = opened(entries=4)
    keys = [f"k{i}" for i in range(6)]
    put(store, *keys)
    mount.short, mount.results = {1 * PAGE: 100}, {2 * PAGE: -errno.EIO, 4 * PAGE: 2 * PAGE}
    assert get(store, *keys) == [HIT, FAILED, FAILED, HIT, FAILED, HIT]
    assert store.stats()["short"] == 3
    mount.short, mount.results = {}, {}
    assert get(store, *keys) == [HIT] * 6  # nothing was removed because of a failure that may pass


def test_a_result_without_data_is_no_hit(mount, opened):
    store = opened(entries=1, rings=1)
    put(store, "a", "b")
    assert get(store, "a") == [HIT]
    mount.results = {0: 64 + SIZE}  # says that it read all of "a", and read nothing: the memory has "a" from before
    assert get(store, "a") == [FAILED]


def test_a_failed_write_in_the_middle(mount, opened):
    store = opened()
    mount.short, mount.results = {1 * PAGE: 10}, {2 * PAGE: -errno.ENOSPC}
    assert put(store, "a", "b", "c", "d") == [True, False, False, True]
    assert store.exists(["a", "b", "c", "d"], soon()) == [YES, NO, NO, YES]
    assert store.stats()["free"] == 38  # the pages of what failed are free again
    mount.short, mount.results = {}, {}
    assert put(store, "a", "b", "c", "d") == [True] * 4
    assert get(store, "d", "c", "b", "a") == [HIT] * 4


@pytest.mark.parametrize("error", [OSError, ValueError, RuntimeError])
def test_a_request_that_is_refused(mount, opened, error):
    store = opened()
    put(store, "a", "b", "c")
    mount.raising["prepare"] = [error(errno.EAGAIN, "full")]
    assert get(store, "a", "b", "c") == [FAILED, HIT, HIT]
    mount.raising["prepare"] = [error(errno.EAGAIN, "full")]
    assert put(store, "d", "e") == [False, True]
    assert get(store, "a", "b", "c", "d", "e") == [HIT, HIT, HIT, MISSING, HIT]


def test_refused_requests_cost_no_memory(mount, opened):
    store = opened(entries=2, rings=1)
    put(store, "a")
    mount.raising["prepare"] = [OSError(errno.EAGAIN, "full") for _ in range(5)]
    for _ in range(5):
        assert get(store, "a") == [FAILED]
    assert get(store, "a", "a", "a") == [HIT] * 3


@pytest.mark.parametrize("where", ["submit", "wait"])
def test_a_ring_that_raises(mount, opened, where):
    """What was prepared may be carried out all the same: it is taken for late until its end is seen."""
    store = opened(rings=1)
    put(store, "a", "b")
    mount.raising[where] = [OSError(errno.EIO, "odd")]
    assert get(store, "a", "b") == [FAILED, FAILED]
    assert get(store, "a", "b") == [HIT, HIT]
    mount.raising[where] = [OSError(errno.EIO, "odd")]
    assert put(store, "c", "d") == [False, False]
    assert put(store, "c", "d") == [True, True]
    assert get(store, "a", "b", "c", "d") == [HIT] * 4
    put(store, "e")
    assert store.stats()["free"] == 40 - 5


def test_a_late_read_writes_into_no_buffer(mount, opened):
    store = opened(entries=4, rings=1)
    put(store, "a", "b")
    mount.held = True
    buffers = [memoryview(bytearray(SIZE)) for _ in range(2)]
    begin = time.monotonic()
    assert store.get(["a", "b"], buffers, soon(0.1)) == [FAILED, FAILED]
    assert time.monotonic() - begin < 2
    mount.release()
    assert get(store, "b", "a") == [HIT, HIT]  # in other memory than that of the late ones, or the fake would tell
    assert buffers == [bytes(SIZE)] * 2
    assert store.stats()["late"] == 2
    assert get(store, *"abab" * 3) == [HIT] * 12


def test_more_late_reads_than_a_ring_has_entries(mount, opened):
    store = opened(entries=2, rings=1)
    put(store, "a", "b", "c")
    mount.held = True
    assert get(store, "a", "b", "c", seconds=0.3) == [FAILED] * 3
    assert get(store, "a", seconds=0.3) == [FAILED]
    mount.release()
    assert get(store, "a", "b", "c") == [HIT] * 3


def test_the_page_of_a_late_write_is_nobody_elses(mount, opened):
    store = opened(pages=3, rings=1)
    mount.held = True
    assert put(store, "a", seconds=0.3) == [False]
    assert store.stats()["free"] == 2  # not given back: it may be written yet
    assert mount.requests == [("write", 0, 64 + SIZE)]
    assert put(store, "b", seconds=0.3) == [False]
    mount.release()
    assert put(store, "c") == [True]
    assert put(store, "d") == [True]
    assert store.stats()["free"] == 1
    assert [offset for kind, offset, _ in mount.requests if kind == "write"][:3] == [0, PAGE, 2 * PAGE]
    assert get(store, "a", "b", "c", "d") == [MISSING, MISSING, HIT, HIT]


def test_a_ring_is_waited_for_until_the_deadline(mount, opened):
    store = opened(rings=1)
    put(store, "a")
    mount.held = True
    thread = threading.Thread(target=get, args=(store, "a"), kwargs={"seconds": 20})
    thread.start()
    while len([each for each in mount.requests if each[0] == "read"]) < 1:
        time.sleep(0.001)
    begin = time.monotonic()
    assert get(store, "a", seconds=0.1) == [FAILED]
    assert time.monotonic() - begin < 2
    mount.release()
    thread.join()
    assert get(store, "a") == [HIT]


def test_objects_of_several_lengths(opened):
    store = opened()
    OBJECTS.check_lengths(store)
    assert get(store, "a", "b", "c") == [FAILED, FAILED, HIT]
    assert store.exists(["a", "b", "d"], soon()) == [YES, YES, NO]


def test_the_longest_unused_goes_first(opened):
    store = opened(pages=8)
    keys = [f"k{i}" for i in range(8)]
    put(store, *keys)
    get(store, *keys[:3])
    assert put(store, *[f"n{i}" for i in range(5)]) == [True] * 5
    assert store.exists(keys, soon()) == [YES] * 3 + [NO] * 5
    assert put(store, *[f"m{i}" for i in range(9)]) == [True] * 8 + [False]  # a batch doesn't evict itself
    assert store.stats()["evictions"] == 13


def test_a_local_index_survives_a_restart(mount, opened):
    store = opened(pages=8)
    put(store, *"abcdefgh")
    assert get(store, "a") == [HIT]
    store.close()
    store = opened(pages=8)
    assert get(store, *"abcdefgh") == [HIT] * 8
    assert get(store, "a") == [HIT]
    assert put(store, "i") == [True]
    assert store.exists(["a", "h", "i"], soon()) == [YES, NO, YES]  # the order of use, too


def test_an_old_index_leads_to_no_wrong_object(mount, opened):
    """A process that was killed leaves an index that is older than the pages."""
    directory = mount.root / "kv"
    store = opened(pages=3)
    put(store, "a", "b", "c")
    store.close()
    old = (directory / "index.json").read_bytes()
    store = opened(pages=3)
    put(store, "d", "e")  # in the pages of two of them
    store.close()
    (directory / "index.json").write_bytes(old)
    store = opened(pages=3)
    assert store.exists(["a", "b", "c"], soon()) == [YES] * 3
    answers = get(store, "a", "b", "c")
    assert sorted(answers) == [HIT, FAILED, FAILED]
    assert get(store, "a", "b", "c") == [MISSING if answer is FAILED else HIT for answer in answers]
    assert store.stats()["wrong"] == 2
    assert put(store, "a", "b", "c") == [True] * 3
    assert get(store, "a", "b", "c") == [HIT] * 3


@pytest.mark.parametrize("offset", [0, 10, 20, 40, 50, 64, 64 + SIZE - 1])
def test_a_flipped_byte(mount, opened, offset):
    store = opened()
    put(store, "a", "b", "c")
    with open(mount.root / "kv" / "pages.bin", "r+b") as file:
        file.seek(PAGE + offset)
        byte = file.read(1)[0]
        file.seek(PAGE + offset)
        file.write(bytes([byte ^ 1]))
    assert get(store, "a", "b", "c") == [HIT, FAILED, HIT]
    put(store, "b")
    assert get(store, "a", "b", "c") == [HIT] * 3


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format": 1, "pages": 40, "entries": 1}\n',
        b'{"format": 1, "pages": 40, "entries": 1}\n[["a", 1]',
        b'{"format": 1, "pages": 40, "entries": 1}\n7',
        b'{"format": 1, "pages": 40, "entries": 1}\n[["a", 40]]',
        b'{"format": 1, "pages": 40, "entries": 1}\n[["a", -1]]',
        b'{"format": 1, "pages": 40, "entries": 1}\n[["a", true]]',
        b'{"format": 1, "pages": 40, "entries": 1}\n[[["a"], 1]]',
        b'{"format": 1, "pages": 40, "entries": 2}\n[["a", 1], ["b", 1]]',
        b'{"format": 1, "pages": 40, "entries": 2}\n[["a", 1], ["a", 2]]',
        b'{"format": 1, "pages": 41, "entries": 1}\n[["a", 1]]',
        b'{"format": 2, "pages": 40, "entries": 1}\n[["a", 1]]',
    ],
)
def test_a_damaged_index_is_as_none(mount, opened, damage, caplog):
    opened().close()
    (mount.root / "kv" / "index.json").write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        store = opened()
    assert "starting with an empty one" in caplog.text
    assert store.stats()["objects"] == 0
    assert put(store, "a") == [True]
    assert get(store, "a") == [HIT]


def test_the_index_is_saved_now_and_then(tmp_path):
    file = tmp_path / "index.json"
    index = hf3fs_index.LocalIndex(file, 4, save_seconds=0.0)
    (page,) = index.reserve(["a"], soon())
    assert not file.exists()
    index.confirm([("a", page)], [], soon())
    while not file.exists():
        time.sleep(0.001)
    assert json.loads(file.read_bytes().splitlines()[1]) == [["a", page]]


def test_an_index_that_is_closed_is_saved_no_more(tmp_path):
    file = tmp_path / "index.json"
    index = hf3fs_index.LocalIndex(file, 4, save_seconds=0.0)
    index.close()
    file.write_text("another's")
    index.confirm([("a", *index.reserve(["a"], soon()))], [], soon())
    for thread in threading.enumerate():
        if thread.name == "purecache hf3fs index":
            thread.join(20)
    assert file.read_text() == "another's"


def test_the_slower_of_two_writers_gives_its_page_back(tmp_path):
    index = hf3fs_index.LocalIndex(tmp_path / "index.json", 4)
    (one,), (other,) = index.reserve(["a"], soon()), index.reserve(["a"], soon())
    assert one != other
    assert index.confirm([("a", other)], [], soon()) == index.confirm([("a", one)], [], soon()) == [True]
    assert index.find(["a"], soon()) == [other]
    assert index.counts()["free"] == 3


def test_a_page_is_dropped_only_while_it_is_the_one(tmp_path):
    index = hf3fs_index.LocalIndex(tmp_path / "index.json", 4)
    (page,) = index.reserve(["a"], soon())
    index.confirm([("a", page)], [], soon())
    index.drop("a", page + 1, soon())
    assert index.find(["a"], soon()) == [page]
    index.drop("a", page, soon())
    assert index.find(["a"], soon()) == [None]


def test_an_index_of_many_lines(tmp_path):
    file, keys = tmp_path / "index.json", [f"k{i}" for i in range(1000)]
    index = hf3fs_index.LocalIndex(file, 1100)
    pages = index.reserve(keys, soon())
    index.confirm(list(zip(keys, pages, strict=True)), [], soon())
    index.close()
    again = hf3fs_index.LocalIndex(file, 1100)
    assert again.find(keys, soon()) == pages
    assert again.counts() == {"objects": 1000, "free": 100, "pages": 1100, "evictions": 0}


def test_a_directory_has_one_owner_and_one_size(mount, opened, tmp_path):
    store = opened()
    with pytest.raises(ValueError, match="in use by another store"):
        opened()
    store.close()
    for other in ({"pages": 41}, {"size": SIZE + PAGE}):
        with pytest.raises(ValueError, match="was made with"):
            opened(**other)
    with pytest.raises(ValueError, match="is not on a mounted 3FS"):
        open_store(f"hf3fs://{tmp_path}/elsewhere/deep", SIZE, capacity="1MiB")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("", "say how much it may hold"),
        ("capacity=4000", "has no room for a page of 4096"),
        ("capacity=3999", "holds no object"),
        ("capacity=1MiB&entries=0", "at least 1"),
        ("capacity=1MiB&rings=0", "at least 1"),
        ("capacity=1MiB&block=4095", "a block of 4095 bytes has no room"),
        ("capacity=1MiB&entry=1", "unknown option entry; there are capacity"),
        ("capacity=1MiB&metadata=https://host:1", "write http://host:port"),
        ("capacity=1MiB&metadata=http://user:geheim@host:1", "write http://host:port"),
        ("capacity=1MiB&metadata=http://host:many", "its port is no number"),
    ],
)
def test_impossible_urls(mount, query, error):
    with pytest.raises(ValueError, match=error) as caught:
        open_store(f"hf3fs://{mount.root}/kv?{query}", SIZE)
    assert "geheim" not in str(caught.value)
    with pytest.raises(ValueError, match="absolute path"):
        open_store("hf3fs://host/kv?capacity=1MiB", SIZE)


def test_without_the_package():
    missing = r"docs/stores/hf3fs\.md says how"
    with over_clients({"hf3fs_fuse": None}, *ENGINE), pytest.raises(ImportError, match=missing):
        open_store("hf3fs:///mnt/kv?capacity=1MiB", SIZE)


def test_nothing_is_left_of_a_store_that_can_not_be_opened(mount, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "no ring")

    monkeypatch.setattr(sys.modules["hf3fs_fuse.io"], "make_ioring", refuse)
    with pytest.raises(OSError, match="no ring"):
        open_store(f"hf3fs://{mount.root}/kv?capacity=1MiB", SIZE)


# With a metadata server.


def test_two_machines_share_a_file(opened, server):
    one, other = opened(metadata=server.url), opened(metadata=server.url)
    assert put(one, "a", "b") == [True, True]
    assert get(other, "b", "none", "a") == [HIT, MISSING, HIT]
    assert other.delete(["a", "never"], soon()) == [True, True]
    assert get(one, "a", "b") == [MISSING, HIT]
    one.clear()
    assert other.exists(["b"], soon()) == [NO]
    assert server.calls.count("initialize") == 2
    with pytest.raises(ValueError, match="was made with"):
        opened()  # with an index of its own


def test_two_writers_of_one_key_lose_no_page(mount, opened, server, monkeypatch):
    """The server forgets the page of the faster writer when the slower one confirms: then it would be lost for good."""
    one, other = opened(metadata=server.url), opened(metadata=server.url)
    ring = importlib.import_module(RINGS).Ring
    original = ring.run

    def run(self, transfers, deadline):
        monkeypatch.setattr(ring, "run", original)
        assert put(other, "a") == [True]  # between the reservation and the confirmation of the first
        original(self, transfers, deadline)

    monkeypatch.setattr(ring, "run", run)
    assert put(one, "a") == [True]
    rank = server.ranks["0:purecache"]
    assert sorted([*rank["free"], *rank["keys"].values()]) == list(range(rank["pages"]))
    assert get(one, "a") == get(other, "a") == [HIT]


def test_a_failed_write_gives_its_page_back_to_the_server(mount, opened, server):
    store = opened(metadata=server.url)
    mount.results = {39 * PAGE: -errno.EIO}  # the server gives the last page first
    assert put(store, "a", "b") == [False, True]
    rank = server.ranks["0:purecache"]
    assert len(rank["free"]) == 39
    assert store.stats()["objects"] == 1
    assert store.stats()["lost"] == 0


def test_a_full_server_may_evict_what_it_has_just_promised(opened, server):
    store = opened(pages=2, metadata=server.url)
    put(store, "a", "b")
    answers = put(store, "a", "b", "c")  # "c" gets the page of "a", which the same answer says is there
    assert answers == [False, True, True]
    assert get(store, "a", "b", "c") == [MISSING, HIT, HIT]
    assert put(store, *"defgh") == [False] * 5  # it has nothing left to evict, and fails: status 500


@pytest.mark.parametrize("how", ["store", "guard"])
def test_a_restored_key_leads_to_no_wrong_object(opened, server, monkeypatch, how):
    """The server saves its index once a minute: after a restart, keys lead to pages that others have now.

    The head of the page says so; and without it, the trailer of the guard.
    """
    guard = Guard(opened(pages=2, metadata=server.url), workers=1)
    numbers = itertools.count()

    def call(kind, *keys):
        buffers = [memoryview(bytearray(SIZE)) for _ in keys] if kind in (Kind.PUT, Kind.GET) else []
        for key, buffer in zip(keys, buffers, strict=False):
            buffer[:-TRAILER] = content(key, SIZE - TRAILER) if kind is Kind.PUT else bytes(SIZE - TRAILER)
        assert guard.start(Request(kind, next(numbers), keys, buffers))
        assert guard.wait(20)
        (done,) = guard.poll()
        for key, buffer, answer in zip(keys, buffers, done.answers, strict=False):
            assert kind is not Kind.GET or answer is not HIT or buffer[:-TRAILER] == content(key, SIZE - TRAILER)
        return done.answers

    assert call(Kind.PUT, "old", "kept") == [True, True]
    saved = server.save()
    assert call(Kind.PUT, "new") == [True]  # in the page of "old"
    server.restart(saved)
    assert call(Kind.EXISTS, "old", "kept") == [YES, YES]
    if how == "guard":
        monkeypatch.setattr(importlib.import_module(RINGS), "check_head", lambda *_: True)
    assert call(Kind.GET, "kept", "old") == [HIT, FAILED]
    assert guard.stats()["get_corrupt"] == (how == "guard")
    assert call(Kind.EXISTS, "old", "kept") == [NO, YES]  # it was removed
    assert call(Kind.PUT, "old") == [True]
    assert call(Kind.GET, "old", "kept") == [HIT, HIT]
    assert guard.close()


@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_server_that_refuses(opened, server, status):
    store = opened(metadata=server.url)
    put(store, "a")
    calls = "exists", "get_page_indices", "reserve_and_allocate_page_indices", "confirm_write", "delete_keys", "clear"
    server.failing = dict.fromkeys(calls, status)
    assert store.exists(["a", "b"], soon()) == [UNKNOWN] * 2
    assert get(store, "a", "b") == [FAILED] * 2
    assert put(store, "a", "b") == [False] * 2
    assert store.delete(["a", "b"], soon()) == [False] * 2
    store.clear()
    server.failing = {"confirm_write": status}
    assert put(store, "b") == [False]
    assert store.stats()["lost"] == 1
    server.failing = {}
    assert get(store, "a", "b") == [HIT, MISSING]


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("exists", {}),
        ("exists", {"exists": [True]}),
        ("exists", {"exists": "yes"}),
        ("exists", {"exists": [1, "no"]}),
        ("exists", {"exists": [-1, None]}),
        ("exists", [True, True]),
        ("get_page_indices", {"indices": [40, 0]}),
        ("get_page_indices", {"indices": [-1, 0]}),
        ("get_page_indices", {"indices": [True, 0]}),
        ("get_page_indices", {"indices": [0]}),
        ("reserve_and_allocate_page_indices", {"indices": [[False, -1], [False, 40]]}),
        ("reserve_and_allocate_page_indices", {"indices": [[1, 0], [0, 1]]}),
        ("reserve_and_allocate_page_indices", {"indices": [None, 3]}),
    ],
)
def test_a_server_that_answers_nonsense(mount, opened, server, call, answer):
    store = opened(metadata=server.url)
    server.answers = {call: answer}
    if call == "exists":
        assert store.exists(["a", "b"], soon()) == [UNKNOWN] * 2
    elif call == "get_page_indices":
        assert get(store, "a", "b") == [FAILED] * 2
    else:
        assert put(store, "a", "b") == [False] * 2
    assert not mount.requests


def test_one_page_for_two_keys(opened, server):
    store = opened(metadata=server.url)
    server.answers = {"reserve_and_allocate_page_indices": {"indices": [[False, 3], [False, 3]]}}
    assert put(store, "a", "b") == [True, False]
    assert get(store, "a", "b") == [HIT, MISSING]


def test_a_server_that_hangs(opened, server):
    store = opened(metadata=server.url)
    put(store, "a")
    server.hanging.clear()
    begin = time.monotonic()
    assert store.exists(["a"], soon(0.1)) == [UNKNOWN]
    assert get(store, "a", seconds=0.1) == [FAILED]
    assert put(store, "a", seconds=0.1) == [False]
    assert time.monotonic() - begin < 3
    server.hanging.set()
    assert get(store, "a") == [HIT]


def test_a_server_that_closes_idle_connections(opened, server):
    store = opened(metadata=server.url)
    put(store, "a")
    server.dropping = 1
    assert get(store, "a") == [HIT]
    assert server.dropping == 0


def test_a_server_that_has_lost_everything(opened, server):
    store = opened(metadata=server.url)
    put(store, "a", "b")
    server.restart()
    assert get(store, "a") == [MISSING]
    assert put(store, "b", "a") == [True, True]
    assert get(store, "a", "b") == [HIT, HIT]


def test_no_server(mount, server):
    server.close()
    with pytest.raises(OSError, match="refused"):
        open_store(f"hf3fs://{mount.root}/kv?capacity=1MiB&metadata={server.url}", SIZE)


def test_links_in_the_directory_are_refused(mount, tmp_path):
    directory = mount.root / "kv"
    directory.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("keep me")
    (directory / "pages.bin").symlink_to(victim)
    with pytest.raises(OSError, match="no plain file"):
        open_store(f"hf3fs://{directory}?capacity=1MiB", SIZE)
    assert victim.read_text() == "keep me"
    shutil.rmtree(directory)


def test_the_data_file_has_the_capacity_at_most(mount, opened):
    opened(pages=10)
    assert (Path(mount.root) / "kv" / "pages.bin").stat().st_size == 10 * PAGE
