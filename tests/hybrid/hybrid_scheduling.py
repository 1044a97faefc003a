"""What a scheduler does with a cache of several pools, with every served byte checked."""

import numpy as np
from hybrid_support import check_value, sizes_of, tails_of, write_values
from support import path_of

from purecache.answers import Load
from purecache.state import NONE, Tier
from purecache.state.layout import Account

PAGE = 2


def prompt(first, pages, page=PAGE):
    """`pages` pages of tokens that no other `first` shares."""
    return [100 * first + index for index in range(pages * page)]


def free(cache, pool, tier=Tier.DEVICE):
    return cache.pages(Account.FREE, tier, 0, pool=pool)


def ask(cache, tokens):
    """Ask for a prompt as a scheduler does: admit, load back, check the bytes. Returns the tokens served."""
    match, receipt = cache.admit(tokens)
    check_match(cache, tokens, match)
    served = match.device_length
    if match.length > match.device_length:
        answer = cache.load_back(match)
        if isinstance(answer, Load):
            check_match(cache, tokens, match, answer)
            served = match.length
    cache.abort([], receipt, values={})
    return served


def law_places(config, pool, pages):
    """The pages (0-based) that a prefix of so many pages needs values on."""
    return range(tails_of(config)[pool].first(pages), pages)


def compute(facade, tokens, match, places=None, pages=None, **space):
    """What a request computes behind its match: lent KV pages, and lent values at `places`.

    places: {pool: pages of the prompt}; default: what the laws ask of the whole prompt, as far as it is not matched.
    Returns (KV pages of the whole prompt, {pool: int32 row of values}).
    """
    config, path = facade.config, path_of(facade.config, tokens, **space)
    prefixes = [path[: depth + 2] for depth in range(len(path) - 1)]
    have = match.device_pages if pages is None else pages
    rank, number = path[0], len(prefixes)
    new = facade.allocate(number - len(have), rank=rank)
    assert new is not None
    write_values(facade, "kv", rank, new, prefixes[len(have) :])
    rows = {}
    for pool in tails_of(config):
        default = [place for place in law_places(config, pool, number) if place >= len(have)]
        wanted = default if places is None else places.get(pool, ())
        lent = facade.allocate(len(wanted), rank=rank, pool=pool)
        assert lent is not None, pool
        write_values(facade, pool, rank, lent, [prefixes[place] for place in wanted])
        rows[pool] = np.full(number, NONE, np.int32)
        rows[pool][list(wanted)] = lent
    return np.concatenate([have, new]), rows


def serve_hybrid(facade, tokens, places=None, **space):
    """Run a request to its end. `places` as in `compute`."""
    match, receipt = facade.admit(tokens, **space)
    pages, values = compute(facade, tokens, match, places, **space)
    return facade.finish(tokens, pages, receipt, values=values, **space)


def check_match(facade, tokens, match, load=None, **space):
    """Assert that all that a match, or its load back, names holds the bytes of its prefix."""
    path = path_of(facade.config, tokens, **space)
    pages = match.device_pages if load is None else load.pages
    skip = 0 if load is None else (match.length // facade.config.page_size) - len(pages)
    for depth, page in enumerate(pages, skip + 2):
        check_value(facade, "kv", path[0], page, path[:depth])
    for pool, row in (match if load is None else load).values.items():
        needed = law_places(facade.config, pool, len(row))
        assert [place for place in range(len(row)) if row[place] != NONE] == list(needed), pool
        for place in needed:
            check_value(facade, pool, path[0], row[place], path[: place + 2])


def dirty_all(facade):
    """Overwrite every free device page of rank 0, so that bytes which were not copied are not there by luck."""
    for pool in ("kv", *tails_of(facade.config)):
        lent = facade.allocate(facade.pages(Account.FREE, Tier.DEVICE, 0, pool=pool), pool=pool)
        write_values(facade, pool, 0, lent, [("dirt", page) for page in lent.tolist()])
        facade.release(lent, pool=pool)


def lent_pages(facade):
    """Device pages that requests hold, by pool; those of no interest (none) left out."""
    counts = {
        (pool, rank): facade.pages(Account.LENT, Tier.DEVICE, rank, pool=pool)
        for pool in ("kv", *tails_of(facade.config))
        for rank in range(facade.config.ranks)
    }
    return {where: count for where, count in counts.items() if count}


def conserved(facade):
    """P1: per tier, pool and rank, the accounts add up to the capacity, and no law is broken."""
    broken = facade.violations()
    assert broken == []
    for pool in ("kv", *tails_of(facade.config)):
        for tier in (Tier.DEVICE, Tier.HOST):
            for rank in range(facade.config.ranks):
                total = sum(facade.pages(account, tier, rank, pool=pool) for account in Account)
                assert total == sizes_of(facade.config)[pool][tier], (pool, tier, rank)


def drained_all(facade):
    """P3: everything has ended, so evicting everything leaves nothing but free pages in every pool."""
    for _ in range(2):
        facade.drain()
        facade.evict(100)
        facade.evict_host(100)
    broken = facade.violations()
    assert broken == []
    for pool in ("kv", *tails_of(facade.config)):
        for tier in (Tier.DEVICE, Tier.HOST):
            for rank in range(facade.config.ranks):
                free = facade.pages(Account.FREE, tier, rank, pool=pool)
                assert free == sizes_of(facade.config)[pool][tier], (pool, tier, rank)
