"""The data plane: device pools, host pages, and the copies between them. The only part that touches devices."""

from purecache.effects.agreement import Agree, AgreedPlane, DivergedError, across_processes, agreed
from purecache.effects.interpreter import Interpreter
from purecache.effects.options import HostOptions
from purecache.effects.planes import Planes
from purecache.effects.transfers import (
    Completion,
    Gate,
    PoolGoneError,
    PoolLostError,
    PoolOwner,
    Transfer,
    TransferKind,
    completion_of,
)

__all__ = [
    "Agree",
    "AgreedPlane",
    "Completion",
    "DivergedError",
    "Gate",
    "HostOptions",
    "Interpreter",
    "Planes",
    "PoolGoneError",
    "PoolLostError",
    "PoolOwner",
    "Transfer",
    "TransferKind",
    "across_processes",
    "agreed",
    "completion_of",
]
