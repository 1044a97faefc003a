"""Metrics as a scrape sees them: every number is that of the cache, under names that sglang's users know."""

import json
import os
import re
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support import new_cache, serve, settle, tiny

from purecache.answers import Load
from purecache.effects.tally import Tally
from purecache.effects.transfers import Completion, Transfer
from purecache.histograms import Counts
from purecache.metrics import Sampler
from purecache.metrics.exporter import Metrics
from purecache.state.layout import COUNTERS, TIERS, Account, Scalar
from purecache.transitions import TransferKind

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from tiers import ABCD, LastingStore, attached, emptied, prefetched, stored

pytestmark = pytest.mark.filterwarnings("ignore:a page is 2 tokens")
DOCS = Path(__file__).parents[2] / "docs"


def scraped(metrics):
    """{(name, labels as a frozenset): value} of a scrape, parsed from its text."""
    registry = CollectorRegistry()
    metrics.register(registry)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def of(found, name, **labels):
    return found[name, frozenset(labels.items())]


@pytest.fixture(scope="module")
def three_tiers():
    """A cache that has backed up, stored, evicted, prefetched and loaded back, and what was scraped of it."""
    store = LastingStore()
    cache, tier, _ = attached(store)
    tier.warm(8)  # before anything waits for it
    metrics = Metrics()
    metrics.watch(cache)
    stored(cache, tier, ABCD)
    emptied(cache)
    assert prefetched(tier, cache, ABCD) == 8
    match = cache.match(ABCD)
    assert isinstance(cache.load_back(match), Load)
    cache.match([*ABCD, 9, 9])
    serve(cache, [7, 7, 8, 8], rank=1)
    settle(cache)
    cache.tick()
    assert cache.evict(8) > 0
    assert cache.evict_host(1) == 1
    cache.tick()
    yield cache, tier, scraped(metrics)
    tier.detach()


def test_hits_evictions_and_transfers_in_tokens(three_tiers):
    cache, _, found = three_tiers
    counters = cache.counters()
    for name, labels, key in (
        ("sglang:cached_tokens_total", {"cache_source": "device"}, "matched_device_pages"),
        ("sglang:cached_tokens_total", {"cache_source": "host"}, "matched_host_pages"),
        ("purecache:uncached_tokens_total", {}, "matched_miss_pages"),
        ("sglang:evicted_tokens_total", {}, "evicted_device_pages"),
        ("purecache:evicted_host_tokens_total", {}, "evicted_host_pages"),
        ("sglang:prefetched_tokens_total", {}, "prefetched_pages"),
        ("sglang:backuped_tokens_total", {}, "stored_pages"),
        ("sglang:load_back_tokens_total", {"pool": "kv"}, "loaded_pages"),
        ("sglang:hicache_backup_tokens_total", {"pool": "kv"}, "backup_pages"),
        ("purecache:inserted_tokens_total", {}, "inserted_pages"),
    ):
        assert of(found, name, **labels) == counters[key] * 2 > 0, name
    for name, key in (("load_back", "bytes_loaded_back"), ("hicache_backup", "bytes_backed_up")):
        assert of(found, f"sglang:{name}_bytes_total") == counters[key] > 0
    assert 0 <= of(found, "sglang:cache_hit_rate") <= 1


def test_seconds_of_transfers(three_tiers):
    _, _, found = three_tiers
    for name in ("load_back", "hicache_backup"):
        count = of(found, f"sglang:{name}_duration_seconds_count", pool="kv")
        assert count >= 1
        assert of(found, f"sglang:{name}_duration_seconds_bucket", pool="kv", le="+Inf") == count
        assert of(found, f"sglang:{name}_duration_seconds_sum", pool="kv") > 0


def test_storage_in_objects_bytes_and_bandwidth(three_tiers):
    _, tier, found = three_tiers
    stats = tier.guard.stats()
    for kind in ("exists", "get", "put", "delete"):
        assert of(found, "purecache:storage_bytes_total", operation=kind) == stats[f"{kind}_bytes"]
        for outcome in ("hits", "missing", "failed", "corrupt"):
            value = of(found, "purecache:storage_keys_total", operation=kind, outcome=outcome)
            assert value == stats[f"{kind}_{outcome}"]
        for label, outcome in (("accepted", "calls"), ("raised", "exceptions"), ("late", "late")):
            value = of(found, "purecache:storage_calls_total", operation=kind, outcome=label)
            assert value == stats[f"{kind}_{outcome}"]
    for name, kind in (("prefetch", "get"), ("backup", "put")):
        assert of(found, f"sglang:{name}_pgs_count") == stats[f"{kind}_calls"] >= 1
        assert of(found, f"sglang:{name}_pgs_sum") == stats[f"{kind}_pages"] >= 4
        assert of(found, f"sglang:{name}_bandwidth_count") >= 1
    assert of(found, "purecache:prefetches_total", outcome="begun") == 1
    assert of(found, "purecache:storage_breaker_open") == 0


