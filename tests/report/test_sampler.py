"""A sampler that looks on at a cache: real seconds, bounded memory, transfers as far as ticks tell."""

import json

import numpy as np
import pytest
from recordings import AB, CD
from support import new_cache, serve, settle, tiny

from purecache import CacheConfig
from purecache.report import Sampler, from_json
from purecache.report.readings import settings_of, stocks_of
from purecache.report.watch import Watch
from purecache.state import Checkpoint, PoolSpec, Window
from purecache.state.layout import Account, Ledger, Scalar, Tier, TransferKind


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def sampled(**options):
    clock = Clock()
    cache, gate = new_cache(tiny(), check_laws=False)
    sampler = Sampler(clock=clock, **options)
    cache.observe(sampler)
    return cache, gate, clock, sampler


def test_a_sample_is_what_the_cache_says_at_that_tick():
    cache, _, clock, sampler = sampled()
    seen = []
    for number in range(4):
        serve(cache, [*AB, number, number])
        settle(cache)
        clock.now += 2
        cache.tick()
        seen.append((cache.pages(Account.EVICTABLE), cache.pages(Account.FREE, Tier.HOST), cache.counters()))
    report = sampler.report(cache, title="four")
    assert (report.source, report.axis, report.title) == ("run", "seconds", "four")
    assert report.at == (2, 4, 6, 8)
    stocks = {(stock.tier, stock.rank): stock for stock in report.stocks}
    assert stocks["device", 0].accounts["evictable"] == tuple(each[0] for each in seen)
    assert stocks["host", 0].accounts["free"] == tuple(each[1] for each in seen)
    assert report.counters["inserted_pages"] == tuple(each[2]["inserted_pages"] for each in seen)
    assert report.found["device"] == tuple(2 * each[2]["matched_device_pages"] for each in seen)


def test_transfers_have_the_times_of_the_ticks_that_saw_them():
    cache, gate, clock, sampler = sampled()
    gate.holding = {TransferKind.BACKUP}
    serve(cache, AB)
    clock.now += 1
    cache.tick()
    clock.now += 3
    cache.tick()
    settle(cache)
    gate.holding = set()
    clock.now += 1
    cache.tick()
    gate.fails = lambda kind, count: [True] * count
    gate.holding = {TransferKind.BACKUP}
    serve(cache, CD)
    cache.tick()
    gate.holding = set()
    settle(cache)
    clock.now += 1
    cache.tick()
    report = sampler.report(cache)
    found = [(each.kind, each.pages, each.begun, each.ended, each.outcome) for each in report.transfers]
    assert found == [("backup", 2, 1, 5, "ok"), ("backup", 2, 5, 6, "failed")]


def test_memory_is_bounded_and_the_samples_span_the_whole_run():
    cache, _, clock, sampler = sampled(samples=10)
    for _ in range(500):
        clock.now += 1
        cache.tick()
        assert len(sampler) <= 10
    report = sampler.report(cache)
    gaps = np.diff(report.at)
    assert report.at[0] == 1
    assert report.at[-1] == 500
    assert 5 <= len(report.at) <= 11
    assert gaps.max() <= 2 * sampler.period + 1


def test_transfers_are_bounded_too_and_what_is_dropped_is_counted():
    cache, gate, clock, sampler = sampled(transfers=1)
    for number in range(3):
        gate.holding = {TransferKind.BACKUP}
        serve(cache, [number + 1] * 2)
        cache.tick()
        gate.holding = set()
        settle(cache)
        clock.now += 1
        cache.tick()
    report = sampler.report(cache)
    assert (len(report.transfers), report.transfers_left_out) == (1, 2)
    assert report.transfers[0].ended == 3


def test_tokens_are_shown_only_if_asked_for():
    cache, _, clock, sampler = sampled()
    serve(cache, [77, 78, 79, 80])
    settle(cache)
    clock.now += 1
    cache.tick()
    assert all(prefix.label.startswith("node ") for prefix in sampler.report(cache).prefixes)
    assert [prefix.label for prefix in sampler.report(cache, tokens=True).prefixes] == ["tokens 77 78"]


def test_saved_and_read_again(tmp_path):
    cache, _, clock, sampler = sampled()
    serve(cache, AB)
    clock.now += 1
    cache.tick()
    settle(cache)
    cache.drain()
    for _ in range(2):  # the second one takes the place of the first
        sampler.save(tmp_path / "run.json", cache, title="saved", made={"command": "mine"})
    assert (tmp_path / "run.json").stat().st_mode & 0o077 == 0
    report = from_json(json.loads((tmp_path / "run.json").read_text()))
    assert report == sampler.report(cache, title="saved", made={"command": "mine"})


def test_a_report_before_the_first_tick():
    cache, _, _, sampler = sampled()
    report = sampler.report(cache)
    assert report.at == (0,)
    assert report.prefixes == ()


@pytest.mark.parametrize("wrong", [{"samples": 1}, {"transfers": -1}, {"period": -1.0}, {"period": float("nan")}])
def test_sizes_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="at least 2"):
        Sampler(**wrong)


