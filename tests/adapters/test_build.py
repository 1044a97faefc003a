import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purecache.adapters.build import (
    RULES,
    WAYS,
    ArgumentsError,
    Component,
    DevicePool,
    Facts,
    Kind,
    Place,
    UnsupportedError,
    build_kv_cache,
    cache_config,
    choose,
    dispatch,
)
from purecache.adapters.sessions import SessionCache
from purecache.effects import Planes
from purecache.state import Window
from purecache.state.config import Policy, WritePolicy

DOCS = Path(__file__).parents[2] / "docs" / "sglang-dispatch.md"
CPP, UNIFIED = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "SGLANG_ENABLE_UNIFIED_RADIX_TREE"


def chosen(environment: dict[str, str] | None = None, *, swa: bool = False, recurrent: bool = False, **arguments: Any):
    facts = Facts.read(
        SimpleNamespace(**arguments), hybrid_swa=swa, hybrid_recurrent=recurrent, environment=environment or {}
    )
    return dispatch(facts)


# ---- the eight ways --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "arguments", "way", "kind"),
    [
        ({}, {"disable_radix_cache": True, "chunked_prefill_size": 64}, 1, Kind.CHUNK),
        ({}, {"disable_radix_cache": True, "chunked_prefill_size": -1}, 1, Kind.CHUNK),
        ({}, {"disable_radix_cache": True, "chunked_prefill_size": 64, "swa": True}, 1, Kind.SWA_CHUNK),
        ({CPP: "1", UNIFIED: "1"}, {}, 2, Kind.CPP_RADIX),
        ({UNIFIED: "true"}, {"enable_hierarchical_cache": True}, 3, Kind.UNIFIED),
        ({"SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE": "1"}, {}, 3, Kind.UNIFIED),
        ({}, {"enable_unified_radix_tree": True, "swa": True, "recurrent": True}, 3, Kind.UNIFIED),
        ({}, {"enable_hierarchical_cache": True, "enable_lmcache": True}, 4, Kind.HI_RADIX),
        ({}, {"hicache_storage": "none"}, 4, Kind.HI_RADIX),
        ({}, {"enable_hierarchical_cache": True, "recurrent": True}, 4, Kind.HI_MAMBA),
        ({}, {"enable_hierarchical_cache": True, "swa": True}, 4, Kind.UNIFIED),
        ({}, {"swa": True, "recurrent": True}, 5, Kind.SWA),
        ({}, {"recurrent": True, "enable_lmcache": True}, 6, Kind.MAMBA),
        ({}, {"enable_lmcache": True}, 7, Kind.LMCACHE),
        ({CPP: "0", UNIFIED: "no"}, {"chunked_prefill_size": 64, "hicache_storage": "disable"}, 8, Kind.RADIX),
        ({}, {"disable_radix_cache": True}, 8, Kind.RADIX),
    ],
)
def test_the_first_way_that_applies_is_taken(environment, arguments, way, kind):
    choice = chosen(environment, **arguments)
    assert (choice.way, choice.kind) == (way, kind)


def test_components_follow_the_model():
    assert chosen().components == (Component.FULL,)
    assert chosen({UNIFIED: "1"}, swa=True).components == (Component.FULL, Component.SWA)
    both = chosen({UNIFIED: "1"}, swa=True, recurrent=True)
    assert both.components == (Component.FULL, Component.SWA, Component.MAMBA)
    assert chosen(disable_radix_cache=True, chunked_prefill_size=8, swa=True).components == ()


@pytest.mark.parametrize(
    ("arguments", "places", "storage"),
    [
        ({}, (Place.DEVICE,), None),
        ({"enable_hierarchical_cache": True}, (Place.DEVICE, Place.HOST), None),
        ({"hicache_storage": "none"}, (Place.DEVICE, Place.HOST), None),
        ({"hicache_storage": "file"}, (Place.DEVICE, Place.HOST, Place.STORAGE), "file"),
        (
            {"enable_hierarchical_cache": True, "hicache_storage_backend": "mooncake"},
            (Place.DEVICE, Place.HOST, Place.STORAGE),
            "mooncake",
        ),
        ({"enable_lmcache": True}, (Place.DEVICE, Place.HOST), None),
    ],
)
def test_places_follow_the_arguments_of_either_server(arguments, places, storage):
    choice = chosen(**arguments)
    assert (choice.places, choice.storage) == (places, storage)


