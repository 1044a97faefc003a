"""What a scheduler does with a cache, with every served byte checked."""

import numpy as np
from support import content, path_of, read_page, write_pages

from purecache.answers import Load
from purecache.state import Tier
from purecache.state.layout import Account

PAGE = 2


def prompt(first, pages):
    """`pages` pages of tokens that no other `first` shares."""
    return [100 * first + index for index in range(pages * PAGE)]


def bytes_are_right(cache, tokens, pages, skip=0, **space):
    path = path_of(cache.config, tokens, **space)
    for depth, page in enumerate(pages, skip + 2):
        np.testing.assert_array_equal(read_page(cache, path[0], page), content(path[:depth]))


def ask(cache, tokens, **space):
    """Ask for a prompt as a scheduler does: admit, load back, check the bytes. Returns the tokens served."""
    match, receipt = cache.admit(tokens, **space)
    bytes_are_right(cache, tokens, match.device_pages, **space)
    served = match.device_length
    if match.host_length:
        answer = cache.load_back(match)
        if isinstance(answer, Load):
            assert len(answer.pages) * PAGE == match.host_length
            bytes_are_right(cache, tokens, answer.pages, len(match.device_pages), **space)
            served = match.length
    cache.abort([], receipt, rank=space.get("rank", 0))
    return served


def drained(cache):
    """P3: everything has ended, so evicting everything leaves nothing but free pages."""
    for _ in range(2):
        cache.drain()
        cache.evict(100)
        cache.evict_host(100)
    assert cache.violations() == []
    for rank in range(cache.config.ranks):
        assert cache.free_pages(rank) == cache.config.device_pages
        assert cache.pages(Account.FREE, Tier.HOST, rank) == cache.config.host_pages
    assert cache.counters()["stale_completions"] == 0


def dirty(cache):
    """Overwrite every free device page, so that bytes which were not copied are not there by luck."""
    lent = cache.allocate(cache.free_pages())
    write_pages(cache, 0, lent, [("dirt", page) for page in lent.tolist()])
    cache.release(lent)
