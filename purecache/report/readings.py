"""Series out of the books of a cache: what its accounts and counters say at every sample."""

from collections.abc import Sequence

import numpy as np

from purecache.replay.configs import config_as_json
from purecache.report.model import Stock
from purecache.state import CacheConfig
from purecache.state.layout import COUNTERS, TIERS, Account, Scalar

FOUND = {
    "device": Scalar.MATCHED_DEVICE_PAGES,
    "host": Scalar.MATCHED_HOST_PAGES,
    "computed": Scalar.MATCHED_MISS_PAGES,
}
"""Counters of the pages of prompts that were looked up, by where they were found."""


def stocks_of(config: CacheConfig, books: Sequence[np.ndarray]) -> tuple[Stock, ...]:
    """The accounts of every tier, pool and rank that has pages, over samples of the books."""
    layout, table = config.layout, np.stack(books)
    return tuple(
        Stock(
            tier=tier.name.lower(),
            pool=name,
            rank=rank,
            capacity=layout.capacity(tier, pool),
            accounts={
                each.name.lower(): tuple(table[:, layout.account(each, tier, rank, pool)].tolist()) for each in Account
            },
        )
        for pool, name in enumerate(config.pool_names)
        for tier in TIERS
        for rank in range(config.ranks)
        if layout.capacity(tier, pool)
    )


def found_of(config: CacheConfig, books: Sequence[np.ndarray]) -> dict[str, tuple[float, ...]]:
    """Tokens that were looked up, by where they were found, over samples of the books."""
    table = np.stack(books)
    return {where: tuple((table[:, row].astype(np.int64) * config.page_size).tolist()) for where, row in FOUND.items()}


def counters_of(books: Sequence[np.ndarray]) -> dict[str, tuple[float, ...]]:
    """All counters over samples of the books."""
    table = np.stack(books)
    return {name.name.lower(): tuple(table[:, name].tolist()) for name in COUNTERS}


def settings_of(config: CacheConfig) -> dict[str, str]:
    """What was configured, without the secret of the hash table."""
    settings = config_as_json(config, secret=False)
    pools = settings.pop("pools")
    shown = {name.replace("_", " "): str(value) for name, value in settings.items() if value is not None}
    for pool in pools:
        law = pool["law"] and f"{pool['law']['law']} {pool['law']['fields']}"
        shown[f"pool {pool['name']}"] = f"{law or 'beside ' + str(pool['anchor'])}, tiers {', '.join(pool['tiers'])}"
    return shown
