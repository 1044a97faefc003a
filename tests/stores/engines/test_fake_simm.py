"""The SiMM store on a fake of its client: the real one needs RDMA, and a transport that is not open source."""

import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
from calls import FAILED, HIT, MISSING, NO, UNKNOWN, YES, Objects, over_clients, soon
from fake_simm import GET_FAILED, TIMEOUT, FakeCluster

from purecache.stores.engines import lanes
from purecache.stores.registry import open_store
from purecache.testing import check_store

SIZE = 4096
OBJECTS = Objects(SIZE)
content, put, get = OBJECTS.content, OBJECTS.put, OBJECTS.get
ENGINE = "purecache.stores.engines.simm"


@pytest.fixture
def cluster():
    fake = FakeCluster()
    with over_clients(fake.modules(), ENGINE):
        yield fake
    assert not fake.violations, fake.violations
    assert not fake.regions, "memory is still registered"


@pytest.fixture
def opened(cluster):
    stores = []

    def make(**options):
        stores.append(open_store("simm://10.0.0.1:30001", SIZE, **options))
        return stores[-1]

    yield make
    cluster.gate.set()
    for store in stores:
        store.close()


@pytest.mark.parametrize("options", [{}, {"batch": 3, "lanes": 1}, {"prefix": "team/" * 11, "lanes": 4}])
@pytest.mark.parametrize("has_codes", [True, False])
def test_fake_conformance(cluster, options, has_codes):
    cluster.has_codes = has_codes

    def make():
        cluster.objects.clear()
        return open_store("simm://10.0.0.1:30001", SIZE, **options)

    check_store(make, SIZE)
    for call in ("MPut", "MGet"):
        assert cluster.largest[call] <= options.get("batch", 16)


def test_a_full_cluster_loses_the_oldest(cluster, opened):
    cluster.room = 8
    store = opened()
    keys = [f"k{i}" for i in range(12)]
    assert put(store, *keys) == [True] * 12
    assert store.stats()["objects"] == 12
    assert get(store, *keys) == [MISSING] * 4 + [HIT] * 8
    assert store.stats()["objects"] == 8


def test_holes_stay_where_they_are(opened):
    store = opened(batch=7)
    keys, _ = OBJECTS.check_holes(store)
    assert put(store, *keys) == [True] * 40  # what is there is not put again, or the fake would tell
    assert get(store, *keys) == [HIT] * 40


def test_a_failure_in_the_middle(cluster, opened):
    store = opened()
    put(store, "a", "b", "c")
    cluster.codes = {"b": TIMEOUT, "d": -4006}
    assert store.exists(["a", "b", "c"], soon()) == [YES, UNKNOWN, YES]
    assert get(store, "a", "b", "c", "none") == [HIT, FAILED, HIT, MISSING]
    assert put(store, "d", "e") == [False, True]
    assert store.delete(["a", "b", "never"], soon()) == [True, False, True]
    cluster.codes = {}
    assert store.exists(["a", "b", "c", "d", "e"], soon()) == [NO, YES, YES, NO, YES]


@pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE + 1, GET_FAILED])
def test_a_get_that_tells_another_length(cluster, opened, length):
    store = opened()
    put(store, "a", "b", "c")
    cluster.lengths = {"b": length}
    assert get(store, "a", "b", "c") == [HIT, FAILED, HIT]


def test_a_longer_object_is_not_written_over_its_neighbours(cluster, opened):
    """The client tells the server the length of the region: buffers beside one another in one region are in danger."""
    store = opened()
    put(store, "a", "b", "c")
    cluster.objects["b"] = b"x" * (2 * SIZE)
    assert get(store, "a", "b", "c") == [HIT, FAILED, HIT]
    cluster.objects["b"] = b"x" * SIZE
    buffers = [memoryview(bytearray(100)) for _ in range(3)]
    assert store.get(["a", "b", "c"], buffers, soon()) == [FAILED] * 3
    assert buffers == [bytes(100)] * 3


def test_objects_of_several_lengths(opened):
    store = opened()
    OBJECTS.check_lengths(store)
    assert store.put(["empty"], [memoryview(bytearray())], soon()) == [False]


