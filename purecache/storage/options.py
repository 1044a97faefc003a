"""Bounds and policies of a storage tier."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class EndPolicy(enum.StrEnum):
    """How long a prefetch may hold up its request."""

    BEST_EFFORT = "best_effort"
    """What has arrived when the scheduler asks for the first time."""
    WAIT_COMPLETE = "wait_complete"
    """Until all of it has arrived or failed."""
    TIMEOUT = "timeout"
    """Until then, or until a time that grows with its length is over."""


@dataclass(frozen=True)
class StorageOptions:
    """Bounds and policies of a storage tier. Raises ValueError for a value that cannot work.

    threshold: tokens from which a prefetch is worth it. tokens_in_flight: of all prefetches together, in pages of kv
    (default: half of what host memory holds). policy, timeout_base (s), timeout_per_1024 (s per 1,024 tokens): when a
    prefetch ends. staging_pages: buffers between host memory and the store, of each pool; they bound the pages under
    way in both directions. staging_bytes: a pool of large pages (recurrent states) has fewer of them, at least one.
    batch_pages: most pages of one read or write. head_axis: axis of the heads in every leaf of a page, not counting the
    page axis, along which a naming with several objects per page (`HeadGroups`) cuts it; one for all pools, or by name
    of the pool. workers, queue, call_timeout (s): of the guard around the store.
    """

    threshold: int = 256
    tokens_in_flight: int | None = None
    policy: EndPolicy = EndPolicy.TIMEOUT
    timeout_base: float = 1.0
    timeout_per_1024: float = 0.25
    staging_pages: int = 64
    staging_bytes: int = 1 << 30
    batch_pages: int = 16
    head_axis: int | Mapping[str, int] = 0
    workers: int = 2
    queue: int = 64
    call_timeout: float = 5.0

    def __post_init__(self) -> None:
        for name in ("threshold", "staging_pages", "staging_bytes", "batch_pages", "workers", "queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if min(self.timeout_base, self.timeout_per_1024) < 0 or self.call_timeout <= 0:
            raise ValueError("times must not be negative, and call_timeout must be positive")
        if self.tokens_in_flight is not None and self.tokens_in_flight < self.threshold:
            raise ValueError("tokens_in_flight is below the threshold: no prefetch could ever start")

    def axis_of(self, pool: str) -> int:
        """Axis of the heads in the pages of a pool."""
        return self.head_axis.get(pool, 0) if isinstance(self.head_axis, Mapping) else self.head_axis
