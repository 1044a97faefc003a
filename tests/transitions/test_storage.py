"""Store and prefetch, one example each way: what is written down, what is locked, what an end publishes or frees."""

import functools

import jax
import numpy as np
import pytest

from purecache import transitions as t
from purecache.namespaces import namespace_digest
from purecache.state import NONE, CacheConfig, as_jax, empty_state
from purecache.state.laws import violations
from purecache.state.layout import Account, Column, Scalar, Stored, Tier
from purecache.transitions import Status

SIZE, PAGE = 8, 2
CONFIG = CacheConfig(page_size=PAGE, device_pages=6, host_pages=4, load_back_threshold=1)
AB, ABC = [1, 1, 2, 2], [1, 1, 2, 2, 3, 3]
SIZED = ("allocate", "evict_device", "evict_host", "begin_backup", "begin_store", "begin_prefetch")
PLAIN = ("match", "peek", "insert", "lock", "unlock", "finish_backup", "finish_store", "finish_prefetch", "reset")
JITTED = {name: jax.jit(getattr(t, name)) for name in PLAIN} | {
    name: jax.jit(functools.partial(getattr(t, name), size=SIZE)) for name in SIZED
}


def prompt(tokens):
    padded = np.zeros(SIZE * PAGE, np.int32)
    padded[: len(tokens)] = tokens
    return t.Prompt(padded, np.int32(len(tokens) // PAGE), namespace_digest(), np.int32(0))


def run(name, state, *arguments):
    step = JITTED[name](state, *(np.int32(a) if isinstance(a, int) else a for a in arguments))
    assert violations(step.state) == []
    return step


def padded(values, fill=NONE):
    return np.array([*values, *[fill] * (SIZE - len(values))], np.int32)


def computed(state, tokens):
    """The state after a request that computed `tokens`."""
    found = JITTED["peek"](state, prompt(tokens))
    kept = np.asarray(found.device_pages)[: int(found.device_length)].tolist()
    state, _, lent = run("allocate", state, 0, len(tokens) // PAGE - len(kept))
    pages = kept + [int(page) for page in lent.pages if page != NONE]
    return run("insert", state, prompt(tokens), t.Offer(padded(pages), np.int32(0), np.int32(0))).state


def backed_up(tokens):
    state = computed(as_jax(empty_state(CONFIG)), tokens)
    state, (copies,), begun = run("begin_backup", state, handle_of(state, tokens), 0)
    handle = t.Handle(copies.operation[0], copies.generation[0])
    assert int(begun.number) == len(tokens) // PAGE
    return run("finish_backup", state, handle, np.ones(SIZE, bool)).state


def handle_of(state, tokens):
    found = JITTED["peek"](state, prompt(tokens))
    return t.NodeHandle(found.node, found.clock)


def host(state, account):
    return int(state.account(account, Tier.HOST, 0))


def counter(state, name):
    return int(state.scalar(Scalar[name]))


def stored(state, tokens):
    """What is known of the pages of a prompt in storage, deepest first."""
    node, found = int(JITTED["peek"](state, prompt(tokens)).node), []
    nodes = np.array(state.nodes)
    while node < state.layout.nodes:
        found.append(Stored(int(nodes[Column.STORED, node])))
        node = nodes[Column.PARENT, node]
    return found


def reserved(state, tokens, number):
    state, effects, begun = run("begin_prefetch", state, handle_of(state, tokens), number)
    assert effects == ()
    return state, t.Handle(begun.operation, begun.generation), begun


def test_a_page_that_storage_holds_on_host_can_be_evicted_from_the_device():
    """Also if a request unlocks it meanwhile: what counts as evictable must be found by an eviction."""
    state = computed(as_jax(empty_state(CONFIG)), AB)
    state, _, begun = reserved(state, [1, 1], 1)
    assert int(begun.number) == 1
    state, _, lock = run("lock", state, handle_of(state, [1, 1]))
    state, _, evicted = run("evict_device", state, 0, SIZE)
    assert int(evicted.number) == 1
    state = run("unlock", state, t.ReceiptHandle(lock.receipt, lock.generation)).state
    assert int(state.account(Account.EVICTABLE, Tier.DEVICE, 0)) == 1
    state, _, lent = run("allocate", state, 0, CONFIG.device_pages)
    assert sorted(np.asarray(lent.pages)[: CONFIG.device_pages].tolist()) == list(range(CONFIG.device_pages))


def test_a_store_locks_its_host_pages_and_says_which_arrived():
    state = backed_up(ABC)
    state, (writes,), begun = run("begin_store", state, handle_of(state, ABC), (SIZE,))
    assert (int(begun.number), int(begun.left)) == (3, 0)
    assert int(writes.kind) == t.TransferKind.STORE
    assert stored(state, ABC) == [Stored.WRITING] * 3
    assert run("begin_store", state, handle_of(state, ABC), (SIZE,)).reply.status == Status.NOTHING
    gone = run("evict_device", state, 0, 3).state
    assert int(run("evict_host", gone, 0, 3).reply.number) == 0
    ok = np.array([True, False, True, *[True] * 5])
    handle = t.Handle(writes.operation[0], writes.generation[0])
    state, _, ended = run("finish_store", state, handle, ok)
    assert int(ended.number) == 2
    assert stored(state, ABC) == [Stored.YES, Stored.NO, Stored.YES]
    assert (counter(state, "STORED_PAGES"), counter(state, "STORE_FAILED_PAGES")) == (2, 1)
    again = run("begin_store", state, handle_of(state, ABC), (SIZE,))
    assert int(again.reply.number) == 1
    assert run("finish_store", state, handle, ok).reply.status == Status.STALE
    gone = run("evict_device", state, 0, 3).state
    assert int(run("evict_host", gone, 0, 3).reply.number) == 3


def test_a_store_writes_the_shallowest_pages_first_and_not_more_than_there_is_room_for():
    state = backed_up(ABC)
    assert run("begin_store", state, handle_of(state, ABC), (0,)).reply.status == Status.NO_ROOM
    state, (writes,), begun = run("begin_store", state, handle_of(state, ABC), (2,))
    assert (int(begun.number), int(begun.left)) == (2, 1)
    assert stored(state, ABC) == [Stored.NO, Stored.WRITING, Stored.WRITING]
    nodes = np.array(state.nodes)
    for node, page in zip(np.array(writes.target)[:2], np.array(writes.source)[:2], strict=True):
        assert nodes[Column.HOST_PAGE, node] == page


def test_a_prefetch_inserts_the_leading_run_that_arrived_below_its_anchor():
    state = computed(as_jax(empty_state(CONFIG)), AB)
    state, handle, begun = reserved(state, AB, 3)
    assert (int(begun.number), host(state, Account.IN_FLIGHT), host(state, Account.FREE)) == (3, 3, 1)
    long = [*ABC, 4, 4, 5, 5]
    ok = np.array([True, True, False, *[False] * 5])
    state, _, ended = run("finish_prefetch", state, handle, prompt(long), 2, begun.pages, ok)
    assert (int(ended.status), int(ended.number)) == (Status.OK, 2)
    found = run("match", state, prompt(long)).reply
    assert (int(found.device_length), int(found.length)) == (2, 4)
    assert stored(state, [*ABC, 4, 4])[:2] == [Stored.YES] * 2
    assert (host(state, Account.IN_FLIGHT), host(state, Account.EVICTABLE), host(state, Account.FREE)) == (0, 2, 2)
    assert (counter(state, "PREFETCHED_PAGES"), counter(state, "PREFETCH_FAILED_PAGES")) == (2, 1)
    pages = np.array(state.nodes)[Column.HOST_PAGE]
    assert pages[int(found.node)] == int(begun.pages[1])


def test_a_prefetch_meets_pages_that_came_otherwise():
    """One page is on device by now, and adopts the copy; one is on host, and the copy is freed."""
    state = as_jax(empty_state(CONFIG))
    state, handle, begun = reserved(state, [], 3)
    state = computed(state, ABC)
    state, (copies,), _ = run("begin_backup", state, handle_of(state, [1, 1]), 0)
    backup = t.Handle(copies.operation[0], copies.generation[0])
    state = run("finish_backup", state, backup, np.ones(SIZE, bool)).state
    state, _, ended = run("finish_prefetch", state, handle, prompt(ABC), 0, begun.pages, np.ones(SIZE, bool))
    assert int(ended.number) == 2
    nodes, node = np.array(state.nodes), int(JITTED["peek"](state, prompt(ABC)).node)
    assert nodes[Column.HOST_PAGE, node] == int(begun.pages[2])
    assert host(state, Account.FREE) == 1
    state = run("evict_device", state, 0, 3).state
    found = run("match", state, prompt(ABC)).reply
    assert (int(found.device_length), int(found.length)) == (0, 3)


@pytest.mark.parametrize("why", ["nothing arrived", "other tokens", "another rank", "reset", "pages left out"])
def test_a_prefetch_that_comes_to_nothing_leaves_nothing(why):
    state = computed(as_jax(empty_state(CONFIG)), AB)
    state, handle, begun = reserved(state, AB, 2)
    tokens, pages, ok = [*ABC, 4, 4], begun.pages, np.ones(SIZE, bool)
    if why == "nothing arrived":
        ok = ~ok
    elif why == "other tokens":
        tokens = [9, 9, 9, 9, 3, 3, 4, 4]
    elif why == "another rank":
        query = prompt(tokens)._replace(rank=np.int32(5))
    elif why == "reset":
        state = run("reset", state).state
    else:
        pages = padded([int(begun.pages[0])])
    query = query if why == "another rank" else prompt(tokens)
    state, _, ended = run("finish_prefetch", state, handle, query, 2, pages, ok)
    assert int(ended.number) == 0
    expected = Status.STALE if why in ("reset", "pages left out") else Status.OK
    assert int(ended.status) == expected
    if why == "pages left out":  # still open: the caller gives all of them
        state = run("finish_prefetch", state, handle, query, 2, begun.pages, ok).state
        assert counter(state, "PREFETCHED_PAGES") == 2
    else:
        assert (host(state, Account.FREE), host(state, Account.IN_FLIGHT)) == (4, 0)
        assert run("finish_prefetch", state, handle, query, 2, begun.pages, ok).reply.status == Status.STALE


def test_a_prefetch_keeps_its_anchor_and_ends_above_a_gap():
    """The anchor loses its page meanwhile: it stays as a node, but nothing can hang below it."""
    state = computed(as_jax(empty_state(CONFIG)), [1, 1])
    state, handle, begun = reserved(state, [1, 1], 1)
    state = run("evict_device", state, 0, 2).state
    assert int(run("match", state, prompt(AB)).reply.length) == 0
    assert int(state.scalar(Scalar.FREE_NODES)) == state.layout.nodes - 1
    state, _, ended = run("finish_prefetch", state, handle, prompt(AB), 1, begun.pages, np.ones(SIZE, bool))
    assert int(ended.number) == 0
    assert host(state, Account.FREE) == 4
    assert int(state.scalar(Scalar.FREE_NODES)) == state.layout.nodes


def test_a_page_that_loses_its_parent_goes_although_a_prefetch_hangs_below_it():
    """A is on device alone and B on host below it; host is full, so A leaves without a copy."""
    state = as_jax(empty_state(CONFIG))
    state, first, begun = reserved(state, [], 2)
    state = computed(state, [1, 1])
    arrived = np.array([True, True, *[False] * 6])
    state = run("finish_prefetch", state, first, prompt(AB), 0, begun.pages, arrived).state
    state, handle, begun = reserved(state, AB, 2)
    nodes = np.array(state.nodes)
    host_pages = nodes[Column.HOST_PAGE]
    assert int((host_pages >= 0).sum()) == 2
    state = run("evict_device", state, 0, 1).state
    assert int(run("match", state, prompt(AB)).reply.length) == 2
    state, _, ended = run("finish_prefetch", state, handle, prompt([*ABC, 4, 4]), 2, begun.pages, np.ones(SIZE, bool))
    assert int(ended.number) == 2


def test_a_lost_parent_takes_locked_host_pages_along():
    state = computed(as_jax(empty_state(CONFIG)), [1, 1])
    state, first, begun = reserved(state, [1, 1], 1)
    ok = np.ones(SIZE, bool)
    state = run("finish_prefetch", state, first, prompt(AB), 1, begun.pages, ok).state
    state, handle, below = reserved(state, AB, 1)
    state, _, rest = reserved(state, [], 4)
    assert (int(rest.number), host(state, Account.FREE)) == (2, 0)
    # No host page is free, so the page above leaves the device without a copy, and what hangs below is lost with it.
    state = run("evict_device", state, 0, 1).state
    assert int(run("match", state, prompt(AB)).reply.length) == 0
    assert host(state, Account.FREE) == 1
    state, _, ended = run("finish_prefetch", state, handle, prompt(ABC), 2, below.pages, ok)
    assert int(ended.number) == 0
    assert host(state, Account.FREE) == 2


def test_a_quarter_of_the_operations_is_kept_for_device_and_host():
    config = CacheConfig(page_size=PAGE, device_pages=6, host_pages=4, max_operations=2)
    state = as_jax(empty_state(config))
    state, _, first = run("begin_prefetch", state, handle_of(state, []), 1)
    assert int(first.status) == Status.OK
    state = computed(state, AB)
    assert int(run("begin_prefetch", state, handle_of(state, AB), 1).reply.status) == Status.OK
    config = CacheConfig(page_size=PAGE, device_pages=6, host_pages=4, max_operations=4)
    state = as_jax(empty_state(config))
    for _ in range(3):
        state = run("begin_prefetch", state, handle_of(state, []), 1).state
    assert int(run("begin_prefetch", state, handle_of(state, []), 1).reply.status) == Status.TABLE_FULL
    state = computed(state, AB)
    assert int(run("begin_backup", state, handle_of(state, AB), 0).reply.number) == 1


def test_a_prefetch_takes_less_when_there_is_less_and_says_when_there_is_none():
    state = as_jax(empty_state(CONFIG))
    state, _, first = reserved(state, [], 3)
    state, _, second = reserved(state, [], 3)
    assert (int(first.number), int(second.number)) == (3, 1)
    state, _, third = reserved(state, [], 3)
    assert int(third.status) == Status.NO_ROOM
    assert counter(state, "PREFETCHES_REFUSED") == 1
    bad = t.NodeHandle(np.int32(10_000), np.int32(0))
    assert run("begin_prefetch", state, bad, 1).reply.status == Status.BAD_NODE
    assert run("begin_store", state, bad, (1,)).reply.status == Status.BAD_NODE
