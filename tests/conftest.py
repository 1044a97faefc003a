"""Hypothesis profiles; choose with PURECACHE_HYPOTHESIS. (Being here, it also lets all tests import their helpers.)"""

import os

from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("default", max_examples=60, stateful_step_count=40, **COMMON)
settings.register_profile("soak", max_examples=400, stateful_step_count=50, **COMMON)
settings.register_profile("deep", max_examples=5000, stateful_step_count=60, **COMMON)
settings.load_profile(os.environ.get("PURECACHE_HYPOTHESIS", "default"))