def test_looking_on_does_not_keep_the_state_from_being_changed_in_place():
    """A view that is held would make the next transition copy an array."""
    cache, _, clock, sampler = sampled()
    for number in range(3):
        serve(cache, [number + 1] * 4)
        clock.now += 1
        cache.tick()
        before = cache._driver.views()[0].__array_interface__["data"][0]
        sampler.ticked(cache)
        cache.match([number + 1] * 4)
        assert cache._driver.views()[0].__array_interface__["data"][0] == before
    settle(cache)
    cache.drain()


# ---- how operations ended, where several end between two looks -------------------------------------------------------


class Tables:
    """Books and ledger of a cache that nobody runs."""

    def __init__(self, operations=8):
        self.config = CacheConfig(page_size=2, device_pages=8, host_pages=8, max_operations=operations)
        self.books = np.zeros(self.config.layout.books, np.int32)
        self.ledger = np.full((len(Ledger), operations), -1, np.int32)
        self.ledger[Ledger.OPERATION_GENERATION] = 0
        self.watch = Watch(self.config)
        self.at = 0

    def begin(self, number, pages, kind=TransferKind.BACKUP):
        self.ledger[Ledger.OPERATION_KIND, number] = kind
        self.ledger[Ledger.OPERATION_COUNT, number] = pages
        self.ledger[[Ledger.OPERATION_POOL, Ledger.OPERATION_RANK], number] = 0

    def end(self, number, failed=0, row=Scalar.BACKUP_FAILED_PAGES):
        self.ledger[Ledger.OPERATION_KIND, number] = -1
        self.ledger[Ledger.OPERATION_GENERATION, number] += 1
        self.books[row] += failed

    def look(self):
        self.at += 1
        vacant = (self.ledger[Ledger.OPERATION_KIND] < 0).sum()
        self.books[Scalar.VACANT_OPERATIONS] = vacant
        return [each.outcome for each in self.watch.look(self.at, self.books, self.ledger.copy)]


def test_two_that_end_together_are_told_apart_only_if_that_is_certain():
    for failed, outcomes in (((0, 0), ["ok"] * 2), ((2, 3), ["failed"] * 2), ((2, 0), ["unknown"] * 2)):
        tables = Tables()
        tables.begin(0, 2)
        tables.begin(1, 3)
        assert tables.look() == []
        tables.end(0, failed[0])
        tables.end(1, failed[1])
        assert tables.look() == outcomes


def test_failures_of_another_kind_are_not_mine():
    tables = Tables()
    tables.begin(0, 2)
    tables.begin(1, 2, TransferKind.LOAD_BACK)
    tables.look()
    tables.end(0)
    tables.end(1, 1, Scalar.LOAD_FAILED_PAGES)
    assert tables.look() == ["ok", "part"]


def test_one_that_came_and_went_unseen_may_be_the_one_that_failed():
    tables = Tables()
    tables.begin(0, 2)
    tables.look()
    tables.end(0)
    tables.begin(3, 2)
    tables.end(3, 2)
    assert tables.look() == ["unknown"]


def test_a_number_that_is_used_again_is_another_operation():
    tables = Tables()
    tables.begin(0, 2)
    tables.look()
    tables.end(0, 2)
    tables.begin(0, 5)
    assert tables.look() == ["failed"]
    assert [(each.pages, each.outcome) for each in tables.watch.open()] == [(5, "open")]


def test_a_reset_forgets_what_is_under_way():
    tables = Tables()
    tables.begin(0, 2)
    tables.look()
    tables.ledger[Ledger.OPERATION_KIND] = -1
    tables.ledger[Ledger.OPERATION_GENERATION] += 1
    assert tables.look() == ["forgotten"]


def test_other_pools_have_stocks_and_transfers_of_their_own():
    config = CacheConfig(page_size=2, device_pages=8, host_pages=8, ranks=2).register_pool(
        PoolSpec("states", Checkpoint(), device_pages=3, host_pages=5)
    )
    layout = config.layout
    books = [np.arange(layout.books, dtype=np.int32) + 1000 * number for number in range(3)]
    stocks = {(stock.tier, stock.pool, stock.rank): stock for stock in stocks_of(config, books)}
    assert len(stocks) == 2 * 2 * 2
    assert {key: stock.capacity for key, stock in stocks.items() if key[2] == 1} == {
        ("device", "kv", 1): 8, ("host", "kv", 1): 8, ("device", "states", 1): 3, ("host", "states", 1): 5
    }  # fmt: skip
    index = layout.account(Account.LENT, Tier.HOST, 1, 1)
    assert stocks["host", "states", 1].accounts["lent"] == (index, index + 1000, index + 2000)
    tables = Tables(operations=config.max_operations)
    tables.watch = Watch(config)
    tables.begin(2, 1)
    tables.ledger[[Ledger.OPERATION_POOL, Ledger.OPERATION_RANK], 2] = 1
    tables.look()
    (seen,) = tables.watch.open()
    assert (seen.kind, seen.pool, seen.rank) == ("backup", "states", 1)


def test_settings_say_all_but_the_secret():
    config = CacheConfig(page_size=2, device_pages=8, seed=12345).register_pool(
        PoolSpec("window", Window(4), device_pages=3)
    )
    shown = settings_of(config)
    assert shown["policy"] == "lru"
    assert shown["pool window"].startswith("Window")
    assert "12345" not in str(shown)
