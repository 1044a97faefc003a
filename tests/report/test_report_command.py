"""`purecache report`: the three kinds of files, and what is none of them."""

import json

import pytest
from recordings import AB, recorded
from report_samples import Parsed, full_report
from support import serve
from test_report_of_trace import outcome

from purecache.cli import main
from purecache.report import ReportError, from_json, to_json
from purecache.report.model import read_json


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "a.rec"
    recorded(path, life=lambda cache: serve(cache, AB))
    return path


def test_a_recording(recording, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(recording), "-o", str(page), "--json", str(tmp_path / "r.json"), "--quiet"]) == 0
    assert "page.html" in capsys.readouterr().out
    parsed = Parsed(page.read_text())
    assert "a.rec" in parsed.text["configuration"]
    report = from_json(json.loads((tmp_path / "r.json").read_text()))
    assert report.source == "recording"
    assert str(tmp_path) not in page.read_text()


def test_its_json_gives_the_same_page(recording, tmp_path):
    assert (
        main(["report", str(recording), "-o", str(tmp_path / "1.html"), "--json", str(tmp_path / "r"), "--quiet"]) == 0
    )
    assert main(["report", str(tmp_path / "r"), "-o", str(tmp_path / "2.html"), "--quiet"]) == 0
    assert (tmp_path / "1.html").read_text() == (tmp_path / "2.html").read_text()


def test_a_trace_with_another_title(tmp_path):
    (tmp_path / "t.json").write_text(outcome().to_json())
    assert main(["report", str(tmp_path / "t.json"), "--title", "Monday"]) == 0
    assert "<h1>Monday</h1>" in (tmp_path / "t.json.html").read_text()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "nothing that a Sampler saved"),
        (b'{"format": "other"}', "nothing that a Sampler saved"),
        (b'{"format": "purecache report 1"}', "lacks something"),
        (b'{"format": "purecache-trace-1"}', "lacks something"),
        (b"PureRec\x09....", "version"),
        (b"[" * 100_000, "no JSON"),
        (b'{"format": NaN}', "no JSON"),
    ],
)
def test_files_that_are_none(tmp_path, capsys, content, reason):
    (tmp_path / "file").write_bytes(content)
    assert main(["report", str(tmp_path / "file")]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "file.html").exists()


def test_a_file_that_is_not_there_and_flags_that_make_no_sense(tmp_path, recording, capsys):
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert main(["report", str(recording), "--samples", "0"]) == 2
    before = recording.read_bytes()
    assert main(["report", str(recording), "-o", str(recording), "--quiet"]) == 2
    assert recording.read_bytes() == before
    assert "overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": "dream"}, "source"),
        ({"axis": "miles"}, "axis"),
        ({"at": []}, "no sample"),
        ({"at": [0.0, 0.0]}, "rise"),
        ({"at": "soon"}, "no list"),
        ({"found": {"device": [1.0]}}, "entries"),
        ({"found": {"device": [1.0] * 30 + ["x"]}}, "kind"),
        ({"page_size": 1.5}, "kind"),
        ({"page_size": True}, "kind"),
        ({"title": 5}, "kind"),
        ({"prefixes": [{"parent": 0, "rank": 0, "depth": 0, "pages": 1, "tiers": [], "hits": 1}]}, "above it"),
        ({"prefixes": [{"parent": -1, "rank": 0, "depth": 0, "pages": 0, "tiers": [], "hits": 1}]}, "no page"),
        ({"prefixes": [{"parent": -1}]}, "lacks"),
        ({"transfers": [5]}, "no object"),
        ({"surprise": 1}, "unknown fields"),
    ],
)
def test_reports_that_do_not_fit_together(change, reason):
    good = json.loads(to_json(full_report()))
    assert from_json(good) == full_report()
    with pytest.raises(ReportError, match=reason):
        from_json(good | change)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("purecache.report.model.MOST_BYTES", 3)
    (tmp_path / "file").write_text("[1, 2]")
    with pytest.raises(ReportError, match="more than"):
        read_json(tmp_path / "file")


def test_without_its_packages_the_command_names_the_extra(monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.startswith("purecache.report.") and "model" not in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'purecache\[report\]'"):
        main(["report", "file"])
