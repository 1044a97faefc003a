"""The page in headless Chromium: it is quiet, loads nothing, shows the report's numbers, and works by keyboard."""

import http.server
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from report_samples import bare_report, full_report
from test_report_of_trace import as_read, outcome

from purecache.report.page import page_of
from purecache.report.traced import report_of_outcome

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")
sync_api = pytest.importorskip("playwright.sync_api", reason="there is no Playwright here: pip install playwright")

REPORTS = {
    "recording": full_report(),
    "trace": report_of_outcome(as_read(outcome())),
    "nothing": bare_report(),
}
SIZES = {"desk": 1280, "phone": 390}


@pytest.fixture(scope="module")
def browser():
    arguments = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, report in REPORTS.items():
        (folder / f"{name}.html").write_text(page_of(report), encoding="utf-8")
    return folder


class Opened:
    """A page, and all that it said and asked for."""

    def __init__(self, browser, path, width=1280, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.context.close()


@pytest.mark.parametrize(
    ("name", "size", "scheme"),
    [
        ("recording", "desk", "light"),
        ("recording", "phone", "dark"),
        ("trace", "desk", "dark"),
        ("nothing", "phone", "light"),
    ],
)
def test_it_is_quiet_loads_nothing_fits_and_is_accessible(browser, files, name, size, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    path = files / f"{name}.html"
    with Opened(browser, path, SIZES[size], scheme) as opened:
        page = opened.page
        assert opened.asked == [path.as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]
        sections = page.locator("section")
        assert sections.count() == (7 if name == "recording" else 6)
        assert all(sections.nth(number).bounding_box()["height"] > 40 for number in range(sections.count()))
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 26)"
        assert dark == (scheme == "dark")
        for details in page.locator("summary").all():
            details.click()
        result = axe.run(page).response
        assert [(each["id"], each["nodes"][0]["html"][:200]) for each in result["violations"]] == []
        assert len(result["passes"]) > 10
        assert opened.said == []
        assert opened.asked == [path.as_uri()]


def test_the_numbers_in_the_document_are_those_of_the_report(browser, files):
    report = REPORTS["recording"]
    with Opened(browser, files / "recording.html") as opened:
        page = opened.page
        assert page.locator(".rate data").inner_text() == "62.5 %"
        tiles = {
            tile.locator("h3").inner_text(): float(tile.locator(".value data").get_attribute("value"))
            for tile in page.locator(".tile").all()
        }
        assert tiles["Pages moved"] == sum(
            report.last(name) for name in ("backup_pages", "loaded_pages", "stored_pages", "prefetched_pages")
        )
        assert tiles["Tokens to compute"] == report.tokens("computed")
        page.locator("#stock-host-state summary").click()
        row = [
            cell.inner_text() for cell in page.locator("#table-stock-host-state tbody tr").last.locator("th,td").all()
        ]
        stocks = [each for each in report.stocks if (each.tier, each.pool) == ("host", "state")]
        names = ("protected", "evictable", "in_flight", "free")
        assert row == ["300", *(str(sum(each.accounts[name][-1] for each in stocks)) for name in names)]


def test_what_is_drawn_has_the_size_of_what_it_stands_for(browser, files):
    report = REPORTS["recording"]
    pages = sum(prefix.pages for prefix in report.prefixes)
    for size, shown in (("desk", "wide"), ("phone", "narrow")):
        with Opened(browser, files / "recording.html", SIZES[size]) as opened:
            assert [each.is_visible() for each in opened.page.locator(".map").all()] == [
                shown == "wide",
                shown == "narrow",
            ]
            whole = opened.page.locator(f".map.{shown} > svg").bounding_box()
            cells = opened.page.locator(f".map.{shown} .cell > rect").all()
            areas = sorted(box["width"] * box["height"] for box in (cell.bounding_box() for cell in cells))
            shares = [area / whole["width"] / whole["height"] for area in areas]
            assert shares == pytest.approx(sorted(prefix.pages / pages for prefix in report.prefixes), abs=0.01)
            bar = opened.page.locator(".bar").bounding_box()
            parts = [part.bounding_box()["width"] / bar["width"] for part in opened.page.locator(".bar rect").all()]
            assert parts == pytest.approx([0.5, 0.125, 0.375], abs=0.02)


def test_values_of_a_chart_by_pointer_and_by_keyboard(browser, files):
    with Opened(browser, files / "recording.html") as opened:
        page, plot = opened.page, opened.page.locator("#stock-device-kv .plot")
        rows = [
            re.sub(r"\s+", " ", row.text_content()) for row in page.locator("#table-stock-device-kv tbody tr").all()
        ]
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
        tip = page.locator("#tip")
        assert tip.locator("b").inner_text() == "event 150"
        page.mouse.move(5, 5)
        assert not tip.is_visible()
        plot.focus()
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert tip.locator("b").inner_text() == "event 280"
        values = [span.locator("i").nth(1).inner_text() for span in tip.locator("span").all()]
        assert "".join(["280", *reversed(values)]) == rows[28].replace(" ", "")
        page.keyboard.press("Escape")
        assert not tip.is_visible()
        assert opened.said == []


def test_the_tree_map_and_the_bars_by_keyboard_and_the_colours(browser, files):
    with Opened(browser, files / "recording.html") as opened:
        page, cells = opened.page, opened.page.locator(".map.wide .cell")
        colours = {}
        for mode in ("t", "h", "r", "s"):
            page.locator(f"#mode-{mode}").check()
            fills = [cell.locator("rect").evaluate("each => getComputedStyle(each).fill") for cell in cells.all()]
            assert page.locator(f".legend-{mode}").is_visible()
            colours[mode] = tuple(fills)
        assert len(set(colours.values())) == 4
        assert len(set(colours["t"])) == 4
        for items, count in ((cells, 4), (page.locator("#lane-backup .bars rect"), 6)):
            page.mouse.click(5, 5)
            items.first.focus()
            seen = []
            for _ in range(count):
                seen.append(page.evaluate("document.activeElement.getAttribute('aria-label')"))
                page.keyboard.press("ArrowRight")
            assert sorted(seen) == sorted(each.get_attribute("aria-label") for each in items.all())
            assert page.locator("#tip").is_visible()
            page.keyboard.press("Escape")
        assert opened.said == []


def test_code_and_requests_that_get_into_the_page_all_the_same_are_stopped(browser, tmp_path):
    """As if something had not been escaped: the policy of the page is a second wall."""
    asked = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        there = f"//127.0.0.1:{server.server_port}"
        bad = (
            f"<img src=http:{there}/image onerror='window.bad=1'><script>window.bad=2</script>"
            f"<script src=http:{there}/script></script><link rel=stylesheet href=http:{there}/style>"
            f"<iframe src=http:{there}/frame></iframe><style>body{{background:url(http:{there}/url)}}</style>"
        )
        html = page_of(full_report())
        path = Path(tmp_path) / "bad.html"
        # Without the policy all of it would work; so the test can tell.
        for policy in (True, False):
            text = html if policy else html.replace("Content-Security-Policy", "X-Nothing")
            path.write_text(text.replace("<main>", "<main>" + bad), encoding="utf-8")
            with Opened(browser, path) as opened:
                opened.page.wait_for_load_state("networkidle")
                assert bool(opened.page.evaluate("window.bad")) == (not policy)
            assert sorted(asked) == ([] if policy else ["/frame", "/image", "/script", "/style", "/url"])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_without_scripts_all_is_there_but_the_tips(browser, files):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((files / "recording.html").as_uri())
    assert page.locator(".rate data").inner_text() == "62.5 %"
    assert page.locator(".map.wide .cell").count() == 4
    page.locator("#hits summary").click()
    assert page.locator("#table-hits").is_visible()
    context.close()
