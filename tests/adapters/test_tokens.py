"""Lists of tokens as arrays: always the list as it is now, each token converted once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.adapters import tokens as module
from purecache.adapters.tokens import TokenMemo, TokenRow


class Converted:
    """Counts the tokens that are converted."""

    def __init__(self, monkeypatch):
        self.total, convert = 0, module.as_int32
        monkeypatch.setattr(module, "as_int32", lambda values: self.count(convert(values)))

    def count(self, array):
        self.total += len(array)
        return array


@pytest.fixture
def converted(monkeypatch):
    return Converted(monkeypatch)


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=8))
def test_a_row_is_the_list_that_was_given_whatever_came_before(lists):
    row = TokenRow()
    for tokens in lists:
        assert row.of(list(tokens)).tolist() == tokens


@given(st.lists(st.lists(st.integers(300, 302), max_size=5), max_size=20))
def test_a_memo_takes_no_list_for_another(lists):
    memo = TokenMemo()
    for tokens in lists:
        found = memo.of(tokens)
        assert found.dtype == np.int32
        assert found.tolist() == tokens


def test_a_growing_request_is_converted_once(converted):
    row, tokens = TokenRow(), list(range(1000, 1100))
    for length in (99, 100, 99, 100):
        row.of(tokens[:length])
    assert converted.total == 100
    for token in range(50):
        tokens.append(token)
        row.of(tokens)
    assert converted.total == 150


def test_a_list_that_was_changed_in_place_is_converted_again_from_there(converted):
    row, tokens = TokenRow(), list(range(1000, 1100))
    row.of(tokens)
    tokens[90] = 7
    assert row.of(tokens).tolist() == tokens
    assert converted.total == 110


def test_equal_lists_are_converted_once_while_they_are_remembered(converted, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 250)
    memo, lists = TokenMemo(), [list(range(start, start + 100)) for start in (1000, 2000, 3000)]
    for tokens in (lists[0], lists[1], lists[0], lists[1]):
        memo.of(tokens[:])
    assert converted.total == 200
    memo.of(lists[2])
    memo.of(lists[1])
    assert converted.total == 300
    memo.of(lists[0])
    assert converted.total == 400


def test_pairs_are_the_tokens_they_were_made_from():
    pairs = [(1, 2), (2, 3), (3, 4)]
    assert TokenRow().of(pairs).tolist() == [1, 2, 3, 4]
    assert TokenMemo().of(pairs).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("make", [TokenRow, TokenMemo])
def test_arrays_pass_and_tokens_beyond_32_bits_are_refused(make):
    assert make().of(np.array([5, 6], np.int64)).tolist() == [5, 6]
    with pytest.raises(ValueError, match="32 bits"):
        make().of([1, 2**31])
