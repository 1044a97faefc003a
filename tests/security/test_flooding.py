"""Prompts that were made to collide in the hash table, and trees that were made to be slow."""

import jax.numpy as jnp
import numpy as np
import pytest

from purecache import CacheConfig, PrefixCache
from purecache.namespaces import namespace_digest
from purecache.state.layout import NONE
from purecache.transitions.walk import bucket_of

PAGE, PROMPTS, VOCABULARY = 4, 256, 150_000
SMALL = {"page_size": PAGE, "device_pages": 300, "max_operations": 4, "max_receipts": 6, "levels": 4}
SEED, OTHER_SEED = 0, 2**61 - 1
"""The one that the attacker knows, and one that it doesn't."""


def buckets_under(seed, pages):
    """int[n] bucket of pages [n, PAGE] below the root of rank 0, as the hash table computes it."""
    state = PrefixCache(CacheConfig(seed=seed, **SMALL)).state
    keys = np.array(state.books)[state.layout.hash_keys : state.layout.retention].view(np.uint32).reshape(2, -1)
    root, space = np.uint32(state.layout.root(0)), namespace_digest(None).view(np.uint32)
    words = np.concatenate([pages.astype(np.uint32), np.tile([root, *space], (len(pages), 1))], axis=1, dtype=np.uint32)
    total = ((words & 0xFFFF) * keys[0] + (words >> 16) * keys[1]).sum(1, dtype=np.uint32)
    mixed = (total ^ (total >> np.uint32(16))) * np.uint32(0x9E3779B1)
    return mixed >> np.uint32(33 - state.layout.buckets.bit_length())


@pytest.fixture(scope="module")
def colliding():
    """[PROMPTS, PAGE]: pages of one bucket under SEED, found by trying; all are tokens of a vocabulary."""
    tried = np.random.default_rng(1).integers(0, VOCABULARY, (400_000, PAGE), np.int32)
    found = buckets_under(SEED, tried)
    return tried[found == np.bincount(found).argmax()][:PROMPTS]


def chains(cache):
    """int[buckets]: nodes in each chain of the hash table."""
    links, layout = np.array(cache.state.links), cache.config.layout
    lengths = np.zeros(layout.buckets, int)
    for bucket in range(layout.buckets):
        node = links[bucket]
        while node != NONE:
            lengths[bucket] += 1
            node = links[layout.buckets + node]
    return lengths


def flooded(seed, prompts):
    cache = PrefixCache(CacheConfig(seed=seed, **SMALL))
    for prompt in prompts:
        cache.insert(prompt, cache.allocate(1))
    assert cache.violations() == []
    return cache


def test_the_model_of_the_attacker_is_the_hash_of_the_cache(colliding):
    state = PrefixCache(CacheConfig(seed=OTHER_SEED, **SMALL)).state
    root, space = jnp.int32(state.layout.root(0)), jnp.array(namespace_digest(None))
    for page, bucket in zip(colliding[:5], buckets_under(OTHER_SEED, colliding[:5]), strict=True):
        assert bucket_of(state, root, jnp.array(page), space) == bucket


def test_who_knows_the_seed_makes_one_long_chain_and_who_does_not_makes_none(colliding):
    assert len(colliding) == PROMPTS
    lengths = chains(flooded(SEED, colliding))
    assert lengths.max() >= PROMPTS - 1  # one of them may follow its parent's id
    lengths = chains(flooded(OTHER_SEED, colliding))
    assert lengths.sum() >= PROMPTS - 1
    assert lengths.max() <= 8


def test_a_flooded_chain_is_walked_by_the_prompts_of_its_bucket_alone(colliding):
    """Even who knows the seed slows nobody else: other prompts are in chains of their own, as short as ever."""
    cache = flooded(SEED, colliding)
    honest = np.random.default_rng(2).integers(0, VOCABULARY, (40, PAGE), np.int32)
    alone = set(buckets_under(SEED, honest).tolist()) - set(buckets_under(SEED, colliding).tolist())
    assert len(alone) > 30
    for prompt in honest:
        cache.insert(prompt, cache.allocate(1))
        assert cache.match(prompt).length == PAGE
    assert chains(cache)[sorted(alone)].max() <= 4


def test_structured_tokens_of_a_vocabulary_still_spread():
    """Pages that differ in one high bit per token, without knowing any seed: no more than a few share a chain."""
    picks = np.random.default_rng(3).choice(2**PAGE * 81, PROMPTS, replace=False)
    pages = np.stack([(picks // 6**place % 6) * 2**14 for place in range(PAGE)], axis=1).astype(np.int32)
    pages = np.unique(pages, axis=0)
    lengths = chains(flooded(OTHER_SEED, pages))
    assert lengths.sum() >= len(pages) - 1
    assert lengths.max() <= 8


def test_tokens_that_differ_in_their_highest_bits_alone_spread():
    """No token of a vocabulary, but a server may not check that: every seed has to spread them."""
    source = np.random.default_rng(4)
    pages = np.unique(source.integers(0, 2**3, (PROMPTS, PAGE)).astype(np.int32) << 28, axis=0)
    for seed in (SEED, OTHER_SEED):
        lengths = chains(flooded(seed, pages))
        assert lengths.sum() >= len(pages) - 1
        assert lengths.max() <= 8


def test_many_children_of_one_node_are_found_added_and_evicted_one_by_one():
    """All siblings of one parent: the cache never looks through their list. Any order of leaving keeps it right."""
    cache = PrefixCache(CacheConfig(seed=OTHER_SEED, **SMALL))
    root = [7] * PAGE
    prompts = [root + [index] * PAGE for index in range(200)]
    for prompt in prompts:
        pages = cache.match(prompt).device_pages
        new = cache.allocate(2 - len(pages))
        assert new is not None
        cache.insert(prompt, np.concatenate([pages, new]))
    assert all(cache.peek(prompt).length == 2 * PAGE for prompt in prompts)
    for prompt in prompts[50:150]:
        cache.match(prompt)
    assert cache.evict(100) == 100
    assert [cache.peek(prompt).length == 2 * PAGE for prompt in prompts] == [False] * 50 + [True] * 100 + [False] * 50
    assert cache.violations() == []
