"""The columns that laws speak of, and what is derived from them once; for NumPy and JAX alike."""

from types import ModuleType
from typing import Any

import numpy as np

from purecache.state.cache_state import CacheState
from purecache.state.layout import LOCKS, NONE, PAGES, Column


class Columns:
    """The nodes of one state, with `xp`, the module (numpy or jax.numpy) that its arrays are of."""

    def __init__(self, state: CacheState, xp: ModuleType) -> None:
        layout = state.layout
        self.state, self.xp, self.layout = state, xp, layout
        self.ids = xp.arange(layout.rows)
        self.is_root = (self.ids >= layout.nodes) & (self.ids < layout.nodes + layout.ranks)
        self.parent = state.nodes[Column.PARENT]
        self.live = (self.parent != NONE) & (self.ids < layout.nodes)
        self.above = xp.where(self.live, self.parent, 0)
        self.device, self.host, self.incoming = (state.nodes[row] for row in PAGES)
        self.device_locks, self.host_locks = (state.nodes[row] for row in LOCKS)

    def total(self, mask: Any) -> Any:
        """How often `mask` holds."""
        return self.xp.sum(mask, dtype=self.xp.int32)

    def per_node(self, nodes: Any, mask: Any) -> Any:
        """[rows] how many of the masked entries name each node; those that name none don't count."""
        rows = self.layout.rows
        named = mask & (nodes >= 0) & (nodes < rows)
        return counted(self.xp, self.xp.where(named, nodes, rows).reshape(-1), rows + 1)[:rows]


def counted(xp: ModuleType, values: Any, size: int) -> Any:
    """[size] how often each number below `size` is among `values` [n]."""
    return xp.bincount(values, minlength=size, **({} if xp is np else {"length": size}))
