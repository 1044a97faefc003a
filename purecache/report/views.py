"""What the page shows of a report, part by part: charts, tiles and tables, ready to be written."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from purecache.report.geometry import Tick, line, places, stacked, window_shares, x_ticks, y_ticks
from purecache.report.lanes import worth_showing
from purecache.report.model import Prefix, Report
from purecache.report.treemap import Cell, tree_map
from purecache.report.wording import amount, count, moment, name_of, percent

ACCOUNTS = ("used", "protected", "evictable", "lent", "in_flight", "free")
"""From the bottom of a chart to its top."""
FOUND = ("device", "host", "disk", "storage", "computed")
"""Where tokens are found, from the bottom of a chart to its top."""
MOVES = {
    "backup_pages": "backed up",
    "loaded_pages": "loaded back",
    "stored_pages": "stored",
    "prefetched_pages": "prefetched",
}
EVICTIONS = {
    "evicted_device_pages": "device",
    "evicted_host_pages": "host",
    "evicted_disk_pages": "disk",
    "dropped_pages": "of these without a copy",
}
REFUSALS = {
    "refusals": "of all kinds",
    "backup_refused_pages": "pages of backups",
    "loads_refused": "load backs",
    "stores_refused": "stores",
    "prefetches_refused": "prefetches",
}
FAILURES = {
    "backup_failed_pages": "backup",
    "load_failed_pages": "load back",
    "store_failed_pages": "store",
    "prefetch_failed_pages": "prefetch",
}
WINDOW = 20
"""Hit rates are of the last 1 / WINDOW of the time."""
LEVELS = 5
MAPS = {"wide": (1200.0, 480.0, 260), "narrow": (350.0, 560.0, 90)}
"""Pixels and most runs of the tree map, for two widths of the page."""
CHARACTER, LINE = 7.6, 15.0
"""Pixels of a character and of a line of text, about."""
MOST_ROWS = 120
"""Rows of a table."""


@dataclass(frozen=True)
class Tile:
    """One number with what it is made of."""

    name: str
    value: float
    text: str
    parts: tuple[tuple[str, float], ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Layer:
    """One area or line of a chart."""

    name: str
    shown: str
    path: str


@dataclass(frozen=True)
class Table:
    """Rows behind a chart. `places`: percent of the horizontal axis, one per row, if they lie on it."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    places: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A chart over time."""

    id: str
    title: str
    note: str
    layers: tuple[Layer, ...]
    lines: tuple[Layer, ...]
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    table: Table


@dataclass(frozen=True)
class Block:
    """A cell of the tree map with its looks."""

    cell: Cell
    classes: str
    lines: tuple[str, ...]
    """What fits into it."""
    text: str
    """All of it, as a sentence."""


def hit_shares(report: Report) -> dict[str, float]:
    """Share of all tokens that were looked up, by where they were found; empty if nothing was."""
    whole = sum(line[-1] for line in report.found.values())
    return {where: report.tokens(where) / whole for where in _known(report.found, FOUND)} if whole else {}


def tiles(report: Report) -> list[Tile]:
    """The headline numbers besides the hit rate."""
    shown = []
    if report.found:
        whole = sum(line[-1] for line in report.found.values())
        note = "of all prompts" if report.source == "trace" else "whole pages of prompts; twice if asked twice"
        shown.append(Tile("Tokens looked up", whole, count(whole), note=note))
        missed = report.tokens("computed")
        shown.append(Tile("Tokens to compute", missed, count(missed), note="not found in any tier"))
    for name, parts, note in (
        ("Pages moved", MOVES, "between two tiers"),
        ("Pages evicted", EVICTIONS, ""),
        ("Refused", REFUSALS, "for want of room, or not worth it"),
        ("Pages that failed", FAILURES, "transfers that did not arrive"),
    ):
        known = [(text, report.last(key)) for key, text in parts.items() if key in report.counters]
        if known:
            # What was dropped has left the device: it is among the evicted pages already.
            total = sum(value for text, value in known if text != EVICTIONS["dropped_pages"])
            moved = tuple((text, value) for text, value in known if value)
            shown.append(Tile(name, total, count(total), moved, note))
    return shown


