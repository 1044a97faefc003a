"""Where things lie: ticks, areas, windows, and the rectangles of the tree map."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import full_report

from purecache.report import Prefix, Report, Transfer
from purecache.report.geometry import area, buckets, line, nice_step, shorten, stacked, window_shares, x_ticks, y_ticks
from purecache.report.lanes import MOST_BARS, timeline
from purecache.report.treemap import tree_map
from purecache.report.views import hit_chart, stock_charts, tiles

spans = st.floats(1e-3, 1e9)


@given(first=st.floats(0, 1e5), span=spans, most=st.integers(1, 12))
def test_ticks_are_round_lie_on_the_axis_and_are_not_too_many(first, span, most):
    ticks = x_ticks(first, first + span, most)
    assert 0 <= len(ticks) <= most + 1
    assert all(-1e-3 <= tick.place <= 100.001 for tick in ticks)
    assert [tick.place for tick in ticks] == sorted(tick.place for tick in ticks)
    step = nice_step(span, most)
    assert math.isclose(
        10 ** (math.log10(step) % 1), min((1, 2, 5, 10), key=lambda n: abs(10 ** (math.log10(step) % 1) - n))
    )
    assert step * most >= span * (1 - 1e-6)


def test_ticks_of_some_axes():
    assert [(tick.place, tick.label) for tick in x_ticks(0, 100, 5)] == [
        (0, "0"), (20, "20"), (40, "40"), (60, "60"), (80, "80"), (100, "100")
    ]  # fmt: skip
    assert [tick.label for tick in y_ticks(384)] == ["0", "100", "200", "300"]
    assert [shorten(each) for each in (0, 0.25, 9500, 12345, 2_500_000, 3e9)] == [
        "0",
        "0.25",
        "9500",
        "12.3k",
        "2.5M",
        "3G",
    ]
    assert [tick.label for tick in x_ticks(7, 7)] == ["7"]


def test_areas_are_on_top_of_each_other():
    paths = stacked([0, 500, 1000], {"a": [1, 2, 3], "b": [1, 1, 1]}, 4.0)
    assert paths["a"] == "M0,750L500,500L1000,250L1000,1000L500,1000L0,1000Z"
    assert paths["b"] == "M0,500L500,250L1000,0L1000,250L500,500L0,750Z"
    assert line([0], [1], 2.0) == "M0,500L1000,500"
    assert area([0], [0], [0], 0.0) == "M0,1000L1000,1000L1000,1000L0,1000Z"


def test_shares_of_a_window_are_of_what_came_in_it():
    shares, amounts = window_shares([0, 1, 2, 3], {"hit": [0, 1, 1, 4], "miss": [0, 1, 3, 3]}, 1.0)
    assert amounts == [0, 2, 2, 3]
    assert shares == {"hit": [0, 50, 0, 100], "miss": [0, 50, 100, 0]}
    # Nothing came: it stays what it was.
    assert window_shares([0, 1, 2], {"hit": [0, 1, 1]}, 1.0)[0] == {"hit": [0, 100, 100]}


@given(
    steps=st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 9)), min_size=1, max_size=40),
    most=st.integers(1, 30),
)
def test_columns_add_up_to_the_total(steps, most):
    at, totals = [0.0], [0]
    for step, more in steps:
        at.append(at[-1] + step)
        totals.append(totals[-1] + more)
    ends, amounts = buckets(at, totals, most)
    assert len(ends) == len(amounts) <= most
    assert sum(amounts) == totals[-1]
    assert min(amounts) >= 0


@st.composite
def trees(draw):
    count = draw(st.integers(1, 40))
    return tuple(
        Prefix(draw(st.integers(-1, number - 1)), 0, 0, draw(st.integers(1, 50)), ("device",), 1)
        for number in range(count)
    )


@given(prefixes=trees(), most=st.integers(1, 50))
def test_a_tree_map_shows_every_page_once_with_its_area(prefixes, most):
    cells = tree_map(prefixes, 400.0, 300.0, most)
    pages = sum(prefix.pages for prefix in prefixes)
    assert sum(cell.pages for cell in cells) == pages
    runs = [cell for cell in cells if not cell.joined]
    assert len(runs) == min(most, len(prefixes)) == len({cell.prefix for cell in runs})
    assert len(runs) + sum(cell.joined for cell in cells) == len(prefixes)
    for cell in cells:
        # Rounded to 0.001 % of each side.
        assert cell.width * cell.height == pytest.approx(1e4 * cell.pages / pages, abs=0.3)
        assert -0.001 <= cell.x <= cell.x + cell.width <= 100.002
        assert -0.001 <= cell.y <= cell.y + cell.height <= 100.002
    for number, one in enumerate(cells):
        for other in cells[number + 1 :]:
            across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert across <= 0.01 or down <= 0.01, "two cells overlap"


@given(prefixes=trees())
def test_what_is_drawn_is_drawn_with_all_above_it(prefixes):
    drawn = {cell.prefix for cell in tree_map(prefixes, 400.0, 300.0, 5) if not cell.joined}
    assert all(prefixes[each].parent in drawn | {-1} for each in drawn)


def test_the_hottest_runs_are_drawn_not_the_largest():
    cold = tuple(Prefix(-1, 0, 0, 50, (), 1) for _ in range(6))
    hot = (Prefix(-1, 0, 0, 2, (), 90), Prefix(6, 0, 2, 1, (), 80))
    cells = tree_map(cold + hot, 400.0, 300.0, 3)
    assert {cell.prefix for cell in cells if not cell.joined} == {0, 6, 7}
    assert [(cell.joined, cell.pages) for cell in cells if cell.joined] == [(5, 250)]


def test_no_prefix_makes_no_map():
    assert tree_map((), 400.0, 300.0, 5) == []


def test_bars_do_not_cover_each_other_and_failures_are_drawn_first():
    many = [Transfer("backup", "kv", 0, 1, float(n % 97), float(n % 97 + 1), "ok") for n in range(2 * MOST_BARS)]
    bad = [Transfer("backup", "kv", 0, 1, 10.0 * n, 10.0 * n + 0.5, "failed") for n in range(9)]
    report = Report("run", "many", "seconds", (0.0, 100.0), 1, transfers=(*many, *bad))
    found = timeline(report)
    (lane,) = found.lanes
    assert found.known == 2 * MOST_BARS + 9
    assert found.drawn == len(lane.bars) <= MOST_BARS
    assert found.outcomes == {"ok": 2 * MOST_BARS, "failed": 9}
    assert sum(bar.transfer.outcome == "failed" for bar in lane.bars) == 9
    for row in {bar.y for bar in lane.bars}:
        bars = sorted((bar.x, bar.x + bar.width) for bar in lane.bars if bar.y == row)
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in itertools.pairwise(bars))


def test_lanes_count_by_the_counters_where_single_transfers_are_not_known():
    report = Report(
        "trace", "t", "seconds", (0.0, 1.0, 2.0), 1, counters={"stored_pages": (0, 4, 5), "loaded_pages": (0, 0, 0)}
    )
    (lane,) = timeline(report).lanes
    assert (lane.kind, lane.pages, lane.top) == ("store", 5, 4)
    assert [amount for _, amount in lane.amounts] == [4, 1]


def test_charts_of_a_full_report():
    report = full_report()
    charts = stock_charts(report)
    assert [chart.note for chart in charts] == ["128 pages, 2 ranks together"] * 2 + ["256 pages, 2 ranks together"] * 2
    assert [layer.name for layer in charts[0].layers] == ["protected", "evictable", "in_flight", "free"]
    hits = hit_chart(report)
    assert hits is not None
    assert [layer.name for layer in hits.layers] == ["device", "host"]
    assert {tile.name: tile.value for tile in tiles(report)} == {
        "Tokens looked up": 900 * 32,
        "Tokens to compute": 900 * 12,
        "Pages moved": 900 * 10,
        "Pages evicted": 900 * 11,  # what was dropped is among them
        "Refused": 900 * 8,
        "Pages that failed": 900 * 9,
    }
