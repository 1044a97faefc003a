"""Planning: bytes of KV, when loading beats computing, and what engines gain by sharing a store. docs/scale.md."""

from purecache.capacity.break_even import Accelerator, Break, break_even
from purecache.capacity.fleet import Fleet, Hits, Routing
from purecache.capacity.models import MODELS, ModelShape

__all__ = [
    "MODELS",
    "Accelerator",
    "Break",
    "Fleet",
    "Hits",
    "ModelShape",
    "Routing",
    "break_even",
]
