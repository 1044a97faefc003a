"""The guard around stores that do what stores do, and the circuit breaker against a model."""

import itertools
import subprocess
import sys
import textwrap
import threading
from collections import Counter

import pytest
from faulty import FaultyStore, Gate, answering, doing_then, raising
from hypothesis import example, given
from hypothesis import strategies as st

from purecache.stores import Fetch, Presence, envelope
from purecache.stores.breaker import Breaker
from purecache.stores.guard import SLACK, Done, Guard, Kind, Request

PAGE = 200
FAILURE = {Kind.EXISTS: Presence.UNKNOWN, Kind.GET: Fetch.FAILED, Kind.PUT: False, Kind.DELETE: False}
SUCCESS = {Kind.EXISTS: Presence.YES, Kind.GET: Fetch.HIT, Kind.PUT: True, Kind.DELETE: True}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Caller:
    """A guard, with the part of its user that tests need: tickets, buffers, and waiting for answers."""

    def __init__(self, store, **settings):
        self.clock = Clock()
        self.store = store
        self.settings = {"workers": 2, "queue": 64, "timeout": 5.0} | settings
        self.guard = Guard(store, clock=self.clock, **self.settings)
        self.tickets = itertools.count()

    def request(self, kind, keys, fill=None):
        """A request; `fill` gives the bytes of each page."""
        buffers = []
        if kind in (Kind.GET, Kind.PUT):
            for key in keys:
                buffer = bytearray(PAGE + envelope.TRAILER)
                buffer[:PAGE] = (fill or page)(key) if kind is Kind.PUT else b"?" * PAGE
                buffers.append(memoryview(buffer))
        return Request(kind, next(self.tickets), list(keys), buffers)

    def start(self, kind, keys, fill=None):
        """The request, which must be accepted."""
        request = self.request(kind, keys, fill)
        assert self.guard.start(request)
        return request

    def reports(self, number=1):
        """The next `number` reports, waiting for completions."""
        done = self.guard.poll()
        while len(done) < number:
            assert self.guard.wait(30), f"no more than {done}"
            done += self.guard.poll()
        assert len(done) == number
        return done

    def ask(self, kind, keys, fill=None):
        """The answers to a request that ends."""
        request = self.start(kind, keys, fill)
        (done,) = self.reports()
        assert (done.number, done.kind, done.finished) == (request.number, kind, True)
        return done.answers

    def pass_deadline(self):
        self.clock.now += self.settings["timeout"] + SLACK + 0.01


def page(key):
    return (key.encode() * PAGE)[:PAGE]


@pytest.fixture
def store():
    return FaultyStore()


@pytest.fixture
def caller(store):
    caller = Caller(store)
    yield caller
    caller.guard.close()


def stuck(caller, kind=Kind.GET, keys=("a",)):
    """A started request whose call is in the store and stays there, and the gate that lets it go on."""
    gate = Gate()
    caller.store.script(kind.value, gate)
    request = caller.start(kind, keys)
    assert gate.entered.wait(30)
    return request, gate


def test_round_trip(caller):
    keys = ["a", "b", "c"]
    assert caller.ask(Kind.EXISTS, keys) == [Presence.NO] * 3
    assert caller.ask(Kind.PUT, ["a", "c"]) == [True, True]
    assert caller.ask(Kind.EXISTS, keys) == [Presence.YES, Presence.NO, Presence.YES]
    request = caller.start(Kind.GET, keys)
    assert caller.reports() == [Done(request.number, Kind.GET, [Fetch.HIT, Fetch.MISSING, Fetch.HIT], True)]
    assert [bytes(buffer[:PAGE]) for buffer in request.buffers] == [page("a"), b"?" * PAGE, page("c")]
    assert caller.ask(Kind.DELETE, ["a", "b"]) == [True, True]
    assert caller.ask(Kind.GET, ["a"]) == [Fetch.MISSING]
    stats = {name: number for name, number in caller.guard.stats().items() if number}
    assert stats == {
        **{"exists_calls": 2, "exists_pages": 6, "exists_hits": 2, "exists_missing": 4},
        **{"put_calls": 1, "put_pages": 2, "put_hits": 2, "put_bytes": 2 * PAGE},
        **{"get_calls": 2, "get_pages": 4, "get_hits": 2, "get_missing": 2, "get_bytes": 2 * PAGE},
        **{"delete_calls": 1, "delete_pages": 2, "delete_hits": 2},
    }


