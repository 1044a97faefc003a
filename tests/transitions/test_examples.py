"""Transitions as pure functions: what each does on a small tree, jitted, un-jitted and under vmap alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purecache import transitions as t
from purecache.state import NONE, CacheConfig, as_jax, empty_state
from purecache.state.laws import violations
from purecache.state.layout import Account, Column, Scalar, Tier

SIZE, PAGE = 4, 2
SPACE = np.arange(4, dtype=np.int32)
CONFIG = CacheConfig(page_size=PAGE, device_pages=6, host_pages=4, max_operations=2, max_receipts=3, levels=2)
A, AB, AC = [1, 1], [1, 1, 2, 2], [1, 1, 3, 3]
JITTED = {
    name: jax.jit(getattr(t, name))
    for name in (
        "match",
        "peek",
        "insert",
        "lock",
        "unlock",
        "release",
        "admit",
        "abort",
        "finish_backup",
        "finish_load_back",
    )
} | {
    name: jax.jit(functools.partial(getattr(t, name), size=SIZE))
    for name in ("allocate", "evict_device", "evict_host", "begin_backup", "begin_load_back")
}


def prompt(tokens, space=SPACE):
    padded = np.zeros(SIZE * PAGE, np.int32)
    padded[: len(tokens)] = tokens
    return t.Prompt(padded, np.int32(len(tokens) // PAGE), space, np.int32(0))


def padded(pages):
    return np.array([*pages, *[NONE] * (SIZE - len(pages))], np.int32)


def offer(pages, counted=0):
    return t.Offer(padded(pages), np.int32(counted), np.int32(0))


def seen(matched):
    """Handle of the deepest node on device, or of all that is usable where nothing is on device."""
    return t.NodeHandle(jnp.where(matched.device_length > 0, matched.device_node, matched.node), matched.clock)


def run(name, state, *arguments):
    step = JITTED[name](state, *arguments)
    assert violations(step.state) == []
    return step


def grown(*prompts):
    """A state after requests that computed `prompts` one after another."""
    state = as_jax(empty_state(CONFIG))
    for tokens in prompts:
        found = JITTED["peek"](state, prompt(tokens))
        kept = [int(page) for page in found.device_pages[: int(found.device_length)]]
        state, _, lent = run("allocate", state, np.int32(0), np.int32(len(tokens) // PAGE - len(kept)))
        pages = kept + [int(page) for page in lent.pages if page != NONE]
        state, _, reply = run("insert", state, prompt(tokens), offer(pages))
        assert int(reply.length) == len(tokens) // PAGE
    return state


def account(state, name, tier=Tier.DEVICE):
    return int(state.account(name, tier, 0))


def test_match_finds_the_longest_prefix():
    state = grown(AB, AC)
    for tokens, pages in ((AB, 2), (AC, 2), ([1, 1, 9, 9], 1), ([9, 9, 2, 2], 0), ([*AB, 5, 5], 2)):
        assert int(run("match", state, prompt(tokens)).reply.device_length) == pages
    assert int(run("match", state, prompt(AB, SPACE + 1)).reply.length) == 0


def test_peek_changes_nothing_and_match_touches():
    state = grown(AB, AC)
    touched = run("match", state, prompt(AB)).state
    # AC was inserted last, so it is evicted last, unless AB was touched since.
    for before, last in ((state, AC), (touched, AB)):
        after = run("evict_device", before, np.int32(0), np.int32(1)).state
        assert int(t.peek(after, prompt(last)).device_length) == 2


def test_insert_hands_duplicates_back():
    state = grown(AB)
    state, _, lent = run("allocate", state, np.int32(0), np.int32(3))
    mine = [int(page) for page in lent.pages[:3]]
    state, _, reply = run("insert", state, prompt([*AB, 7, 7]), offer(mine))
    assert [int(page) for page in reply.duplicates[:3]] == [mine[0], mine[1], NONE]
    assert int(reply.pages[2]) == mine[2]
    assert account(state, Account.LENT) == 2
    state = run("release", state, np.int32(0), padded(mine[:2])).state
    assert account(state, Account.LENT) == 0


def test_locks_protect_a_path_and_are_undone_once():
    state = grown(AB, AC)
    found = run("match", state, prompt(AB)).reply
    state, _, first = run("lock", state, seen(found))
    state, _, second = run("lock", state, seen(found))
    assert (account(state, Account.PROTECTED), account(state, Account.EVICTABLE)) == (2, 1)
    state, _, evicted = run("evict_device", state, np.int32(0), np.int32(3))
    assert int(evicted.number) == 1
    state, _, reply = run("unlock", state, t.ReceiptHandle(first.receipt, first.generation))
    assert account(state, Account.PROTECTED) == 2
    assert run("unlock", state, t.ReceiptHandle(first.receipt, first.generation)).reply.status == t.Status.BAD_RECEIPT
    state, _, reply = run("unlock", state, t.ReceiptHandle(second.receipt, second.generation))
    assert reply.status == t.Status.OK
    assert account(state, Account.EVICTABLE) == 2


def test_backup_evict_and_load_back():
    state = grown(AB)
    found = run("match", state, prompt(AB)).reply
    state, (copies,), begun = run("begin_backup", state, seen(found), np.int32(0))
    assert int(begun.number) == 2
    assert int(copies.kind) == t.TransferKind.BACKUP
    handle = t.Handle(copies.operation[0], copies.generation[0])
    assert account(state, Account.IN_FLIGHT, Tier.HOST) == 2
    assert (
        int(t.peek(run("evict_device", state, np.int32(0), np.int32(2)).state, prompt(AB)).length) == 0
    )  # pending: not yet on host
    state, _, ended = run("finish_backup", state, handle, np.ones(SIZE, bool))
    assert int(ended.number) == 2
    assert run("finish_backup", state, handle, np.ones(SIZE, bool)).reply.status == t.Status.STALE
    state = run("evict_device", state, np.int32(0), np.int32(2)).state
    found = run("match", state, prompt(AB)).reply
    assert (int(found.device_length), int(found.length)) == (0, 2)
    below = run("begin_load_back", state, seen(found))
    assert below.reply.status == t.Status.BELOW_THRESHOLD  # 4 tokens, and the threshold is 10


@pytest.mark.parametrize(("ok", "length"), [([1, 1], 2), ([0, 1], 1), ([1, 0], 0), ([0, 0], 0)])
def test_the_leading_run_of_a_load_back_is_published(ok, length):
    state = grown(AB)
    state = state.replace(books=state.books.at[Scalar.LOAD_BACK_TOKENS].set(0))
    found = run("match", state, prompt(AB)).reply
    state, (copies,), _ = run("begin_backup", state, seen(found), np.int32(0))
    state = run("finish_backup", state, t.Handle(copies.operation[0], copies.generation[0]), np.ones(SIZE, bool)).state
    state = run("evict_device", state, np.int32(0), np.int32(2)).state
    state, _, begun = run("begin_load_back", state, seen(found))
    assert (int(begun.number), account(state, Account.IN_FLIGHT)) == (2, 2)
    assert int(t.peek(state, prompt(AB)).device_length) == 0
    flags = np.zeros(SIZE, bool)
    flags[:2] = ok  # deepest first
    state, _, ended = run("finish_load_back", state, t.Handle(begun.operation, begun.generation), flags)
    assert int(ended.number) == length
    found = t.peek(state, prompt(AB))
    assert (int(found.device_length), int(found.length)) == (length, 2)
    assert account(state, Account.FREE) == CONFIG.device_pages - length


def test_a_load_below_one_that_failed_is_waited_for():
    """What it loads can't be had without the page above it, and a new load must not take its pages."""
    state = grown(AB)
    state = state.replace(books=state.books.at[Scalar.LOAD_BACK_TOKENS].set(0))
    found = run("match", state, prompt(AB)).reply
    state, (copies,), _ = run("begin_backup", state, seen(found), np.int32(0))
    state = run("finish_backup", state, t.Handle(copies.operation[0], copies.generation[0]), np.ones(SIZE, bool)).state
    state = run("evict_device", state, np.int32(0), np.int32(2)).state
    found = run("match", state, prompt(AB)).reply
    above = t.NodeHandle(state.nodes[Column.PARENT, found.node], found.clock)
    state, _, first = run("begin_load_back", state, above)
    state, _, second = run("begin_load_back", state, seen(found))
    assert (int(first.number), int(second.number)) == (1, 1)
    coming = int(state.nodes[Column.INCOMING_PAGE, found.node])
    state = run("finish_load_back", state, t.Handle(first.operation, first.generation), np.zeros(SIZE, bool)).state
    state, _, third = run("begin_load_back", state, seen(found))
    assert (int(third.status), int(third.number)) == (t.Status.JOINED, 0)
    assert int(state.nodes[Column.INCOMING_PAGE, found.node]) == coming
    state = run("finish_load_back", state, t.Handle(second.operation, second.generation), np.ones(SIZE, bool)).state
    assert violations(state) == []
    state, _, again = run("begin_load_back", state, seen(found))
    assert (int(again.status), int(again.number)) == (t.Status.OK, 2)