def test_only_the_chunk_caches_and_a_disabled_tree_stay_the_servers_own():
    assert not chosen(disable_radix_cache=True, chunked_prefill_size=8).ours
    assert not chosen(disable_radix_cache=True).ours
    assert chosen(disable_radix_cache=True).disabled
    for environment, arguments in (({CPP: "1"}, {}), ({UNIFIED: "1"}, {}), ({}, {"enable_lmcache": True}), ({}, {})):
        assert chosen(environment, **arguments).ours
    assert "LMCache is not used" in (chosen(enable_lmcache=True).note or "")
    assert chosen().note is None


def test_arguments_may_be_a_mapping_lack_fields_and_be_none():
    choice = choose({"hicache_storage": "none", "chunked_prefill_size": None, "page_size": None}, environment={})
    assert choice.way == 4
    assert choose(object(), environment={}).kind is Kind.RADIX


def test_a_switch_of_the_environment_that_is_no_switch_is_refused():
    with pytest.raises(ValueError, match=f"{CPP} is 'maybe'"):
        choose({}, environment={CPP: "maybe"})


@pytest.mark.parametrize(
    ("model", "part"),
    [({"hybrid_swa": True}, Component.SWA), ({"hybrid_recurrent": True}, Component.MAMBA)],
)
@pytest.mark.parametrize("environment", [{}, {UNIFIED: "1"}, {CPP: "1"}])
def test_components_that_an_adapter_lacks_are_refused_with_a_way_out(model, part, environment):
    with pytest.raises(UnsupportedError, match=r"yet, and this model has some: .*--disable-radix-cache"):
        choose({}, environment=environment, **model)
    assert part in choose({}, environment=environment, keeps=tuple(Component), **model).components
    own = choose({"disable_radix_cache": True, "chunked_prefill_size": 8}, environment=environment, **model)
    assert not own.ours


def test_windows_and_states_in_one_model_are_refused():
    with pytest.raises(UnsupportedError, match="both sliding windows and recurrent layers"):
        choose({}, hybrid_swa=True, hybrid_recurrent=True, environment={}, keeps=tuple(Component))


# ---- what excludes what ----------------------------------------------------------------------------------------------

UNIFIED_BUFFER = {"enable_recurrent_extra_buffer": True, "enable_unified_radix_tree": True, "page_size": 4}
DECODE_RADIX = {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}
OFF = {"disable_radix_cache": True, "chunked_prefill_size": 8}
BROKEN = {
    "hierarchical-without-radix": {"enable_hierarchical_cache": True, **OFF},
    "hierarchical-with-lmcache": {"enable_hierarchical_cache": True, "enable_lmcache": True},
    "hierarchical-with-cpp": {"hicache_storage": "none", "environment": {CPP: "1"}},
    "hierarchical-with-recurrent": {"hicache_storage": "none", "recurrent": True},
    "lmcache-without-radix": {"enable_lmcache": True, **OFF},
    "lmcache-shadowed": {"enable_lmcache": True, "environment": {UNIFIED: "1"}},
    "storage-without-host": {"hicache_storage_backend": "file"},
    "storage-without-path": {"hicache_storage": "file", "file_storage_path": ""},
    "storage-unknown": {"hicache_storage": "tape"},
    "write-policy-unknown": {"hicache_write_policy": "write_never"},
    "write-threshold": {"hicache_write_through_threshold": 0},
    "eviction-policy-unknown": {"radix_eviction_policy": "best"},
    "prefetch-policy-unknown": {"hicache_storage_prefetch_policy": "never"},
    "host-size": {"enable_hierarchical_cache": True, "hicache_ratio": 0.0},
    "chunks-of-pages": {"chunked_prefill_size": 10, "page_size": 4},
    "window-ratio": {"swa_full_tokens_ratio": 0.0},
    "decode-radix-with-hybrid": {**DECODE_RADIX, "recurrent": True},
    "decode-radix-with-hisparse": {**DECODE_RADIX, **OFF, "enable_hisparse": True},
    "decode-radix-with-fake": {**DECODE_RADIX, "disaggregation_transfer_backend": "fake"},
    "decode-radix-with-speculation": {**DECODE_RADIX, "speculative_algorithm": "EAGLE"},
    "decode-offload-elsewhere": {
        "disaggregation_decode_enable_offload_kvcache": True,
        "hicache_storage_backend": "file",
    },
    "decode-offload-without-storage": {
        "disaggregation_decode_enable_offload_kvcache": True,
        "disaggregation_mode": "decode",
    },
    "chunk-transfer-with-radix": {"disaggregation_enable_chunk_prefill_transfer": True},
    "hisparse-with-radix": {"enable_hisparse": True},
    "no-kv-with-radix": {"prefill_only_disable_kv_cache": True, "chunked_prefill_size": -1},
    "no-kv-with-chunks": {"prefill_only_disable_kv_cache": True, **OFF},
    "extra-buffer-without-unified": {"enable_recurrent_extra_buffer": True, "page_size": 4},
    "extra-buffer-with-single-tokens": {**UNIFIED_BUFFER, "page_size": 1},
    "extra-buffer-interval": {**UNIFIED_BUFFER, "recurrent_track_interval": 6},
    "extra-buffer-with-speculation": {**UNIFIED_BUFFER, "speculative_algorithm": "EAGLE"},
    "extra-buffer-with-mixed-chunks": {**UNIFIED_BUFFER, "enable_mixed_chunk": True},
    "int8-states-elsewhere": {"enable_int8_mamba_checkpoint": True, "radix_cache_backend": "purecache"},
}
"""For each rule, arguments that break it and no other."""