def test_the_store_gets_the_deadline(caller):
    begin = caller.clock.now
    for kind in Kind:
        caller.ask(kind, ["a"])
    assert [call[2] for call in caller.store.calls] == [begin + 5.0] * 4


def test_empty_requests_are_answered(caller):
    assert [caller.ask(kind, []) for kind in Kind] == [[]] * 4


class Panic(BaseException):
    """As the panics of foreign code, which are no Exception."""


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


ERRORS = [
    OSError(28, "disk full"),
    KeyError("a"),
    MemoryError(),
    StopIteration(),
    SystemExit(1),
    Panic(),
    Unspeakable(),
]


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_is_an_answer(caller, kind, error):
    caller.ask(Kind.PUT, ["a", "b"])
    caller.store.script(kind.value, raising(error))
    assert caller.ask(kind, ["a", "b"]) == [FAILURE[kind]] * 2
    assert caller.guard.stats()[f"{kind.value}_exceptions"] == 1
    assert type(error).__name__ in caller.guard.last_error
    assert caller.ask(kind, ["a", "b"]) == [SUCCESS[kind]] * 2


class Hostile(list):
    def __len__(self):
        raise OSError


JUNK = {
    "None": None,
    "nothing": [],
    "too few": [Fetch.HIT],
    "too many": [Fetch.HIT] * 3,
    "a generator": (Fetch.HIT for _ in range(2)),
    "a dict": {0: True, 1: True},
    "text": "ab",
    "a number": 2,
    "hostile": Hostile(),
    "None each": [None, None],
    "negative": [-1, -200],
    "ones": [1, 1],
    "text each": ["yes", "no"],
    "floats": [1.0, 1.0],
    "of others": [[True], object()],
    "beyond": [7, 10**30],
}
NEARLY = {Kind.EXISTS: [True, Fetch.HIT], Kind.GET: [True, Presence.YES], Kind.PUT: [1, Presence.YES], Kind.DELETE: [1]}


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("junk", [*JUNK.values(), NEARLY], ids=[*JUNK, "nearly"])
def test_junk_is_no_success(caller, kind, junk):
    caller.ask(Kind.PUT, ["a", "b"])
    caller.store.script(kind.value, answering(NEARLY[kind] if junk is NEARLY else junk))
    assert caller.ask(kind, ["a", "b"]) == [FAILURE[kind]] * 2
    assert caller.guard.last_error


@pytest.mark.parametrize("kind", Kind)
def test_good_answers_beside_junk_count(caller, kind):
    caller.ask(Kind.PUT, ["a", "b", "c"])
    caller.store.script(kind.value, doing_then(lambda answers: (answers[0], -1, answers[2])))
    assert caller.ask(kind, ["a", "b", "c"]) == [SUCCESS[kind], FAILURE[kind], SUCCESS[kind]]


# What is corrupt.


def test_every_flipped_bit_is_caught(caller):
    caller.ask(Kind.PUT, ["a"])
    good, bits = caller.store.objects["a"], 8 * (PAGE + envelope.TRAILER)
    for bit in range(bits):
        caller.store.objects["a"] = good
        caller.store.flip("a", bit)
        assert caller.ask(Kind.GET, ["a"]) == [Fetch.FAILED], f"bit {bit}"
        assert not caller.store.objects, "a corrupt object is deleted"
    stats = caller.guard.stats()
    assert (stats["get_corrupt"], stats["get_failed"], stats["get_hits"], stats["get_bytes"]) == (bits, bits, 0, 0)
    caller.store.objects["a"] = good
    assert caller.ask(Kind.GET, ["a"]) == [Fetch.HIT], "the object itself was good"


def test_a_hit_that_filled_part_of_the_buffer_is_caught(caller):
    """The buffer holds the very page, from a use before: what the store didn't write doesn't count."""
    caller.ask(Kind.PUT, ["a"])
    good = caller.store.objects["a"]
    for length in range(len(good)):
        request = caller.request(Kind.GET, ["a"])
        request.buffers[0][:] = good

        def shorter(right, view=request.buffers[0], length=length):
            view[:length] = good[:length]
            return [Fetch.HIT]

        caller.store.script("get", shorter)
        assert caller.guard.start(request)
        (done,) = caller.reports()
        assert done.answers == [Fetch.FAILED], f"{length} bytes"


