"""The outcome of a trace run as a report: sums of its rows, times that rise, stretches of pages."""

import json

import pytest
from report_samples import Parsed

from purecache.report import ReportError
from purecache.report.page import page_of
from purecache.report.traced import report_of_outcome
from purecache.traces.outcome import Hot, Latency, Moment, Moved, Outcome, Refusals, Setting, Share, TraceFacts

TIERS, LINKS = ("device", "host", "disk"), ("backup", "load_back", "store", "prefetch")


def moment(number, time):
    """A row of the series in which everything is a multiple of its number."""
    pages = {
        "device": {"free": 100 - number, "evictable": number, "protected": 0, "in_flight": 0, "lent": 0},
        "host": {"free": 200 - 2 * number, "evictable": 2 * number, "protected": 0, "in_flight": 0, "lent": 0},
        "disk": {"free": 400 - 3 * number, "used": 3 * number},
    }
    return Moment(
        requests=number,
        time=time,
        hits={"device": 16 * number, "host": 8 * number, "disk": 4 * number, "computed": 4 * number},
        moved={link: place * number for place, link in enumerate(LINKS, 1)},
        evicted=dict.fromkeys(TIERS, number),
        pages=pages,
        running=1,
        refused=1,
    )


def outcome(times=(0.0, 1.0, 1.0, 5.0), disk_pages=400):
    rows = tuple(moment(number, time) for number, time in enumerate(times, 1))
    return Outcome(
        trace=TraceFacts("conversation.jsonl", "mooncake", 4, 320, 40, 16, 20, 12, 5.0),
        setting=Setting(
            100,
            200,
            disk_pages,
            "lru",
            "write_through",
            "wait",
            1,
            1.0,
            "a model",
            1 << 20,
            1e15,
            5e10,
            5e9,
            1e-4,
            0.02,
        ),
        hits={name: Share(1, 1, 0.25) for name in ("device", "host", "disk", "computed")},
        moved={link: Moved(1, 1, 0.1) for link in LINKS},
        evicted=dict.fromkeys(TIERS, 10),
        dropped=0,
        refusals=Refusals(0, 1, 2, 3, 4, 5),
        latency=Latency(1.5, 1.0, 2.0, 3.0, 0.5, 10.0, dict.fromkeys(TIERS, 0.25), 20.0),
        series=rows,
        hot=(Hot(7, -1, 0, 64, 9), Hot(9, 7, 64, 20, 4)),
    )


def as_read(found):
    return json.loads(found.to_json())


def test_the_rows_are_added_up_and_rows_of_one_time_are_one():
    report = report_of_outcome(as_read(outcome()), made={"command": "c"})
    assert (report.source, report.axis, report.title, report.page_size) == (
        "trace",
        "seconds",
        "conversation.jsonl",
        16,
    )
    assert report.at == (0, 1, 5)
    assert report.found == {
        "device": (16, 96, 160), "host": (8, 48, 80), "disk": (4, 24, 40), "computed": (4, 24, 40)
    }  # fmt: skip
    assert report.counters["backup_pages"] == (1, 6, 10)
    assert report.counters["prefetched_pages"] == (4, 24, 40)
    assert report.counters["evicted_disk_pages"] == (1, 6, 10)
    assert report.counters["refusals"] == (1, 3, 4)
    disk = report.stocks[2]
    assert (disk.tier, disk.capacity, disk.accounts["used"]) == ("disk", 400, (3, 9, 12))
    assert [(p.parent, p.depth, p.pages, p.hits) for p in report.prefixes] == [(-1, 0, 4, 9), (0, 4, 2, 4)]
    assert report.figures["refused: prefetches late"] == "5"
    assert report.settings["policy"] == "lru"


def test_a_run_that_begins_later_begins_empty():
    report = report_of_outcome(as_read(outcome(times=(2.0, 3.0, 4.0, 5.0))))
    assert report.at == (0, 2, 3, 4, 5)
    assert report.stocks[0].accounts["free"] == (100, 99, 98, 97, 96)
    assert report.found["device"] == (0, 16, 48, 96, 160)


def test_a_tier_that_is_switched_off_is_left_out():
    report = report_of_outcome(as_read(outcome(disk_pages=0)))
    assert [stock.tier for stock in report.stocks] == ["device", "host"]


def test_the_page_of_a_trace():
    parsed = Parsed(page_of(report_of_outcome(as_read(outcome()))))
    assert len(parsed.named("figure", class_="chart")) == 4
    assert [each["id"] for each in parsed.named("div", class_="lane")] == [f"lane-{link}" for link in LINKS]
    assert [each["id"] for each in parsed.named("input")] == ["mode-h"]
    assert "87.5 %" in parsed.text["headline"]
    assert "Single transfers are not known here." in parsed.text["transfers"]


def test_what_is_no_outcome_is_refused():
    good = as_read(outcome())
    with pytest.raises(ReportError, match="no outcome"):
        report_of_outcome(good | {"format": "purecache-trace-9"})
    for change in ({"series": 5}, {"series": []}, {"hot": [{"id": 1}]}, {"trace": None}, {"setting": {}}):
        with pytest.raises(ReportError):
            report_of_outcome(good | change)