def test_every_rule_has_a_case():
    assert list(BROKEN) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", BROKEN)
def test_arguments_that_exclude_each_other_are_refused(name):
    arguments = dict(BROKEN[name])
    environment = arguments.pop("environment", {})
    model = {"hybrid_recurrent": arguments.pop("recurrent", False)}
    message = next(rule.message for rule in RULES if rule.name == name)
    with pytest.raises(ArgumentsError, match=re.escape(f"{message} [{name}]")) as error:
        choose(arguments, environment=environment, **model)
    assert error.value.rules == (name,)


def test_all_broken_rules_are_named_at_once():
    with pytest.raises(ArgumentsError) as error:
        choose({"enable_hierarchical_cache": True, "enable_lmcache": True, "hicache_size": -1}, environment={})
    assert error.value.rules == ("hierarchical-with-lmcache", "host-size")


@pytest.mark.parametrize(
    "arguments",
    [
        {"hicache_storage": "file", "hicache_write_policy": "write_back", "chunked_prefill_size": 64, "page_size": 16},
        {"enable_hierarchical_cache": True, "hicache_size": 4, "hicache_ratio": 0, "hicache_storage_backend": "eic"},
        {"chunked_prefill_size": 10, "page_size": 4, "disaggregation_mode": "decode"},
        {"chunked_prefill_size": -1, "page_size": 4},
        {**OFF, "enable_hisparse": True, "disaggregation_enable_chunk_prefill_transfer": True},
        {**DECODE_RADIX, "disaggregation_transfer_backend": "mooncake"},
    ],
)
def test_arguments_that_go_together_are_taken(arguments):
    choose(arguments, environment={})


def table(heading: str) -> list[list[str]]:
    section = DOCS.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_docs_have_the_same_ways():
    assert table("The eight ways") == [[str(w.number), f"`{w.kind}`", w.when, w.host_class] for w in WAYS]


def test_the_docs_have_the_same_exclusions():
    assert table("What excludes what") == [[f"`{rule.name}`", rule.message] for rule in RULES]


# ---- pools and sizes -------------------------------------------------------------------------------------------------


@dataclass
class MHATokenToKVPool:
    kv_buffer: list[jax.Array]


@dataclass
class MLATokenToKVPool:
    kv_buffer: list[jax.Array]
    indexer_key_buffer: list[jax.Array] = field(default_factory=list)


@dataclass
class SWAKVPool:
    full_kv_pool: Any
    swa_kv_pool: Any


@dataclass
class HybridLinearKVPool:
    full_kv_pool: Any


class OtherPool:
    pass


@dataclass
class Allocator:
    pool: Any
    size: int = 64
    page_size: int = 4
    dp_size: int = 2

    def get_kvcache(self) -> Any:
        return self.pool


def windows() -> Any:
    """An allocator of both pools of a model with windows, like sglang-jax's: 8 and 4 pages per rank."""
    full, swa = MHATokenToKVPool(layers(18)), MHATokenToKVPool(layers(10, 2))
    both = Allocator(SWAKVPool(full, swa))
    both.full_attn_allocator, both.swa_attn_allocator = Allocator(full), Allocator(swa, size=32)
    return both


