"""When loading a prefix beats computing it again."""

import math
from dataclasses import dataclass

from purecache.capacity.models import ModelShape


@dataclass(frozen=True)
class Accelerator:
    """One chip, or several that compute one prefill together."""

    name: str
    flops: float
    """Peak operations per second in bf16, of all chips."""
    efficiency: float = 0.5
    """Share of the peak that a prefill reaches: measure yours."""

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.flops * self.efficiency


@dataclass(frozen=True)
class Break:
    """Where loading and computing take equally long."""

    tokens: float
    """Prefixes of at least so many tokens are loaded faster; infinite where none is."""
    bandwidth: float
    """Bytes per second from which loading is faster for every length, but for the latency."""


def break_even(
    model: ModelShape, accelerator: Accelerator, bandwidth: float, latency: float = 0.0, element: float = 2
) -> Break:
    """Compare `latency + tokens x bytes per token / bandwidth` with `flops(tokens) / rate`.

    bandwidth: bytes per second from the store to the device; latency: seconds until its first byte; element: bytes per
    number of KV. Layers with a window are left out of both (their KV is bounded, and their computing grows with the
    length only). Raises ValueError for numbers that are not positive.
    """
    if bandwidth <= 0 or accelerator.rate <= 0 or element <= 0 or latency < 0:
        raise ValueError("bandwidth, operations per second and element bytes must be positive, latency not negative")
    linear = 2 * model.active / accelerator.rate
    square = model.flops(1) / accelerator.rate - linear
    size = model.bytes_per_token(element)
    slope = linear - size / bandwidth
    # square x n^2 + slope x n - latency = 0, its larger root.
    root = math.sqrt(slope**2 + 4 * square * latency)
    if slope <= 0 and not square:
        return Break(math.inf, size / linear)
    # Two forms of one root: each has no difference of nearly equal numbers where it is used.
    tokens = 2 * latency / (root + slope) if slope > 0 else (root - slope) / (2 * square)
    return Break(tokens, size / linear)
