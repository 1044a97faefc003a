from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from purecache.demo.hybrid_engine import HybridSpan
from purecache.demo.hybrid_model import forward
from purecache.demo.hybrid_pools import HybridRows, make_pools, write
from purecache.demo.hybrid_sample import sample_config, sample_weights
from tests.demo.hybrid_reference import HybridReference
from tests.demo.hybrid_worlds import Owner, by_token, prefill

pytestmark = pytest.mark.xdist_group("hybrid")  # its programs are compiled once

# float32 against float64 in six layers with sharp attention, logits of up to 30: 1e-4 was measured. A wrong gate, mask,
# norm or rotation changes logits by whole units.
TOLERANCE = 5e-4
PAGES = np.arange(20, dtype=np.int32)
WINDOW = 12
SIZES = {"kv": 60, "window": 60, "state": 4}


@pytest.fixture(scope="module")
def tokens(hybrid):
    return hybrid.prompt(75, seed=3)


@pytest.fixture
def world(hybrid_programs):
    return partial(Owner.of, hybrid_programs, **SIZES)


@pytest.fixture(scope="module")
def computed(hybrid_programs, tokens):
    """Pools after 70 tokens, and the logits after the last."""
    owner = Owner.of(hybrid_programs, **SIZES)
    logits = prefill(hybrid_programs, owner, HybridSpan(tokens[:70], 0, 0, PAGES, PAGES, 0))
    return owner, logits


def assert_same_bits(owner, computed, first=0):
    """Keys and values of tokens 0 to 70 in full layers and from `first` on in window layers, and the states."""
    for name, begin in (("kv", 0), ("window", first)):
        for mine, other in zip(owner.arrays(name), computed.arrays(name), strict=True):
            np.testing.assert_array_equal(by_token(mine)[:, begin:70], by_token(other)[:, begin:70])
    for mine, other in zip(owner.arrays("state"), computed.arrays("state"), strict=True):
        np.testing.assert_array_equal(mine[:, 0], other[:, 0])


