"""`purecache inspect` of a snapshot."""

import json

import pytest
from controlled import AB, ABC, D, plain_cache, run

from purecache.cli import main
from purecache.inspect.text import locks_text, sizes_text


@pytest.fixture
def file(tmp_path):
    cache = plain_cache(ABC, AB)
    run(cache, D, namespace="tenant")
    cache.snapshot().save(tmp_path / "snapshot")
    return str(tmp_path / "snapshot")


def test_the_tree_and_the_hottest_prefixes_of_a_snapshot(file, capsys):
    assert main(["inspect", file]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "4 pages, 3 prefixes; page_size 2, bigrams False, ranks 2",
        "  2 pages, tokens 1 1  -  hits 2  rank 0  namespace None",
        "  1 pages, tokens 3 3  -  hits 1",
        "  1 pages, tokens 4 4  -  hits 1  rank 0  namespace 'tenant'",
        "",
        "hottest prefixes:",
        "   1 2 tokens, 1 hits, 0/1 stored, namespace 'tenant': tokens 4 4",
        "   2 4 tokens, 2 hits, 0/2 stored, namespace None: tokens 1 1 2 2",
        "   3 6 tokens, 1 hits, 0/3 stored, namespace None: tokens 1 1 2 2 3 3",
    ]


def test_parts_of_it_and_json(file, capsys):
    assert main(["inspect", file, "--show", "tree", "--lines", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  ... and 2 pages more"
    assert main(["inspect", file, "--json", "--hot", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["first_tokens"] for each in found["hot"]] == [D]


def test_what_is_no_snapshot_is_told(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    (tmp_path / "text").write_text("text")
    assert main(["inspect", str(tmp_path / "text")]) == 2
    assert "no snapshot" in capsys.readouterr().err


def test_locks_and_sizes_as_text():
    held = {"by": "pin p", "rank": 0, "pages": 2, "on": {"device": 1, "host": 2}, "first_tokens": list(range(9))}
    assert (
        locks_text([held]).splitlines()[1]
        == "  pin p: rank 0, 2 pages (1 on device, 2 on host), tokens 0 1 2 3 4 5 ..."
    )
    assert locks_text([{"by": "backup of 1 pages of w (operation 0.0)"}]).endswith("(operation 0.0)")
    pin = {"name": "p", "seconds_left": 9.6, "rank": 1, "device_pages": 1, "pages": 2}
    stats = {"config": {"ranks": 1}, "pages": {"kv": {"device": [{"free": 0, "in_flight": 2}]}}, "pins": [pin]}
    text = sizes_text(stats | {"resizing": [{"rank": 0, "device_pages": 3}], "storage": {"in_flight": 4}})
    assert "rank 0, kv, device: 2 in flight" in text
    assert "pin p: 10 s left, rank 1, 1 of 2 pages on device" in text
    assert text.endswith("storage: 4 in flight")
