"""The EIC store on a fake of its client: EIC is a closed service, and its client is not to be had elsewhere."""

import contextlib
import gc
import threading
import time
from types import ModuleType

import pytest
from calls import FAILED, HIT, MISSING, NO, UNKNOWN, YES, Objects, over_clients, soon
from fake_eic import FakeService

from purecache.stores.engines import lanes
from purecache.stores.registry import open_store
from purecache.testing import check_store

SIZE = 4096
OBJECTS = Objects(SIZE)
content, put, get = OBJECTS.content, OBJECTS.put, OBJECTS.get
ENGINE = "purecache.stores.engines.eic"
UNHEARD = {"SUCCESS": 0, "PARTIAL_FAILED": 1, "ABSENT": 17, "TIMEOUT": 4}
"""Status codes of which none sounds like absence."""


@pytest.fixture
def install():
    services = []
    with contextlib.ExitStack() as stack:

        def make(*arguments):
            services.append(FakeService(*arguments))
            stack.enter_context(over_clients(services[-1].modules(), ENGINE))
            return services[-1]

        yield make
    for service in services:
        if service.clients:
            gc.collect()
        assert not service.violations, service.violations
        assert service.clients == 0, "a client outlives its store"


@pytest.fixture
def service(install):
    return install()


@pytest.fixture
def opened(service):
    stores = []

    def make(**options):
        stores.append(open_store("eic://10.0.0.1:12500?instance=id-1&namespace=ns", SIZE, **options))
        return stores[-1]

    yield make
    service.gate.set()
    for store in stores:
        store.close()


@pytest.mark.parametrize("options", [{}, {"batch": 3, "lanes": 1}])
@pytest.mark.parametrize("silent", [False, True])
def test_fake_conformance(service, options, silent):
    service.silent = silent

    def make():
        service.objects.clear()
        return open_store("eic://10.0.0.1:12500", SIZE, instance="id", **options)

    check_store(make, SIZE)
    for call in ("mset", "mget"):
        assert service.largest[call] <= options.get("batch", 32)


@pytest.mark.parametrize("options", [{}, {"missing": "ABSENT"}])
def test_fake_conformance_with_codes_unheard_of(install, options):
    service = install(UNHEARD, "ABSENT")

    def make():
        service.objects.clear()
        return open_store("eic://10.0.0.1:12500", SIZE, instance="id", **options)

    check_store(make, SIZE)


def test_fake_conformance_without_registered_memory(service):
    service.register_answer = False

    def make():
        service.objects.clear()
        return open_store("eic://10.0.0.1:12500", SIZE, instance="id")

    check_store(make, SIZE)


def test_holes_stay_where_they_are(opened):
    OBJECTS.check_holes(opened(batch=7))


def test_a_failure_in_the_middle(service, opened):
    """PARTIAL_FAILED: each key has its own code, in every call."""
    store = opened()
    put(store, "a", "b", "c")
    service.key_codes = {"b": "TIMEOUT", "d": "FAILED"}
    assert store.exists(["a", "b", "c", "none"], soon()) == [YES, UNKNOWN, YES, NO]
    assert get(store, "a", "b", "c", "none") == [HIT, FAILED, HIT, MISSING]
    assert put(store, "c", "d", "e") == [True, False, True]
    assert store.delete(["a", "b", "never"], soon()) == [True, False, True]
    service.key_codes = {}
    assert store.exists(["a", "b", "c", "d", "e"], soon()) == [NO, YES, YES, NO, YES]


def test_failures_with_codes_unheard_of(install):
    """Where no code is known to mean absence, what failed in a call that went through counts as absent."""
    service = install(UNHEARD, "ABSENT")
    for missing, expected in (("", NO), ("ABSENT", UNKNOWN)):
        store = open_store("eic://10.0.0.1:12500", SIZE, instance="id", missing=missing)
        put(store, "a", "b")
        service.key_codes = {"b": "TIMEOUT"}
        assert store.exists(["a", "b", "none"], soon()) == [YES, expected, NO]
        service.key_codes = {}
        store.close()