@pytest.mark.parametrize("cut", [1, 64, PAGE, PAGE + 63])
def test_a_truncated_object_that_is_padded_is_caught(caller, cut):
    caller.ask(Kind.PUT, ["a"])
    caller.store.objects["a"] = caller.store.objects["a"][:-cut] + bytes(cut)
    assert caller.ask(Kind.GET, ["a"]) == [Fetch.FAILED]
    assert caller.guard.stats()["get_corrupt"] == 1


def test_swapped_objects_are_caught(caller):
    caller.ask(Kind.PUT, ["a", "b", "c"])
    objects = caller.store.objects
    objects["a"], objects["b"] = objects["b"], objects["a"]
    request = caller.start(Kind.GET, ["c", "a", "b", "c"])
    assert caller.reports()[0].answers == [Fetch.HIT, Fetch.FAILED, Fetch.FAILED, Fetch.HIT]
    assert bytes(request.buffers[3][:PAGE]) == page("c")
    assert set(objects) == {"c"}


def test_pages_of_another_format_are_caught(caller, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(envelope, "VERSION", envelope.VERSION + 1)
        caller.ask(Kind.PUT, ["a"])
        assert caller.ask(Kind.GET, ["a"]) == [Fetch.HIT]
    assert caller.ask(Kind.GET, ["a"]) == [Fetch.FAILED]
    assert caller.guard.stats()["get_corrupt"] == 1
    assert caller.ask(Kind.GET, ["a"]) == [Fetch.MISSING]


def test_a_corrupt_page_is_deleted_before_it_is_reported(caller):
    caller.ask(Kind.PUT, ["a", "b"])
    caller.store.flip("a", 0)
    gate = Gate()
    caller.store.script("delete", gate)
    caller.start(Kind.GET, ["a", "b"])
    assert gate.entered.wait(30)
    assert caller.guard.poll() == []
    gate.opened.set()
    assert caller.reports()[0].answers == [Fetch.FAILED, Fetch.HIT]
    assert caller.store.calls[-1][:2] == ("delete", ("a",))


def test_a_corrupt_page_that_cannot_be_deleted_is_still_reported(caller):
    caller.ask(Kind.PUT, ["a", "b"])
    caller.store.flip("b", 999)
    caller.store.script("delete", raising(OSError("read only")))
    assert caller.ask(Kind.GET, ["a", "b"]) == [Fetch.HIT, Fetch.FAILED]
    assert (caller.guard.stats()["get_corrupt"], caller.guard.stats()["get_exceptions"]) == (1, 1)


# What is late.


@pytest.mark.parametrize("kind", Kind)
def test_a_late_call_is_reported_twice(caller, kind):
    caller.ask(Kind.PUT, ["a", "b"])
    request, gate = stuck(caller, kind, ["a", "b"])
    caller.clock.now += 5.0 + SLACK / 2
    assert caller.guard.poll() == []
    caller.clock.now += SLACK
    assert caller.guard.poll() == [Done(request.number, kind, [FAILURE[kind]] * 2, finished=False)]
    assert caller.guard.poll() == []
    again = Request(kind, request.number, request.keys, request.buffers)
    with pytest.raises(ValueError, match="still under way"):
        caller.guard.start(again)
    gate.opened.set()
    # The store has done it; but for the caller it has failed already.
    assert caller.reports() == [Done(request.number, kind, [FAILURE[kind]] * 2, finished=True)]
    assert caller.guard.start(again)
    assert caller.reports()[0].answers == [SUCCESS[kind]] * 2
    stats = caller.guard.stats()
    assert (stats[f"{kind.value}_late"], stats[f"{kind.value}_failed"], stats["stuck_threads"]) == (1, 2, 0)


def test_a_call_that_returns_before_anyone_looked_is_not_late(caller):
    caller.ask(Kind.PUT, ["a"])
    _, gate = stuck(caller)
    gate.opened.set()
    assert caller.guard.wait(30)
    caller.pass_deadline()
    (done,) = caller.guard.poll()
    assert (done.answers, done.finished) == ([Fetch.HIT], True)


def test_what_waits_too_long_never_begins(store):
    caller = Caller(store, workers=1)
    _, gate = stuck(caller)
    waiting = caller.start(Kind.PUT, ["b"])
    caller.pass_deadline()
    done = {each.number: each for each in caller.guard.poll()}
    assert done[waiting.number] == Done(waiting.number, Kind.PUT, [False], finished=True)
    assert len(done) == 2
    gate.opened.set()
    caller.reports()
    caller.guard.close()
    assert [call[0] for call in store.calls] == ["get"]
    assert caller.guard.stats()["put_late"] == 1


def workers_of(guard):
    return [
        thread
        for thread in threading.enumerate()
        if getattr(thread, "_target", None) is not None and getattr(thread._target, "__self__", None) is guard
    ]


def test_stuck_threads_are_replaced_up_to_a_bound(store):
    caller = Caller(store, workers=2, breaker=Breaker(100, 1.0))
    store.put(["a"], [memoryview(b"")], 0)
    gates = []
    for turn in range(4):
        gates.append(stuck(caller)[1])
        caller.pass_deadline()
        assert [done.finished for done in caller.guard.poll()] == [False]
        assert caller.guard.stats()["stuck_threads"] == turn + 1
        if turn < 3:  # the others are served as ever
            assert caller.ask(Kind.EXISTS, ["a"]) == [Presence.YES]
    assert len(workers_of(caller.guard)) == 6
    assert not caller.guard.start(caller.request(Kind.EXISTS, ["a"]))
    gates[0].opened.set()
    assert [done.finished for done in caller.reports()] == [True]
    assert caller.ask(Kind.EXISTS, ["a"]) == [Presence.YES]
    for gate in gates:
        gate.opened.set()
    assert all(done.finished for done in caller.reports(3))
    assert caller.guard.stats()["stuck_threads"] == 0
    for gate in gates:
        gate.thread.join(30)
    assert len(workers_of(caller.guard)) == 2
    assert caller.guard.close()
    for thread in workers_of(caller.guard):
        thread.join(30)
    assert not workers_of(caller.guard)


def test_what_was_accepted_before_cannot_use_up_threads_either(store):
    caller = Caller(store, workers=1, breaker=Breaker(100, 1.0))
    gates = [Gate() for _ in range(4)]
    store.script("get", *gates)
    begin = caller.clock.now
    # A call is started before the one that has the thread becomes late; after two late ones nothing is accepted.
    for started, late, gate in [([0, 4], 5.5, gates[0]), ([7, 8], 9.5, gates[1]), ([], 12.5, gates[2])]:
        for seconds in started:
            caller.clock.now = begin + seconds
            last = caller.start(Kind.GET, ["a"])
        assert gate.entered.wait(30)
        caller.clock.now = begin + late
        assert [done.finished for done in caller.guard.poll()] == [False]
    assert caller.guard.stats()["stuck_threads"] == len(workers_of(caller.guard)) == 3
    caller.pass_deadline()
    assert caller.guard.poll() == [Done(last.number, Kind.GET, [Fetch.FAILED], finished=True)]
    assert not gates[3].entered.is_set()
    for gate in gates:
        gate.opened.set()
    caller.reports(3)
    caller.guard.close()


def test_without_new_threads_the_rest_goes_on(store, monkeypatch):
    caller = Caller(store, workers=2)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    _, gate = stuck(caller)
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        caller.pass_deadline()
        assert [done.finished for done in caller.guard.poll()] == [False]
        assert caller.ask(Kind.EXISTS, ["a"]) == [Presence.NO]
        assert len(workers_of(caller.guard)) == 2
    caller.guard.poll()
    assert len(workers_of(caller.guard)) == 3
    gate.opened.set()
    caller.reports()
    caller.guard.close()


# Bounds.


def test_nothing_waits_while_the_store_does(store):
    """All of this happens in the thread that would open the gates: if anything waited, the test would hang."""
    caller = Caller(store, workers=2, queue=10)
    gates = [Gate() for _ in range(2)]
    store.script("put", *gates)
    requests = [caller.request(Kind.PUT, [f"key{index}"]) for index in range(15)]
    assert [caller.guard.start(request) for request in requests] == [True] * 10 + [False] * 5
    assert caller.guard.poll() == []
    assert caller.guard.stats()["put_refused"] == 5
    assert caller.guard.stats()["unreported"] == 10
    for gate in gates:
        gate.opened.set()
    assert sorted(done.number for done in caller.reports(10)) == list(range(10))
    assert caller.guard.start(requests[10])
    caller.reports()
    assert sorted(store.objects) == sorted(f"key{index}" for index in range(11))
    caller.guard.close()


def test_the_bound_holds_until_poll(store):
    caller = Caller(store, queue=1)
    caller.start(Kind.EXISTS, ["a"])
    assert caller.guard.wait(30)
    assert not caller.guard.start(caller.request(Kind.EXISTS, ["a"]))
    caller.guard.poll()
    assert caller.ask(Kind.EXISTS, ["a"]) == [Presence.NO]
    caller.guard.close()


def test_late_calls_make_room(store):
    caller = Caller(store, queue=1)
    _, gate = stuck(caller)
    assert not caller.guard.start(caller.request(Kind.EXISTS, ["a"]))
    caller.pass_deadline()
    assert len(caller.guard.poll()) == 1
    assert caller.ask(Kind.EXISTS, ["a"]) == [Presence.NO]
    gate.opened.set()
    caller.reports()
    caller.guard.close()


def buffers(*sizes):
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.mark.parametrize(
    "request_",
    [
        Request(Kind.GET, 1, ["a", "b"], buffers(100)),
        Request(Kind.PUT, 1, ["a"], []),
        Request(Kind.EXISTS, 1, ["a"], buffers(100)),
        Request(Kind.PUT, 1, ["a"], buffers(64)),
        Request(Kind.GET, 1, ["a"], [memoryview(bytes(100))]),
        Request(Kind.GET, 1, ["a"], [memoryview(bytearray(200))[::2]]),
        Request(Kind.GET, 1, ["a"], [memoryview(bytearray(200)).cast("I")]),
    ],
    ids=["too few", "none", "too many", "small", "read-only", "in pieces", "not bytes"],
)
def test_wrong_requests_raise(caller, request_):
    with pytest.raises(ValueError, match="buffer"):
        caller.guard.start(request_)
    assert caller.guard.stats()["unreported"] == 0


@pytest.mark.parametrize("settings", [{"workers": 0}, {"queue": 0}, {"timeout": 0}])
def test_wrong_settings_raise(store, settings):
    with pytest.raises(ValueError, match="need workers"):
        Guard(store, **settings)


# The breaker.


def guarded(store, **settings):
    caller = Caller(store, **settings)
    caller.guard.breaker = Breaker(3, 10.0, caller.clock)
    return caller


@pytest.mark.parametrize("kind", Kind)
def test_the_breaker_opens_and_closes_by_itself(store, kind):
    caller = guarded(store)
    store.script(kind.value, *[raising(OSError())] * 4)
    for _ in range(3):
        assert caller.ask(kind, ["a"]) == [FAILURE[kind]]
    for other in Kind:
        assert not caller.guard.start(caller.request(other, ["a"]))
    caller.clock.now += 9.9
    assert not caller.guard.start(caller.request(kind, ["a"]))
    caller.clock.now += 0.2
    assert caller.ask(kind, ["a"]) == [FAILURE[kind]]  # the probe
    assert not caller.guard.start(caller.request(kind, ["a"]))
    caller.clock.now += 10
    _, gate = stuck(caller, Kind.EXISTS)  # the next probe
    assert not caller.guard.start(caller.request(kind, ["a"]))
    gate.opened.set()
    caller.reports()
    assert len({caller.start(Kind.EXISTS, ["a"]).number for _ in range(5)}) == 5
    caller.reports(5)
    stats = caller.guard.stats()
    assert (stats["breaker_openings"], stats["breaker_open"]) == (2, 0)
    assert sum(stats[f"{each.value}_refused"] for each in Kind) == 4 + 1 + 1 + 1
    caller.guard.close()


def test_answers_that_say_nothing_count_as_failed_calls(store):
    caller = guarded(store)
    store.script("exists", answering([Presence.UNKNOWN] * 2))
    store.script("get", answering([Fetch.FAILED] * 2))
    store.script("put", answering([-200, None]))
    for kind in (Kind.EXISTS, Kind.GET, Kind.PUT):
        assert not caller.guard.breaker.is_open
        caller.ask(kind, ["a", "b"])
    assert caller.guard.breaker.is_open
    caller.guard.close()


def test_misses_refused_writes_and_corrupt_pages_leave_the_breaker_closed(store):
    caller = guarded(store)
    store.script("put", *[answering([False])] * 9)
    for _ in range(9):
        assert caller.ask(Kind.PUT, ["b"]) == [False]
        assert caller.ask(Kind.GET, ["b"]) == [Fetch.MISSING]
        assert caller.ask(Kind.EXISTS, ["b"]) == [Presence.NO]
    for _ in range(9):
        caller.ask(Kind.PUT, ["a"])
        store.flip("a", 5)
        assert caller.ask(Kind.GET, ["a"]) == [Fetch.FAILED]
    assert caller.guard.stats()["breaker_openings"] == 0
    caller.guard.close()


def test_a_refused_write_is_no_proof_either_way(store):
    caller = guarded(store)
    store.script("get", *[raising(OSError())] * 3)
    store.script("put", answering([False]), answering([False]))
    caller.ask(Kind.GET, ["a"])
    caller.ask(Kind.GET, ["a"])
    caller.ask(Kind.PUT, ["a"])
    caller.ask(Kind.GET, ["a"])
    assert caller.guard.breaker.is_open
    caller.clock.now += 10
    assert caller.ask(Kind.PUT, ["a"]) == [False]
    assert caller.guard.breaker.is_open
    assert caller.ask(Kind.EXISTS, ["a"]) == [Presence.NO]  # is the probe now
    assert not caller.guard.breaker.is_open
    caller.guard.close()


def test_an_opening_breaker_answers_what_waits(store):
    caller = guarded(store, workers=1)
    gate = Gate()
    store.script("get", raising(OSError()), raising(OSError()), lambda right: gate(raising(OSError())))
    for _ in range(6):
        caller.start(Kind.GET, ["a"])
    assert gate.entered.wait(30)
    gate.opened.set()
    assert [done.answers for done in caller.reports(6)] == [[Fetch.FAILED]] * 6
    assert len(store.calls) == 3
    assert caller.guard.stats()["get_dropped"] == 3
    caller.guard.close()


def test_late_calls_open_the_breaker_and_a_late_success_does_not_close_it(store):
    caller = guarded(store, workers=3)
    gates = [stuck(caller, Kind.EXISTS)[1] for _ in range(3)]
    caller.pass_deadline()
    assert [done.finished for done in caller.guard.poll()] == [False] * 3
    assert caller.guard.breaker.is_open
    for gate in gates:
        gate.opened.set()
    caller.reports(3)
    assert caller.guard.breaker.is_open
    caller.guard.close()


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["call", "success", "failure", "nothing"]), st.integers(0, 3)), max_size=60),
)
@example(1, [("failure", 0), ("call", 3), ("failure", 0), ("call", 0), ("call", 3)])
def test_the_breaker_against_a_model(limit, steps):
    """One step at a time, of calls that end at once or stay under way (the probe too)."""
    clock = Clock()
    breaker, row, opened, probe, openings = Breaker(limit, 3.0, clock), 0, None, False, 0
    for step, seconds in steps:
        clock.now += seconds
        if step == "call":
            wanted = opened is None or (clock.now >= opened + 3 and not probe)
            assert breaker.allows() is wanted
            probe = probe or (wanted and opened is not None)
        elif step == "success":
            breaker.succeeded()
            row, opened, probe = 0, None, False
        elif step == "failure":
            breaker.failed()
            row += 1
            if probe or (opened is None and row >= limit):
                opened, probe, openings = clock.now, False, openings + 1
        else:
            breaker.abandoned()
            probe = False
        assert breaker.is_open is (opened is not None)
        assert breaker.openings == openings


