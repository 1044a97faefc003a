"""The frequency sketch: what it remembers of pages that the tree has forgotten, and how it forgets."""

import jax
import numpy as np
import pytest

from purecache import transitions as t
from purecache.state import CacheConfig, ConfigError, as_jax, empty_state
from purecache.transitions.sketch import AGING, remembered

SIZE, COUNTERS = 4, 64
remember = jax.jit(remembered)


def prompt(tokens, namespace=0, rank=0):
    padded = np.zeros(2 * SIZE, np.int32)
    padded[: len(tokens)] = tokens
    return t.Prompt(padded, np.int32(len(tokens) // 2), np.full(4, namespace, np.int32), np.int32(rank))


def used(state, asked, counted=SIZE):
    """The state, and how often the pages of a prompt had been used before; the first `counted` are used now."""
    state, before = remember(state, asked, np.arange(SIZE) < min(counted, asked.pages))
    return state, before[: int(asked.pages)].tolist()


@pytest.fixture
def state():
    return as_jax(empty_state(CacheConfig(page_size=2, device_pages=4, ranks=2, sketch=COUNTERS)))


def test_it_counts_prefixes(state):
    state, before = used(state, prompt([1, 2, 3, 4]))
    assert before == [0, 0]
    state, before = used(state, prompt([1, 2, 3, 4, 5, 6]))
    assert before == [1, 1, 0]
    state, before = used(state, prompt([1, 2, 9, 9]), counted=0)
    assert before == [2, 0]
    for other in (prompt([3, 4]), prompt([1, 2], namespace=1), prompt([1, 2], rank=1)):
        assert used(state, other)[1] == [0], "the same page elsewhere is another prefix"
    assert used(state, prompt([1, 2, 3, 4]), counted=0)[1] == [2, 2]


def test_old_fame_fades(state):
    uses = AGING * COUNTERS
    for _ in range(uses - 1):
        state, _ = used(state, prompt([1, 2]))
    assert used(state, prompt([1, 2]), counted=0)[1] == [uses - 1]
    state, _ = used(state, prompt([1, 2]))
    assert used(state, prompt([1, 2]), counted=0)[1] == [uses // 2], "all are halved"
    state, _ = used(state, prompt([1, 2]))
    assert used(state, prompt([1, 2]), counted=0)[1] == [uses // 2 + 1], "and the count of uses, too"


def test_what_it_says_is_at_least_what_was_counted(state):
    """Prefixes that share counters can only raise each other."""
    random, truth = np.random.default_rng(0), {}
    for first in random.integers(0, 60, 300).tolist():
        state, before = used(state, prompt([first, 1]))
        assert before[0] >= truth.get(first, 0)
        truth[first] = truth.get(first, 0) + 1


def test_its_size_is_a_power_of_two():
    with pytest.raises(ConfigError, match="power of two"):
        CacheConfig(page_size=2, device_pages=4, sketch=60)