def test_every_page_is_in_an_account(three_tiers):
    cache, _, found = three_tiers
    for tier in TIERS:
        for rank in range(2):
            for account in Account:
                labels = {"pool": "kv", "dp_rank": str(rank), "tier": tier.name.lower()}
                value = of(found, "purecache:pages", account=account.name.lower(), **labels)
                assert value == cache.pages(account, tier, rank)
    for rank in ("0", "1"):
        parts = [of(found, f"sglang:kv_{name}_tokens", dp_rank=rank) for name in ("available", "evictable", "used")]
        assert sum(parts) == of(found, "sglang:max_total_num_tokens", dp_rank=rank) == 16
        assert of(found, "sglang:token_usage", dp_rank=rank) == parts[2] / 16


def test_pages_out_of_use_are_neither_there_nor_used():
    cache, _ = new_cache(tiny(), check_laws=False)
    metrics = Metrics()
    metrics.watch(cache)
    whole = cache.config.device_pages, cache.config.host_pages
    cache.resize(device_pages=whole[0] - 2, host_pages=whole[1] - 1, rank=0)
    cache.tick()
    found = scraped(metrics)
    for name, pages in (
        ("max_total_num_tokens", whole[0] - 2),
        ("kv_available_tokens", whole[0] - 2),
        ("kv_used_tokens", 0),
        ("hicache_host_total_tokens", whole[1] - 1),
        ("hicache_host_used_tokens", 0),
    ):
        assert of(found, f"sglang:{name}", dp_rank="0") == pages * cache.config.page_size


def test_failures_and_refusals_by_class():
    cache, gate = new_cache(tiny(), check_laws=False)
    metrics = Metrics({"model_name": "m"}, prefix="other")
    metrics.watch(cache, engine="a")
    gate.fails = lambda kind, number: [kind is TransferKind.BACKUP] * number
    serve(cache, [1, 1, 2, 2])
    settle(cache)
    cache.tick()
    gate.fails = lambda kind, number: [kind is TransferKind.LOAD_BACK] * number
    serve(cache, [3, 3, 4, 4])
    settle(cache)
    cache.tick()
    cache.evict(8)
    cache.load_back(cache.match([3, 3, 4, 4]))
    receipt = cache.admit([3, 3, 4, 4])[1]
    lent = cache.allocate(cache.free_pages())
    cache.load_back(cache.match([3, 3, 4, 4]))  # no room
    cache.tick()
    found, same = scraped(metrics), {"model_name": "m", "engine": "a"}
    assert of(found, "purecache:failed_pages_total", operation="backup", **same) == 2
    assert of(found, "purecache:failed_pages_total", operation="load_back", **same) == 2
    assert of(found, "purecache:failed_transfers_total", **same) == cache.counters()["transfers_failed"] >= 2
    assert of(found, "purecache:refused_total", operation="load_back", **same) == 1
    assert of(found, "other:hicache_backup_tokens_total", pool="kv", **same) == 4
    assert not any(name.startswith("sglang") for name, _ in found)
    cache.abort(lent, receipt)


def test_in_flight():
    cache, gate = new_cache(tiny(), check_laws=False)
    metrics = Metrics()
    metrics.watch(cache)
    gate.holding = {TransferKind.BACKUP}
    serve(cache, [1, 1, 2, 2])
    settle(cache)
    cache.tick()
    assert of(scraped(metrics), "purecache:in_flight", what="device_host") == 1
    gate.holding = set()
    cache.tick()
    assert of(scraped(metrics), "purecache:in_flight", what="device_host") == 0


class Books:
    """What a sampler asks a cache for, with counters as they are told."""

    def __init__(self):
        self.storage, self.tally = None, Tally()
        self.plane = SimpleNamespace(counters=dict, in_flight=0)
        self.values = np.zeros(100, np.int32)
        self._driver = self

    def books(self):
        return self.values

    def count(self, **amounts):
        self.values = self.values.copy()
        for name, amount in amounts.items():
            self.values[Scalar[name.upper()] :][:1].view(np.uint32)[:] += np.uint32(amount)