@pytest.mark.parametrize("settings", [(0, 1.0), (1, -1.0)])
def test_a_breaker_needs_sense(settings):
    with pytest.raises(ValueError, match="breaker needs"):
        Breaker(*settings)


# The end.


def test_close_closes_the_store_once(caller):
    caller.ask(Kind.PUT, ["a"])
    assert caller.guard.close()
    assert caller.store.closed
    assert caller.guard.close()
    assert not caller.guard.start(caller.request(Kind.EXISTS, ["a"]))
    assert caller.guard.poll() == []


def test_close_leaves_a_store_in_use_open(store):
    caller = Caller(store, workers=1)
    inside, gate = stuck(caller, Kind.PUT)
    waiting = caller.start(Kind.GET, ["b"])
    assert not caller.guard.close(0)
    assert caller.guard.poll() == [Done(waiting.number, Kind.GET, [Fetch.FAILED], finished=True)]
    assert not store.closed
    caller.pass_deadline()
    assert caller.guard.poll() == [Done(inside.number, Kind.PUT, [False], finished=False)]
    gate.opened.set()
    assert caller.guard.close(30)
    assert store.closed
    assert caller.guard.poll() == [Done(inside.number, Kind.PUT, [False], finished=True)]
    assert caller.guard.stats()["get_dropped"] == 1