def stock_charts(report: Report) -> list[Chart]:
    """One chart per tier and pool; the ranks are added up."""
    x, groups = places(report.at), dict.fromkeys((stock.tier, stock.pool) for stock in report.stocks)
    pools = {pool for _, pool in groups}
    charts = []
    for tier, pool in groups:
        stocks = [stock for stock in report.stocks if (stock.tier, stock.pool) == (tier, pool)]
        names = _known((name for stock in stocks for name in stock.accounts), ACCOUNTS)
        lines = {
            name: [sum(each) for each in zip(*(stock.accounts[name] for stock in stocks), strict=True)]
            for name in names
        }
        lines = {name: line for name, line in lines.items() if any(line) or name == "free"}
        capacity = sum(stock.capacity for stock in stocks)
        top = float(max(capacity, *(sum(each) for each in zip(*lines.values(), strict=True)), 1))
        paths = stacked(x, lines, top)
        ranks = f", {len(stocks)} ranks together" if len(stocks) > 1 else ""
        charts.append(
            Chart(
                id=f"stock-{tier}-{pool}",
                title=f"{tier.capitalize()}" + (f", pool {pool}" if len(pools) > 1 else ""),
                note=f"{count(capacity)} pages{ranks}" if capacity else "pages, without limit",
                layers=tuple(Layer(name, name_of(name), paths[name]) for name in lines),
                lines=(),
                x=tuple(x_ticks(report.at[0], report.at[-1])),
                y=tuple(y_ticks(top)),
                table=_table(report, {name_of(name): line for name, line in lines.items()}, count),
            )
        )
    return charts


def hit_chart(report: Report) -> Chart | None:
    """Shares of what was looked up lately, by where it was found; None if nothing was."""
    names = _known(report.found, FOUND)
    if not names or not sum(report.tokens(name) for name in names):
        return None
    totals = {name: report.found[name] for name in names}
    span = report.at[-1] - report.at[0]
    shares, _ = window_shares(report.at, totals, span / WINDOW)
    whole = [sum(each) for each in zip(*totals.values(), strict=True)]
    cumulated = [
        100 * (1 - missed / all_of) if all_of else 0.0
        for missed, all_of in zip(report.found.get("computed", [0] * len(whole)), whole, strict=True)
    ]
    x = places(report.at)
    found = {name: shares[name] for name in names if name != "computed" and any(shares[name])}
    paths = stacked(x, found, 100.0)
    table = {f"{name_of(name)}, %": shares[name] for name in names} | {"hit rate so far, %": cumulated}
    return Chart(
        id="hits",
        title="Hit rate",
        note=f"tokens found, of those looked up in the last {100 // WINDOW} % of the time",
        layers=tuple(Layer(name, name_of(name), paths[name]) for name in found),
        lines=(Layer("total", "all tiers, since the beginning", line(x, cumulated, 100.0)),),
        x=tuple(x_ticks(report.at[0], report.at[-1])),
        y=tuple(y_ticks(100.0, unit=" %")),
        table=_table(report, table, lambda value: f"{value:.1f}"),
    )


def blocks(report: Report, width: str) -> list[Block]:
    """The cells of the tree map, for one of MAPS."""
    pixels, height, most = MAPS[width]
    most_hits = max((prefix.hits for prefix in report.prefixes), default=0)
    shown = []
    for cell in tree_map(report.prefixes, pixels, height, most):
        prefix = report.prefixes[cell.prefix]
        across, down = cell.width * pixels / 100, cell.height * height / 100
        if cell.joined:
            lines = [f"{count(cell.joined)} more", amount(cell.pages, "page")]
            text = f"{amount(cell.joined, 'run')} not drawn, {amount(cell.pages, 'page')}, below: {prefix.label}"
            classes = "joined"
        else:
            lines = [amount(prefix.pages, "page"), amount(prefix.hits, "hit"), prefix.label]
            text, classes = ". ".join(describe(prefix, report)), looks(prefix, most_hits)
        shown.append(Block(cell, classes, _fitting(lines, cell, across, down), text))
    return shown


