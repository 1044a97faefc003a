"""The metrics: their names, types, labels, and where their values come from. docs/metrics.md has the table.

Names that begin with the prefix (sglang by default) are those of sglang 0.5.23 and mean the same as there
(`sglang/srt/observability/metrics_collector.py`); those that begin with `purecache:` are what it has no name for.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from purecache.histograms import Histogram
from purecache.metrics.samples import Sample, StorageSample
from purecache.state import CacheConfig, WritePolicy
from purecache.state.layout import TIERS, Account, Scalar, Tier
from purecache.state.pools import ANCHOR
from purecache.stores.guard import Kind
from purecache.transitions import TransferKind

OPERATIONS = ("backup", "load_back", "store", "prefetch")
_FAILED = (
    Scalar.BACKUP_FAILED_PAGES,
    Scalar.LOAD_FAILED_PAGES,
    Scalar.STORE_FAILED_PAGES,
    Scalar.PREFETCH_FAILED_PAGES,
)
_REFUSED = (Scalar.LOADS_REFUSED, Scalar.STORES_REFUSED, Scalar.PREFETCHES_REFUSED)


class Point(NamedTuple):
    """One value of one metric."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: dict[str, str]
    value: float | Histogram


def points(sample: Sample, config: CacheConfig, prefix: str) -> Iterator[Point]:
    """All values of a sample."""
    totals = sample.totals()
    yield from _tokens(sample, totals, config, prefix)
    yield from _transfers(sample, config, prefix)
    yield from _sizes(sample, config, prefix)
    yield from _accounts(sample, config)
    yield from _troubles(sample, totals)
    if sample.storage is not None:
        yield from _storage(sample.storage, prefix)


def _tokens(sample: Sample, totals: dict[Scalar, int], config: CacheConfig, prefix: str) -> Iterator[Point]:
    """Of prompts and evictions."""
    width = config.page_size
    text = "Tokens of prompts that were looked up and found, by the tier that had them."
    for source, counter in (("device", Scalar.MATCHED_DEVICE_PAGES), ("host", Scalar.MATCHED_HOST_PAGES)):
        where = {"cache_source": source}
        yield Point(f"{prefix}:cached_tokens_total", "counter", text, where, totals[counter] * width)
    for name, counter, text in (
        ("purecache:uncached_tokens_total", Scalar.MATCHED_MISS_PAGES, "Tokens of prompts, looked up and not found."),
        ("purecache:inserted_tokens_total", Scalar.INSERTED_PAGES, "Tokens whose pages the tree took over."),
        ("purecache:duplicate_tokens_total", Scalar.DUPLICATE_PAGES, "Tokens computed that the tree had already."),
        (f"{prefix}:evicted_tokens_total", Scalar.EVICTED_DEVICE_PAGES, "Tokens evicted from the device."),
        ("purecache:evicted_host_tokens_total", Scalar.EVICTED_HOST_PAGES, "Tokens evicted from host memory."),
        (f"{prefix}:prefetched_tokens_total", Scalar.PREFETCHED_PAGES, "Tokens that came from storage to host."),
        (f"{prefix}:backuped_tokens_total", Scalar.STORED_PAGES, "Tokens written to storage."),
    ):
        yield Point(name, "counter", text, {}, totals[counter] * width)
    reason = "host_pressure" if config.write is WritePolicy.WRITE_BACK else "write_through_unbacked_eviction"
    dropped = totals[Scalar.DROPPED_PAGES] * width
    text = "Tokens evicted from the device without a copy on host."
    yield Point(f"{prefix}:hicache_dropped_tokens_total", "counter", text, {"reason": reason, "pool": ANCHOR}, dropped)
    text = "Share of the tokens looked up in the last 10 seconds that was found on device or host."
    yield Point(f"{prefix}:cache_hit_rate", "gauge", text, {}, sample.hit_rate())


def _transfers(sample: Sample, config: CacheConfig, prefix: str) -> Iterator[Point]:
    """Between device and host."""
    for kind, name, what, key in (
        (TransferKind.LOAD_BACK, "load_back", "loaded back from host to device", "bytes_loaded_back"),
        (TransferKind.BACKUP, "hicache_backup", "backed up from device to host", "bytes_backed_up"),
    ):
        for pool, pool_name in enumerate(config.pool_names):
            moved = sample.moved.get((kind, pool))
            if moved is None:
                continue
            # The value of a tail pool stands for the page that it is at.
            where, tokens = {"pool": pool_name}, moved.pages * config.page_size
            yield Point(f"{prefix}:{name}_tokens_total", "counter", f"Tokens {what}.", where, tokens)
            text = f"Seconds until pages were {what}, as far as ticks tell."
            yield Point(f"{prefix}:{name}_duration_seconds", "histogram", text, where, moved.seconds)
        if key in sample.plane:
            yield Point(f"{prefix}:{name}_bytes_total", "counter", f"Bytes {what}.", {}, sample.plane[key])


