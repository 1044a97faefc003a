"""An outcome as text for a terminal."""

from collections.abc import Iterator

from purecache.traces.outcome import Outcome


def lines_of(outcome: Outcome) -> Iterator[str]:
    """The lines of the report."""
    trace, setting = outcome.trace, outcome.setting
    yield (
        f"{trace.name} ({trace.form}): {trace.requests:,} requests, {trace.tokens:,} prompt tokens, "
        f"{trace.distinct_pages:,} different pages of {trace.page_tokens} tokens, {trace.seconds:,.0f} s"
    )
    tiers = ((tier, getattr(setting, f"{tier}_pages")) for tier in ("device", "host", "disk"))
    sizes = ", ".join(
        f"{tier} {pages:,} pages ({pages * setting.bytes_per_page / 1e9:,.1f} GB)" for tier, pages in tiers if pages
    )
    yield f"{sizes}; {setting.policy}, {setting.write}; {setting.model}, {_order(outcome)}"
    yield ""
    yield f"{'found on':>12}{'tokens':>16}{'share':>9}{'pages':>12}{'seconds saved':>16}"
    for name, share in outcome.hits.items():
        saved = outcome.latency.saved.get(name)
        end = "" if saved is None else f"{saved:16,.1f}"
        yield f"{name:>12}{share.tokens:16,}{share.rate:9.4f}{share.pages:12,}{end}"
    yield ""
    yield f"{'moved':>12}{'pages':>16}{'GB':>12}{'seconds':>12}"
    for link, moved in outcome.moved.items():
        yield f"{link:>12}{moved.pages:16,}{moved.bytes / 1e9:12,.1f}{moved.seconds:12,.1f}"
    yield ""
    evicted = ", ".join(f"{tier} {pages:,}" for tier, pages in outcome.evicted.items())
    yield f"evicted pages: {evicted}; {outcome.dropped:,} left the device without a copy"
    refused = outcome.refusals
    yield (
        f"refused: {refused.too_large} requests too large, {refused.loads} load backs, "
        f"{refused.backup_pages:,} pages of backups, {refused.prefetches} prefetches ({refused.prefetches_late} late); "
        f"{refused.waited} requests waited for pages"
    )
    latency = outcome.latency
    yield (
        f"time to first token (model): mean {latency.ttft_mean:.3f} s, p50 {latency.ttft_p50:.3f}, "
        f"p90 {latency.ttft_p90:.3f}, p99 {latency.ttft_p99:.3f}; of it in the queue {latency.queue_mean:.3f}"
    )
    yield f"prefill (model): {latency.prefill:,.1f} s, without a cache {latency.prefill_without:,.1f} s"


def _order(outcome: Outcome) -> str:
    setting = outcome.setting
    if setting.concurrent == 1:
        return "one request after the other"
    return f"{setting.concurrent} requests at once at most, arriving {setting.speed:g} times as fast as recorded"