@pytest.mark.parametrize("status", ["FAILED", "TIMEOUT", "KEY_NOT_EXIST"])
def test_a_call_that_fails_as_a_whole(service, opened, status):
    """The codes of its keys say SUCCESS, which nobody must believe then."""
    store = opened()
    put(store, "a")
    service.status = status
    assert store.exists(["a", "b"], soon()) == [UNKNOWN] * 2
    assert get(store, "a", "b") == [FAILED] * 2
    assert put(store, "a", "b") == [False] * 2
    assert store.delete(["a", "b"], soon()) == [False] * 2
    service.status = None
    assert get(store, "a", "b") == [HIT, MISSING]


def test_a_success_that_fills_nothing(service, opened):
    store = opened(lanes=1)
    put(store, "a", "b")
    assert get(store, "a", "b") == [HIT, HIT]
    service.empty = True
    assert get(store, "a", "b") == [FAILED, FAILED]  # the memory still has what was read before


def test_another_length_or_other_bytes(service, opened):
    store = opened()
    put(store, "a", "b", "c", "d")
    whole = {key: service.objects["ns", key] for key in "abcd"}
    service.objects["ns", "a"] = whole["a"][:-1]
    service.objects["ns", "b"] = whole["b"] + b"x"
    service.objects["ns", "c"] = whole["d"]
    assert get(store, "a", "b", "c", "d") == [FAILED, HIT, FAILED, HIT]  # of "b", all that was put is there
    service.objects["ns", "b"] = b"x" + whole["b"]
    assert get(store, "a", "b", "c", "d") == [FAILED, FAILED, FAILED, HIT]
    assert put(store, "a", "b", "c") == [True] * 3  # heals them
    assert get(store, "a", "b", "c", "d") == [HIT] * 4


def test_objects_of_several_lengths(opened):
    store = opened()
    OBJECTS.check_lengths(store)
    assert get(store, "a", "b", "c") == [FAILED, FAILED, HIT]


def test_a_client_that_raises(service, opened):
    store = opened()
    put(store, "a")
    service.raising = RuntimeError("odd")
    assert store.exists(["a", "b"], soon()) == [UNKNOWN] * 2
    assert get(store, "a", "b") == [FAILED] * 2
    assert put(store, "a", "b") == [False] * 2
    assert store.delete(["a", "b"], soon()) == [False] * 2
    store.clear()
    service.raising = None
    assert get(store, "a", "b") == [HIT, MISSING]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("status", ["SUCCESS", "PARTIAL_FAILED", None])
def test_a_wrong_number_of_codes(service, opened, count, status):
    store = opened()
    put(store, "a", "b")
    code = None if status is None else service.codes[status]
    outcome = type("Outcome", (), {"status_codes": [service.codes.SUCCESS] * count})()
    service.scripted = {"mexist": (code, outcome), "mset": (code, outcome), "mget": (code, None, outcome)}
    believed = status == "SUCCESS" and count == 0
    assert store.exists(["a", "b"], soon()) == [YES if believed else UNKNOWN] * 2
    assert put(store, "c", "d") == [believed] * 2
    assert get(store, "a", "b") == [FAILED] * 2


@pytest.mark.parametrize("answer", [None, (), "no", (1,), (1, 2, 3, 4)])
def test_a_client_that_answers_nonsense(service, opened, answer):
    store = opened()
    service.scripted = dict.fromkeys(("mexist", "mset", "mget", "mdel"), answer)
    assert store.exists(["a"], soon()) == [UNKNOWN]
    assert put(store, "a") == [False]
    assert get(store, "a") == [FAILED]
    assert store.delete(["a"], soon()) == [False]


def test_a_call_waits_for_memory_until_its_deadline(service, opened):
    store = opened(lanes=1)
    put(store, "a")
    service.gate.clear()
    thread = threading.Thread(target=get, args=(store, "a"))
    thread.start()
    while service.calls["mget"] == 0:
        time.sleep(0.001)
    begin = time.monotonic()
    assert get(store, "a", seconds=0.1) == [FAILED]
    assert put(store, "b", seconds=0.1) == [False]
    assert time.monotonic() - begin < 2
    service.gate.set()
    thread.join()
    assert get(store, "a", "b") == [HIT, MISSING]