def _fitting(lines: list[str], cell: Cell, across: float, down: float) -> tuple[str, ...]:
    """Those of some lines that fit into so many pixels; the number of pages alone if not even the first one does."""
    room = int((down - 6) // LINE)
    fits = tuple(text for text in lines[:room] if across > CHARACTER * len(text) + 12)
    if lines[0] not in fits:
        fits = (count(cell.pages),) if room and across > CHARACTER * len(count(cell.pages)) + 12 else ()
    return fits


def looks(prefix: Prefix, most_hits: int) -> str:
    """Classes that give a cell its colours."""
    on = [tier for tier in prefix.tiers if tier in ("device", "host")]
    tier = "both" if len(on) == 2 else on[0] if on else "none"
    level = 0 if prefix.hits <= 1 or most_hits <= 1 else round((LEVELS - 1) * math.log(prefix.hits, most_hits))
    classes = [f"t-{tier}", f"h-{level}", f"s-{'yes' if 'storage' in prefix.tiers else 'no'}"]
    if prefix.heat is not None:
        classes.append(f"r-{min(LEVELS - 1, int(prefix.heat * LEVELS))}")
    return " ".join(classes)


def describe(prefix: Prefix, report: Report) -> list[str]:
    """All that is known of a run, as short sentences."""
    first = prefix.depth * report.page_size
    facts = [
        prefix.label,
        f"{amount(prefix.pages, 'page')}, tokens {count(first)} to {count(first + prefix.pages * report.page_size)}",
        amount(prefix.hits, "hit"),
    ]
    if prefix.tiers:
        facts.append("on " + ", ".join(prefix.tiers).replace("on storage", "in storage"))
    if prefix.heat is not None:
        facts.append(f"evicted after {percent(1 - prefix.heat)} of the others")
    if prefix.locked:
        facts.append("locked")
    return facts


def hottest(report: Report) -> Table:
    """The runs with the most hits times pages."""
    ranked = sorted(report.prefixes, key=lambda each: (-each.hits * each.pages, each.depth))[:MOST_ROWS]
    tiers = any(prefix.tiers for prefix in report.prefixes)
    heat = any(prefix.heat is not None for prefix in report.prefixes)
    head = ["prefix", "rank", "from token", "pages", "hits"] + ["where"] * tiers + ["place in eviction order"] * heat
    rows = []
    for each in ranked:
        row = [each.label, str(each.rank), count(each.depth * report.page_size), count(each.pages), count(each.hits)]
        row += [", ".join(each.tiers) or "on its way"] * tiers
        row += [percent(each.heat) if each.heat is not None else ""] * heat
        rows.append(tuple(row))
    return Table(tuple(head), tuple(rows))


def transfers_table(report: Report) -> Table:
    """The transfers that did not go well, then the longest."""
    chosen = worth_showing(report.transfers)[:MOST_ROWS]
    rows = [
        (
            name_of(each.kind),
            each.pool,
            str(each.rank),
            count(each.pages),
            moment(report, each.begun),
            "" if each.ended is None else moment(report, each.ended),
            each.outcome,
        )
        for each in sorted(chosen, key=lambda each: each.begun)
    ]
    return Table(("kind", "pool", "rank", "pages", "begun", "ended", "outcome"), tuple(rows))


def _known(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Names in the order given, then those that are in none."""
    names = set(names)
    return [name for name in order if name in names] + sorted(names.difference(order))


def _table(report: Report, lines: Mapping[str, Sequence[float]], shown: Callable[[float], str]) -> Table:
    """A table of series, thinned out to MOST_ROWS samples that include the last."""
    step = -(-len(report.at) // MOST_ROWS)
    last = len(report.at) - 1
    chosen = [last - n * step for n in range(last // step + 1)][::-1]
    x = places(report.at)
    rows = tuple((moment(report, report.at[n]), *(shown(line[n]) for line in lines.values())) for n in chosen)
    return Table((report.axis, *lines), rows, tuple(round(x[n] / 10, 3) for n in chosen))
