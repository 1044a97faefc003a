"""One configuration to replay a workload with."""

from dataclasses import dataclass

from purecache.state import CacheConfig
from purecache.traces.hardware import Hardware
from purecache.traces.outcome import Setting
from purecache.workloads import PagedTrace

PREFETCHES = ("wait", "best-effort", "off")
"""What is done about pages that only the disk has: requests wait for them, take what has come, or none is read."""


@dataclass(frozen=True)
class RunSetting:
    """Sizes in pages of the trace, policies, and the engine. Raises ValueError for values that cannot work."""

    hardware: Hardware
    device_pages: int
    host_pages: int = 0
    disk_pages: int = 0
    policy: str = "lru"
    write: str = "write_through"
    prefetch: str = "wait"
    concurrent: int = 1
    speed: float = 1.0
    load_back_tokens: int = 10

    def __post_init__(self) -> None:
        if self.prefetch not in PREFETCHES:
            raise ValueError(f"prefetch must be one of {', '.join(PREFETCHES)}, not {self.prefetch!r}")
        if self.concurrent < 1 or self.speed <= 0 or self.disk_pages < 0:
            raise ValueError("concurrent and speed must be positive, the disk not negative")
        if self.disk_pages and not self.host_pages:
            raise ValueError("a disk needs host memory: what is stored comes from there")

    def config(self, page_tokens: int) -> CacheConfig:
        """The cache: one token stands for a page of `page_tokens` tokens. Raises ConfigError (a ValueError)."""
        return CacheConfig(
            page_size=1,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            policy=self.policy,
            write=self.write,
            load_back_threshold=-(-self.load_back_tokens // page_tokens),
        )

    def facts(self, trace: PagedTrace) -> Setting:
        """As an outcome names it."""
        hardware = self.hardware
        return Setting(
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            disk_pages=self.disk_pages,
            policy=self.policy,
            write=self.write,
            prefetch=self.prefetch if self.disk_pages else "off",
            concurrent=self.concurrent,
            speed=self.speed,
            model=hardware.model.name,
            bytes_per_page=round(hardware.token_bytes * trace.page_tokens),
            flops_per_second=hardware.chip.rate,
            host_bandwidth=hardware.host_bandwidth,
            disk_bandwidth=hardware.disk_bandwidth,
            disk_latency=hardware.disk_latency,
            decode_seconds=hardware.decode_seconds,
        )
