from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from purecache.demo.engine import Geometry, Programs, Span
from purecache.demo.memory import PlainMemory
from purecache.demo.model import Rows, forward, make_pool, write
from tests.demo.reference import ReferenceModel

# float32 keeps 24 bits, and sums of 576 to 1536 products in 30 layers lose a few: 3e-5 was measured for logits of up
# to 29. A wrong rotation, mask, head or scale changes logits by whole units.
TOLERANCE = 5e-4


def prefill(programs, memory, tokens, pages):
    """Logits after the last of `tokens`, computed chunk by chunk into `pages`."""
    chunk, logits = programs.geometry.chunk, None
    for start in range(0, len(tokens), chunk):
        _, logits = programs.prefill(memory, Span(tokens[start : start + chunk], start, start, pages))
    return np.asarray(logits)


def test_logits_equal_float64_reference(model):
    tokens = model.tokenizer.encode("The capital of France is")
    tokens = np.concatenate([model.tokenizer.message("user", "Name one city."), tokens])
    programs = Programs(model.weights, model.config, Geometry(page_size=4, chunk=8, batch=1, context=64, block=8))
    memory = PlainMemory(programs.pool(8))
    expected = ReferenceModel(model.metadata, model.tensors).logits(tokens)
    pages = np.array([5, 2, 7, 0, 1, 6], np.int32)
    for end in (5, 8, len(tokens)):
        got = prefill(programs, memory, tokens[:end], pages)
        np.testing.assert_allclose(got, expected[end - 1], rtol=0, atol=TOLERANCE)
    assert model.tokenizer.decode([int(expected[-1].argmax())]) == " Paris"


@pytest.fixture
def prompt(small):
    return small.prompt(70)


def test_chunks_equal_one_shot(small, programs, prompt):
    memory = PlainMemory(programs.pool(20))
    chunked = prefill(programs, memory, prompt, np.arange(20, dtype=np.int32))
    whole = jax.jit(partial(forward, config=small.config, block=32))
    one = np.zeros(1, np.int32)
    rows = Rows(prompt[None], one, one, one + len(prompt), np.zeros((1, 64), np.int32))
    logits, _, _ = whole(small.weights, pool=make_pool(small.config, 20, 4), rows=rows)
    np.testing.assert_allclose(chunked, np.asarray(logits[0]), rtol=0, atol=TOLERANCE)


def test_page_ids_do_not_matter(programs, prompt):
    plain = prefill(programs, PlainMemory(programs.pool(20)), prompt, np.arange(20, dtype=np.int32))
    pages = np.random.default_rng(0).permutation(30).astype(np.int32)
    shuffled = prefill(programs, PlainMemory(programs.pool(30)), prompt, pages[:20])
    np.testing.assert_array_equal(plain, shuffled)


def test_decoding_continues_prefill(programs, prompt):
    pages, memory = np.arange(20, dtype=np.int32), PlainMemory(programs.pool(20))
    prefill(programs, memory, prompt[:-1], pages)
    last = len(prompt) - 1
    followed = programs.decode(memory, [Span(prompt[-1:], last, last, pages)])
    expected = prefill(programs, PlainMemory(programs.pool(20)), prompt, pages)
    assert followed.tolist() == [int(expected.argmax())]


def test_a_result_does_not_depend_on_its_batch(programs, prompt):
    """Bit for bit: keys and values written by a decoding step alone and beside a longer and a shorter request."""
    pages = np.arange(60, dtype=np.int32).reshape(3, 20)
    lengths = (33, 64, 5)

    def decoded(members):
        memory = PlainMemory(programs.pool(60))
        for member in members:
            prefill(programs, memory, prompt[: lengths[member]], pages[member])
        spans = [Span(prompt[n : n + 1], n, n, pages[m]) for m in members for n in [lengths[m]]]
        answer = programs.decode(memory, spans)
        return answer[members.index(0)], np.asarray(memory.pool.keys[:, :20])

    alone, together = decoded([0]), decoded([1, 2, 0])
    assert alone[0] == together[0]
    # The row of the batch differs; every row of a product is computed alike.
    np.testing.assert_array_equal(alone[1], together[1])


def test_cached_positions_are_not_written(programs, prompt):
    memory, pages = PlainMemory(programs.pool(20)), np.arange(20, dtype=np.int32)
    prefill(programs, memory, prompt[:16], pages)
    before = np.asarray(memory.pool.keys[:, :4]).copy()
    programs.prefill(memory, Span(prompt[20:36], 0, 12, pages))
    after = np.asarray(memory.pool.keys[:, :4])
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert not np.array_equal(before[:, 3], after[:, 3])


def test_padding_rows_write_nothing(programs, prompt):
    memory = PlainMemory(programs.pool(20))
    programs.prefill(memory, Span(prompt[:6], 0, 0, np.array([3, 9], np.int32)))
    touched = np.flatnonzero(np.abs(np.asarray(memory.pool.values)).sum(axis=(0, 3, 4)).reshape(-1))
    assert touched.tolist() == [12, 13, 14, 15, 36, 37]


def test_chunks_start_at_multiples(programs, prompt):
    memory = PlainMemory(programs.pool(4))
    with pytest.raises(ValueError, match="multiple of 16"):
        programs.prefill(memory, Span(prompt[:3], 4, 4, np.arange(4, dtype=np.int32)))


@pytest.mark.parametrize(("groups", "rows"), [(1, 16), (3, 1)])
def test_no_program_copies_the_pool(small, groups, rows):
    """The temporary memory of the compiled programs does not grow with the number of pages."""

    def temporaries(pages):
        pool = make_pool(small.config, pages, 4)
        numbers = np.zeros(groups, np.int32)
        batch = Rows(np.zeros((groups, rows), np.int32), numbers, numbers, numbers, np.zeros((groups, 64), np.int32))
        run = jax.jit(partial(forward, config=small.config, block=32))
        compute = run.lower(small.weights, pool=pool, rows=batch).compile()
        fresh = np.zeros((small.config.layers, groups, rows, small.config.kv_heads, small.config.head_dim), np.float32)
        store = jax.jit(write, donate_argnums=0).lower(pool, fresh, fresh, batch).compile()
        sizes = [compiled.memory_analysis() for compiled in (compute, store)]
        assert sizes[1].alias_size_in_bytes >= pool.keys.nbytes + pool.values.nbytes
        return [size.temp_size_in_bytes for size in sizes]

    assert temporaries(64) == temporaries(1024)
