"""Small caches inside the arrays of a large one, so that capacities are data and one set of programs serves them all.

Pages beyond a capacity are out of use from the start, as after `PrefixCache.resize`.
"""

from dataclasses import replace

import numpy as np

from purecache.state import CacheConfig, CacheState, empty_state
from purecache.state.layout import NONE, WITHHELD, Account, Scalar, Shelf, Tier

LEAST_DEVICE, LEAST_HOST = 1 << 13, 1 << 16
"""Pages of the smallest large cache: small traces, and most others, share its programs."""
LEAST_WIDTH = 512
"""Pages of the smallest program."""


def power_of_two(number: int, least: int = 1) -> int:
    """The next one, and no less than `least`."""
    return max(least, 1 << max(0, number - 1).bit_length())


def roomy(config: CacheConfig) -> CacheConfig:
    """The large cache that holds one of `config`."""
    device = power_of_two(config.device_pages, LEAST_DEVICE)
    return replace(config, device_pages=device, host_pages=power_of_two(config.host_pages, LEAST_HOST))


def width_for(largest: int) -> int:
    """Pages of the one program for requests of at most `largest` pages."""
    return power_of_two(largest, LEAST_WIDTH)


def withheld_state(config: CacheConfig, large: CacheConfig) -> CacheState:
    """An empty cache with the layout of `large` that decides as one of `config`. As NumPy arrays.

    Both have one rank and no pools. Raises ValueError where `config` does not fit in.
    """
    if config.device_pages > large.device_pages or config.host_pages > large.host_pages:
        raise ValueError(
            f"{config.device_pages} and {config.host_pages} pages exceed {large.device_pages} and {large.host_pages}"
        )
    whole = replace(config, device_pages=large.device_pages, host_pages=large.host_pages)
    small, state = empty_state(config), empty_state(whole)
    layout, books, shelves = state.layout, np.array(state.books), np.array(state.shelves)
    # The write policy of a cache without host memory is none at all, whatever there is in the layout.
    for name in (Scalar.WRITE_BACK, Scalar.BACKUP_HITS):
        books[name] = small.books[name]
    for tier, capacity in ((Tier.DEVICE, config.device_pages), (Tier.HOST, config.host_pages)):
        first, size = layout.shelf(tier), layout.capacity(tier)
        stack = shelves[Shelf.FREE_PAGES, first : first + size]
        shelves[Shelf.OWNERS, first + stack[capacity:]] = WITHHELD
        stack[capacity:] = NONE
        books[layout.account(Account.FREE, tier, 0)] = capacity
        books[layout.account(Account.WITHHELD, tier, 0)] = size - capacity
    return state.replace(books=books, shelves=shelves)
