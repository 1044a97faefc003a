"""Transfers as a timeline: a lane per kind, with what moved in every stretch of time and single transfers as bars."""

from bisect import bisect_left
from dataclasses import dataclass

from purecache.report.geometry import SIZE, Tick, buckets, shorten, x_ticks
from purecache.report.model import Report, Transfer

KINDS = {
    "backup": ("Backup", "device to host", "backup_pages"),
    "load_back": ("Load back", "host to device", "loaded_pages"),
    "store": ("Store", "host to storage", "stored_pages"),
    "prefetch": ("Prefetch", "storage to host", "prefetched_pages"),
}
"""Kind of a transfer: (name, way, counter of its pages)."""
MOST_BARS, MOST_ROWS, MOST_STRETCHES = 400, 6, 120
AREA_HEIGHT, BAR_HEIGHT, GAP = 36, 7, 2
"""Pixels of a lane."""
LEAST_WIDTH = 0.15
"""Percent of the axis that a bar has at least."""


@dataclass(frozen=True)
class Bar:
    """A transfer that is drawn."""

    x: float
    """Percent."""
    width: float
    y: int
    """Pixels from the top of the bars."""
    transfer: Transfer


@dataclass(frozen=True)
class Lane:
    """All of one kind."""

    kind: str
    name: str
    way: str
    pages: float
    """That moved, by the counter of the cache."""
    path: str
    """Columns of the pages per stretch, in the box of paths."""
    top: float
    """Pages of the highest column."""
    bars: tuple[Bar, ...]
    height: int
    """Pixels of the bars."""
    amounts: tuple[tuple[str, float], ...]
    """(end of the stretch, pages) of the stretches in which something moved."""


@dataclass(frozen=True)
class Timeline:
    """The lanes of a report."""

    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]
    drawn: int
    """Transfers that are drawn."""
    known: int
    """Transfers that are known one by one."""
    outcomes: dict[str, int]
    """How they ended."""


def timeline(report: Report) -> Timeline:
    """The lanes in which something moved or was tried."""
    chosen = set(map(id, worth_showing(report.transfers)[:MOST_BARS]))
    lanes = []
    for kind, (name, way, counter) in KINDS.items():
        mine = [each for each in report.transfers if each.kind == kind]
        totals = report.counters.get(counter, (0,) * len(report.at))
        if not mine and not totals[-1]:
            continue
        path, top, amounts = _columns(report, totals)
        bars = _bars(report, [each for each in mine if id(each) in chosen])
        height = (max((bar.y for bar in bars), default=-BAR_HEIGHT - GAP) + BAR_HEIGHT + GAP) if bars else 0
        lanes.append(Lane(kind, name, way, totals[-1], path, top, tuple(bars), height, tuple(amounts)))
    outcomes: dict[str, int] = {}
    for each in report.transfers:
        outcomes[each.outcome] = outcomes.get(each.outcome, 0) + 1
    drawn = sum(len(lane.bars) for lane in lanes)
    ticks = tuple(x_ticks(report.at[0], report.at[-1]))
    return Timeline(tuple(lanes), ticks, drawn, len(report.transfers), outcomes)


def worth_showing(transfers: tuple[Transfer, ...]) -> list[Transfer]:
    """Transfers in the order in which they are worth to be shown: what did not go well, the longest, the largest."""

    def rank(each: Transfer) -> tuple[bool, float, int]:
        length = float("inf") if each.ended is None else each.ended - each.begun
        return each.outcome == "ok", -length, -each.pages

    return sorted(transfers, key=rank)


def _bars(report: Report, transfers: list[Transfer]) -> list[Bar]:
    """Bars in rows, so that none covers another. Those worth most come first; what finds no row is left out."""
    first, last = report.at[0], report.at[-1]
    span = (last - first) or 1.0
    rows: list[list[tuple[float, float]]] = [[] for _ in range(MOST_ROWS)]
    bars = []
    for each in worth_showing(tuple(transfers)):
        x = min(max(100 * (each.begun - first) / span, 0.0), 100 - LEAST_WIDTH)
        end = 100.0 if each.ended is None else 100 * (each.ended - first) / span
        end = max(min(end, 100.0), x + LEAST_WIDTH)
        for number, row in enumerate(rows):
            place = bisect_left(row, (x, end))
            before, after = row[place - 1 : place], row[place : place + 1]
            if all(other <= x for _, other in before) and all(end <= other for other, _ in after):
                row.insert(place, (x, end))
                bars.append(Bar(round(x, 3), round(end - x, 3), number * (BAR_HEIGHT + GAP), each))
                break
    return sorted(bars, key=lambda bar: (bar.x, bar.y))


def _columns(report: Report, totals: tuple[float, ...]) -> tuple[str, float, list[tuple[str, float]]]:
    """The path of the columns, the highest of them, and the amounts."""
    ends, amounts = buckets(report.at, totals, MOST_STRETCHES)
    top = max(amounts, default=0)
    if top <= 0:
        return "", 0, []
    width = SIZE / len(amounts)
    parts = [
        f"M{n * width:.1f},{SIZE}V{SIZE * (1 - amount / top):.1f}h{width * 0.85:.1f}V{SIZE}Z"
        for n, amount in enumerate(amounts)
        if amount > 0
    ]
    listed = [(shorten(round(end, 6)), amount) for end, amount in zip(ends, amounts, strict=True) if amount > 0]
    return "".join(parts), top, listed
