from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from purecache.demo.engine import Geometry
from purecache.demo.gemma import gemma_config, gemma_weights
from purecache.demo.gemma_tokenizer import GemmaTokenizer
from purecache.demo.hybrid_config import Kind
from purecache.demo.hybrid_engine import HybridPrograms, HybridSpan
from purecache.demo.weights import DemoError, open_model
from tests.demo.gemma_files import vocabulary, write_gemma
from tests.demo.gemma_reference import GemmaReference
from tests.demo.hybrid_worlds import Owner, by_token, prefill

# float32 against float64, four layers, logits of up to 3: 4e-6 was measured. A wrong scale, norm, mask or rotation
# changes logits by 0.01 and more.
TOLERANCE = 5e-5
GEOMETRY = Geometry(page_size=4, chunk=16, batch=2, context=128, block=16)
PAGES = np.arange(20, dtype=np.int32)


@dataclass(frozen=True)
class Gemma:
    programs: HybridPrograms
    expected: np.ndarray
    tokens: np.ndarray


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Gemma:
    metadata, tensors = open_model(write_gemma(tmp_path_factory.mktemp("gemma") / "tiny.gguf", stretch=8.0))
    config = gemma_config(metadata, len(vocabulary()[0]))
    programs = HybridPrograms(gemma_weights(tensors, config), config, GEOMETRY)
    tokens = np.random.default_rng(5).integers(0, config.vocabulary, 70).astype(np.int32)
    return Gemma(programs, GemmaReference(metadata, tensors, period=3).logits(tokens), tokens)


def test_logits_equal_float64_reference(gemma):
    assert np.abs(gemma.expected).max() > 1.5
    for end in (5, 16, 43, 70):
        owner = Owner.of(gemma.programs, kv=20, window=20)
        got = prefill(gemma.programs, owner, HybridSpan(gemma.tokens[:end], 0, 0, PAGES, PAGES))
        np.testing.assert_allclose(got, gemma.expected[end - 1], rtol=0, atol=TOLERANCE)


def test_decoding_continues_prefill(gemma):
    programs, owner = gemma.programs, Owner.of(gemma.programs, kv=40, window=40)
    tables = PAGES, PAGES + 20
    starts = (69, 33)
    for table, start in zip(tables, starts, strict=True):
        prefill(programs, owner, HybridSpan(gemma.tokens[:start], 0, 0, table, table))
    spans = [
        HybridSpan(gemma.tokens[start : start + 1], start, start, table, table)
        for table, start in zip(tables, starts, strict=True)
    ]
    assert programs.decode(owner, spans).tolist() == [int(gemma.expected[start].argmax()) for start in starts]


@pytest.mark.parametrize("cached", [16, 20, 44, 60])
def test_a_prefix_can_be_taken_up_bit_for_bit(gemma, cached):
    """From pages of the last window (and a chunk) only; the pages before hold NaN."""
    programs = gemma.programs
    whole = Owner.of(programs, kv=20, window=20)
    expected = prefill(programs, whole, HybridSpan(gemma.tokens, 0, 0, PAGES, PAGES))
    start = programs.start_of(cached)
    needed = max(0, start - programs.config.window + 1) // 4
    taken = jax.tree.map(np.array, whole.pools)
    for array in jax.tree.leaves(taken["window"]):
        array[:, :needed] = np.nan
        array[:, cached // 4 :] = np.nan
    for array in jax.tree.leaves(taken["kv"]):
        array[:, cached // 4 :] = np.nan
    owner = Owner(taken)
    windows = np.where(needed > PAGES, -1, PAGES)
    got = prefill(programs, owner, HybridSpan(gemma.tokens[start:], start, cached, PAGES, windows))
    np.testing.assert_array_equal(got, expected)
    for name, first in (("kv", 0), ("window", 4 * needed)):
        for mine, full in zip(owner.arrays(name), whole.arrays(name), strict=True):
            np.testing.assert_array_equal(by_token(mine)[:, first:70], by_token(full)[:, first:70])


def test_chunks_start_at_multiples(gemma):
    with pytest.raises(ValueError, match="multiple of 16"):
        gemma.programs.prefill(Owner.of(gemma.programs, kv=4, window=4), HybridSpan(gemma.tokens[:3], 4, 4, PAGES[:4]))


@pytest.fixture
def metadata(tmp_path):
    return open_model(write_gemma(tmp_path / "tiny.gguf", layers=7, period=None))[0]


def test_five_of_six_layers_are_windows_unless_the_file_says_otherwise(metadata):
    assert gemma_config(metadata, 9).kinds == (Kind.WINDOW,) * 5 + (Kind.FULL, Kind.WINDOW)
    flags = [True, False] * 3 + [True]
    kinds = gemma_config(metadata | {"gemma3.attention.sliding_window_pattern": flags}, 9).kinds
    assert kinds == (Kind.WINDOW, Kind.FULL) * 3 + (Kind.WINDOW,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gemma3.final_logit_softcapping": 30.0}, "cap on the logits"),
        ({"gemma3.attention.value_length": 16}, "differ in size"),
        ({"gemma3.attention.sliding_window_pattern": [True]}, "7 layers and a pattern of windows for 1"),
    ],
)
def test_unknown_variants_are_refused(metadata, change, message):
    with pytest.raises(DemoError, match=message):
        gemma_config(metadata | change, 9)


@pytest.fixture
def tokenizer(metadata):
    return GemmaTokenizer(metadata)


def words_of(metadata, ids):
    return [metadata["tokenizer.ggml.tokens"][index] for index in ids]


def test_words_are_merged_by_their_scores(metadata, tokenizer):
    ids = tokenizer.encode("the hand and the user")
    assert words_of(metadata, ids) == ["the", "\u2581", "h", "and", "\u2581and", "\u2581the", "\u2581", "user"]


def test_unknown_letters_are_bytes(metadata, tokenizer):
    assert words_of(metadata, tokenizer.encode("\u00e9\n\n\n")) == ["<0xC3>", "<0xA9>", "\n\n", "\n"]


@pytest.mark.parametrize("text", ["\u00e9\u6f22\u5b57 \U0001f600\n\n  tabs\tand spaces ", "the  model", " and"])
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_markers_are_single_tokens(metadata, tokenizer):
    words = words_of(metadata, tokenizer.message("user", "in"))
    assert words == ["<start_of_turn>", "user", "\n", "in", "<end_of_turn>", "\n"]
    assert words_of(metadata, tokenizer.message("system", "in")) == ["<bos>", *words]
    assert words_of(metadata, [tokenizer.stop]) == ["<end_of_turn>"]
    assert words_of(metadata, tokenizer.answer_start()) == ["<start_of_turn>", "model", "\n"]


def test_other_tokenizers_are_refused(metadata):
    with pytest.raises(DemoError, match="'gpt2'"):
        GemmaTokenizer(metadata | {"tokenizer.ggml.model": "gpt2"})
