"""The tree as schedule policies walk it: recursive, with the nodes of waiting requests as keys."""

import numpy as np
import pytest

from purecache.adapters.slot_cache import Owner, SlotCache
from purecache.cache import PrefixCache
from purecache.state import CacheConfig

PAGES, A = 64, Owner(None, 0)


class Allocator:
    def __init__(self):
        self.freed = []

    def free(self, slots, dp_rank=0):
        self.freed += slots.tolist()

    def available_size(self, dp_rank=0):
        return 0


@pytest.fixture
def slots():
    config = CacheConfig(page_size=1, device_pages=PAGES, ranks=2, external_pages=True)
    return SlotCache(PrefixCache(config), Allocator())


def tokens(*values):
    return np.array(values, np.int32)


def shape(node):
    return {child.node.number: shape(child) for child in node.children.values()}


def test_pages_in_a_row_are_one_node_and_branches_are_kept(slots):
    slots.insert(tokens(1, 2, 3, 4), tokens(1, 2, 3, 4), A)
    slots.insert(tokens(1, 2, 8, 9), tokens(1, 2, 5, 6), A)
    (below,) = shape(slots.view.root).values()
    assert sorted(map(len, below.values())) == [0, 0]


def test_a_node_that_a_request_waits_at_is_found_in_the_middle_of_a_row(slots):
    slots.insert(np.arange(40, dtype=np.int32), np.arange(1, 41, dtype=np.int32), A)
    assert shape(slots.view.root) == {slots.match(np.arange(40, dtype=np.int32), A).device_node.node.number: {}}
    waiting = slots.match(np.arange(7, dtype=np.int32), A).device_node
    (top,) = slots.view.root.children.values()
    assert top == waiting
    assert hash(top) == hash(waiting)
    assert len(top.children) == 1


def test_other_ranks_and_namespaces_hang_below_the_same_root(slots):
    for number, owner in enumerate((A, Owner("x", 0), Owner(None, 1), Owner(None, None))):
        slots.insert(tokens(1, 2), tokens(2 * number + 1, 2 * number + 2), owner)
    assert len(slots.view.root.children) == 4
    assert {node.rank for node in slots.view.root.children.values()} == {0, 1}


def test_what_was_evicted_is_not_shown(slots):
    slots.insert(tokens(1, 2, 3), tokens(1, 2, 3), A)
    slots.match(tokens(1, 2, 3), A)
    assert slots.evict(3, 0) == 3
    assert shape(slots.view.root) == {}
    assert sorted(slots._room._allocator.freed) == [1, 2, 3]


def test_the_allocator_takes_what_an_operator_freed(slots):
    slots.insert(tokens(1, 2, 3), tokens(1, 2, 3), A)
    assert slots.cache.evict(2) == 2  # as `forget` and `flush` do, by themselves
    assert slots.take_free() == 2
    assert sorted(slots._room._allocator.freed) == [2, 3]
    assert (slots.take_free(), slots.cache.free_pages(), slots.evictable()) == (0, 0, 1)


def test_the_root_equals_itself_only(slots):
    slots.insert(tokens(1, 2, 3), tokens(1, 2, 3), A)
    assert slots.match(tokens(5), A).device_node is slots.view.root
    assert slots.match(tokens(1), A).device_node != slots.view.root


def test_a_cache_that_owns_its_pages_is_refused():
    with pytest.raises(ValueError, match="external_pages"):
        SlotCache(PrefixCache(CacheConfig(page_size=1, device_pages=4)), Allocator())
