"""`purecache replay` from the command line."""

import io
import json
from pathlib import Path

import pytest
from recordings import recorded
from support import tiny

from purecache.cli import main
from purecache.replay import Player, Recording
from purecache.replay.shell import Shell


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "life"
    recorded(path, tiny(), state_every=5)
    return str(path)


def test_equal_recordings_end_with_0(file, capsys):
    assert main(["replay", file]) == 0
    out, err = capsys.readouterr()
    assert "equal: every answer and every state" in out
    assert "finish_backup" in out
    assert "compiled" in err
    assert main(["replay", file, "--quiet", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["equal"]
    assert found["damage"] is None
    assert found["events"] == found["recorded"] == sum(found["by_name"].values()) > 40
    assert found["same_code"]


def test_different_recordings_end_with_1(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("purecache.replay.player.answer_digest", lambda answer: b"otherwise")
    assert main(["replay", file, "--quiet"]) == 1
    assert "DIFFERENT: the answer of event 1" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr("purecache.replay.player.state_digest", lambda *given, **more: b"otherwise")
    assert main(["replay", file, "--quiet", "--json", str(tmp_path / "out")]) == 1
    assert "DIFFERENT: the state of event 0" in capsys.readouterr().out
    assert json.loads((tmp_path / "out").read_text())["difference"]["what"] == "state"


def test_files_that_are_of_no_use_end_with_2(file, tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none")]) == 2
    (tmp_path / "text").write_text("no recording")
    assert main(["replay", str(tmp_path / "text")]) == 2
    assert main(["replay", file, "--at", "100000"]) == 2
    assert main(["replay", file, "--laws", "--every", "0"]) == 2
    assert "no recording of purecache" in capsys.readouterr().err


def test_a_recording_that_was_cut_off_is_replayed_with_a_note(file, tmp_path, capsys):
    (tmp_path / "cut").write_bytes(Path(file).read_bytes()[:-3])
    assert main(["replay", str(tmp_path / "cut"), "--quiet"]) == 0
    assert "cut off" in capsys.readouterr().err


def test_trees_and_laws(file, monkeypatch, capsys):
    assert main(["replay", file, "--quiet", "--at", "20"]) == 0
    assert "rank 0, kv: device" in capsys.readouterr().out
    assert main(["replay", file, "--quiet", "--laws", "--every", "10"]) == 0
    assert "no law is broken" in capsys.readouterr().out
    monkeypatch.setattr(Player, "violations", lambda self: ["all is lost"] * (self.at >= 17))
    assert main(["replay", file, "--quiet", "--laws", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["violation"] == {"event": 17, "laws": ["all is lost"]}


def test_stepping(file):
    lines = ["n", "next 5", "", "b", "back 2", "goto 30", "tree", "event", "laws", "goto x", "goto 9999", "dance"]
    lines += ["goto 0", "back", "event", "help", "quit"]
    out = io.StringIO()
    Shell(Player(Recording(file)), io.StringIO("\n".join(lines) + "\n"), out).cmdloop()
    text = out.getvalue()
    assert "after event 11 of" in text  # an empty line repeats
    assert "event 30:" in text
    for part in ("rank 0, kv", "no law is broken", "there are events 0 to", "what is 'dance'", "the empty cache"):
        assert part in text
    assert "reply" in text
    at_the_end = io.StringIO()
    Shell(Player(Recording(file)), io.StringIO("next\n"), at_the_end).cmdloop()
    assert "event 1:" in at_the_end.getvalue()
