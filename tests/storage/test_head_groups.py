"""Objects without topology: what ranks with all heads wrote is read by ranks with some of them, and the other way."""

import jax.numpy as jnp
import numpy as np
import pytest

from purecache import CacheConfig, Interpreter, PrefixCache
from purecache.storage import EndPolicy, StorageOptions, StorageTier
from purecache.stores.interface import Presence
from purecache.stores.memory import MemoryStore
from purecache.stores.names import HeadGroups, ObjectRecord

PAGES, WIDTH, PROMPT = 3, 5, np.arange(48, dtype=np.int32)


class Shelf(MemoryStore):
    def __init__(self):
        super().__init__(1 << 20)
        self.lacks = ()

    def exists(self, keys, deadline):
        present = super().exists(keys, deadline)
        return [Presence.NO if key in self.lacks else answer for key, answer in zip(keys, present, strict=True)]

    def close(self):
        """Stay."""


def attached(shelf, heads, ranks, rank):
    """A cache over keys [page, head, dim] and values [1, page, head, dim], and what its tier needs."""
    first, end = heads
    pool = {
        "k": jnp.zeros((PAGES, end - first, WIDTH), jnp.float32),
        "v": jnp.zeros((1, PAGES, end - first, WIDTH), jnp.bfloat16),
    }
    plane = Interpreter(pool, page_axis={"k": 0, "v": 1}, device_pages=PAGES, host_pages=PAGES)
    cache = PrefixCache(CacheConfig(page_size=16, device_pages=PAGES, host_pages=PAGES, load_back_threshold=1), plane)
    record = ObjectRecord("m", "r", "mixed", "head,dim", 16, (0, 1), heads=heads, tp=(rank, ranks))
    options = StorageOptions(threshold=16, tokens_in_flight=96, policy=EndPolicy.WAIT_COMPLETE, head_axis=-2)
    return cache, options, HeadGroups(record, group=2)


def values_of(first, end):
    """[pages, heads, dim]: page, head and place can be read from each number; exact in bf16."""
    page, head, dim = np.ogrid[:PAGES, first:end, :WIDTH]
    return page * 4 + head + dim / 8


@pytest.mark.parametrize(("wrote", "reads"), [([(0, 4)], [(0, 2), (2, 4)]), ([(0, 2), (2, 4)], [(0, 4)])])
def test_other_numbers_of_ranks_share_their_pages(wrote, reads):
    shelf = Shelf()
    for rank, heads in enumerate(wrote):
        cache, options, naming = attached(shelf, heads, len(wrote), rank)
        cache.pool = cache.pool | {"k": jnp.asarray(values_of(*heads), jnp.float32)}
        cache.pool = cache.pool | {"v": jnp.asarray(values_of(*heads), jnp.bfloat16)[None]}
        tier = StorageTier(cache, shelf, naming, options)
        cache.insert(PROMPT, cache.allocate(PAGES))
        cache.drain()
        assert tier.flush(60)
        tier.detach()
    assert shelf.stats()["objects"] == PAGES * 2
    for rank, heads in enumerate(reads):
        cache, options, naming = attached(shelf, heads, len(reads), rank)
        tier = StorageTier(cache, shelf, naming, options)
        prefetch = tier.prefetch(PROMPT)
        assert tier.flush(60)
        assert prefetch.loaded == 48
        load = cache.load_back(cache.match(PROMPT))
        for index, page in enumerate(load.pages):
            expected = values_of(*heads)[index]
            np.testing.assert_array_equal(np.array(cache.pool["k"])[page], expected.astype(np.float32))
            np.testing.assert_array_equal(
                np.array(cache.pool["v"])[0, page].astype(np.float32),
                np.array(jnp.asarray(expected, jnp.bfloat16), np.float32),
            )
        tier.detach()


def test_a_page_is_there_only_with_all_its_objects():
    shelf = Shelf()
    cache, options, naming = attached(shelf, (0, 4), 1, 0)
    tier = StorageTier(cache, shelf, naming, options)
    cache.insert(PROMPT, cache.allocate(PAGES))
    cache.drain()
    assert tier.flush(60)
    names = sorted(shelf._objects)
    tier.detach()
    assert len(names) == 6
    for lacking in names:
        shelf.lacks = (lacking,)
        cache, _, naming = attached(shelf, (0, 4), 1, 0)
        tier = StorageTier(cache, shelf, naming, options)
        prefetch = tier.prefetch(PROMPT)
        assert tier.flush(60)
        assert prefetch.loaded in (0, 16, 32)
        assert cache.match(PROMPT).length == prefetch.loaded
        tier.detach()


def test_heads_that_make_no_equal_parts_are_refused():
    cache, options, _ = attached(Shelf(), (0, 4), 1, 0)
    record = ObjectRecord("m", "r", "mixed", "head,dim", 16, (0, 1), heads=(0, 6))
    with pytest.raises(ValueError, match="equal parts"):
        StorageTier(cache, Shelf(), HeadGroups(record, group=2), options)
