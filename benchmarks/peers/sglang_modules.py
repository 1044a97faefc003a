"""Imports sglang's caches without what only GPUs and servers need."""

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

from benchmarks.peers import stubs

PARTS = (
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.constrained",
    "sglang.srt.entrypoints",
    "sglang.srt.function_call",
    "sglang.srt.layers",
    "sglang.srt.models",
    "sglang.srt.multimodal",
    "sglang.srt.parser",
)
"""Layers and kernels of models, and a server's endpoints: no cache calls them here."""
BEFORE = "torch._inductor.compile_fx"
"""Imported before there are stubs: torch looks for some of the same modules, and does without."""


def sglang_modules() -> SimpleNamespace:
    """torch and sglang's modules of prefix caches. Raises ImportError where sglang or torch is not installed."""
    torch = importlib.import_module("torch")
    importlib.import_module(BEFORE)
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ImportError("sglang is not installed")
    stubs.install(("sglang",), PARTS)
    stubs.bare_package("sglang", Path(found.submodule_search_locations[0]))

    def part(name: str) -> object:
        return importlib.import_module(f"sglang.srt.mem_cache.{name}")

    return SimpleNamespace(
        torch=torch,
        base=part("base_prefix_cache"),
        radix=part("radix_cache"),
        unified=part("unified_radix_cache"),
        params=part("cache_init_params"),
        components=part("unified_cache.component_type"),
        bindings=getattr(part("rust_tree_core.extension"), "bindings"),  # noqa: B009
    )