def test_a_store_that_cannot_close_does_not_matter(store, monkeypatch):
    caller = Caller(store)
    monkeypatch.setattr(store, "close", lambda: raising(Panic("no"))(None))
    assert caller.guard.close()
    assert caller.guard.last_error == "Panic: no"


def test_a_hung_store_does_not_keep_the_process():
    program = """
        import sys, threading
        sys.path.insert(0, sys.argv[1])
        from faulty import FaultyStore, Gate
        from purecache.stores.guard import Guard, Kind, Request
        store, gate = FaultyStore(), Gate()
        store.script("exists", gate)
        guard = Guard(store)
        assert guard.start(Request(Kind.EXISTS, 1, ["a"]))
        assert gate.entered.wait(30)
        assert not guard.close(0.01)
        print("left", flush=True)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), __file__.rpartition("/")[0]],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (ran.stdout, ran.returncode) == ("left\n", 0), ran.stderr


# All together.

FAULTS = {
    "right": None,
    "raise": raising(OSError()),
    "panic": raising(Panic()),
    "none": answering(None),
    "short": doing_then(lambda answers: answers[:-1]),
    "junk": doing_then(lambda answers: [-1] * len(answers)),
    "liar": doing_then(lambda answers: [SUCCESS[kind_of(answer)] for answer in answers]),
    "hang": "hang",
}


def kind_of(answer):
    return Kind.EXISTS if type(answer) is Presence else Kind.GET if type(answer) is Fetch else Kind.PUT


STEPS = st.one_of(
    st.tuples(
        st.sampled_from(Kind), st.lists(st.sampled_from("abcd"), max_size=4), st.sampled_from([*FAULTS, "right"])
    ),
    st.sampled_from(["poll", "time", "open", "flip", "swap"]),
)


@given(st.lists(STEPS, max_size=30), st.integers(1, 3), st.integers(1, 6))
def test_every_request_gets_one_end_and_no_hit_is_wrong(steps, workers, queue):
    """Whatever the store does: as many answers as keys, one end, at most one report of lateness before, true counts."""
    store = FaultyStore()
    caller = Caller(store, workers=workers, queue=queue)
    accepted, refused, reports, gates = {}, 0, [], []

    def poll():
        for done in caller.guard.poll():
            reports.append(done)
            request = accepted[done.number]
            assert len(done.answers) == len(request.keys)
            for key, buffer, answer in zip(request.keys, request.buffers, done.answers, strict=False):
                assert answer is not Fetch.HIT or bytes(buffer[:PAGE]) == page(key)

    for step in steps:
        match step:
            case (kind, keys, fault):
                if fault == "hang":
                    gates.append(Gate())
                    store.script(kind.value, gates[-1])
                elif FAULTS[fault] is not None:
                    store.script(kind.value, FAULTS[fault])
                request = caller.request(kind, keys)
                if caller.guard.start(request):
                    accepted[request.number] = request
                else:
                    refused += 1
            case "poll":
                poll()
            case "time":
                caller.pass_deadline()
                poll()
            case "open":
                for gate in gates:
                    gate.opened.set()
            case "flip":
                for key in [*store.objects][:1]:
                    store.flip(key, 77)
            case "swap":
                for first, second in [[*store.objects][:2]] if len(store.objects) > 1 else []:
                    objects = store.objects
                    objects[first], objects[second] = objects[second], objects[first]
    for gate in gates:
        gate.opened.set()
    assert caller.guard.close(30)
    poll()
    ends = Counter(done.number for done in reports if done.finished)
    assert ends == Counter(accepted.keys())
    late = Counter(done.number for done in reports if not done.finished)
    assert all(times == 1 for times in late.values())
    stats = caller.guard.stats()
    for kind in Kind:
        numbers = {name: stats[f"{kind.value}_{name}"] for name in ("calls", "pages", "hits", "missing", "failed")}
        own = [request for request in accepted.values() if request.kind is kind]
        assert numbers["calls"] == len(own)
        assert numbers["pages"] == sum(len(request.keys) for request in own)
        assert numbers["hits"] + numbers["missing"] + numbers["failed"] == numbers["pages"]
    assert sum(stats[f"{kind.value}_refused"] for kind in Kind) == refused
    assert stats["unreported"] == stats["stuck_threads"] == 0
