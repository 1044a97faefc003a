"""Metrics for Prometheus, with the names that sglang's users know (docs/metrics.md), and structured logs of trouble.

`purecache.metrics.exporter.Metrics` needs the extra `metrics`; what is here does not.
"""

from purecache.metrics.samples import Sample, Sampler
from purecache.metrics.trouble import TroubleLog

__all__ = ["Sample", "Sampler", "TroubleLog"]
