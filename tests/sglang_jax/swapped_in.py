"""A pytest plugin: sglang-jax's own tests get purecache's cache instead of the class that SWAPPED_OUT names.

That class is `module:name` in `sgl_jax.srt.mem_cache`.
"""

import importlib
import os

from purecache.adapters.sglang_jax import SglangJaxCache

_MODULE, _NAME = os.environ["SWAPPED_OUT"].split(":")
setattr(importlib.import_module(f"sgl_jax.srt.mem_cache.{_MODULE}"), _NAME, SglangJaxCache)
