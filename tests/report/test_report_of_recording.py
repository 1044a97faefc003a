"""A recording as a report: every series, transfer and prefix is that of the cache which was recorded."""

import json

import numpy as np
import pytest
from recordings import AB, CD, recorded
from support import serve, settle, tiny

from purecache.replay import Player
from purecache.report import from_json, report_of_recording, to_json
from purecache.state.layout import Account, Column, Tier, TransferKind


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A life, and the report of its recording, with a sample at every event."""
    cache, recording = recorded(tmp_path_factory.mktemp("known") / "life", tokens="plain")
    return cache, recording, report_of_recording(recording, samples=10**6)


def test_the_series_are_those_of_every_state(known):
    _, recording, report = known
    layout, player = recording.config.layout, Player(recording)
    assert report.at == tuple(map(float, range(len(recording) + 1)))
    assert len(report.stocks) == 2 * 2, "tiers times ranks"
    for at in (0, 1, len(recording) // 3, len(recording) // 2, len(recording)):
        player.goto(at)
        books = player.state.books
        for stock in report.stocks:
            tier = Tier[stock.tier.upper()]
            here = {name: line[at] for name, line in stock.accounts.items()}
            assert here == {a.name.lower(): int(books[layout.account(a, tier, stock.rank)]) for a in Account}
            assert sum(here.values()) == stock.capacity == layout.capacity(tier)


def test_the_totals_are_the_counters_of_the_cache(known):
    cache, _, report = known
    totals = cache.counters()
    for name in report.counters:
        assert report.last(name) == totals[name]
    size = cache.config.page_size
    assert report.tokens("device") == size * totals["matched_device_pages"] > 0
    assert report.tokens("host") == size * totals["matched_host_pages"] > 0
    assert report.tokens("computed") == size * totals["matched_miss_pages"] > 0


def test_few_samples_are_some_of_all_and_have_the_last(known):
    _, recording, report = known
    few = report_of_recording(recording, samples=7)
    assert 7 <= len(few.at) <= 16
    assert few.at[-1] == len(recording)
    for one, all_of in zip(few.stocks, report.stocks, strict=True):
        for name, line in one.accounts.items():
            assert line == tuple(all_of.accounts[name][int(at)] for at in few.at)
    assert (few.transfers, few.prefixes, few.answers) == (report.transfers, report.prefixes, report.answers)


def test_the_prefixes_are_the_tree_at_the_end(known):
    cache, _, report = known
    nodes = np.asarray(cache.state.nodes)
    live_nodes = np.flatnonzero(nodes[Column.PARENT, : cache.config.layout.nodes] >= 0)
    assert sum(prefix.pages for prefix in report.prefixes) == len(live_nodes) > 0
    assert max(prefix.hits for prefix in report.prefixes) == nodes[Column.HITS, live_nodes].max()
    on_device = sum(prefix.pages for prefix in report.prefixes if "device" in prefix.tiers)
    assert on_device == (nodes[Column.DEVICE_PAGE, live_nodes] >= 0).sum()
    for prefix in report.prefixes:
        above = report.prefixes[prefix.parent] if prefix.parent >= 0 else None
        assert prefix.depth == (above.depth + above.pages if above else 0)
        assert prefix.rank == (above.rank if above else prefix.rank)
        assert above is None or above.heat <= prefix.heat
    assert min(prefix.heat for prefix in report.prefixes) == 0
    assert all(prefix.label.startswith("tokens ") for prefix in report.prefixes)


def test_the_answers_are_counted(known):
    _, recording, report = known
    verified = Player(recording).verify()
    assert {name: sum(counts.values()) for name, counts in report.answers.items()} == dict(verified.by_name)


def troubled(cache):
    """Backups: one arrives, one in part, one not at all, one is forgotten by a reset; a load back is left open."""
    gate = cache._driver.plane._gate
    for number, failing in enumerate(([False] * 2, [True, False], [True] * 2)):
        gate.fails = lambda kind, count, failing=failing: failing[:count]
        serve(cache, [number + 1] * 4)
        settle(cache)
        cache.tick()
        cache.drain()
    gate.fails = lambda kind, count: [False] * count
    gate.holding = {TransferKind.BACKUP}
    cache.evict(8)
    serve(cache, [7] * 4)
    cache.tick()
    cache.reset()
    gate.holding = set()
    serve(cache, AB)
    settle(cache)
    cache.tick()
    cache.evict(8)
    gate.holding = {TransferKind.LOAD_BACK}
    cache.begin_load_back(cache.match(AB))
    cache.tick()


def test_how_every_transfer_ended_is_told(tmp_path):
    cache, recording = recorded(tmp_path / "life", life=troubled)
    report = report_of_recording(recording)
    assert [(each.kind, each.pages, each.outcome) for each in report.transfers] == [
        ("backup", 2, "ok"),
        ("backup", 2, "part"),
        ("backup", 2, "failed"),
        ("backup", 2, "forgotten"),
        ("backup", 2, "ok"),
        ("load_back", 2, "open"),
    ]
    names = [event.name for event in recording]
    for each in report.transfers:
        assert names[int(each.begun) - 1] == f"begin_{each.kind}"
        if each.ended is not None:
            ended_by = "reset" if each.outcome == "forgotten" else f"finish_{each.kind}"
            assert names[int(each.ended) - 1] == ended_by
    cache._driver.plane._gate.__init__()
    cache.drain()
    assert all(prefix.label.startswith("hash ") for prefix in report.prefixes)


def test_a_page_written_back_at_eviction_is_a_transfer(tmp_path):
    def life(cache):
        for number in range(5):
            serve(cache, [number + 1] * 6)
            settle(cache)
            cache.drain()

    _, recording = recorded(tmp_path / "life", config=tiny(write="write_back"), life=life)
    report = report_of_recording(recording)
    backups = [each for each in report.transfers if each.kind == "backup"]
    assert sum(each.pages for each in backups) == report.last("backup_pages") > 0
    assert {each.outcome for each in backups} == {"ok"}
    assert "begin_backup" not in report.answers


def test_a_recording_that_was_cut_off_says_so(tmp_path):
    _, recording = recorded(tmp_path / "life", life=lambda cache: serve(cache, CD))
    content = (tmp_path / "life").read_bytes()
    (tmp_path / "cut").write_bytes(content[:-20])
    report = report_of_recording(type(recording)(tmp_path / "cut"))
    assert any("damaged" in note or "no end" in note for note in report.notes)
    assert report.title == "cut"


def test_an_answer_that_differs_is_told(tmp_path, monkeypatch):
    _, recording = recorded(tmp_path / "life", life=lambda cache: serve(cache, CD))
    forward = Player.forward
    monkeypatch.setattr(Player, "forward", lambda self: forward(self) and self.at != 2)
    (note,) = [note for note in report_of_recording(recording).notes if "differ" in note]
    assert note.startswith("1 answers")


def test_json_and_back_is_the_same_report(known):
    _, _, report = known
    again = from_json(json.loads(to_json(report)))
    assert again == report


def test_the_life_of_other_tests_has_what_this_looks_for(known):
    """So that no test here passes because nothing happened."""
    _, recording, report = known
    assert {"reset", "evict_device", "begin_load_back"} <= {event.name for event in recording}
    assert {each.kind for each in report.transfers} == {"backup", "load_back"}
