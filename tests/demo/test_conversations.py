from __future__ import annotations

import numpy as np
import pytest

from purecache.demo.conversations import manual_scripts, recorded_scripts
from purecache.demo.weights import DemoError


def common(left, right):
    """Length of the common prefix."""
    size = min(len(left), len(right))
    return int(np.argmin(np.append(left[:size] == right[:size], False)))


@pytest.fixture(scope="module")
def scripts(model):
    return manual_scripts(model.tokenizer, users=6, documents=3, turns=2, document_tokens=200, limit=8)


def test_users_of_one_chapter_share_it(scripts):
    assert common(scripts[0].pieces[0], scripts[3].pieces[0]) > 300
    assert len(scripts[0].pieces[0]) != common(scripts[0].pieces[0], scripts[3].pieces[0])


def test_users_of_different_chapters_share_at_most_the_system_prompt(scripts):
    same_system, other_system = (common(scripts[0].pieces[0], scripts[index].pieces[0]) for index in (2, 1))
    assert 100 < same_system < 300
    assert other_system < 10


def test_a_prompt_contains_the_answers_before_it(scripts):
    prompt = scripts[0].prompt([[7, 8]])
    assert prompt.tolist() == [*scripts[0].pieces[0].tolist(), 7, 8, *scripts[0].pieces[1].tolist()]


def test_longest_covers_every_prompt_and_answer(scripts):
    script = scripts[0]
    assert script.longest == len(script.prompt([[0] * 8])) + 8


@pytest.mark.parametrize(("change", "message"), [({"documents": 99}, "--documents 99"), ({"users": 0}, "--users")])
def test_impossible_sizes_are_refused(model, change, message):
    sizes = {"users": 1, "documents": 1, "turns": 1, "document_tokens": 10, "limit": 1} | change
    with pytest.raises(DemoError, match=message):
        manual_scripts(model.tokenizer, **sizes)


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "recorded.npz"
    np.savez(
        path,
        tokens=np.arange(60, dtype=np.uint16),
        offsets=np.array([0, 10, 15, 20, 60]),
        session=np.array(["b", "a", "b", "b"]),
        output_tokens=np.array([3, 2, 9, 1], np.int32),
    )
    return str(path)


def test_recorded_calls_keep_their_tokens_and_order(recording):
    scripts, left_out = recorded_scripts(recording, sessions=2, calls=3, context=30, limit=4)
    assert [script.name for script in scripts] == ["b", "a"]
    assert [piece.tolist() for piece in scripts[0].pieces] == [list(range(10)), list(range(15, 20))]
    assert scripts[0].limits == (3, 4)
    assert scripts[0].longest == 13
    assert left_out == 1
    assert scripts[0].prompt([[1, 2, 3]]).tolist() == list(range(15, 20))


def test_sessions_and_calls_are_limits(recording):
    scripts, left_out = recorded_scripts(recording, sessions=1, calls=1, context=30, limit=4)
    assert [len(script.pieces) for script in scripts] == [1]
    assert left_out == 0


def test_bad_recordings_say_what_is_wrong(recording, tmp_path):
    with pytest.raises(DemoError, match="no such file"):
        recorded_scripts(str(tmp_path / "none.npz"), 1, 1, 30, 4)
    with pytest.raises(DemoError, match="raise --context"):
        recorded_scripts(recording, 1, 1, 5, 4)
    other = tmp_path / "other.npz"
    np.savez(other, something=np.zeros(3))
    with pytest.raises(DemoError, match="tokens, offsets and session"):
        recorded_scripts(str(other), 1, 1, 30, 4)
