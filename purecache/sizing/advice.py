"""What to make of a sweep: where the curve bends, which sizes are enough, which policy, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from purecache.sizing.sweep import Sized

ENOUGH = 0.95
"""Share of the most that any configuration saves which is enough."""
SAME = 0.005
"""Share of all tokens by which two policies must differ to be told apart."""


@dataclass(frozen=True)
class Knee:
    """Where more memory begins to bring less than it does on average."""

    pages: int
    rate: float
    most: float
    """What an endless cache finds."""


def knee_of(capacities: np.ndarray, rates: np.ndarray) -> Knee:
    """The point of a curve that is highest above the line from nothing to its end.

    (Satopää et al., "Finding a kneedle in a haystack", 2011, with linear axes.) capacities: [n] rising; rates: [n].
    """
    most = float(rates[-1])
    if most <= 0:
        return Knee(int(capacities[0]), 0.0, 0.0)
    place = int(np.argmax(rates / most - capacities / capacities[-1]))
    return Knee(int(capacities[place]), float(rates[place]), most)


def best_by_size(rows: Sequence[Sized]) -> list[Sized]:
    """Of every size, the policies that save most; in the order of the sizes."""
    best: dict[tuple[int, int, int], Sized] = {}
    for row in rows:
        size = row.device_pages, row.host_pages, row.disk_pages
        if size not in best or row.seconds > best[size].seconds:
            best[size] = row
    return [best[size] for size in sorted(best)]


def smallest_enough(rows: Sequence[Sized]) -> Sized:
    """The smallest configuration (device first, then host, then disk) that saves `ENOUGH` of the most saved.

    One of them must save something.
    """
    best = best_by_size(rows)
    most = max(row.seconds for row in best)
    return next(row for row in best if row.seconds >= ENOUGH * most)


def advice(rows: Sequence[Sized], knee: Knee, page_bytes: float) -> list[str]:
    """Sentences for people."""

    def size(pages: int) -> str:
        return f"{pages * page_bytes / 1e9:,.1f} GB ({pages:,} pages)"

    lines = [
        f"LRU bends at {size(knee.pages)}: it finds {knee.rate:.3f} of all tokens there, "
        f"and {knee.most:.3f} without end. Below that size a byte brings more than on average, above it less."
    ]
    most = max(rows, key=lambda row: row.seconds)
    if most.seconds <= 0:
        return [*lines, "No configuration saves time: what loading costs outweighs what was found."]
    chosen = smallest_enough(rows)
    tiers = [("device", chosen.device_pages), ("host", chosen.host_pages), ("disk", chosen.disk_pages)]
    parts = ", ".join(f"{tier} {size(pages)}" for tier, pages in tiers if pages)
    lines.append(
        f"Of these sizes, the smallest that saves {ENOUGH:.0%} of the most ({most.seconds:,.0f} s): {parts}, with "
        f"{chosen.policy} and {chosen.write}. It finds {chosen.rate:.3f} of all tokens and saves "
        f"{chosen.seconds:,.0f} s."
    )
    lines += _about_policies(rows, chosen)
    for tier, seconds in chosen.saved.items():
        if seconds < 0:
            lines.append(f"Loading from {tier} takes longer than computing ({-seconds:,.0f} s): raise its threshold.")
    if any(row.too_large for row in rows):
        least = min(row.device_pages for row in rows if not row.too_large) if not all(r.too_large for r in rows) else 0
        lines.append(
            "Some devices are smaller than the largest request, which they refuse"
            + (f": {size(least)} are enough for all." if least else ".")
        )
    return lines


def _about_policies(rows: Sequence[Sized], chosen: Sized) -> list[str]:
    """How the policies compare at the chosen size."""
    size = chosen.device_pages, chosen.host_pages, chosen.disk_pages
    there = [row for row in rows if (row.device_pages, row.host_pages, row.disk_pages) == size]
    lru = [row for row in there if row.policy == "lru"]
    if len(there) < 2 or not lru:
        return []
    plain = max(lru, key=lambda row: row.seconds)
    if chosen.rate - plain.rate < SAME:
        return [f"No other policy finds {SAME:.1%} of all tokens more than LRU there."]
    return [
        f"{chosen.policy} with {chosen.write} finds {chosen.rate - plain.rate:.3f} of all tokens more than LRU there."
    ]
