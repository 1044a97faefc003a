"""A report of a trace run: what `purecache trace --json` wrote."""

from itertools import accumulate
from typing import Any

from purecache.report.model import Prefix, Report, ReportError, Stock
from purecache.traces.outcome import FORMAT

MOVED = {
    "backup": "backup_pages",
    "load_back": "loaded_pages",
    "store": "stored_pages",
    "prefetch": "prefetched_pages",
}
"""Counter of a report for each link of an outcome."""


def report_of_outcome(outcome: dict[str, Any], *, made: dict[str, str] | None = None) -> Report:
    """The report of an outcome (`purecache.traces.outcome.Outcome`), as `json.loads` gives it.

    made: what to say of how it was made. Raises ReportError for what is none.
    """
    if outcome.get("format") != FORMAT:
        raise ReportError(f"this is no outcome of `purecache trace` in the format {FORMAT}")
    try:
        return _report(outcome, made or {})
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(f"the outcome lacks something, or has it in another form: {error!r}") from error


def _report(outcome: dict[str, Any], made: dict[str, str]) -> Report:
    trace, setting, rows = outcome["trace"], outcome["setting"], outcome["series"]
    # Several rows may have one time: the last of them says what there is then.
    kept = [n for n, row in enumerate(rows) if n + 1 == len(rows) or rows[n + 1]["time"] > row["time"]]
    at = [float(rows[n]["time"]) for n in kept]
    begins = bool(at) and at[0] > 0
    capacities = {tier: int(setting[f"{tier}_pages"]) for tier in ("device", "host", "disk")}

    def totals(part: str, name: str) -> tuple[float, ...]:
        sums = list(accumulate(int(row[part][name]) for row in rows))
        return tuple([0] * begins + [sums[n] for n in kept])

    def account(tier: str, name: str) -> tuple[float, ...]:
        first = [capacities[tier] if name == "free" else 0] * begins
        return tuple(first + [int(rows[n]["pages"][tier].get(name, 0)) for n in kept])

    tiers = [tier for tier in rows[0]["pages"] if capacities[tier]] if rows else []
    refused = list(accumulate(int(row["refused"]) for row in rows))
    counters = {MOVED[link]: totals("moved", link) for link in (rows[0]["moved"] if rows else ())}
    counters |= {f"evicted_{tier}_pages": totals("evicted", tier) for tier in (rows[0]["evicted"] if rows else ())}
    counters["refusals"] = tuple([0] * begins + [refused[n] for n in kept])
    return Report(
        source="trace",
        title=str(trace["name"]),
        axis="seconds",
        at=tuple([0.0] * begins + at),
        page_size=int(trace["page_tokens"]),
        stocks=tuple(
            Stock(tier, "kv", 0, capacities[tier], {name: account(tier, name) for name in rows[0]["pages"][tier]})
            for tier in tiers
        ),
        found={where: totals("hits", where) for where in (rows[0]["hits"] if rows else ())},
        counters=counters,
        prefixes=tuple(_prefixes(outcome["hot"], int(trace["page_tokens"]))),
        figures=_figures(outcome),
        settings={name.replace("_", " "): _text(value) for name, value in setting.items()},
        made=made | {"trace": f"{trace['name']} ({trace['form']})"},
        notes=("Transfers of a trace run are counted by link; the single ones are not recorded.",),
    )


def _prefixes(hot: list[dict[str, Any]], page_tokens: int) -> list[Prefix]:
    places = {each["id"]: place for place, each in enumerate(hot)}
    return [
        Prefix(
            parent=places[each["parent"]] if each["parent"] != -1 else -1,
            rank=0,
            depth=each["depth"] // page_tokens,
            pages=max(1, -(-each["tokens"] // page_tokens)),
            tiers=(),
            hits=int(each["uses"]),
            label=f"stretch {each['id']}",
        )
        for each in hot
    ]


def _figures(outcome: dict[str, Any]) -> dict[str, str]:
    trace, latency, refusals = outcome["trace"], outcome["latency"], outcome["refusals"]
    seconds = {
        "time to first token, mean": latency["ttft_mean"],
        "time to first token, median": latency["ttft_p50"],
        "time to first token, 99 %": latency["ttft_p99"],
        "queueing, mean": latency["queue_mean"],
        "prefill of all requests": latency["prefill"],
        "prefill of all requests without a cache": latency["prefill_without"],
        **{f"prefill saved by {tier}": value for tier, value in latency["saved"].items()},
    }
    counts = {
        "requests": trace["requests"],
        "tokens of all prompts": trace["tokens"],
        "different pages": trace["distinct_pages"],
        **{f"refused: {name.replace('_', ' ')}": value for name, value in refusals.items()},
    }
    shown = {name: _text(value) for name, value in counts.items()}
    return shown | {f"{name} (by the model)": f"{_text(value)} s" for name, value in seconds.items()}


def _text(value: Any) -> str:
    """A number as people write it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.3e}"
