"""What a hashed recording tells of prompts: which of them share prefixes, and nothing else."""

import numpy as np
import pytest
from recordings import recorded
from support import serve, tiny

from purecache.entries import entries
from purecache.namespaces import namespace_digest
from purecache.replay import Recorder
from purecache.replay.arguments import arguments_of
from purecache.replay.format import unpack
from purecache.replay.veil import MOST_TOKENS, Veil
from purecache.state.pools import PoolSpec, Window

SECRET = 0x5EC2E7


def pages_of(*rows):
    return np.array(rows, np.int32)


SPACE, OTHER = namespace_digest("a"), namespace_digest("b")


@pytest.mark.parametrize("width", [1, 2, 3, 16])
def test_equal_prefixes_stay_equal_and_nothing_else_does(width):
    veil = Veil(width)
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 2, (40, width)).astype(np.int32)
    space, words = veil.hashed(SPACE, pages)
    assert words.shape == (40, min(width, 2))
    # The same page is another one below another prefix.
    assert len({row.tobytes() for row in words}) == 40
    changed = pages.copy()
    changed[20, -1] ^= 1
    again, late = veil.hashed(SPACE, changed)
    np.testing.assert_array_equal(again, space)
    np.testing.assert_array_equal(late[:20], words[:20])
    assert (late[20:] != words[20:]).any(axis=1).all()
    elsewhere, other = veil.hashed(OTHER, pages)
    assert (elsewhere != space).any()
    assert (other != words).any(axis=1).all()
    fresh = Veil(width).hashed(SPACE, pages)
    assert (fresh[1] != words).any(axis=1).all()
    assert (fresh[0] != space).any()


def test_what_is_remembered_is_what_would_be_hashed():
    rng = np.random.default_rng(1)
    veil, plain = Veil(4), Veil(4)
    plain._key = veil._key
    plain._longest = lambda start, pages: (None, 0)
    prompts = [rng.integers(0, 2, (rng.integers(0, 12), 4)).astype(np.int32) for _ in range(20)]
    for _ in range(200):
        first, second = (prompts[rng.integers(len(prompts))] for _ in range(2))
        prompt = np.concatenate([first[: rng.integers(len(first) + 1)], second])
        np.testing.assert_array_equal(veil.hashed(SPACE, prompt)[1], plain.hashed(SPACE, prompt)[1])


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("purecache.replay.veil.MOST_TOKENS", 4096)
    veil = Veil(2)
    for number in range(200):
        veil.hashed(SPACE, np.full((100, 2), number, np.int32))
    assert sum({id(each): each.pages.size for each in veil._late.values()}.values()) <= 4 * 4096
    assert veil._remembered <= 4096 < MOST_TOKENS
    assert veil._remembered == sum(each.cost for each in veil._late.values())


def test_siblings_of_one_token_are_never_confused():
    veil = Veil(1)
    words = [int(veil.hashed(SPACE, pages_of([7], [token]))[1][1, 0]) for token in range(3000)]
    assert len(set(words)) == 3000
    permuted = [int(veil.hashed(SPACE, pages_of([token]))[1][0, 0]) for token in (-1, 0, 2**31 - 1, -(2**31))]
    assert len(set(permuted)) == 4


@pytest.mark.parametrize("tokens", ["hashed", "plain"])
def test_no_token_no_namespace_and_no_seed_is_in_the_file(tmp_path, tokens):
    prompt = [SECRET, SECRET + 1, SECRET, SECRET + 1, SECRET + 2, SECRET]

    def life(cache):
        serve(cache, prompt, namespace="tenant-7")
        cache.match_many([prompt, prompt[:2]], namespace="tenant-7")

    _, found = recorded(tmp_path / "life", tiny(seed=987654321), life, tokens=tokens)
    content = (tmp_path / "life").read_bytes()
    words = np.concatenate([unpack(content[f.offset :][: f.length], f).words for f in found._frames])
    digest = namespace_digest("tenant-7").tolist()
    said = bool(np.isin(words, [SECRET, SECRET + 1, SECRET + 2]).any()), bool(np.isin(digest, words).any())
    assert said == ((False, False) if tokens == "hashed" else (True, True))
    assert (b"987654321" in content) == (tokens == "plain")
    admitted, finished = (next(event for event in found if event.name == name) for name in ("admit", "finish"))
    np.testing.assert_array_equal(admitted.arguments[0], finished.arguments[0])
    rows = admitted.arguments[0].reshape(-1, 2)[:3]
    assert (rows[0] != rows[1]).any() == (tokens == "hashed")


def test_two_recordings_of_one_life_have_nothing_in_common(tmp_path):
    def life(cache):
        serve(cache, [1, 2, 3, 4])

    found = [recorded(tmp_path / str(number), life=life)[1] for number in range(2)]
    first, second = (next(event for event in each if event.name == "admit").arguments for each in found)
    assert (first[0][:4] != second[0][:4]).any()
    assert (first[2] != second[2]).any()
    assert Recorder(tmp_path / "third")._hashed


@pytest.mark.parametrize("pools", [(), (PoolSpec("window", Window(2), 2, 2),)])
def test_every_namespace_among_arguments_is_known(pools):
    """Four words are a namespace, here and nowhere else: one that the recorder doesn't know would be told."""
    layout = tiny(pools=pools).layout
    for name in entries(layout):
        for size in (16, 32):
            given = arguments_of(layout, name, size)
            lanes = {place.namespace: place.lanes for place in given.prompts}
            known = {*lanes, *given.namespaces}
            four = {leaf for leaf, length in enumerate(given.lengths) if given.arrays[leaf] and length == 4}
            assert four <= known, name
            assert all(given.lengths[leaf] == 4 * lanes.get(leaf, 1) for leaf in known)
    assert arguments_of(layout, "forget_namespace", 0).namespaces == (0,)
