"""Tenants of one server: nobody is served, or told of, a page of somebody else's, in any tier."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from scheduling import ask
from tiers import ABCD, OBJECT, LastingStore, attached, emptied, prefetched, stored

from purecache.stores.files import FileStore
from purecache.stores.local import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore:a page is 2 tokens")
TENANTS = {
    "none": None,
    "a": "a",
    "b": "b",
    "salted": (("salt", "a"),),
    "adapter": (("adapter", "a"),),
    "both": (("adapter", "a"), ("salt", "b")),
    "swapped": (("adapter", "b"), ("salt", "a")),
}


class Memory:
    """A store in memory that outlives its tiers."""

    def __init__(self, directory):
        self.store = LastingStore()

    def __call__(self):
        return self.store


class Local:
    """A directory that is opened anew by every process."""

    def __init__(self, directory):
        self.directory = directory

    def __call__(self):
        return LocalStore(self.directory, OBJECT, 64 * 4096)


class Files(Local):
    """Likewise, with a file per page."""

    def __call__(self):
        return FileStore(self.directory, 1 << 20)


@pytest.mark.parametrize("opened", [Memory, Local, Files])
def test_a_tenant_finds_its_own_pages_in_every_tier_and_no_others(tmp_path, opened):
    """One tenant after the other, with the same tokens; `ask` compares all bytes that are served."""
    make = opened(tmp_path)
    for number, (name, space) in enumerate(TENANTS.items()):
        cache, tier, _ = attached(make())  # another process: what it finds is in storage
        for _, earlier in itertools.islice(TENANTS.items(), number):
            emptied(cache)
            assert prefetched(tier, cache, ABCD, namespace=earlier) == 8
            assert cache.peek(ABCD, namespace=space).length == 0, name  # nor on host
            assert ask(cache, ABCD, namespace=earlier) == 8
            assert cache.peek(ABCD, namespace=space).length == 0, name  # nor on device
        emptied(cache)
        assert prefetched(tier, cache, ABCD, namespace=space) == 0, name  # nor in storage
        stored(cache, tier, ABCD, namespace=space)
        emptied(cache)
        assert prefetched(tier, cache, ABCD, namespace=space) == 8
        tier.detach()


def test_a_prefetch_of_one_tenant_leaves_nothing_for_another():
    store = LastingStore()
    cache, tier, _ = attached(store)
    stored(cache, tier, ABCD, namespace="a")
    emptied(cache)
    started = tier.prefetch(ABCD, namespace="a")
    for _ in range(50):
        cache.tick()
        assert cache.peek(ABCD, namespace="b").length == 0
        assert cache.peek(ABCD).length == 0
    assert prefetched(tier, cache, ABCD, namespace="b") == 0
    tier.abort(started)
    tier.detach()
    emptied(cache)


def test_every_object_of_a_tenant_has_a_name_of_its_own():
    """All names that a store ever hears, of pages of all depths."""
    heard = {}
    for name, space in TENANTS.items():
        store = LastingStore()
        cache, tier, _ = attached(store)
        stored(cache, tier, ABCD, namespace=space)
        heard[name] = set(store._objects)
        assert len(heard[name]) == 4
        tier.detach()
        emptied(cache)
    for one, other in itertools.combinations(heard, 2):
        assert not heard[one] & heard[other]