def test_logits_equal_float64_reference(hybrid, hybrid_programs, tokens, world):
    expected = HybridReference(hybrid.weights, hybrid.config).logits(tokens)
    assert np.abs(expected).max() > 10
    for end in (5, 16, 40, 75):
        got = prefill(hybrid_programs, world(), HybridSpan(tokens[:end], 0, 0, PAGES, PAGES, 0))
        np.testing.assert_allclose(got, expected[end - 1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("cached", [4, 16, 20, 44, 68])
def test_a_prefix_can_be_taken_up_bit_for_bit(hybrid_programs, tokens, world, computed, cached):
    """From its kv pages, the window pages of its last tokens and its state, each in another place than before."""
    first = max(0, cached - WINDOW + 1) // 4
    source, owner = world(), world()
    prefill(hybrid_programs, source, HybridSpan(tokens[:cached], 0, 0, PAGES + 20, PAGES + 30, 2))
    kept = {"kv": (PAGES[: cached // 4], 20), "window": (PAGES[first : cached // 4], 30)}
    pools = jax.tree.map(lambda array: np.full_like(array, np.nan), owner.pools)
    for name, (pages, shift) in kept.items():
        for new, old in zip(jax.tree.leaves(pools[name]), source.arrays(name), strict=True):
            new[:, pages] = old[:, pages + shift]
    for new, old in zip(jax.tree.leaves(pools["state"]), source.arrays("state"), strict=True):
        new[:, 0] = old[:, 2]
    owner = Owner(pools)
    windows = np.where(first > PAGES, -1, PAGES)
    logits = prefill(hybrid_programs, owner, HybridSpan(tokens[cached:70], cached, cached, PAGES, windows, 0))
    np.testing.assert_array_equal(logits, computed[1])
    assert_same_bits(owner, computed[0], first=4 * first)


def test_decoding_and_prefill_give_the_same_bits(hybrid_programs, tokens, world, computed):
    owner = world()
    prefill(hybrid_programs, owner, HybridSpan(tokens[:3], 0, 0, PAGES, PAGES, 0))
    for at in range(3, 70):
        windows = np.where((at - WINDOW + 1) // 4 > PAGES, -1, PAGES)
        followed = hybrid_programs.decode(owner, [HybridSpan(tokens[at : at + 1], at, at, PAGES, windows, 0)])
    assert followed.tolist() == [int(computed[1].argmax())]
    assert_same_bits(owner, computed[0])


def test_a_result_does_not_depend_on_its_batch(hybrid_programs, tokens, world, computed):
    """The first request decodes its last tokens beside a longer and a shorter one, in changing rows of the batch."""
    owner = world()
    members = {0: 60, 1: 64, 2: 5}
    for member, length in members.items():
        pages = PAGES + 20 * member
        prefill(hybrid_programs, owner, HybridSpan(tokens[:length], 0, 0, pages, pages, member))
    for step in range(10):
        spans = []
        for member in np.roll([0, 1, 2], step):
            at, pages = members[member] + step, PAGES + 20 * member
            spans.append(HybridSpan(tokens[at : at + 1], at, at, pages, pages, member))
        hybrid_programs.decode(owner, spans)
    assert_same_bits(owner, computed[0])


def test_a_state_starts_empty_whatever_its_slot_held(hybrid_programs, tokens, world, computed):
    owner = world()
    prefill(hybrid_programs, owner, HybridSpan(tokens[20:60], 0, 0, PAGES, PAGES, 0))
    prefill(hybrid_programs, owner, HybridSpan(tokens[:70], 0, 0, PAGES, PAGES, 0))
    assert_same_bits(owner, computed[0])


def test_only_own_rows_pages_and_slots_are_written(hybrid_programs, tokens, world):
    owner = world()
    pages, windows = np.array([3, 9], np.int32), np.array([-1, 5], np.int32)
    hybrid_programs.prefill(owner, HybridSpan(tokens[:6], 0, 0, pages, windows, 2))

    def touched(array):
        return np.flatnonzero(np.abs(by_token(array)).sum(axis=(0, 2, 3))).tolist()

    assert [touched(array) for array in owner.arrays("kv")] == [[12, 13, 14, 15, 36, 37]] * 2
    assert [touched(array) for array in owner.arrays("window")] == [[20, 21]] * 2
    used = [np.flatnonzero(np.abs(array).sum(axis=(0, 2, 3))) for array in owner.arrays("state")[1:]]
    assert [slots.tolist() for slots in used] == [[2]]


def test_cached_positions_are_not_written(hybrid_programs, tokens, world):
    owner = world()
    prefill(hybrid_programs, owner, HybridSpan(tokens[:16], 0, 0, PAGES, PAGES, 0))
    before = owner.arrays("kv", "window")
    hybrid_programs.prefill(owner, HybridSpan(tokens[20:36], 0, 12, PAGES, PAGES, 1))
    for old, new in zip(before, owner.arrays("kv", "window"), strict=True):
        np.testing.assert_array_equal(old[:, :3], new[:, :3])
        assert not np.array_equal(old[:, 3], new[:, 3])


def test_no_program_copies_a_pool():
    """The temporary memory of the compiled programs does not grow with the number of pages."""
    config = sample_config(context=128, window=WINDOW, repeats=1)
    weights, batch = sample_weights(config), HybridRows.empty(2, 16, 32)

    def temporaries(pages):
        pools = make_pools(config, dict.fromkeys(config.pools, pages), 4)
        run = jax.jit(partial(forward, config=config, block=32))
        compute = run.lower(weights, pools=pools, rows=batch)
        fresh = jax.eval_shape(run, weights, pools=pools, rows=batch)[1]
        store = jax.jit(write, donate_argnums=0).lower(pools, fresh, batch).compile()
        sizes = [compiled.memory_analysis() for compiled in (compute.compile(), store)]
        assert sizes[1].alias_size_in_bytes >= sum(array.nbytes for array in jax.tree.leaves(pools))
        return [size.temp_size_in_bytes for size in sizes]

    assert temporaries(64) == temporaries(1024)
