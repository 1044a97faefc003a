"""Every transition, every mistake: the status that the compiled program answers, and not a bit of the state changed."""

import jax
import numpy as np
import pytest
from support import new_cache, serve, tiny

from purecache import transitions as t
from purecache.namespaces import namespace_digest
from purecache.state import as_jax
from purecache.state.layout import Scalar
from purecache.transitions import Status

SIZE, AB = 16, [1, 1, 2, 2]


@pytest.fixture(scope="module")
def scene():
    """A cache with a prompt of two pages, three lent pages, a good receipt and a used one; its state; what is known."""
    cache, _ = new_cache(tiny())
    serve(cache, AB)
    cache.drain()
    lent = cache.allocate(3)
    good, used = cache.lock(cache.match(AB).node), cache.lock(cache.match(AB).node)
    cache.unlock(used)
    seen = cache.peek(AB)
    known = {"own": seen.device_pages.tolist(), "seen": seen.node}
    return cache, cache.state, known | {"lent": lent.tolist(), "good": good, "used": used}


def padded(values, size=SIZE, fill=-1):
    return np.array([*values, *[fill] * (size - len(values))], np.int32)


def prompt(tokens, rank=0, pages=None):
    pages = len(tokens) // 2 if pages is None else pages
    return t.Prompt(padded(tokens, 2 * SIZE, 0), np.int32(pages), namespace_digest(), np.int32(rank))


def offer(pages):
    return t.Offer(padded(pages), np.int32(0), np.int32(0))


def receipt(number, generation):
    return t.ReceiptHandle(np.int32(number), np.int32(generation))


def compiled(cache, state, name, *arguments):
    """The next state and the reply of a compiled transition; `state` stays."""
    program = cache._programs.get(name, SIZE)
    leaves, vector = program.run(jax.tree.leaves(as_jax(state)), program.command(*jax.tree.leaves(arguments)))
    return jax.tree.unflatten(jax.tree.structure(state), leaves), program.answer(vector)[1]


def insert_mistakes(known):
    lent, own, good = known["lent"], known["own"], receipt(known["good"].number, known["good"].generation)
    free = next(page for page in range(8) if page not in lent + own)
    new = [5, 5]
    for name, rest in (("insert", ()), ("checkpoint", (good,)), ("finish", (good,))):
        yield f"{name}: page out of range", name, (prompt(new), offer([8]), *rest), Status.BAD_PAGE
        yield f"{name}: free page", name, (prompt(new), offer([free]), *rest), Status.BAD_PAGE
        yield f"{name}: page of another node", name, (prompt(new), offer(own[:1]), *rest), Status.BAD_PAGE
        yield f"{name}: page given twice", name, (prompt([5] * 4), offer(lent[:1] * 2), *rest), Status.BAD_PAGE
        yield f"{name}: page missing", name, (prompt(new), offer([]), *rest), Status.BAD_PAGE
        yield f"{name}: rank out of range", name, (prompt(new, rank=2), offer(lent[:1]), *rest), Status.BAD_RANK
        yield f"{name}: negative rank", name, (prompt(new, rank=-1), offer(lent[:1]), *rest), Status.BAD_RANK
        yield f"{name}: too long", name, (prompt(new, pages=SIZE + 1), offer(lent[:1]), *rest), Status.BAD_LENGTH
        yield f"{name}: negative length", name, (prompt(new, pages=-1), offer(lent[:1]), *rest), Status.BAD_LENGTH
    yield "finish: page in the tail again", "finish", (prompt(new), offer(lent[:1] * 2), good), Status.BAD_PAGE
    yield "finish: tail not lent", "finish", (prompt(new), offer([lent[0], own[0]]), good), Status.BAD_PAGE
    yield "finish: tail of a prompt without pages", "finish", (prompt([]), offer(own[:1]), good), Status.BAD_PAGE


