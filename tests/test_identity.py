"""Whose prefix is it: namespaces never share, and what callers do to their arrays afterwards changes nothing."""

import numpy as np
import pytest
from scheduling import PAGE, ask, dirty, drained, prompt
from support import content, new_cache, path_of, read_page, serve, tiny, write_pages

from purecache.answers import Load
from purecache.transitions import TransferKind

SPACES = (
    {},
    {"rank": None},
    {"rank": 1},
    {"namespace": "a"},
    {"namespace": ("a",)},
    {"namespace": b"a"},
    {"namespace": (("adapter", "a"),)},
    {"namespace": (("salt", "a"),)},
)


def test_namespaces_never_share_and_always_find_their_own():
    cache, _ = new_cache(tiny())
    tokens = prompt(1, 1)
    for number, space in enumerate(SPACES):
        for other in SPACES[number:]:
            assert cache.peek(tokens, **other).length == 0
        serve(cache, tokens, **space)
    cache.drain()
    for space in SPACES:
        assert ask(cache, tokens, **space) == PAGE
    cache.evict(16)
    for space in SPACES:
        length = cache.peek(tokens, **space).length
        assert ask(cache, tokens, **space) == length
    assert any(cache.peek(tokens, **space).device_length for space in SPACES)
    drained(cache)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_caller_may_use_its_arrays_again_at_once(offset):
    cache, gate = new_cache(tiny(page_size=64, ranks=1, max_receipts=8), smallest=16)
    gate.holding = set(TransferKind)
    buffer = np.zeros(512 + offset, np.int32)
    tokens = buffer[offset:][: 3 * 64]
    tokens[:] = np.arange(3 * 64)
    wanted = tokens.tolist()
    paths = path_of(cache.config, wanted)
    pages = np.array(cache.allocate(3))
    write_pages(cache, 0, pages, [paths[: depth + 2] for depth in range(3)])
    done = cache.insert(tokens, pages)
    tokens[:], pages[:] = -1, 0
    gate.holding = set()
    cache.drain()
    match = cache.match(wanted)
    assert match.device_length == 3 * 64
    kept = match.device_pages.tolist()
    assert done.pages.tolist() == kept
    cache.evict(3)
    cache.drain()
    dirty(cache)
    assert match.device_pages.tolist() == kept  # a reply is no view of the state
    answer = cache.load_back(cache.match(wanted))
    assert isinstance(answer, Load)
    for depth, page in enumerate(answer.pages, 2):
        np.testing.assert_array_equal(read_page(cache, 0, page), content(paths[:depth]))
    lent = np.array(cache.allocate(2))
    given = lent.copy()
    cache.release(given)
    given[:] = 99
    assert cache.violations() == []