def layers(pages: int, count: int = 3) -> list[jax.Array]:
    return [jnp.full((pages, 4, 2, 2, 8), layer, jnp.bfloat16) for layer in range(count)]


def pool_of(**options: Any) -> DevicePool:
    return DevicePool.of(Allocator(MHATokenToKVPool(layers(18)), **options))


def configured(pool: DevicePool | None = None, *, is_eagle: bool = False, **arguments: Any):
    choice = choose(arguments, environment={})
    return cache_config(arguments, choice, pool or pool_of(), is_eagle=is_eagle)


def test_a_pool_of_several_ranks():
    pool = pool_of()
    assert (pool.device_pages, pool.ranks, pool.page_size) == (9, 2, 4)
    assert pool.page_bytes == 3 * 4 * 2 * 2 * 8 * 2


def test_single_tokens_are_pages():
    pool = DevicePool.of(Allocator(MHATokenToKVPool([jnp.zeros((65, 1, 2, 1, 8))]), page_size=1, dp_size=1))
    assert (pool.device_pages, pool.page_bytes) == (65, 2 * 8 * 4)


def test_pools_with_indexer_keys_move_both():
    pool = DevicePool.of(Allocator(MLATokenToKVPool(layers(18), [jnp.zeros((18, 4, 128))])))
    assert sorted(pool.arrays) == ["indexer_key_buffer", "kv_buffer"]
    assert pool.page_bytes == 3 * 4 * 2 * 2 * 8 * 2 + 4 * 128 * 4


@pytest.mark.parametrize("pool", [OtherPool(), HybridLinearKVPool(OtherPool())])
def test_other_pools_are_refused(pool):
    with pytest.raises(UnsupportedError, match="OtherPool is not a pool that purecache knows"):
        DevicePool.of(Allocator(pool))


def test_models_with_windows_have_two_pools():
    pool = DevicePool.of(windows())
    assert (pool.device_pages, pool.ranks, pool.page_size) == (9, 2, 4)
    assert pool.window is not None
    assert (pool.window.device_pages, pool.window.ranks, pool.window.page_size) == (5, 2, 4)
    assert pool.window.page_bytes * 3 == pool.page_bytes * 2


def test_models_with_recurrent_layers_have_the_pool_of_full_attention():
    pool = DevicePool.of(Allocator(HybridLinearKVPool(MHATokenToKVPool(layers(18)))))
    assert (pool.device_pages, pool.window) == (9, None)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="not whole pages"):
        pool_of(size=66)
    with pytest.raises(ValueError, match="not whole pages"):
        pool_of(size=60)
    with pytest.raises(ValueError, match=r"have \{18\} pages, expected 10"):
        pool_of(size=32)


def test_without_a_host_tier():
    config = configured()
    assert (config.page_size, config.device_pages, config.host_pages, config.ranks) == (4, 9, 0, 2)
    assert config.external_pages
    assert (config.policy, config.bigrams, config.load_back_threshold) == (Policy.LRU, False, 10)
    assert pool_of().interpreter(config) is None


def test_host_pages_by_ratio_and_by_size():
    # 8 pages of 4 tokens per rank can be handed out.
    assert configured(hicache_storage="none").host_pages == 16
    assert configured(hicache_storage="none", hicache_ratio=0.7).host_pages == 5
    page = pool_of().page_bytes
    big = configured(enable_hierarchical_cache=True, hicache_ratio=0.7, hicache_size=1e-9 * page * 7.5)
    assert big.host_pages == 7
    with pytest.raises(ValueError, match="no room for a page"):
        configured(hicache_storage="none", hicache_ratio=0.1)


def test_windows_have_host_pages_in_proportion():
    choice = choose({"hicache_storage": "none"}, hybrid_swa=True, environment={}, keeps=tuple(Component))
    pool = DevicePool.of(windows())

    def sizes(**arguments: Any) -> list[tuple[int, int]]:
        config = cache_config(arguments, choice, pool, sliding_window_size=6)
        return [(config.layout.capacity(tier, 0), config.layout.capacity(tier, 1)) for tier in (0, 1)]

    assert sizes() == [(9, 5), (16, 8)]
    both = 8 * pool.page_bytes + 4 * (pool.window.page_bytes if pool.window else 0)
    assert sizes(hicache_size=both * 1.5e-9) == [(9, 5), (12, 6)]
    plane = pool.plane(cache_config({}, choice, pool, sliding_window_size=6), lambda: None)
    assert isinstance(plane, Planes)
    assert [plane.planes[name].host_pages for name in ("kv", "window")] == [16, 8]


