"""Pages of a workload: two requests have the same number at a place iff their prefixes are the same up to there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.workloads import Request, Trace, paged

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=6)


@given(PROMPTS, st.sampled_from([1, 2, 3]), st.lists(st.sampled_from("ab"), min_size=6, max_size=6))
def test_numbers_stand_for_prefixes_of_tokens(prompts, page, scopes):
    requests = [Request(len(each), each, scope=scope) for each, scope in zip(prompts, scopes, strict=False)]
    found = paged(Trace("tokens", 1, requests), page)
    names = {}
    for number, request in enumerate(requests):
        assert found.prompt_pages[number] == len(request.blocks) // page == len(found.pages(number))
        for place, each in enumerate(found.pages(number).tolist()):
            prefix = request.scope, tuple(request.blocks[: (place + 1) * page])
            assert names.setdefault(each, prefix) == prefix
            assert found.parents[each] == (found.pages(number)[place - 1] if place else -1)
    assert len(set(names.values())) == len(names) == found.distinct


@given(PROMPTS, st.sampled_from([(4, 2), (4, 4), (4, 8), (2, 8)]), st.integers(0, 3))
def test_blocks_are_cut_and_joined(blocks, sizes, missing):
    """Pages of blocks are those of the tokens that the blocks stand for, whatever the sizes."""
    block, page = sizes
    prefixes = {}
    names = [
        [prefixes.setdefault(tuple(each[: end + 1]), len(prefixes)) for end in range(len(each))] for each in blocks
    ]
    lengths = [max(len(each) * block - min(missing, block - 1), 0) for each in names]
    by_block = paged(
        Trace("b", block, [Request(length, each) for length, each in zip(lengths, names, strict=True)]), page
    )
    tokens = [np.repeat(each, block)[:length].tolist() for length, each in zip(lengths, names, strict=True)]
    by_token = paged(Trace("t", 1, [Request(len(each), each) for each in tokens]), page)
    assert np.array_equal(by_block.ids, by_token.ids)
    assert np.array_equal(by_block.starts, by_token.starts)


def test_one_token_is_always_computed():
    found = paged(Trace("tokens", 1, [Request(8, range(8)), Request(9, range(9)), Request(0, [])]), 4)
    assert found.prompt_pages.tolist() == [2, 2, 0]
    assert found.match_pages.tolist() == [1, 2, 0]


def test_what_is_known_of_an_answer_is_cached_too():
    """Its last token has no KV; an answer that is only counted has no pages."""
    known, counted = Request(6, range(12), output=6), Request(6, range(6), output=6)
    found = paged(Trace("tokens", 1, [known, counted]), 4)
    assert found.sizes.tolist() == [2, 1]
    assert found.prompt_pages.tolist() == [1, 1]
    with pytest.raises(ValueError, match="must divide"):
        paged(Trace("blocks", 6, [Request(6, [1])]), 4)
