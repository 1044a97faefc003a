"""The law of a valid prefix against its definition, read off the columns: random trees, random values, all laws."""

import numpy as np
import pytest
from hybrid_support import LAWS, tails_of, three_tails, wide_pages, window_and_state
from support import shared_programs

from purecache.cache import PrefixCache
from purecache.state import NONE, CacheState, Tier, WritePolicy
from purecache.state.layout import Column

CONFIGS = {"window and state": window_and_state, "three tails": three_tails, "wide pages": wide_pages}
WRITES = [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK]


class Tree:
    """What the columns of a state say, by prefix of pages: {prefix: {pool: [on device, on host, on its way]}}."""

    def __init__(self, config, state: CacheState):
        layout, nodes = config.layout, np.array(state.nodes)
        tokens = np.array(state.tokens).reshape(layout.rows, layout.page_size)
        self.config, self.prefixes = config, {}

        def prefix_of(node):
            if node >= layout.nodes:
                return ()
            return (*prefix_of(nodes[Column.PARENT, node]), int(tokens[node][0]))

        for node in np.flatnonzero(nodes[Column.PARENT, : layout.nodes] != NONE):
            if nodes[Column.RANK, node] == 0:
                self.prefixes[prefix_of(node)] = {
                    pool: [bool(nodes[layout.page_row(tier, config.pool_of(pool)), node] >= 0) for tier in Tier]
                    for pool in config.pool_names
                }

    def has(self, pool, prefix, tiers, offered=()):
        """Whether a pool has a page for the last page of `prefix`, in one of `tiers` or offered."""
        there = self.prefixes.get(prefix)
        return len(prefix) - 1 in offered or (there is not None and any(there[pool][tier] for tier in tiers))

    def run(self, prompt, tiers):
        """How many leading pages of a prompt have KV in one of `tiers`."""
        length = 0
        while length < len(prompt) and self.has("kv", prompt[: length + 1], tiers):
            length += 1
        return length

    def valid(self, prompt, depth, tiers, offers):
        """The definition: every page that a law asks for is there."""
        for pool in tails_of(self.config):
            first, _ = LAWS[pool, self.config.page_size]
            for page in range(depth):
                wanted = page >= first(depth)
                if wanted and not self.has(pool, prompt[: page + 1], tiers, offers.get(pool, ())):
                    return False
        return True

    def longest(self, prompt, run, tiers, offers=None):
        return next(d for d in range(run, -1, -1) if self.valid(prompt, d, tiers, offers or {}))


def tokens_of(config, prompt):
    return [page for page in prompt for _ in range(config.page_size)]


def offer_at_random(cache, random, prompt):
    """Insert a prompt with values on a random part of its pages; the length is the one that the definition says."""
    config, size = cache.config, cache.config.page_size
    before = Tree(config, cache.state)
    pages = cache.allocate(len(prompt))
    if pages is None:
        return
    values, offers = {}, {}
    for pool in tails_of(config):
        chance = random.choice([0.0, 0.5, 0.9, 1.0])
        places = [place for place in range(len(prompt)) if random.random() < chance]
        lent = cache.allocate(len(places), pool=pool)
        places = [] if lent is None else places
        offers[pool], values[pool] = places, np.full(len(prompt), NONE, np.int32)
        values[pool][places] = [] if lent is None else lent
    before = Tree(config, cache.state)
    got = cache.insert(tokens_of(config, prompt), pages, values=values)
    # What is there already is never refused, whatever it lacks.
    known = before.run(prompt, [Tier.DEVICE])
    expected = max(known, before.longest(prompt, len(prompt), [Tier.DEVICE], offers))
    assert got.length == expected * size, (got, prompt, offers)
    cache.release(np.setdiff1d(pages, got.pages))
    for pool, row in values.items():
        taken = got.values[pool]
        cache.release(np.setdiff1d(row[row != NONE], taken), pool=pool)
        after = Tree(config, cache.state)
        assert [page != NONE for page in taken] == [
            after.has(pool, prompt[: depth + 1], [Tier.DEVICE]) for depth in range(expected)
        ]


def compare(cache, prompt):
    """The lengths and values of a match against the definition."""
    config, size = cache.config, cache.config.page_size
    tree, found = Tree(config, cache.state), cache.peek(tokens_of(config, prompt))
    both = [Tier.DEVICE, Tier.HOST]
    full = tree.run(prompt, both)
    device = tree.longest(prompt, tree.run(prompt, [Tier.DEVICE]), [Tier.DEVICE])
    usable = tree.longest(prompt, full, both)
    assert found.full_length == full * size, prompt
    assert found.device_length == device * size, prompt
    assert found.length == usable * size, prompt
    for pool in tails_of(config):
        first, _ = LAWS[pool, size]
        assert [page != NONE for page in found.values[pool]] == [page >= first(device) for page in range(device)]
    return device, usable, full


def shake(cache, random):
    """Evict a little here and there, and let some copies end."""
    for pool in cache.config.pool_names:
        if random.random() < 0.3:
            cache.evict(int(random.integers(1, 3)), rank=0, pool=pool)
        if random.random() < 0.2:
            cache.evict_host(int(random.integers(1, 3)), rank=0, pool=pool)
    if random.random() < 0.7:
        cache.tick()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefix_is_valid_where_every_law_holds(name, write):
    seen = []
    for seed in range(12):
        random = np.random.default_rng(seed)
        cache = shared_programs(PrefixCache(CONFIGS[name](write=write)), 16)
        for _ in range(12):
            prompt = tuple(random.integers(1, 3, random.integers(1, 7)).tolist())
            offer_at_random(cache, random, prompt)
            shake(cache, random)
            seen.extend(compare(cache, tuple(random.integers(1, 3, 7).tolist())) for _ in range(4))
            seen.append(compare(cache, prompt))
        assert cache.violations() == []
    # The trees are rich enough for the comparison to mean something.
    assert sum(device > 1 for device, _, _ in seen) > 20
    assert sum(usable > device for device, usable, _ in seen) > 5
    assert sum(full > usable for _, usable, full in seen) > 20
