"""Every law of tail pools is seen to be broken when it is: each test damages one entry of a sound state."""

import jax
import numpy as np
import pytest

from purecache import PrefixCache
from purecache.state import NONE, CacheConfig, Checkpoint, Chunk, ConfigError, PoolSpec, WholePrefix, Window
from purecache.state.budget import share_host_memory
from purecache.state.laws import broken_laws, violations
from purecache.state.layout import BEING_STORED, Account, Column, Ledger, Shelf, TailColumn, Tier
from purecache.transitions import TransferKind

CONFIG = CacheConfig(
    page_size=1,
    device_pages=6,
    host_pages=4,
    max_operations=4,
    max_receipts=4,
    pools=(PoolSpec("window", Window(2), 4, 3),),
)
PROMPT = np.arange(4, dtype=np.int32)


@pytest.fixture(scope="module")
def sound():
    """Pages 0 .. 3 of one prompt: values of the window on 1 .. 3, those on 2 and 3 locked; 2 .. 3 are on their way."""
    cache = PrefixCache(CONFIG, smallest=4)
    pages, values = cache.allocate(4), cache.allocate(3, pool="window")
    cache._driver.plane.poll = list  # nothing is ever done
    node = cache.insert(PROMPT, pages, values={"window": [NONE, *values]}).node
    cache.lock(node)
    assert cache.violations() == []
    return jax.tree.map(np.array, cache.state)


def row(tier):
    return CONFIG.layout.page_row(tier, 1)


def tail(column):
    return CONFIG.layout.tail_row(column, 1)


def nodes(index, node, value):
    def damage(state):
        state.nodes[index, node] = value

    return damage


def order(state):
    older, newer, _ = state.orders[CONFIG.layout.order(Tier.DEVICE, 1)]
    head = CONFIG.layout.head(0, 0)
    older[: CONFIG.layout.rows] = newer[: CONFIG.layout.rows] = NONE
    older[head] = newer[head] = head


def broken_order(state):
    older, _, _ = state.orders[CONFIG.layout.order(Tier.DEVICE, 1)]
    older[older[CONFIG.layout.head(0, 0)]] = CONFIG.layout.head(0, 0) + 1


def account(state):
    state.books[CONFIG.layout.account(Account.EVICTABLE, Tier.DEVICE, 0, 1)] += 1


def value_free(state):
    first = CONFIG.layout.shelf(Tier.DEVICE, 1)
    state.shelves[Shelf.OWNERS, first + state.nodes[row(Tier.DEVICE), 3]] = 0


def fewer_members(state):
    backups = (state.ledger[Ledger.OPERATION_KIND] == TransferKind.BACKUP) & (state.ledger[Ledger.OPERATION_POOL] == 1)
    state.ledger[Ledger.OPERATION_COUNT, backups] -= 1


DAMAGE = {
    "the depth of a node is that of its parent plus one": nodes(Column.DEPTH, 2, 7),
    "a value on device is on a page on device (pool 1)": nodes(Column.DEVICE_PAGE, 3, NONE),
    "a value on host is on a page (pool 1)": nodes(
        [Column.DEVICE_PAGE, Column.INCOMING_PAGE, row(Tier.HOST)], 3, [-1, -1, 0]
    ),
    "no dead node has a value (pool 1)": nodes(row(Tier.HOST), 9, 0),
    "a value comes to one tier only (pool 1)": nodes(row(Tier.HOST), 3, 0),
    "a value on its way has an operation (pool 1)": nodes(tail(TailColumn.OPERATION), 3, NONE),
    "every value on its way belongs to an operation (pool 1)": fewer_members,
    "every value being stored belongs to an operation (pool 1)": nodes(tail(TailColumn.STORED), 3, BEING_STORED),
    "accounts are true (device, rank 0, pool 1)": account,
    "the owner of a page holds it (device, rank 0, pool 1)": value_free,
    "the eviction order is linked both ways (device, pool 1)": broken_order,
    "the order lists exactly what can be evicted (device, pool 1)": order,
    "a value is in the order of its rank (device, pool 1)": nodes(Column.RANK, 1, 1),
    "value locks are those of receipts and loads (pool 1)": nodes(tail(TailColumn.LOCKS), 1, 1),
}


@pytest.mark.parametrize("law", DAMAGE)
def test_damage_is_named(sound, law):
    state = jax.tree.map(np.array, sound)
    DAMAGE[law](state)
    found = violations(state)
    assert any(law in line for line in found), found


