"""Snapshots: the prefixes of a cache, the hottest first, as a value and as a file."""

import io
import json
import zipfile

import numpy as np
import pytest
from support import new_cache, serve, settle, tiny

from purecache.namespaces import encoded_namespace
from purecache.snapshots import Origin, Snapshot, SnapshotError
from purecache.snapshots.origins import origin_as_json, origin_from_json
from purecache.state import Policy

AB, AC, D = [1, 1, 2, 2], [1, 1, 3, 3], [4, 4]


def known(snapshot):
    """What a snapshot says, hottest first."""
    return [(each.tokens.tolist(), each.namespace, each.rank) for each in snapshot.prefixes()]


def test_prefixes_come_with_their_names_the_hottest_first():
    cache, _ = new_cache(tiny())
    spaces = [{}, {"namespace": "a"}, {"namespace": (("adapter", 3), None, b"x"), "rank": None}]
    for tokens, space in zip((AB, AC, D), spaces, strict=True):
        serve(cache, tokens, **space)
    expected = [(D, (("adapter", 3), None, b"x"), None), (AC, "a", 0), (AB, None, 0)]
    assert known(cache.snapshot()) == expected
    cache.match(AB)
    assert known(cache.snapshot()) == [expected[2], *expected[:2]]
    _, receipt = cache.admit(AC, namespace="a")
    cache.match(D, namespace=(("adapter", 3), None, b"x"), rank=None)
    assert known(cache.snapshot())[0] == expected[1]  # a running request holds it
    cache.unlock(receipt)
    assert cache.violations() == []


def test_what_is_on_host_alone_is_colder_and_all_is_there():
    cache, _ = new_cache(tiny())
    for tokens in ([*AB, 5, 5], [*AB, 6, 6], D):
        serve(cache, tokens)
        settle(cache)
        cache.drain()
    cache.evict(2)
    cache.drain()
    assert known(cache.snapshot())[0][0] == D
    assert {tuple(each[0]) for each in known(cache.snapshot())} >= {(*AB, 6, 6), tuple(D)}


def test_a_hot_beginning_of_a_cold_prompt_comes_before_it():
    cache, _ = new_cache(tiny())
    serve(cache, [*AB, 5, 5])
    serve(cache, D)
    cache.match(AB)
    assert [each[0] for each in known(cache.snapshot())] == [AB, D, [*AB, 5, 5]]


def test_ranks_take_turns_and_levels_come_first():
    cache, _ = new_cache(tiny(policy=Policy.LFU))
    for tokens in (AB, AB, AB, D, [7, 7]):
        serve(cache, tokens)
    serve(cache, [8, 8], rank=1)
    assert [each[0] for each in known(cache.snapshot())] == [AB, [8, 8], [7, 7], D]


def test_bigrams_have_their_first_token():
    cache, _ = new_cache(tiny(bigrams=True))
    serve(cache, [1, 2, 3])
    serve(cache, [5, 2, 3])
    assert known(cache.snapshot()) == [([5, 2, 3], None, 0), ([1, 2, 3], None, 0)]
    for each in cache.snapshot().prefixes():
        assert cache.peek(each.tokens).length == 2


def test_prefixes_whose_namespace_nobody_knows_any_more_are_counted():
    cache, _ = new_cache(tiny())
    serve(cache, AB, namespace="a")
    serve(cache, D)
    cache._inputs._origins = {digest: origin for digest, origin in cache._inputs._origins.items() if origin[0] is None}
    snapshot = cache.snapshot()
    assert (known(snapshot), snapshot.unnamed) == ([(D, None, 0)], 2)


def test_files_say_the_same(tmp_path):
    cache, _ = new_cache(tiny())
    assert len(Snapshot.from_bytes(cache.snapshot().to_bytes())) == 0
    serve(cache, AB, namespace=("a", ("b", 1)))
    serve(cache, AC, rank=1)
    snapshot = cache.snapshot()
    for _ in range(2):
        snapshot.save(tmp_path / "file")
        found = Snapshot.load(tmp_path / "file")
        assert known(found) == known(snapshot)
        assert found.settings == snapshot.settings
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").stat().st_mode & 0o077 == 0


def test_damage_is_found_and_nothing_is_believed(tmp_path):
    cache, _ = new_cache(tiny())
    serve(cache, AB, namespace="a")
    content = cache.snapshot().to_bytes()
    for cut in range(0, len(content), 7):
        with pytest.raises(SnapshotError):
            Snapshot.from_bytes(content[:cut])
    good = 0
    for place in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[place] ^= 1
        try:
            assert known(Snapshot.from_bytes(bytes(damaged))) == known(cache.snapshot())
            good += 1  # such as dates of the archive
        except SnapshotError:
            pass
    assert good < len(content) / 3 / 2
    with pytest.raises(OSError, match="none"):
        Snapshot.load(tmp_path / "none")


@pytest.mark.parametrize(
    "change",
    [
        {"parents": [0, 0]},
        {"parents": [-2, 0]},
        {"tips": [2]},
        {"tips": [-1]},
        {"origins": [1, -1]},
        {"hits": [1]},
        {"tokens": [[1], [2]]},
        {"ranks": [[0, 0]]},
    ],
)
def test_arrays_must_fit_together(change):
    cache, _ = new_cache(tiny())
    serve(cache, AB)
    snapshot = cache.snapshot()
    for name, values in change.items():
        object.__setattr__(snapshot, name, np.array(values, np.int32))
    with pytest.raises(SnapshotError):
        Snapshot.from_bytes(snapshot.to_bytes())


def test_other_versions_types_and_sizes_are_refused(monkeypatch):
    cache, _ = new_cache(tiny())
    serve(cache, AB)
    snapshot = cache.snapshot()
    monkeypatch.setattr("purecache.snapshots.snapshot.VERSION", 2)
    later = snapshot.to_bytes()
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match="version 2"):
        Snapshot.from_bytes(later)
    out = io.BytesIO()
    np.savez(out, about=np.array([print], object))
    with pytest.raises(SnapshotError):
        Snapshot.from_bytes(out.getvalue())
    monkeypatch.setattr("purecache.snapshots.snapshot.MOST_BYTES", 100)
    with pytest.raises(SnapshotError, match="larger"):
        Snapshot.from_bytes(snapshot.to_bytes())
    assert zipfile.is_zipfile(io.BytesIO(later))


@pytest.mark.parametrize(
    "namespace", [None, "", "a", b"\x00", 7, -7, True, False, (), ("a", ("b", None), (("c", 2)), b"d"), ((1, "x"),)]
)
def test_origins_survive_json(namespace):
    origin = Origin(namespace, True, 5)
    found = origin_from_json(json.loads(json.dumps(origin_as_json(origin))))
    assert found == origin
    assert type(found.namespace) is type(namespace)


@pytest.mark.parametrize("name", [b"", b"x" + bytes(8), b"s" + b"\x05" + bytes(7) + b"abc", b"nn", b"b\x01" + bytes(7)])
def test_what_is_no_origin_is_refused(name):
    with pytest.raises(ValueError, match="name"):
        origin_from_json([name.hex(), False, None])
    assert encoded_namespace(None) == b"n"
