"""The states of recurrent layers as sglang-jax's pool of requests keeps them: one slot per state, 0 is none."""

from typing import Any

import numpy as np

from purecache.state import NONE, CacheConfig, Checkpoint, PoolSpec

STATE = "state"
"""Name of the pool."""


class StateTail:
    """The side of a `HybridReqToTokenPool`: see `Tail`. States don't go by slots of KV: requests offer them apart."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def offered(self, pages: np.ndarray, rank: int) -> np.ndarray:
        """int32[n]: none."""
        return np.full(len(pages), NONE, np.int32)

    def settle(self, mine: np.ndarray, trees: np.ndarray, values: np.ndarray, rank: int) -> None:
        """Nothing: a state that the tree did not take stays the request's."""

    def loaded(self, pages: np.ndarray, values: np.ndarray, rank: int) -> None:
        """Nothing: states are on device only."""

    def lend(self, number: int, rank: int) -> np.ndarray:
        """int32[0]: states are on device only."""
        return np.zeros(0, np.int32)

    def take(self, values: np.ndarray, rank: int) -> None:
        """See `Tail`."""
        for slot in values.tolist():
            self._rows.free_recurrent_slot(slot, rank)

    def reset(self) -> None:
        """Nothing."""


def state_config(config: CacheConfig, req_to_token_pool: Any) -> CacheConfig:
    """A configuration with the states of a pool of requests. They are locked with their prefix: who locks it is going
    to copy the state, in a forward that may be waiting."""
    slots = req_to_token_pool.slots_per_rank + 1
    return config.register_pool(PoolSpec(STATE, Checkpoint(in_place=True), slots, tiers=("device",)))