def receipt_mistakes(known):
    lent, good, used = known["lent"], known["good"], receipt(known["used"].number, known["used"].generation)
    wrong = {"used": used, "foreign": receipt(good.number, good.generation + 7), "far": receipt(99, 0)}
    for what, bad in (wrong | {"negative": receipt(-1, 0)}).items():
        computed = (prompt([5, 5]), offer(lent[:1]))
        yield f"unlock: {what} receipt", "unlock", (bad,), Status.BAD_RECEIPT
        yield f"finish: {what} receipt", "finish", (*computed, bad), Status.BAD_RECEIPT
        yield f"checkpoint: {what} receipt", "checkpoint", (*computed, bad), Status.BAD_RECEIPT
        yield f"abort: {what} receipt", "abort", (np.int32(0), padded(lent), bad), Status.BAD_RECEIPT


def other_mistakes(known):
    lent, own, good = known["lent"], known["own"], receipt(known["good"].number, known["good"].generation)
    for name, rest in (("release", ()), ("abort", (good,))):
        for what, pages in (("twice", lent[:1] * 2), ("of the tree", own[:1]), ("out of range", [8])):
            yield f"{name}: page {what}", name, (np.int32(0), padded(pages), *rest), Status.BAD_PAGE
        yield f"{name}: page of another rank", name, (np.int32(1), padded(lent), *rest), Status.BAD_PAGE
        yield f"{name}: rank out of range", name, (np.int32(2), padded(lent), *rest), Status.BAD_RANK
    now, live = known["seen"].clock, known["seen"].number
    for what, node, clock in (
        ("negative", -1, now),
        ("beyond the roots", 42, now),
        ("far away", 10_000, now),
        ("unused", 39, now),
        ("seen before it was born", live, 0),
        ("seen in the future", live, now + 1000),
    ):
        handle = t.NodeHandle(np.int32(node), np.int32(clock))
        yield f"lock: node {what}", "lock", (handle,), Status.BAD_NODE
        yield f"begin_backup: node {what}", "begin_backup", (handle, np.int32(0)), Status.BAD_NODE
        yield f"begin_load_back: node {what}", "begin_load_back", (handle,), Status.BAD_NODE
    for rank in (-1, 2):
        for name in ("allocate", "evict_device", "evict_host"):
            yield f"{name}: rank {rank}", name, (np.int32(rank), np.int32(1)), Status.BAD_RANK
    for number in (-1, SIZE + 1):
        yield f"allocate: {number} pages", "allocate", (np.int32(0), np.int32(number)), Status.BAD_LENGTH


@pytest.mark.parametrize("mistakes", [insert_mistakes, receipt_mistakes, other_mistakes])
def test_a_mistake_has_a_status_and_changes_nothing(scene, mistakes):
    cache, before, known = scene
    wrong = []
    for what, name, arguments, status in mistakes(known):
        after, reply = compiled(cache, before, name, *arguments)
        same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
        if reply.status != status or not same:
            wrong.append((what, Status(reply.status).name, "same" if same else "changed"))
    assert wrong == []


@pytest.mark.parametrize("name", ["finish_backup", "finish_load_back", "finish_store"])
@pytest.mark.parametrize(("operation", "generation"), [(0, 0), (0, 1), (-1, 0), (99, 0)])
def test_a_stale_completion_is_only_counted(scene, name, operation, generation):
    cache, before, _ = scene
    handle = t.Handle(np.int32(operation), np.int32(generation))
    after, reply = compiled(cache, before, name, handle, np.ones(SIZE, np.int32))
    assert reply.status == Status.STALE
    for field in ("tokens", "nodes", "links", "orders", "shelves", "ledger"):
        np.testing.assert_array_equal(getattr(before, field), getattr(after, field), err_msg=field)
    changed = np.flatnonzero(np.array(before.books) != np.array(after.books))
    assert changed.tolist() == [Scalar.STALE_COMPLETIONS]