def test_an_outage_is_no_absence(cluster, opened):
    store = opened()
    put(store, "a")
    cluster.down = True
    assert store.exists(["a", "b"], soon()) == [UNKNOWN] * 2
    assert get(store, "a", "b") == [FAILED] * 2
    assert put(store, "b") == [False]
    assert store.delete(["a", "b"], soon()) == [False] * 2
    cluster.down = False
    assert get(store, "a", "b") == [HIT, MISSING]


def test_a_client_without_codes_takes_an_outage_for_absence(cluster, opened):
    """What the documentation says of its limits: without codes there is no telling."""
    cluster.has_codes = False
    store = opened()
    put(store, "a")
    cluster.down = True
    assert store.exists(["a"], soon()) == [NO]
    assert get(store, "a") == [MISSING]


def test_a_client_that_raises(cluster, opened):
    store = opened()
    put(store, "a")
    cluster.raising = RuntimeError("odd")
    assert store.exists(["a", "b"], soon()) == [UNKNOWN] * 2
    assert get(store, "a", "b") == [FAILED] * 2
    assert put(store, "a", "b") == [False] * 2
    assert store.delete(["a", "b"], soon()) == [False] * 2
    store.clear()
    cluster.raising = None
    assert get(store, "a", "b") == [HIT, MISSING]


@pytest.mark.parametrize("answer", [None, [], [0], [0, 0, 0], [True, "no"], [True, False], "no", [None, 0.5]])
def test_a_client_that_answers_nonsense(opened, monkeypatch, answer):
    store = opened()
    put(store, "a", "b")
    for name in ("mget", "mput", "mexists"):
        monkeypatch.setattr(store._client, name, lambda *_: answer)
    monkeypatch.setattr(store._client._impl, "MExists", lambda *_: answer, raising=False)
    assert get(store, "a", "b") == [FAILED] * 2
    assert put(store, "c", "d") == [False] * 2
    assert store.exists(["a", "b"], soon()) == [UNKNOWN] * 2


@pytest.mark.parametrize("answer", [None, [], [True], [True] * 3, "no", [1, 0], [None, -1]])
def test_a_client_without_codes_that_answers_nonsense(cluster, opened, monkeypatch, answer):
    cluster.has_codes = False
    store = opened()
    put(store, "a", "b")
    monkeypatch.setattr(store._client, "mexists", lambda *_: answer)
    assert store.exists(["a", "b"], soon()) == [UNKNOWN] * 2


def test_a_call_waits_for_memory_until_its_deadline(cluster, opened):
    store = opened(lanes=1)
    put(store, "a")
    cluster.gate.clear()
    before = cluster.calls["MGet"]
    thread = threading.Thread(target=get, args=(store, "a"))
    thread.start()
    while cluster.calls["MGet"] == before:
        time.sleep(0.001)
    begin = time.monotonic()
    assert get(store, "a", seconds=0.1) == [FAILED]
    assert put(store, "b", seconds=0.1) == [False]
    assert time.monotonic() - begin < 2
    cluster.gate.set()
    thread.join()
    assert get(store, "a", "b") == [HIT, MISSING]


def test_steps_end_at_the_deadline(cluster, opened, monkeypatch):
    store = opened(batch=1)
    original = store._client.mput

    def slow(keys, views):
        end = time.monotonic() + 0.06
        while time.monotonic() < end:
            time.sleep(0.01)
        return original(keys, views)

    monkeypatch.setattr(store._client, "mput", slow)
    answers = put(store, *[f"k{i}" for i in range(50)], seconds=0.2)
    assert answers[0] is True
    assert answers[-1] is False
    assert cluster.calls["MPut"] <= 4
    assert store.exists([f"k{i}" for i in range(50)], soon()) == [YES if answer else NO for answer in answers]


def test_a_prefix_keeps_users_apart(cluster, opened):
    one, other = opened(prefix="one/"), opened(prefix="other/")
    put(one, "a", "b")
    assert get(other, "a", "b") == [MISSING, MISSING]
    put(other, "a")
    one.clear()
    assert list(cluster.objects) == ["other/a"]