def script(match, insert, allocate, lock, evict):
    """A run of transitions; returns the last state and all replies."""
    state, replies = as_jax(empty_state(CONFIG)), []
    for function, arguments in (
        (allocate, (np.int32(0), np.int32(3))),
        (insert, (prompt(AB), offer([0, 1]))),
        (match, (prompt(AC),)),
        (lock, (t.NodeHandle(np.int32(0), np.int32(3)),)),
        (evict, (np.int32(0), np.int32(2))),
    ):
        state, _, reply = function(state, *arguments)
        replies.append(reply)
    return state, replies


def test_unjitted_transitions_do_the_same():
    names = ("match", "insert", "allocate", "lock", "evict_device")
    jitted = script(*(JITTED[name] for name in names))
    with jax.disable_jit():
        plain = script(
            t.match,
            t.insert,
            functools.partial(t.allocate, size=SIZE),
            t.lock,
            functools.partial(t.evict_device, size=SIZE),
        )
    jax.tree.map(np.testing.assert_array_equal, jitted, plain)
    assert violations(plain[0]) == []


def test_vmap_runs_independent_caches():
    states = [grown(AB), grown(AC), grown(AB, AC)]
    prompts = [prompt(AB), prompt(AB), prompt(AC)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    queries = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *prompts)
    matched = jax.jit(jax.vmap(t.match))(stacked, queries)
    locked = jax.jit(jax.vmap(t.lock))(matched.state, seen(matched.reply))
    for lane, (state, query) in enumerate(zip(states, prompts, strict=True)):
        alone = run("match", state, query)
        after = run("lock", alone.state, seen(alone.reply))
        for one, many in ((alone.reply, matched.reply), (after, locked)):
            jax.tree.map(np.testing.assert_array_equal, one, jax.tree.map(lambda leaf, lane=lane: leaf[lane], many))


def test_reset_forgets_and_keeps_what_is_lent():
    state = grown(AB)
    state, _, _ = run("allocate", state, np.int32(0), np.int32(2))
    state, _, reply = t.reset(state)
    assert violations(state) == []
    assert (int(reply.lent), account(state, Account.LENT), account(state, Account.FREE)) == (2, 2, 4)
    assert int(t.peek(state, prompt(AB)).length) == 0