def _sizes(sample: Sample, config: CacheConfig, prefix: str) -> Iterator[Point]:
    """Of the kv pool, in tokens, as sglang gives them: per rank."""
    layout, width = config.layout, config.page_size

    def of(account: Account, tier: Tier, rank: int) -> int:
        return int(sample.books[layout.account(account, tier, rank)]) * width

    for rank in range(config.ranks):
        where = {"dp_rank": str(rank)}
        # What an operator took out of use is neither used nor there.
        whole = config.device_pages * width - of(Account.WITHHELD, Tier.DEVICE, rank)
        host = config.host_pages * width - of(Account.WITHHELD, Tier.HOST, rank)
        free, evictable = (of(account, Tier.DEVICE, rank) for account in (Account.FREE, Account.EVICTABLE))
        used, host_used = whole - free - evictable, host - of(Account.FREE, Tier.HOST, rank)
        for name, text, value in (
            ("kv_available_tokens", "Free tokens of the kv pool on device.", free),
            ("kv_evictable_tokens", "Tokens on device that eviction can free.", evictable),
            ("kv_used_tokens", "Tokens on device that are locked, lent or on their way.", used),
            ("num_used_tokens", "As kv_used_tokens.", used),
            ("token_usage", "Share of the kv pool that is used.", used / whole),
            ("full_token_usage", "As token_usage.", used / whole),
            ("max_total_num_tokens", "Tokens of the kv pool on device.", whole),
            ("hicache_host_used_tokens", "Tokens of host memory in use.", host_used),
            ("hicache_host_total_tokens", "Tokens of host memory.", host),
        ):
            yield Point(f"{prefix}:{name}", "gauge", text, where, value)


def _accounts(sample: Sample, config: CacheConfig) -> Iterator[Point]:
    """Every page, by whose hands it is in."""
    layout = config.layout
    text = "Pages by account: free, evictable, protected by locks, in_flight, lent to requests."
    for pool, name in enumerate(config.pool_names):
        for tier in TIERS:
            for rank in range(config.ranks) if layout.capacity(tier, pool) else ():
                for account in Account:
                    where = {"tier": tier.name.lower(), "pool": name, "dp_rank": str(rank)}
                    where["account"] = account.name.lower()
                    value = int(sample.books[layout.account(account, tier, rank, pool)])
                    yield Point("purecache:pages", "gauge", text, where, value)


def _troubles(sample: Sample, totals: dict[Scalar, int]) -> Iterator[Point]:
    """Refusals, failures, and what is under way."""
    text = "Pages whose transfer failed: they are misses."
    for operation, counter in zip(OPERATIONS, _FAILED, strict=True):
        where = {"operation": operation}
        yield Point("purecache:failed_pages_total", "counter", text, where, totals[counter])
    text = "Operations refused, for lack of room or of table entries."
    for operation, counter in zip(OPERATIONS[1:], _REFUSED, strict=True):
        yield Point("purecache:refused_total", "counter", text, {"operation": operation}, totals[counter])
    refused = totals[Scalar.BACKUP_REFUSED_PAGES]
    yield Point("purecache:refused_backup_pages_total", "counter", "Pages whose backup was refused.", {}, refused)
    stale = totals[Scalar.STALE_COMPLETIONS]
    text = "Completions of operations that were no longer known."
    yield Point("purecache:stale_completions_total", "counter", text, {}, stale)
    if "transfers_failed" in sample.plane:
        text = "Transfers between device and host of which a page failed."
        yield Point("purecache:failed_transfers_total", "counter", text, {}, sample.plane["transfers_failed"])
    under_way = {"device_host": sample.in_flight} | dict(sample.storage.under_way if sample.storage else {})
    text = "Transfers under way; stores_waiting: paths that wait for a staging buffer."
    for what, value in under_way.items():
        yield Point("purecache:in_flight", "gauge", text, {"what": what}, value)


def _storage(storage: StorageSample, prefix: str) -> Iterator[Point]:
    """Of storage, read from its guard at this moment."""
    stats, batches = storage.guard.stats(), storage.guard.batches()
    for kind, name in ((Kind.GET, "prefetch"), (Kind.PUT, "backup")):
        sizes = batches[kind]
        yield Point(f"{prefix}:{name}_pgs", "histogram", f"Objects per {name} batch.", {}, sizes.objects)
        yield Point(f"{prefix}:{name}_bandwidth", "histogram", f"GB/s per {name} batch.", {}, sizes.bandwidth)
    for kind in Kind:
        where = {"operation": kind.value}
        text = "Seconds that calls of the store took."
        yield Point("purecache:storage_call_seconds", "histogram", text, where, batches[kind].seconds)
        yield Point(
            "purecache:storage_bytes_total", "counter", "Bytes read or written.", where, stats[f"{kind.value}_bytes"]
        )
        text = "Keys asked for, by what became of them; corrupt ones are failed, too."
        for outcome in ("hits", "missing", "failed", "corrupt"):
            value = stats[f"{kind.value}_{outcome}"]
            yield Point("purecache:storage_keys_total", "counter", text, where | {"outcome": outcome}, value)
        text = "Calls of the store: accepted ones, those among them that went wrong, and refused ones."
        for label, outcome in (
            ("accepted", "calls"),
            ("late", "late"),
            ("raised", "exceptions"),
            ("dropped", "dropped"),
            ("refused", "refused"),
        ):
            value = stats[f"{kind.value}_{outcome}"]
            yield Point("purecache:storage_calls_total", "counter", text, where | {"outcome": label}, value)
    for name, text in (
        ("breaker_open", "Whether the store is left alone because it failed."),
        ("stuck_threads", "Threads in calls of the store that are late."),
    ):
        yield Point(f"purecache:storage_{name}", "gauge", text, {}, stats[name])
    text = "How often the store was left alone."
    yield Point("purecache:storage_breaker_openings_total", "counter", text, {}, stats["breaker_openings"])
    text = "Prefetches: begun, of those limited (too much was under way) and given_up (nothing came of them)."
    for outcome, key in (
        ("begun", "prefetches"),
        ("limited", "prefetches_limited"),
        ("given_up", "prefetches_given_up"),
    ):
        yield Point("purecache:prefetches_total", "counter", text, {"outcome": outcome}, storage.counts[key])
