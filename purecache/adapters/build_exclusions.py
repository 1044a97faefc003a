"""Arguments that exclude each other, for sglang and sglang-jax: one table, checked before anything is built."""

from collections.abc import Callable
from dataclasses import dataclass

from purecache.adapters.build_arguments import Facts
from purecache.state.config import Policy, WritePolicy


class ArgumentsError(ValueError):
    """Arguments that exclude each other. `rules`: names of the broken rules."""

    def __init__(self, rules: "tuple[Rule, ...]") -> None:
        super().__init__("; ".join(f"{rule.message} [{rule.name}]" for rule in rules))
        self.rules = tuple(rule.name for rule in rules)


@dataclass(frozen=True)
class Rule:
    """One row of the exclusions: `broken` says that arguments violate it, `message` what to change."""

    name: str
    broken: Callable[[Facts], bool]
    message: str


WRITE_POLICIES = tuple(policy.value for policy in WritePolicy)
EVICTION_POLICIES = tuple(policy.name.lower() for policy in Policy)
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")

_decode_radix: Callable[[Facts], bool] = lambda f: (  # noqa: E731
    f.disaggregation_mode == "decode" and f.disaggregation_decode_enable_radix_cache
)

RULES = (
    Rule("hierarchical-without-radix", lambda f: f.hierarchical and f.disable_radix_cache,
         "a hierarchical cache needs the radix cache: drop disable_radix_cache or the hierarchical cache"),
    Rule("hierarchical-with-lmcache", lambda f: f.hierarchical and f.enable_lmcache,
         "a hierarchical cache and LMCache exclude each other: choose one"),
    Rule("hierarchical-with-cpp", lambda f: f.hierarchical and f.cpp_radix,
         "the C++ tree has no host tier: unset SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"),
    Rule("hierarchical-with-recurrent", lambda f: f.hierarchical and f.hybrid_recurrent,
         "states of recurrent layers have no host tier: switch the hierarchical cache off for this model"),
    Rule("lmcache-without-radix", lambda f: f.enable_lmcache and f.disable_radix_cache,
         "LMCache needs the radix cache: drop disable_radix_cache or enable_lmcache"),
    Rule("lmcache-shadowed",
         lambda f: f.enable_lmcache and (f.cpp_radix or f.unified or f.hybrid_swa or f.hybrid_recurrent),
         "another tree comes before LMCache, which would be ignored: drop enable_lmcache or the other tree"),
    Rule("storage-without-host",
         lambda f: f.storage is not None and not (f.hierarchical or f.disaggregation_decode_enable_offload_kvcache),
         "storage is behind the host tier: enable_hierarchical_cache, or drop hicache_storage_backend"),
    Rule("storage-without-path", lambda f: f.hicache_storage == "file" and not f.file_storage_path,
         "hicache_storage=file needs a file_storage_path"),
    Rule("storage-unknown", lambda f: f.hicache_storage not in ("disable", "none", "file"),
         "hicache_storage must be disable, none (host memory only) or file"),
    Rule("write-policy-unknown", lambda f: f.hicache_write_policy not in WRITE_POLICIES,
         f"hicache_write_policy must be one of {', '.join(WRITE_POLICIES)}"),
    Rule("write-threshold", lambda f: f.hicache_write_through_threshold < 1,
         "hicache_write_through_threshold must be at least 1"),
    Rule("eviction-policy-unknown", lambda f: f.radix_eviction_policy not in EVICTION_POLICIES,
         f"radix_eviction_policy must be one of {', '.join(EVICTION_POLICIES)}"),
    Rule("prefetch-policy-unknown", lambda f: f.hicache_storage_prefetch_policy not in PREFETCH_POLICIES,
         f"hicache_storage_prefetch_policy must be one of {', '.join(PREFETCH_POLICIES)}"),
    Rule("host-size", lambda f: f.hicache_size < 0 or (f.hierarchical and not f.hicache_size and f.hicache_ratio <= 0),
         "the host tier needs room: hicache_size or hicache_ratio above 0"),
    Rule("chunks-of-pages",
         lambda f: (f.chunked_prefill_size or 0) > 0 and f.disaggregation_mode != "decode"
         and (f.chunked_prefill_size or 0) % f.page_size != 0,
         "chunked_prefill_size must be a multiple of page_size"),
    Rule("window-ratio", lambda f: not 0 < f.swa_full_tokens_ratio <= 1,
         "swa_full_tokens_ratio must be above 0 and at most 1"),
    Rule("decode-radix-with-hybrid", lambda f: _decode_radix(f) and (f.hybrid_swa or f.hybrid_recurrent),
         "a decode server's radix cache takes no window or recurrent model:"
         " drop disaggregation_decode_enable_radix_cache"),
    Rule("decode-radix-with-hisparse", lambda f: _decode_radix(f) and f.enable_hisparse,
         "a decode server's radix cache excludes hierarchical sparse attention: drop one"),
    Rule("decode-radix-with-fake", lambda f: _decode_radix(f) and f.disaggregation_transfer_backend == "fake",
         "a decode server's radix cache needs a real disaggregation_transfer_backend, not fake"),
    Rule("decode-radix-with-speculation", lambda f: _decode_radix(f) and f.speculative_algorithm is not None,
         "a decode server's radix cache excludes speculative decoding: drop one"),
    Rule("decode-offload-elsewhere",
         lambda f: f.disaggregation_decode_enable_offload_kvcache and f.disaggregation_mode != "decode",
         "disaggregation_decode_enable_offload_kvcache is for decode servers only"),
    Rule("decode-offload-without-storage",
         lambda f: f.disaggregation_decode_enable_offload_kvcache and f.storage is None,
         "disaggregation_decode_enable_offload_kvcache needs a hicache_storage_backend"),
    Rule("chunk-transfer-with-radix",
         lambda f: f.disaggregation_enable_chunk_prefill_transfer and not f.disable_radix_cache,
         "disaggregation_enable_chunk_prefill_transfer needs disable_radix_cache"),
    Rule("hisparse-with-radix", lambda f: f.enable_hisparse and not f.disable_radix_cache,
         "hierarchical sparse attention needs disable_radix_cache"),
    Rule("no-kv-with-radix", lambda f: f.prefill_only_disable_kv_cache and not f.disable_radix_cache,
         "prefill_only_disable_kv_cache needs disable_radix_cache: there is no KV to reuse"),
    Rule("no-kv-with-chunks", lambda f: f.prefill_only_disable_kv_cache and f.chunked_prefill_size != -1,
         "prefill_only_disable_kv_cache needs chunked_prefill_size=-1: there is no KV for a second chunk"),
    Rule("extra-buffer-without-unified",
         lambda f: f.enable_recurrent_extra_buffer and (f.disable_radix_cache or not f.unified),
         "enable_recurrent_extra_buffer needs enable_unified_radix_tree and the radix cache"),
    Rule("extra-buffer-with-single-tokens", lambda f: f.enable_recurrent_extra_buffer and f.page_size <= 1,
         "enable_recurrent_extra_buffer needs a page_size above 1"),
    Rule("extra-buffer-interval",
         lambda f: f.enable_recurrent_extra_buffer and f.recurrent_track_interval is not None
         and (f.recurrent_track_interval < 1 or f.recurrent_track_interval % f.page_size != 0),
         "recurrent_track_interval must be a multiple of page_size"),
    Rule("extra-buffer-with-speculation",
         lambda f: f.enable_recurrent_extra_buffer and f.speculative_algorithm is not None,
         "enable_recurrent_extra_buffer excludes speculative decoding: drop one"),
    Rule("extra-buffer-with-mixed-chunks", lambda f: f.enable_recurrent_extra_buffer and f.enable_mixed_chunk,
         "enable_recurrent_extra_buffer excludes enable_mixed_chunk: drop one"),
    Rule("int8-states-elsewhere",
         lambda f: f.enable_int8_mamba_checkpoint and (f.hierarchical or f.radix_cache_backend is not None),
         "enable_int8_mamba_checkpoint needs the server's own recurrent tree, without a host tier:"
         " drop it, or enable_hierarchical_cache and radix_cache_backend"),
)  # fmt: skip
"""What excludes what, for both servers. Each is checked before anything is built."""
