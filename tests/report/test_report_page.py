"""The page without a browser: its structure, its numbers, and that nothing in it can be code or a request."""

import base64
import hashlib
import re

import pytest
from report_samples import NASTY, OUTCOMES, Parsed, bare_report, full_report

from purecache.report.page import page_of
from purecache.report.views import MAPS

SECTIONS = ("headline", "tiers", "hit-rates", "transfers", "prefixes", "answers", "configuration")


@pytest.fixture(scope="module")
def html():
    return page_of(full_report())


@pytest.fixture(scope="module")
def parsed(html):
    return Parsed(html)


def test_the_structure_of_a_full_page(parsed):
    assert [found["id"] for found in parsed.named("section")] == list(SECTIONS)
    charts = [found["id"] for found in parsed.named("figure", class_="chart")]
    assert charts == ["stock-device-kv", "stock-device-state", "stock-host-kv", "stock-host-state", "hits"]
    for each in charts:
        assert parsed.ids[f"table-{each}"][0] == "table", "every chart has its numbers in a table"
    lanes = [found["id"] for found in parsed.named("div", class_="lane")]
    assert lanes == ["lane-backup", "lane-load_back", "lane-store", "lane-prefetch"]
    for outcome in (*OUTCOMES, "open"):
        drawn = [found for found in parsed.named("rect", class_=f"end-{outcome}") if "aria-label" in found]
        assert len(drawn) == (1 if outcome == "open" else 4)
    assert len(parsed.named("svg", class_="cell")) == 4 * len(MAPS)
    assert [found["id"] for found in parsed.named("input")] == ["mode-t", "mode-h", "mode-r", "mode-s"]
    headings = [tag for tag, _ in parsed.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == "h1"
    assert headings.count("h1") == 1


def test_everything_that_is_drawn_has_a_label(parsed):
    for found in (
        *parsed.named("svg", role="img"),
        *parsed.named("rect", role="img"),
        *parsed.named("svg", role="group"),
    ):
        assert found["aria-label"].strip()
    for tag, found in parsed.tags:
        if tag == "section":
            assert found["aria-labelledby"] in parsed.ids


def test_nothing_is_asked_of_a_network_and_no_other_code_may_run(html, parsed):
    assert "http:" not in html
    assert "https:" not in html
    assert "url(" not in html
    assert "@import" not in html
    loading = {"src", "href", "action", "data", "poster", "srcset", "style"}
    for tag, found in parsed.tags:
        assert not loading & found.keys(), f"<{tag}> would load something, or has a style that is not allowed"
        assert not [name for name in found if name.startswith("on")]
        assert tag not in ("link", "iframe", "object", "embed", "form", "base", "img")
    policy = parsed.named("meta", http_equiv="Content-Security-Policy")[0]["content"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_names_from_files_are_text_and_nothing_else(html, parsed):
    assert html.count("<script>") == 1
    assert "<img" not in html
    assert NASTY not in html
    assert NASTY in parsed.text["prefixes"]
    assert NASTY in parsed.text["configuration"]


def test_the_numbers_are_those_of_the_report(parsed):
    report = full_report()
    whole = sum(line[-1] for line in report.found.values())
    for where in report.found:
        assert float(parsed.ids[f"share-{where}"][1]["value"]) == pytest.approx(report.found[where][-1] / whole)
    assert "62.5 %" in parsed.text["headline"]
    values = [float(found["value"]) for found in parsed.named("data")]
    growing = 900
    for number in (
        whole,
        report.tokens("computed"),
        growing * (1 + 2 + 3 + 4),
        growing * (5 + 6),
        8 * growing,
        9 * growing,
    ):
        assert number in values
    assert int(parsed.ids["known"][1]["value"]) == 21
    assert int(parsed.ids["drawn"][1]["value"]) == 21
    assert "7 more were not kept" in parsed.text["transfers"]


def test_the_tables_behind_the_charts_have_the_samples(parsed):
    report = full_report()
    head, *rows = parsed.rows["table-stock-device-kv"]
    assert head == ["event", "protected", "evictable", "in flight", "free"]
    assert [row[0] for row in rows] == [f"{each:.0f}" for each in report.at]
    for name, column in zip(("protected", "evictable", "in_flight", "free"), range(1, 5), strict=True):
        lines = [s.accounts[name] for s in report.stocks if (s.tier, s.pool) == ("device", "kv")]
        assert [int(row[column]) for row in rows] == [sum(each) for each in zip(*lines, strict=True)]
    head, *rows = parsed.rows["table-hits"]
    assert head == ["event", "device, %", "host, %", "not cached, %", "hit rate so far, %"]
    # All three grow alike, so every window has the shares of the whole.
    assert rows[-1][1:] == ["50.0", "12.5", "37.5", "62.5"]
    head, *rows = parsed.rows["table-prefixes"]
    assert [row[:5] for row in rows[:2]] == [[NASTY, "0", "0", "8", "40"], ["tokens 1 2 3 4 …", "0", "128", "4", "9"]]
    assert len(parsed.rows["table-transfers"]) == 1 + 21


def test_what_is_not_known_is_left_out_with_a_sentence():
    parsed = Parsed(page_of(bare_report()))
    assert [found["id"] for found in parsed.named("section")] == [s for s in SECTIONS if s != "answers"]
    for section in SECTIONS[:5]:
        assert len(parsed.text[section].split()) > 5
    assert len(parsed.named("p", class_="unknown")) == 6
    assert not parsed.named("figure")


def test_one_sample_and_no_time_between():
    at = {"at": (5.0,), "transfers": (), "counters": {"backup_pages": (3,)}}
    report = full_report()
    stocks = tuple(
        type(s)(s.tier, s.pool, s.rank, s.capacity, {k: v[:1] for k, v in s.accounts.items()}) for s in report.stocks
    )
    found = dict.fromkeys(report.found, (7,))
    parsed = Parsed(page_of(full_report(stocks=stocks, found=found, **at)))
    assert "66.7 %" in parsed.text["headline"]
    assert all("nan" not in found.get("d", "").lower() for found in parsed.named("path"))


def test_the_same_report_gives_the_same_page(html):
    assert page_of(full_report()) == html
