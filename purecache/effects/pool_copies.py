"""Copies of pages within one device pool."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np

from purecache.effects.copies import copy_in_pool, copy_in_shard
from purecache.effects.host_tier import Arrays
from purecache.effects.pools import PoolLayout
from purecache.effects.programs import ProgramTable, shape_of


class PoolCopies:
    """The one program that copies a page of a pool, compiled when it is first used."""

    def __init__(self, layout: PoolLayout) -> None:
        self._layout = layout
        sizes = {math.prod(leaf.shape) for leaf in layout.leaves if leaf.shape[leaf.axis] > 1}
        self._table = ProgramTable(layout, sizes, "within the pool")

    def copy(self, device: Arrays, source: np.int32, target: np.int32) -> Arrays:
        """Dispatch the copy of page `source` to page `target` (global ids); `device` is donated. May raise anything."""
        return self._table.get("copy a page", 1, self._lower).compiled(device, source, target)

    def programs(self) -> list[dict[str, Any]]:
        """At most one entry."""
        return self._table.report()

    def _lower(self) -> Any:
        leaves = self._layout.leaves
        arrays = tuple(shape_of(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        copy = copy_in_shard(self._layout) if self._layout.shards else partial(copy_in_pool, leaves=leaves)
        out = tuple(leaf.sharding for leaf in leaves)
        return jax.jit(copy, donate_argnums=0, out_shardings=out).lower(arrays, *[shape_of((), np.int32)] * 2)
