"""The data plane: device pools, host pages, and the copies between them. The only part that touches devices."""

from purecache.effects.interpreter import Interpreter
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
    "Completion",
    "Gate",
    "Interpreter",
    "Planes",
    "PoolGoneError",
    "PoolLostError",
    "PoolOwner",
    "Transfer",
    "TransferKind",
    "completion_of",
]
