"""Planes that agree: whatever ends when and how in each process, all of them report the same."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_samples import backup, load_back, simple
from test_planes import CONFIG, Holding, planes

from purecache import PrefixCache
from purecache.effects import AgreedPlane, DivergedError, TransferKind, across_processes, agreed, completion_of
from purecache.state import CacheConfig
from purecache.storage import StorageTier
from purecache.stores.memory import MemoryStore

BACKUP, LOAD_BACK = TransferKind.BACKUP, TransferKind.LOAD_BACK


class Exchange:
    """Lets threads stand for processes: `agrees[k]` takes the vector of process k."""

    def __init__(self, number=2):
        self.barrier = threading.Barrier(number, timeout=20)
        self.threads = [ThreadPoolExecutor(1) for _ in range(number)]
        self.vectors = [np.zeros(0)] * number
        self.sizes = set()
        self.calls = [0] * number
        self.agrees = [lambda vector, process=process: self.call(process, vector) for process in range(number)]

    def call(self, process, vector):
        assert vector.dtype == np.int32
        self.vectors[process] = vector.copy()
        self.calls[process] += 1
        assert self.calls[process] < 5000, "a drain that never ends"
        self.sizes.add(vector.shape)
        self.barrier.wait()
        answer = np.minimum.reduce(self.vectors)
        self.barrier.wait()
        return answer


def together(exchange, *functions):
    """Run one function per process, and return what each returned or raised."""
    running = [thread.submit(function) for thread, function in zip(exchange.threads, functions, strict=True)]
    return [each.exception() or each.result() for each in running]


class Scripted:
    """A plane of transfers with a script: `ends[operation]` is the poll at which one ends and its ok.

    With `fetches`, load backs are staged: `fetches[operation]` is the poll at which the fetch ends, and whether well.
    """

    commit_alone = True

    def __init__(self, ends, fetches=None):
        self.ends, self.fetches, self.now = ends, fetches, 0
        self.flights = {kind: deque() for kind in (BACKUP, LOAD_BACK)}
        self.failed, self.order = set(), []

    def start(self, transfer):
        self.flights[transfer.kind].append(transfer)

    def ended(self, transfer):
        return not self.waits(transfer) and self.now >= self.ends[transfer.operation][0]

    def waits(self, transfer):
        committed = transfer.operation in {operation for operation, _ in self.order}
        return self.fetches is not None and transfer.kind == LOAD_BACK and not committed

    def fetched(self):
        waiting = [transfer.operation for transfer in self.flights[LOAD_BACK] if self.waits(transfer)]
        return {(op, 0): self.fetches[op][1] for op in waiting if self.fetches[op][0] <= self.now}

    def commit(self, operation, generation, ok):
        assert (operation, generation) in self.fetched(), "committed before it was fetched"
        self.order.append((operation, ok))
        if not ok:
            self.failed.add(operation)

    def poll(self):
        self.now += 1
        reported = []
        for flights in self.flights.values():
            while flights and self.ended(flights[0]):
                transfer = flights.popleft()
                failed = transfer.operation in self.failed
                ok = np.array(self.ends[transfer.operation][1], bool) & (not failed)
                reported.append(completion_of(transfer, ok))
        return sorted(reported, key=lambda done: done.operation)

    def drain(self):
        self.now = max(self.now, 1000)
        return self.poll()

    def counters(self):
        return {}

    def reset(self):
        for flights in self.flights.values():
            flights.clear()


def transfer_of(operation, kind, pages):
    make = backup if kind == BACKUP else load_back
    return make(list(range(pages)), list(range(pages)), operation=operation)


@st.composite
def histories(draw):
    """Per poll the transfers that are started before it, and per process when and how each of them ends."""
    kinds = draw(st.lists(st.sampled_from([BACKUP, LOAD_BACK]), max_size=9))
    sizes = [draw(st.integers(0, 4)) for _ in kinds]
    starts = sorted(draw(st.integers(0, 4)) for _ in kinds)
    processes = draw(st.sampled_from([2, 2, 2, 3]))
    fate = [
        [(draw(st.integers(0, 9)), draw(st.lists(st.booleans(), min_size=n, max_size=n))) for n in sizes]
        for _ in range(processes)
    ]
    fetches = [[(draw(st.integers(0, 9)), draw(st.booleans())) for _ in sizes] for _ in range(processes)]
    return kinds, sizes, starts, fate, fetches, draw(st.integers(1, 4)), draw(st.booleans())


def live(plane, kinds, sizes, starts, polls):
    """What a process does; returns what each poll reported, and the drain at the end."""
    reported = []
    for now in range(polls):
        for operation, begin in enumerate(starts):
            if begin == now:
                plane.start(transfer_of(operation, kinds[operation], sizes[operation]))
        reported.append([(done.operation, done.ok.tolist(), plane.plane.now) for done in plane.poll()])
    return [*reported, [(done.operation, done.ok.tolist(), 1000) for done in plane.drain()], plane.in_flight]


@given(histories())
def test_all_processes_report_the_same_whatever_ends_when(history):
    kinds, sizes, starts, fate, fetches, window, staged = history
    exchange, polls = Exchange(len(fate)), 10
    inner = [Scripted(ends, fetch) if staged else Scripted(ends) for ends, fetch in zip(fate, fetches, strict=True)]
    made = [AgreedPlane(plane, agree, window) for plane, agree in zip(inner, exchange.agrees, strict=True)]
    first, *others = together(
        exchange, *(lambda plane=plane: live(plane, kinds, sizes, starts, polls) for plane in made)
    )
    assert isinstance(first, list), first
    assert all(other == first for other in others)
    *reported, left = first
    assert left == 0
    flat = [each for poll in reported for each in poll]
    assert sorted(operation for operation, _, _ in flat) == list(range(len(kinds)))
    for poll in reported[:-1]:  # a drain may take several rounds
        assert [operation for operation, _, _ in poll] == sorted(operation for operation, _, _ in poll)
    for kind in (BACKUP, LOAD_BACK):
        order = [operation for operation, _, _ in flat if kinds[operation] == kind]
        assert order == sorted(order)
    for operation, ok, now in flat:
        everywhere = np.logical_and.reduce([np.array(ends[operation][1], bool) for ends in fate])
        assert now >= max(ends[operation][0] for ends in fate)
        if staged and kinds[operation] == LOAD_BACK:
            everywhere = everywhere & all(fetch[operation][1] for fetch in fetches)
            assert now >= max(fetch[operation][0] for fetch in fetches)
        assert not (np.array(ok, bool) & ~everywhere).any(), "a page that failed somewhere was reported as arrived"
        # What is lost on top of that is between the first and the last failure.
        bad = np.flatnonzero(~everywhere)
        if len(bad):
            assert ok[: bad[0]] == [True] * bad[0]
            assert ok[bad[-1] + 1 :] == [True] * (len(ok) - bad[-1] - 1)
        else:
            assert all(ok)
    assert len(exchange.sizes) == 1
    assert len(set(exchange.calls)) == 1
    assert exchange.calls[0] >= polls
    if staged:
        assert all(plane.order == inner[0].order for plane in inner)
        loads = [operation for operation, kind in enumerate(kinds) if kind == LOAD_BACK]
        assert sorted(operation for operation, _ in inner[0].order) == loads


def pair(*inner, window=64, exchange=None):
    exchange = exchange or Exchange(len(inner))
    return exchange, [AgreedPlane(plane, agree, window) for plane, agree in zip(inner, exchange.agrees, strict=True)]


def test_every_poll_is_one_round_even_with_nothing_in_flight():
    exchange, made = pair(Scripted({}), Scripted({}))
    for number in range(1, 4):
        assert together(exchange, *(plane.poll for plane in made)) == [[], []]
        assert exchange.calls == [number, number]
    assert together(exchange, *(plane.drain for plane in made)) == [[], []]
    assert exchange.calls == [3, 3]
    assert made[0].counters()["agreements"] == 3


def test_the_oldest_transfers_of_each_kind_are_agreed_on_first():
    ends = {operation: (0, [True]) for operation in range(6)}
    exchange, made = pair(Scripted(ends), Scripted(ends), window=2)
    for plane in made:
        for operation in range(6):
            plane.start(transfer_of(operation, BACKUP if operation else LOAD_BACK, 1))
    seen = []
    while made[0].in_flight:
        one, other = together(exchange, *(plane.poll for plane in made))
        assert [done.operation for done in one] == [done.operation for done in other]
        seen.append([done.operation for done in one])
    assert seen == [[0, 1, 2], [3, 4], [5]]


def test_a_page_that_failed_elsewhere_is_counted():
    exchange, made = pair(Scripted({0: (0, [True, True, True])}), Scripted({0: (0, [True, False, True])}))
    for plane in made:
        plane.start(transfer_of(0, BACKUP, 3))
    for done in together(exchange, *(plane.poll for plane in made)):
        assert done[0].ok.tolist() == [True, False, True]
    assert [plane.counters()["pages_failed_elsewhere"] for plane in made] == [1, 0]


def test_a_load_that_ends_before_it_is_fetched_fails_everywhere():
    class Failing(Scripted):
        def ended(self, transfer):
            return True

    one = Failing({0: (0, [False, False])}, {0: (99, True)})
    other = Scripted({0: (0, [True, True])}, {0: (2, True)})
    exchange, made = pair(one, other)
    assert not one.commit_alone
    for plane in made:
        plane.start(transfer_of(0, LOAD_BACK, 2))
    reported = [together(exchange, *(plane.poll for plane in made)) for _ in range(3)]
    assert [[len(each) for each in poll] for poll in reported] == [[0, 0], [0, 0], [1, 1]]
    assert [done[0].ok.tolist() for done in reported[-1]] == [[False, False]] * 2
    assert (one.order, other.order) == ([], [(0, False)])


@pytest.mark.parametrize("change", ["page", "operation", "order", "method", "reset"])
def test_processes_that_ask_for_other_transfers_are_told_so(change):
    ends = dict.fromkeys((0, 1, 7), (0, [True]))
    exchange, made = pair(Scripted(ends), Scripted(ends))
    transfers = [transfer_of(0, BACKUP, 1), transfer_of(1, BACKUP, 1)]
    changed = {
        "page": [replace(transfers[0], target=np.array([1])), transfers[1]],
        "operation": [replace(transfers[0], operation=7), transfers[1]],
        "order": transfers[::-1],
    }.get(change, transfers)
    for plane, each in zip(made, (transfers, changed), strict=True):
        for transfer in each:
            plane.start(transfer)
    if change == "reset":
        made[1].reset()
    second = made[1].drain if change == "method" else made[1].poll
    errors = together(exchange, made[0].poll, second)
    assert [type(error) for error in errors] == [DivergedError, DivergedError]


def test_reset_forgets_what_was_in_flight():
    exchange, made = pair(simple(), simple())
    for plane in made:
        plane.start(transfer_of(0, BACKUP, 2))
        plane.reset()
        assert plane.in_flight == 0
        plane.start(replace(transfer_of(0, BACKUP, 2), generation=1))
    for done in together(exchange, *(plane.drain for plane in made)):
        assert [(each.generation, each.ok.tolist()) for each in done] == [(1, [True, True])]


def test_a_copy_that_fails_in_one_process_has_failed_in_all(monkeypatch):
    exchange, made = pair(simple(), simple())
    assert together(exchange, *(lambda plane=plane: plane.copy(1, 3, 0) for plane in made)) == [True, True]
    for plane in made:
        np.testing.assert_array_equal(np.array(plane.pool)[3], np.array(plane.pool)[1])

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(made[1].plane._copies, "copy", fail)
    assert together(exchange, *(lambda plane=plane: plane.copy(2, 4, 0) for plane in made)) == [False, False]


def reported(exchange, made, polls=2000):
    """The reports of the first poll that reports something."""
    for _ in range(polls):
        found = together(exchange, *(plane.poll for plane in made))
        if any(found):
            return [[(done.operation, done.ok.tolist()) for done in each] for each in found]
    raise AssertionError("nothing was reported")


@pytest.mark.parametrize("form", [{}, {"host_form": "arrays", "copies": "fused"}], ids=["slots", "staged"])
def test_interpreters_that_are_held_differently_report_the_same(form):
    gates = Holding(), Holding(holds=True, fails=True)
    exchange, made = pair(*(simple(gate=gate, **form) for gate in gates))
    for plane, thread in zip(made, exchange.threads, strict=True):
        thread.submit(plane.start, backup([1, 2, 3], [0, 1, 2], operation=4)).result()
    for _ in range(3):
        assert together(exchange, *(plane.poll for plane in made)) == [[], []]
    gates[1].holds = gates[1].fails = False
    assert reported(exchange, made) == [[(4, [False, True, True])]] * 2
    # Page 0 has arrived on one host only; 1 and 2 are on both.
    values = np.array(made[0].pool)
    for operation, hurried in ((5, False), (6, True)):
        for plane, thread in zip(made, exchange.threads, strict=True):
            thread.submit(plane.start, load_back([1, 2], [5 + hurried, 7], operation=operation)).result()
            if hurried:
                thread.submit(plane.hurry).result()
        polls = 1 if hurried else 2000
        assert reported(exchange, made, polls) == [[(operation, [True, True])]] * 2
        for plane in made:
            np.testing.assert_array_equal(np.array(plane.pool)[[5 + hurried, 7]], values[[2, 3]])
    gates[1].fails = True
    for plane, thread in zip(made, exchange.threads, strict=True):
        thread.submit(plane.start, load_back([1, 2], [1, 2], operation=7)).result()
    arrived = [False, False] if form else [False, True]  # what is staged arrives as a whole or not at all
    assert reported(exchange, made) == [[(7, arrived)]] * 2
    gates[1].holds = True  # a drain does not ask
    for plane, thread in zip(made, exchange.threads, strict=True):
        thread.submit(plane.start, load_back([2], [1], operation=8)).result()
    for done in together(exchange, *(plane.drain for plane in made)):
        assert [(each.operation, each.ok.tolist()) for each in done] == [(8, [False])]


def test_a_cache_takes_planes_that_agree():
    plane = AgreedPlane(planes(), lambda vector: vector)
    cache = PrefixCache(CONFIG, plane, smallest=4)
    tokens, pages, state = np.arange(4), cache.allocate(2), cache.allocate(1, pool="state")
    node = cache.insert(tokens, pages, values={"state": [-1, *state]}).node
    before = plane.counters()["agreements"]
    page = cache.fork(node, "state")
    assert plane.counters()["agreements"] == before + 1
    np.testing.assert_array_equal(np.array(cache.pools["state"])[page], np.array(cache.pools["state"])[state[0]])
    cache.pools = {"draft": np.array(cache.pools["draft"]) + 1}
    assert plane.in_flight == 2
    assert sorted(done.pool for done in plane.drain()) == [0, 1]
    assert plane.counters()["pages_backed_up"] == 2 * 3 + 1  # the side pools of kv count as well
    assert {row["pool"] for row in cache.programs() if "pool" in row} == {"kv", "state", "indexer", "draft"}
    plane.drop_host(np.array([0]), 0, pool=1)
    with pytest.raises(ValueError, match="out of range"):
        plane.drop_host(np.array([7]), 0, pool=1)
    assert cache.violations() == []


def test_an_interpreter_that_agrees_has_no_pools_by_name():
    plane = AgreedPlane(simple(), lambda vector: vector)
    with pytest.raises(AttributeError, match="use `pool`"):
        _ = plane.pools
    with pytest.raises(ValueError, match="one for every pool"):
        PrefixCache(CONFIG, plane)


def test_one_process_agrees_with_nobody():
    plane = simple()
    assert across_processes() is None
    assert agreed(plane) is plane


def test_storage_does_not_agree_yet():
    config = CacheConfig(page_size=16, device_pages=8, host_pages=8)
    cache = PrefixCache(config, AgreedPlane(simple(), lambda vector: vector))
    with pytest.raises(ValueError, match="several processes share"):
        StorageTier(cache, MemoryStore(1 << 20), {})


@pytest.mark.parametrize("window", [0, -1, 2.5, True])
def test_a_window_is_a_positive_number(window):
    with pytest.raises(ValueError, match="window is"):
        AgreedPlane(simple(), lambda vector: vector, window)