def test_closing_waits_for_calls(service, opened):
    store = opened(lanes=2)
    put(store, "a")
    service.gate.clear()
    reader = threading.Thread(target=get, args=(store, "a"))
    reader.start()
    while service.calls["mget"] == 0:
        time.sleep(0.001)
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    assert service.clients == 1
    service.gate.set()
    closer.join(20)
    reader.join(20)
    assert not closer.is_alive()


@pytest.mark.parametrize("answer", [False, None, -1, 0])
def test_memory_that_is_not_registered_is_not_said_to_be(service, opened, answer):
    service.register_answer = answer
    store = opened()
    assert store.stats()["registered"] == 0
    assert put(store, "a") == [True]
    assert get(store, "a") == [HIT]


def test_options_reach_the_client(service, opened):
    store = opened(
        transport=2, ttl=60, log_dir="/tmp/eic", log_level=1, flag_file="/etc/eic.flags", interfaces="eth1,eth2"
    )
    assert store.stats()["registered"] == 1
    put(store, "a")
    instance, endpoint, told = service.init
    assert (instance, endpoint) == ("id-1", "10.0.0.1:12500")
    assert told == {
        "transport_type": 2,
        "log_dir": "/tmp/eic",
        "log_level": 1,
        "flag_file": "/etc/eic.flags",
        "multi_net_local_interface_names": "eth1,eth2",
    }
    assert service.ttl == {("ns", "a"): 60}


def test_namespaces_keep_users_apart(service, opened):
    one = opened()
    other = open_store("eic://10.0.0.1:12500?instance=id-1&namespace=other", SIZE)
    put(one, "a", "b")
    assert get(other, "a", "b") == [MISSING, MISSING]
    put(other, "a")
    one.clear()
    assert list(service.objects) == [("other", "a")]
    other.close()


def test_clear_says_what_it_can_not_do(opened, monkeypatch, caplog):
    store = opened()
    monkeypatch.setattr(lanes, "KNOWN", 2)
    put(store, "a", "b", "c")
    assert store.stats()["objects"] == -1
    store.clear()
    assert "could not remove all" in caplog.text
    assert store.exists(["a", "b", "c"], soon()) == [NO, NO, YES]
    assert store.stats()["objects"] == 0


def test_a_client_that_can_not_be_initialized(service):
    service.init_answer = -7
    with pytest.raises(OSError, match="code -7") as caught:
        open_store("eic://10.0.0.1:12500?instance=geheim", SIZE)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("eic://", "write the endpoint"),
        ("eic://geheim@10.0.0.1:1?instance=i", "write the endpoint"),
        ("eic://10.0.0.1:1/path?instance=i", "write the endpoint"),
        ("eic://10.0.0.1:1", "say which instance"),
        ("eic://10.0.0.1:1?instance=i&batch=0", "at least 1"),
        ("eic://10.0.0.1:1?instance=i&ttl=0", "ttl at least 1 or -1"),
        ("eic://10.0.0.1:1?instance=i&missing=GONE", "no status code GONE; there are SUCCESS, PARTIAL_FAILED"),
        ("eic://10.0.0.1:1?instance=i&name=1", "unknown option name; there are instance"),
        ("eic://10.0.0.1:1?instance=i&transport=9", "9 is not a valid TransportType"),
    ],
)
def test_impossible_urls(service, url, error):
    with pytest.raises(ValueError, match=error) as caught:
        open_store(url, SIZE)
    assert "geheim" not in str(caught.value)


def test_without_the_package():
    with over_clients({"eic": None}, ENGINE), pytest.raises(ImportError, match=r"docs/stores/eic\.md says how"):
        open_store("eic://10.0.0.1:1?instance=i", SIZE)


def test_another_package_of_that_name():
    other = {"eic": ModuleType("eic")}
    with over_clients(other, ENGINE), pytest.raises(ImportError, match="is not the client of EIC"):
        open_store("eic://10.0.0.1:1?instance=i", SIZE)
