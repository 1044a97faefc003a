"""What a server's arguments, model and environment say about its cache."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


def get(arguments: Any, name: str, default: Any) -> Any:
    """`arguments[name]` or `arguments.name`; `default` where it lacks or is None."""
    value = arguments.get(name) if isinstance(arguments, Mapping) else getattr(arguments, name, None)
    return default if value is None else value


def _switch(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "").lower()
    if text in ("1", "true", "yes", "y"):
        return True
    if text in ("", "0", "false", "no", "n"):
        return False
    raise ValueError(f"{name} is {environment[name]!r}, expected 1 or 0, true or false, yes or no")


@dataclass(frozen=True)
class Facts:
    """What the choice depends on. Fields of the first group are arguments of either server, under the same name.

    Sizes are in tokens, `hicache_size` in GB (10^9 bytes). What a server's arguments lack has the value given here.
    """

    disable_radix_cache: bool = False
    chunked_prefill_size: int | None = None
    page_size: int = 1
    enable_unified_radix_tree: bool = False
    enable_hierarchical_cache: bool = False
    enable_lmcache: bool = False
    enable_streaming_session: bool = False
    radix_cache_backend: str | None = None
    radix_eviction_policy: str = "lru"
    hicache_storage: str = "disable"
    hicache_storage_backend: str | None = None
    hicache_storage_prefetch_policy: str = "timeout"
    file_storage_path: str = "sglang_storage"
    hicache_ratio: float = 2.0
    hicache_size: float = 0
    hicache_write_policy: str = "write_through"
    hicache_write_through_threshold: int = 1
    disaggregation_mode: str = "null"
    disaggregation_transfer_backend: str = ""
    disaggregation_decode_enable_radix_cache: bool = False
    disaggregation_decode_enable_offload_kvcache: bool = False
    disaggregation_enable_chunk_prefill_transfer: bool = False
    speculative_algorithm: str | None = None
    enable_hisparse: bool = False
    prefill_only_disable_kv_cache: bool = False
    enable_recurrent_extra_buffer: bool = False
    recurrent_track_interval: int | None = None
    enable_int8_mamba_checkpoint: bool = False
    enable_mixed_chunk: bool = False
    swa_full_tokens_ratio: float = 1.0

    hybrid_swa: bool = False
    hybrid_recurrent: bool = False
    cpp_radix: bool = False
    unified_by_environment: bool = False

    @classmethod
    def read(
        cls, arguments: Any, *, hybrid_swa: bool, hybrid_recurrent: bool, environment: Mapping[str, str]
    ) -> "Facts":
        """Take them from a server's arguments (an object or a mapping), its model and its environment."""
        own = ("hybrid_swa", "hybrid_recurrent", "cpp_radix", "unified_by_environment")
        found = {field.name: get(arguments, field.name, field.default) for field in fields(cls)}
        unified = ("SGLANG_ENABLE_UNIFIED_RADIX_TREE", "SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE")
        return cls(
            **{name: value for name, value in found.items() if name not in own},
            hybrid_swa=hybrid_swa,
            hybrid_recurrent=hybrid_recurrent,
            cpp_radix=_switch(environment, "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"),
            unified_by_environment=any(_switch(environment, name) for name in unified),
        )

    @property
    def unified(self) -> bool:
        """The unified tree was asked for."""
        return self.enable_unified_radix_tree or self.unified_by_environment

    @property
    def hierarchical(self) -> bool:
        """A host tier was asked for, in the words of either server."""
        return self.enable_hierarchical_cache or self.hicache_storage != "disable"

    @property
    def storage(self) -> str | None:
        """The storage that was asked for, by the server's name of it."""
        return self.hicache_storage_backend or ("file" if self.hicache_storage == "file" else None)
