"""What the simulator found in the cache, as short as it can be said."""

import numpy as np
import pytest
from support import tiny

from purecache.cache import PrefixCache
from purecache.state import Policy


class SlowStorage:
    """A storage tier that never ends what it began."""

    def write(self, transfer):
        """Begin to read host pages."""

    def store(self, node):
        """Begin nothing by itself."""

    def tick(self):
        """End nothing."""


@pytest.mark.parametrize("policy", list(Policy))
def test_a_page_that_is_unlocked_while_storage_reads_its_copy_can_be_evicted(policy):
    """A store holds a lock on the host copy only. The device page is free, so it must be in the order of eviction."""
    cache = PrefixCache(tiny(policy=policy))
    cache._driver.storage = SlowStorage()
    _, receipt = cache.admit([1, 1])
    cache.finish([1, 1], cache.allocate(1), receipt)
    _, receipt = cache.admit([2, 2])
    done = cache.checkpoint([2, 2], cache.allocate(1), receipt)
    cache.tick()  # both are on host as well
    assert cache._driver.run("begin_store", 16, *done.node, 1).number == 1
    assert cache.allocate(7) is not None  # comes across the locked page, and drops its entry
    cache.abort(np.zeros(0, np.int32), receipt)
    assert cache.violations() == []
    assert cache.evictable_pages() == 1
    assert cache.evict(1) == 1
