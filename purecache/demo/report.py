"""What a demo run shows: rows per request, totals, the comparison of answers, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.demo.scheduler import Request


@dataclass(frozen=True)
class Run:
    """All conversations held once."""

    requests: Sequence[Request]
    seconds: float  # from the first submission to the last answer


@dataclass(frozen=True)
class Report:
    """The same conversations held without the cache (cold) and with it (warm)."""

    cold: Run
    warm: Run
    to_host: int  # bytes written to L2 during the warm run
    to_device: int  # bytes loaded from L2 during the warm run
    settings: Mapping[str, Any]
    counters: Mapping[str, Any]  # of the cache, after the warm run
    waiting: Run | None = None
    """The same once more, with steps that wait for every load back, if that is compared."""

    @property
    def different(self) -> list[str]:
        """Names of the requests whose answers differ between the runs."""
        others = [self.warm, self.waiting] if self.waiting else [self.warm]
        return [
            cold.name
            for place, cold in enumerate(self.cold.requests)
            if any(cold.answer != run.requests[place].answer for run in others)
        ]

    @property
    def different_states(self) -> list[str]:
        """Names of the requests that ended with other keys, values or states, where their bits were compared."""
        pairs = zip(self.cold.requests, self.warm.requests, strict=True)
        return [cold.name for cold, warm in pairs if cold.digest != warm.digest]

    @property
    def proven(self) -> bool:
        """Whether nothing that was compared differs."""
        return not (self.different or self.different_states)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per request; tokens are counts, times are seconds, bytes are bytes."""
        return [
            {
                "request": warm.name,
                "prompt_tokens": len(warm.prompt),
                "answer_tokens": len(warm.answer),
                "computed_tokens_cold": cold.computed,
                "computed_tokens": warm.computed,
                "repeated_tokens": warm.repeated,
                "l1_tokens": warm.hit,
                "l2_tokens": warm.loaded,
                "l3_tokens": warm.stored,
                "loaded_bytes": warm.loaded_bytes,
                "preemptions_cold": cold.preempted,
                "preemptions": warm.preempted,
                "first_token_seconds_cold": cold.first_token - cold.submitted,
                "first_token_seconds": warm.first_token - warm.submitted,
                "queued_seconds_cold": cold.admitted - cold.submitted,
                "queued_seconds": warm.admitted - warm.submitted,
                "answer_equal": cold.answer == warm.answer,
            }
            for cold, warm in zip(self.cold.requests, self.warm.requests, strict=True)
        ]

    def totals(self) -> dict[str, Any]:
        """Sums over all requests, medians of the times to first token, and the bytes moved in both directions."""
        rows = self.rows()
        summed = [key for key in rows[0] if key.endswith(("_tokens", "_tokens_cold")) or key.startswith("preemptions")]
        totals: dict[str, Any] = {"requests": len(rows)} | {key: sum(row[key] for row in rows) for key in summed}
        for key in ("first_token_seconds_cold", "first_token_seconds"):
            totals[f"median_{key}"] = float(np.median([row[key] for row in rows]))
        return (
            totals
            | {
                "seconds_cold": self.cold.seconds,
                "seconds": self.warm.seconds,
                "bytes_to_host": self.to_host,
                "bytes_to_device": self.to_device,
                "answers_equal": not self.different,
            }
            | ({"seconds_waiting": self.waiting.seconds} if self.waiting else {})
        )

    def as_json(self, text: Mapping[str, str]) -> dict[str, Any]:
        """Everything above as one JSON-ready dictionary; `text` holds the answers as text by request name."""
        rows = [row | {"answer": text[row["request"]]} for row in self.rows()]
        return {
            "settings": dict(self.settings),
            "requests": rows,
            "totals": self.totals(),
            "different": self.different,
            "different_states": self.different_states,
            "counters": dict(self.counters),
        }


HEADINGS = ("request", "prompt", "computed", "L1", "L2", "of L3", "answer", "TTFT cold", "TTFT warm", "loaded MB")


def table(report: Report) -> str:
    """Return the rows and totals as text of at most 120 columns, and the verdict below."""
    rows, totals = report.rows(), report.totals()
    lines = [
        (
            row["request"],
            str(row["prompt_tokens"]),
            str(row["computed_tokens"]),
            str(row["l1_tokens"]),
            str(row["l2_tokens"]),
            str(row["l3_tokens"]),
            str(row["answer_tokens"]),
            f"{row['first_token_seconds_cold']:.2f} s",
            f"{row['first_token_seconds']:.2f} s",
            f"{row['loaded_bytes'] / 1e6:.1f}",
        )
        for row in rows
    ]
    total = (
        f"total ({totals['requests']}), median TTFT",
        str(totals["prompt_tokens"]),
        str(totals["computed_tokens"]),
        str(totals["l1_tokens"]),
        str(totals["l2_tokens"]),
        str(totals["l3_tokens"]),
        str(totals["answer_tokens"]),
        f"{totals['median_first_token_seconds_cold']:.2f} s",
        f"{totals['median_first_token_seconds']:.2f} s",
        f"{totals['bytes_to_device'] / 1e6:.1f}",
    )
    widths = [max(len(line[column]) for line in [HEADINGS, *lines, total]) for column in range(len(HEADINGS))]

    def text(line: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *others])

    rule = "-" * len(text(HEADINGS))
    return "\n".join([text(HEADINGS), rule, *map(text, lines), rule, text(total), "", *verdict(report)])


def verdict(report: Report) -> list[str]:
    """Return the lines below the table: what the cache saved, what it moved, and whether the answers are the same."""
    totals = report.totals()
    saved = 1 - totals["computed_tokens"] / totals["computed_tokens_cold"]
    lines = [
        f"Prefill: {totals['computed_tokens']} tokens computed instead of {totals['computed_tokens_cold']} "
        f"({saved:.0%} saved), and {totals['repeated_tokens']} once more because chunks start at fixed multiples.",
        f"Time: {report.cold.seconds:.1f} s without the cache, {report.warm.seconds:.1f} s with it. TTFT is the time "
        "from question to first token, waiting included.",
        f"Moved: {report.to_host / 1e6:.1f} MB to L2 (host), {report.to_device / 1e6:.1f} MB back to L1 (device).",
    ]
    if report.waiting:
        lines.append(
            f"Load backs: {report.warm.seconds:.1f} s with steps that go on while pages come,"
            f" {report.waiting.seconds:.1f} s with steps that wait for them (the faster of two runs each, in turns)."
        )
    if "tokens_prefetched" in report.counters:
        read, written = report.counters["tokens_prefetched"], report.counters["stored_pages"]
        lines.append(f"Storage: {read} tokens came from L3, {written} pages went there; the next run finds them.")
    if totals["preemptions"] or totals["preemptions_cold"]:
        lines.append(
            f"Preempted: {totals['preemptions_cold']} times without the cache, {totals['preemptions']} with it."
        )
    if report.different:
        lines.append(f"DIFFERENT ANSWERS with and without the cache: {', '.join(report.different)}")
    else:
        lines.append(
            f"Proof: all {totals['requests']} answers ({totals['answer_tokens']} tokens) are the same, token for "
            "token, with and without the cache."
        )
    if report.different_states:
        lines.append(f"DIFFERENT STATES with and without the cache: {', '.join(report.different_states)}")
    elif all(request.digest for request in report.warm.requests):
        lines.append("States, keys and values with which the requests ended are the same, too, bit for bit.")
    return lines
