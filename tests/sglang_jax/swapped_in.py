"""A pytest plugin: sglang-jax's own tests get purecache's cache instead of the class that SWAPPED_OUT names.

That class is `module:name` in `sgl_jax.srt.mem_cache`. SUITE has the names of the classes of tests.
"""

import importlib
import os

import numpy as np

from purecache.adapters.sglang_jax import SglangJaxCache
from purecache.adapters.sglang_jax_recurrent import SglangJaxRecurrentCache
from purecache.adapters.sglang_jax_window import SglangJaxWindowCache
from purecache.adapters.window_tail import WINDOW
from purecache.state.layout import Column, Tier

_MODULE, _NAME = os.environ["SWAPPED_OUT"].split(":")

_RECURRENT = importlib.import_module("sgl_jax.srt.mem_cache.unified_cache_components").ComponentType.RECURRENT


class RecurrentCache(SglangJaxRecurrentCache):
    """With the sizes that tests of `UnifiedRadixCache` read, by component."""

    @property
    def component_evictable_size_(self):
        return {_RECURRENT: [self.recurrent_evictable_size(rank) for rank in range(self.cache.config.ranks)]}

    @property
    def component_protected_size_(self):
        return {_RECURRENT: [self.recurrent_protected_size(rank) for rank in range(self.cache.config.ranks)]}


_OURS = SglangJaxCache
if "Recurrent" in os.environ["SUITE"]:
    _OURS = RecurrentCache
if _NAME == "SWARadixCache":
    _OURS = SglangJaxWindowCache
setattr(importlib.import_module(f"sgl_jax.srt.mem_cache.{_MODULE}"), _NAME, _OURS)


def sizes_are_right(test, cache, message=""):
    """In the place of the helper that walks the nodes of `SWARadixCache`: every law, and the map of every page."""
    assert cache.cache.violations() == [], message
    layout = cache.cache.config.layout
    window = layout.page_row(Tier.DEVICE, cache.cache.config.pool_of(WINDOW))
    pages, values = (column[: layout.nodes] for column in cache.cache.columns(Column.DEVICE_PAGE, window))
    held = pages >= 0
    pages, values = pages[held], values[held]
    mapped = np.asarray(cache._both.full_to_swa_index_mapping)[pages * cache.page_size] // cache.page_size
    assert mapped.tolist() == np.maximum(values, 0).tolist(), message
    assert cache.total_size() == (len(pages) * cache.page_size, int((values >= 0).sum()) * cache.page_size), message


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item.cls, "_verify_size_consistency_for"):
            item.cls._verify_size_consistency_for = sizes_are_right
