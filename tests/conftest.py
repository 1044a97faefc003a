"""Hypothesis profiles; choose with PURECACHE_HYPOTHESIS. (Being here, it also lets all tests import their helpers.)

Compiled programs are kept on disk: the workers of one run, the processes that tests start, and later runs share them.
All of them use the CPU backend, whatever the machine has: accelerators are the business of `purecache doctor`.
"""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("default", max_examples=60, stateful_step_count=40, **COMMON)
settings.register_profile("soak", max_examples=400, stateful_step_count=50, **COMMON)
settings.register_profile("deep", max_examples=5000, stateful_step_count=60, **COMMON)
settings.load_profile(os.environ.get("PURECACHE_HYPOTHESIS", "default"))