def test_clear_says_what_it_can_not_do(opened, monkeypatch, caplog):
    store = opened()
    monkeypatch.setattr(lanes, "KNOWN", 2)
    put(store, "a", "b", "c")
    assert store.stats()["objects"] == -1
    store.clear()
    assert "could not remove all" in caplog.text
    assert store.exists(["a", "b", "c"], soon()) == [NO, NO, YES]
    assert store.stats()["objects"] == 0


def test_the_client_is_told_of_its_manager(cluster, opened):
    opened(threads=3, request_ms=500, log_file="/tmp/simm.log")
    assert cluster.flags == {
        "clnt_use_k8s": "false",
        "cm_primary_node_ip": "10.0.0.1",
        "cm_rpc_inter_port": "30001",
        "clnt_thread_pool_size": "3",
        "clnt_sync_req_timeout_ms": "500",
        "clnt_log_file": "/tmp/simm.log",
    }


def test_a_process_has_one_manager(opened):
    opened()
    opened(prefix="x")
    with pytest.raises(ValueError, match="other settings"):
        open_store("simm://10.0.0.2:30001", SIZE)


def test_a_client_without_a_flag(cluster, monkeypatch):
    monkeypatch.setattr(sys.modules["simm.kv"], "set_flag", lambda name, value: name != "cm_rpc_inter_port")
    with pytest.raises(ValueError, match="no flag cm_rpc_inter_port"):
        open_store("simm://10.0.0.1:30001", SIZE)


def test_memory_that_can_not_be_registered(cluster):
    cluster.refuses_memory = True
    with pytest.raises(OSError, match="RDMA"):
        open_store("simm://10.0.0.1:30001", SIZE)


@pytest.mark.parametrize(
    ("url", "size", "error"),
    [
        ("simm://", SIZE, "which host and port"),
        ("simm://host:30001/path", SIZE, "only host and port"),
        ("simm://geheim@host:30001", SIZE, "only host and port"),
        ("simm://host:30001", (64 << 20) - (20 << 10) + 1, "up to 67088384 bytes"),
        (f"simm://host:30001?prefix={'x' * 57}", SIZE, "at most 56 characters"),
        ("simm://host:30001?prefix=a%20b", SIZE, "at most 56 characters"),
        ("simm://host:30001?batch=0", SIZE, "at least 1"),
        ("simm://host:30001?request_ms=0", SIZE, "at least 1"),
        ("simm://host:30001?lane=1", SIZE, "unknown option lane; there are prefix"),
    ],
)
def test_impossible_urls(cluster, url, size, error):
    with pytest.raises(ValueError, match=error) as caught:
        open_store(url, size)
    assert "geheim" not in str(caught.value)


def test_the_largest_object_and_the_longest_key(opened):
    store = opened(prefix="p" * 56)
    assert put(store, "k" * 200) == [True]
    assert get(store, "k" * 200) == [HIT]
    largest = open_store("simm://10.0.0.1:30001", (64 << 20) - (20 << 10), batch=1, lanes=1)
    largest.close()


def test_without_the_package():
    with over_clients({"simm": None}, ENGINE), pytest.raises(ImportError, match=r"docs/stores/simm\.md says how"):
        open_store("simm://10.0.0.1:30001", SIZE)


@pytest.mark.parametrize("with_kv", [False, True])
def test_another_project_of_that_name(with_kv):
    package = ModuleType("simm")
    package.__path__ = []
    other = {"simm": package, **({"simm.kv": ModuleType("simm.kv")} if with_kv else {})}
    error = r"another project|is not the client of SiMM"
    with over_clients(other, ENGINE), pytest.raises(ImportError, match=error):
        open_store("simm://10.0.0.1:30001", SIZE)


def test_fake_threads_that_put_one_key_write_it_once(opened, cluster, monkeypatch):
    """Between asking and writing, no other thread of the process writes the same key."""
    store, both = opened(), threading.Barrier(2)
    ask = store._ask

    def asks(keys):
        found = ask(keys)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # for another thread that has asked, and writes next
        return found

    monkeypatch.setattr(store, "_ask", asks)
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda _: store.put(["k"], [memoryview(bytes(SIZE))], time.monotonic() + 20), range(2))
        assert list(answers) == [[True]] * 2
