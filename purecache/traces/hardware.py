"""How long things would take: a model of one engine, from bandwidths and operations per second. Nothing is measured.

A prefill takes its operations over the rate of the chips, a transfer its bytes over the bandwidth of its link. Both are
counted one after the other for one request (a real engine may overlap them layer by layer, and batch prefills): the
model compares configurations of one engine, it does not predict one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from purecache.capacity import Accelerator, ModelShape


@dataclass(frozen=True)
class Hardware:
    """One engine and its links. Raises ValueError for numbers that are not positive."""

    model: ModelShape
    chip: Accelerator
    host_bandwidth: float
    """Bytes per second between host and device."""
    disk_bandwidth: float
    """Bytes per second between disk and host."""
    disk_latency: float = 0.005
    """Seconds until the first byte of a read."""
    decode_seconds: float = 0.02
    """Per output token of a request, whatever else runs."""
    element: float = 2
    """Bytes per number of KV."""

    def __post_init__(self) -> None:
        rates = self.chip.rate, self.host_bandwidth, self.disk_bandwidth, self.element
        if min(rates) <= 0 or min(self.disk_latency, self.decode_seconds) < 0:
            raise ValueError("operations per second, bandwidths and element bytes must be positive, times not negative")

    # Numbers of tokens may be arrays: seconds are then, too.

    @property
    def token_bytes(self) -> float:
        """Bytes of KV per token."""
        return self.model.bytes_per_token(self.element)

    def prefill(self, known: Any, tokens: Any) -> Any:
        """Seconds to compute a prompt of `tokens`, of which the first `known` are in the cache."""
        return (self.model.flops(tokens) - self.model.flops(known)) / self.chip.rate

    def load(self, tokens: Any) -> Any:
        """Seconds to move the KV of `tokens` between host and device."""
        return tokens * self.token_bytes / self.host_bandwidth

    def read(self, tokens: Any) -> Any:
        """Seconds to read the KV of `tokens` from the disk; 0 for none."""
        return (self.disk_latency + self.write(tokens)) * (tokens > 0)

    def write(self, tokens: Any) -> Any:
        """Seconds to write the KV of `tokens` to the disk."""
        return tokens * self.token_bytes / self.disk_bandwidth

    def saved(self, found: np.ndarray) -> dict[str, float]:
        """Seconds of computing that were saved by tier, less those of loading. found: [requests, 3] tokens of prompts
        that were found on device, on host and on disk, in this order along each prompt."""
        ends = np.cumsum(found, axis=1)
        before = ends - found
        computing = self.prefill(before, ends).sum(axis=0)
        loading = 0.0, self.load(found[:, 1]).sum(), (self.load(found[:, 2]) + self.read(found[:, 2])).sum()
        return {tier: float(computing[place] - loading[place]) for place, tier in enumerate(("device", "host", "disk"))}
