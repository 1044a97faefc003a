"""Hypothesis profiles; choose with PURECACHE_HYPOTHESIS. (Being here, it also lets all tests import their helpers.)

Compiled programs are kept on disk: the workers of one run, the processes that tests start, and later runs share them.
All of them use the CPU backend, whatever the machine has: accelerators are the business of `purecache doctor`.
"""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
# Most of the time goes into compiling. XLA's own passes, which decide what is copied, are as ever.
os.environ.setdefault("PURECACHE_OPTIMIZATION_LEVEL", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Interrupts are tested, which a process that a shell started in the background ignores.
signal.signal(signal.SIGINT, signal.default_int_handler)
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("default", max_examples=60, stateful_step_count=40, **COMMON)
settings.register_profile("mutation", max_examples=8, stateful_step_count=30, derandomize=True, **COMMON)
settings.register_profile("soak", max_examples=400, stateful_step_count=50, **COMMON)
settings.register_profile("deep", max_examples=5000, stateful_step_count=60, **COMMON)
settings.load_profile(os.environ.get("PURECACHE_HYPOTHESIS", "default"))

MOST_BYTES = 4 << 30
"""Resident memory of a worker beyond which it drops its compiled programs. They come back from disk."""
KEPT = (
    ("purecache.programs", "_compiled"),
    ("purecache.effects.programs", "_compiled"),
    ("support", "_TABLES"),
    ("support", "_PLANES"),
    ("hybrid_support", "_PLANES"),
    ("pool_worlds", "_PLANES"),
)
"""What holds compiled programs for the tests that follow: (module, name of a dictionary)."""

LONGEST = ("check/", "test_against_oracle", "test_hybrid_oracle", "replay/", "sglang_jax_", "storage/", "transitions/")
"""Parts of the paths of those tests that take longest: they come first, so that the workers end together."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One worker runs a file, or a group of files, as its tests share compiled programs."""
    for item in items:
        if not any(item.iter_markers("xdist_group")):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    ranks = {part: rank for rank, part in enumerate(LONGEST)}
    items.sort(key=lambda item: min((rank for part, rank in ranks.items() if part in item.nodeid), default=len(ranks)))


@pytest.fixture(autouse=True, scope="module")
def memory_for_the_next_module():
    """Compiled programs of all modules together take more memory than two workers have."""
    yield
    if resident_bytes() < MOST_BYTES:
        return
    for module, name in KEPT:
        getattr(sys.modules.get(module), name, {}).clear()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes():
    """Of this process; 0 where that is not told."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