def test_totals_go_on_where_the_counters_of_the_state_wrap():
    now = [0.0]
    books, sampler = Books(), Sampler(lambda: now[0])
    for _ in range(5):
        now[0] += 1
        books.count(inserted_pages=2**31 - 7, evicted_device_pages=3)
        sampler.ticked(books)
    assert sampler.sample.totals()[Scalar.INSERTED_PAGES] == 5 * (2**31 - 7)
    assert sampler.sample.totals()[Scalar.EVICTED_DEVICE_PAGES] == 15
    assert set(sampler.sample.totals()) == set(COUNTERS)


def test_the_hit_rate_is_of_the_last_ten_seconds():
    now = [0.0]
    books, sampler = Books(), Sampler(lambda: now[0])
    rates = []
    for second in range(40):
        now[0] = float(second)
        hit = second >= 20
        books.count(matched_device_pages=4 * hit, matched_miss_pages=4 * (not hit))
        sampler.ticked(books)
        rates.append(sampler.sample.hit_rate())
    assert rates[19] == 0
    assert rates[24] == pytest.approx(0.5, abs=0.1)
    assert rates[31:] == [1.0] * 9


def test_transfers_are_timed_from_their_start_to_their_end():
    now = [10.0]
    tally = Tally(lambda: now[0])
    pages = np.arange(3, dtype=np.int32)
    for number in (0, 1):
        tally.began(Transfer(number, 0, TransferKind.BACKUP, 0, pages, pages))
    now[0] = 10.25
    tally.ended(Completion(0, 0, TransferKind.BACKUP, np.array([True, True, False])))
    tally.forget()  # a reset: what is under way is never reported
    tally.ended(Completion(5, 0, TransferKind.LOAD_BACK, np.array([True]), pool=1))
    moved = tally.now()
    assert moved[TransferKind.BACKUP, 0][:2] == (2, 1)
    assert moved[TransferKind.BACKUP, 0].seconds.total == 0.25
    assert sum(moved[TransferKind.BACKUP, 0].seconds.counts) == 1
    assert moved[TransferKind.LOAD_BACK, 1].pages == 1
    assert tally._began == {}


def test_a_value_belongs_to_the_first_bucket_whose_end_is_not_below_it():
    counts = Counts((1.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 9.0):
        counts.add(value)
    assert counts.now() == ((1.0, 5.0), (2, 2, 1), 17.0)


def test_two_caches_and_http():
    """Two caches of one process, told apart by a label, scraped over HTTP."""
    metrics = Metrics({"model_name": "m"})
    for name in ("a", "b"):
        cache, _ = new_cache(tiny(), check_laws=False, plane=False)
        metrics.watch(cache, engine=name)
        cache.match([1, 1])
        cache.tick()
    server, thread = metrics.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    server.shutdown()
    server.server_close()
    thread.join(10)
    for name in ("a", "b"):
        assert f'purecache:uncached_tokens_total{{engine="{name}",model_name="m"}} 2.0' in text.replace(
            f'{{model_name="m",engine="{name}"}}', f'{{engine="{name}",model_name="m"}}'
        )


def test_caches_that_can_not_be_told_apart_are_refused():
    metrics = Metrics()
    cache, other = (new_cache(tiny(), check_laws=False, plane=False)[0] for _ in range(2))
    metrics.watch(cache, engine="a")
    with pytest.raises(ValueError, match="labels"):
        metrics.watch(other, engine="a")
    with pytest.raises(ValueError, match="labels"):
        metrics.watch(other)
    registry = CollectorRegistry()
    metrics.register(registry)


def names_of(found):
    """Names of metrics as a query has them, without what the format adds to those of histograms."""
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in found}


def test_the_dashboard_asks_for_what_there_is(three_tiers):
    _, _, found = three_tiers
    board = json.loads((DOCS / "grafana/purecache.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", [])
        for name in re.findall(r"(?:sglang|purecache):[a-z_0-9]+", target["expr"])
    }
    asked = {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked}
    assert len(asked) > 20
    assert asked <= names_of(found)


def test_the_docs_list_what_there_is(three_tiers):
    _, _, found = three_tiers
    listed = set(re.findall(r"`((?:sglang|purecache):[a-z_0-9]+)", (DOCS / "metrics.md").read_text()))
    assert names_of(found) == listed


def test_names_are_those_of_sglang(three_tiers):
    """Against its sources, where they are: PURECACHE_SGLANG names a folder with the package (tried with 0.5.23)."""
    if not (folder := os.environ.get("PURECACHE_SGLANG")):
        pytest.skip("needs PURECACHE_SGLANG, a folder with the package sglang")
    text = (Path(folder) / "sglang/srt/observability/metrics_collector.py").read_text()
    theirs = set(re.findall(r'"(sglang:[a-z_0-9]+)"', text))
    assert {name for name in names_of(three_tiers[2]) if name.startswith("sglang:")} <= theirs
