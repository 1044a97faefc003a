"""`purecache doctor` on the machine at hand, and with things wrong."""

import json

import numpy as np
import pytest

from purecache.cli import main
from purecache.doctor import command, machine, paths
from purecache.doctor.paths import Sample, measure, rates, recommended
from purecache.effects.pools import describe
from purecache.effects.table import routes

SMALL = ["--layers", "2", "--page-shape", "2,2,8", "--pages", "8", "--batch", "4", "--rounds", "1"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What a run on a small pool printed, and its JSON."""
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda *text, **_: printed.append(" ".join(map(str, text))))
        file = tmp_path_factory.mktemp("doctor") / "found.json"
        assert main(["doctor", *SMALL, "--json", str(file)]) == 0
    return "\n".join(printed), json.loads(file.read_text())


def test_every_path_of_the_platform_is_measured_and_exact(report):
    text, found = report
    rows = {row["path"]: row for row in found["paths"]}
    for path in ("slots by loop", "arrays by unrolled", "arrays by fused"):
        assert rows[path]["exact"] is True
        assert rows[path]["backup"] > 0
        assert rows[path]["load_back"] > 0
        assert rows[path]["programs"]
        assert path in text
    assert rows["host copy"]["rate"] > 0
    assert rows["device copy"]["rate"] > 0
    assert found["recommended"] in rows


def test_the_machine_and_the_table_are_shown(report):
    text, found = report
    (device, *_) = found["machine"]["devices"]
    assert device["platform"] == "cpu"
    assert "pinned_host" in device["memory_kinds"]
    assert found["default"] == "slots by loop"
    assert "compiled, never run" in text
    assert "Locked memory (ulimit -l):" in text
    assert "Recommended: host_form=" in text
    assert "0.12 KiB per page" in text


def test_json_on_standard_output_is_alone_there(capsys):
    assert main(["doctor", *SMALL, "--no-rates", "--json", "-"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["paths"] == []
    assert "Recommended" in out.err


@pytest.mark.parametrize(
    "flags",
    [
        ["--batch", "9"],
        ["--layers", "0"],
        ["--dtype", "int4"],
        ["--dtype", "nothing"],
        ["--rounds", "0"],
        ["--page-shape", "0,4"],
        ["--pages", "1", "--batch", "1"],
    ],
)
def test_flags_that_do_not_fit(flags, capsys):
    assert main(["doctor", *SMALL, "--no-rates", *flags]) == 2
    assert "purecache doctor: " in capsys.readouterr().err


def test_a_bad_jaxlib_is_grave(monkeypatch, capsys):
    version = machine.metadata.version
    monkeypatch.setattr(machine.metadata, "version", lambda name: "0.11.1" if name == "jaxlib" else version(name))
    assert main(["doctor", *SMALL, "--no-rates"]) == 1
    assert "PROBLEM: jaxlib 0.11.1 copies arrays" in capsys.readouterr().out


def test_writes_that_copy_arrays_are_grave(monkeypatch):
    monkeypatch.setattr(machine, "write_ratio", lambda: 200.0)
    (found,) = machine.findings()
    assert found.grave
    assert "200 times as much" in found.what


def test_without_pinned_memory_there_is_no_second_tier(monkeypatch):
    facts = machine.facts()
    for device in facts["devices"]:
        device["memory_kinds"] = ["device"]
    monkeypatch.setattr(machine, "facts", lambda: facts)
    assert any("there can be no L2" in found.what for found in machine.findings())


def test_a_path_that_changes_bits_is_never_recommended(monkeypatch, capsys):
    exact = paths._exact
    monkeypatch.setattr(paths, "_exact", lambda plane, sample: plane.route.programs != "loop" and exact(plane, sample))
    assert main(["doctor", *SMALL]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM: slots by loop changes bits: do not use it" in out
    assert "copies='loop'" not in out


def test_a_path_that_a_backend_cannot_do_is_told(monkeypatch, capsys):
    def broken(sample, route, rounds):
        raise RuntimeError("INTERNAL: no such copy\nlong trace")

    monkeypatch.setattr(paths, "measure", broken)
    rows = [row for row in rates(Sample(1, (2, 8), "int32", 4, 2), 1) if "problem" in row]
    assert len(rows) == 3
    assert rows[0]["problem"] == "RuntimeError: INTERNAL: no such copy"
    assert recommended(rows) is None
    assert main(["doctor", *SMALL]) == 1
    out = capsys.readouterr().out
    assert "slots by loop          can't be used: RuntimeError: INTERNAL: no such copy" in out
    assert "PROBLEM: no path keeps every bit here: run without L2" in out
    assert "Recommended" not in out


def test_shapes_that_programs_copy_whole_are_told(monkeypatch, capsys):
    monkeypatch.setattr(command, "trouble", lambda layout, route: "fold the page" if route.form == "slots" else None)
    assert main(["doctor", *SMALL, "--no-rates"]) == 0
    out = capsys.readouterr().out
    assert "slots by loop: fold the page" in out
    assert "arrays by fused: fold" not in out


def test_wrong_bytes_are_found(monkeypatch):
    sample = Sample(1, (2, 8), "int32", 4, 2)
    move = paths.move

    def wrong(plane, kind, source, target):
        move(plane, kind, source, target)
        plane.pool = tuple(array.at[-1].set(0) for array in plane.pool)

    route = routes(describe(sample.pool(), 0, 4))[0]
    assert measure(sample, route, 1)["exact"] is True
    monkeypatch.setattr(paths, "move", wrong)
    assert measure(sample, route, 1)["exact"] is False


def test_samples_hold_every_kind_of_bits():
    bits = np.concatenate([np.array(array).view(np.uint16).ravel() for array in Sample(layers=2, pages=8).pool()])
    exponent, mantissa = (bits >> 7) & 0xFF, bits & 0x7F
    assert ((exponent == 0xFF) & (mantissa != 0)).any()  # NaN payloads