def test_windows_need_their_pool():
    choice = choose({}, hybrid_swa=True, environment={}, keeps=tuple(Component))
    with pytest.raises(UnsupportedError, match="a pool of their own"):
        cache_config({}, choice, pool_of(), sliding_window_size=6)


@pytest.mark.parametrize("policy", list(Policy))
def test_policies_go_by_the_server_s_names(policy):
    assert configured(radix_eviction_policy=policy.name.lower()).policy is policy


@pytest.mark.parametrize(
    ("arguments", "hits"),
    [
        ({}, 1),
        ({"hicache_write_policy": "write_through_selective"}, 2),
        ({"hicache_write_policy": "write_through_selective", "hicache_write_through_threshold": 1}, 2),
        ({"hicache_write_through_threshold": 3}, 3),
        ({"hicache_write_policy": "write_back", "hicache_write_through_threshold": 3}, 0),
    ],
)
def test_when_pages_are_written_to_host(arguments, hits):
    config = configured(hicache_storage="none", **arguments)
    assert config.backup_hits == hits
    assert config.write == WritePolicy(arguments.get("hicache_write_policy", "write_through"))


def test_the_hash_table_has_the_seed_that_the_server_drew():
    assert (configured().seed, configured(random_seed=None).seed, configured(random_seed=77).seed) == (0, 0, 77)


def test_speculation_with_drafts_keys_by_pairs():
    assert configured(is_eagle=True).bigrams


def test_the_interpreter_copies_the_pages_of_every_rank():
    allocator = Allocator(MHATokenToKVPool(layers(18)))
    pool = DevicePool.of(allocator)
    plane = pool.interpreter(configured(pool, hicache_storage="none"))
    assert plane is not None
    assert plane.page_bytes == pool.page_bytes
    assert plane.host_pages == 16


# ---- all together ----------------------------------------------------------------------------------------------------


def built(arguments: dict[str, Any], allocator: Any = None, rows: Any = "rows", **model: Any):
    made = []

    def tree(*parts: Any) -> Any:
        made.append(parts)
        return SimpleNamespace(page_size=4)

    result = build_kv_cache(
        arguments,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator or Allocator(MHATokenToKVPool(layers(18))),
        make_tree=tree,
        make_own=lambda choice: f"own {choice.kind}",
        environment={},
        **model,
    )
    return result, made


def test_the_tree_of_a_server_is_purecache_s():
    result, ((config, pool, choice),) = built({"hicache_storage": "none"}, is_eagle=True)
    assert result.tree_cache.page_size == 4
    assert (result.config, result.choice) == (config, choice)
    assert config.bigrams
    assert np.shape(pool.arrays["kv_buffer"][0])[0] == 18
    assert (result.is_hybrid_swa, result.is_hybrid_ssm, result.disable_radix_cache) == (False, False, False)


def test_models_with_windows_and_with_states_are_built():
    result, ((config, pool, _),) = built({}, windows(), hybrid_swa=True, sliding_window_size=6)
    assert (result.is_hybrid_swa, result.sliding_window_size) == (True, 6)
    assert [(spec.name, spec.law, spec.device_pages) for spec in config.pools] == [("window", Window(6), 5)]
    assert pool.window.device_pages == 5
    rows, allocator = SimpleNamespace(slots_per_rank=7), Allocator(HybridLinearKVPool(MHATokenToKVPool(layers(18))))
    result, ((config, _, _),) = built({}, allocator, rows, hybrid_recurrent=True)
    assert result.is_hybrid_ssm
    assert [(spec.name, spec.device_pages, spec.host_pages) for spec in config.pools] == [("state", 8, 0)]
    assert config.pools[0].law.in_place


def test_the_chunk_cache_of_a_server_stays():
    result, made = built(OFF, hybrid_swa=True, sliding_window_size=128)
    assert result.tree_cache == "own swa_chunk"
    assert result.config is None
    assert not made
    assert (result.is_hybrid_swa, result.sliding_window_size, result.disable_radix_cache) == (True, 128, True)


def test_streaming_sessions_are_wrapped_around():
    result, _ = built({"enable_streaming_session": True})
    assert isinstance(result.tree_cache, SessionCache)
    assert result.tree_cache.page_size == 4