def test_every_law_of_values_has_its_damage(sound):
    laws = {
        law
        for law in broken_laws(sound)
        if "pool 1" in law and not law.startswith(("pages add", "a page on", "every page"))
    }
    shared = {law.split(" (")[0] for law in DAMAGE}
    assert {law.split(" (")[0] for law in laws} <= shared


@pytest.mark.parametrize("law", [WholePrefix(), Window(1), Window(5), Window(64), Chunk(3), Chunk(8), Checkpoint()])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_laws_are_in_range_and_do_not_decrease(law, page_size):
    firsts = [law.first_needed(depth, page_size) for depth in range(200)]
    assert firsts == sorted(firsts)
    assert all(0 <= first <= depth for depth, first in enumerate(firsts))
    np.testing.assert_array_equal(law.first_needed(np.arange(200), page_size), firsts)


def test_what_the_laws_ask_for():
    assert [Window(5).first_needed(depth, 2) for depth in range(6)] == [0, 0, 0, 0, 1, 2]
    assert [Window(1).first_needed(depth, 16) for depth in range(4)] == [0, 0, 1, 2]  # a page is more than the window
    assert [Checkpoint().first_needed(depth, 4) for depth in range(4)] == [0, 0, 1, 2]
    assert [Chunk(8).first_needed(depth, 4) for depth in range(6)] == [0, 0, 2, 2, 4, 4]


class Decreasing(Window):
    def first_needed(self, depth, page_size):
        return 0 if depth > 9 else depth


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ((PoolSpec("a", Window(1), 2), PoolSpec("a", Window(1), 2)), "two pools named a"),
        ((PoolSpec("a", anchor="b"),), "must come before"),
        ((PoolSpec("a", Decreasing(1), 2),), "must not decrease"),
        ((PoolSpec("a", anchor="kv", tiers=("device",)),), "must go wherever kv goes"),
    ],
)
def test_pools_that_cannot_work_are_refused(pools, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(page_size=2, device_pages=4, host_pages=2, pools=pools)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "kv", "law": Window(1), "device_pages": 1}, "identifier other than"),
        ({"name": "a"}, "a law .* or an anchor"),
        ({"name": "a", "law": Window(1)}, "device_pages must be"),
        ({"name": "a", "law": Window(1), "device_pages": 1, "tiers": ("host",)}, "every pool is on the device"),
        ({"name": "a", "law": Window(1), "device_pages": 1, "tiers": ("device", "tape")}, "tape"),
        ({"name": "a", "anchor": "kv", "device_pages": 1}, "has the pages of its anchor"),
        ({"name": "a", "law": object(), "device_pages": 1}, "in_place and first_needed"),
        ({"name": "a", "law": Window(1), "device_pages": 1, "host_pages": 1, "tiers": ("device",)}, "without host"),
    ],
)
def test_specs_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PoolSpec(**options)


def test_values_on_host_need_kv_on_host():
    with pytest.raises(ConfigError, match="set host_pages too"):
        CacheConfig(page_size=2, device_pages=4, pools=(PoolSpec("a", Window(1), 2, 2),))


def test_registering_a_pool_gives_another_configuration():
    config = CONFIG.register_pool(PoolSpec("indexer", anchor="window"))
    assert (config.pool_names, config.pool_of("indexer"), len(CONFIG.pools)) == (("kv", "window"), 1, 1)
    assert config.layout == CONFIG.layout
    with pytest.raises(ConfigError, match="no pool named"):
        config.pool_of("draft")


def test_host_memory_is_one_budget_over_pools_and_ranks():
    pools = (
        PoolSpec("window", Window(4), 10),
        PoolSpec("indexer", anchor="kv"),
        PoolSpec("scratch", Checkpoint(), 5, tiers=("device",)),
    )
    config = CacheConfig(page_size=2, device_pages=40, ranks=2, pools=pools)
    sizes = {"kv": 100, "window": 60, "indexer": 20, "scratch": 1000}
    shared = share_host_memory(config, sizes, 20_000)
    window, _, scratch = shared.pools
    assert (shared.host_pages, window.host_pages, scratch.host_pages) == (74, 18, 0)
    used = 2 * (74 * (100 + 20) + 18 * 60)
    assert 20_000 - 2 * 180 < used <= 20_000
    with pytest.raises(ConfigError, match="raise the budget"):
        share_host_memory(config, sizes, 100)
    with pytest.raises(ConfigError, match="lacks the pools"):
        share_host_memory(config, {"kv": 1}, 20_000)
