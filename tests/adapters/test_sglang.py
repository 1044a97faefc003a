"""The cache for sglang, without sglang (fake), and, where that is installed, with its own classes (real)."""

import importlib.util
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from sglang_engine import Engine, Lives
from sglang_worlds import FakeWorld, InitParams, world_of

from purecache.adapters import sglang
from purecache.adapters.build import ArgumentsError, UnsupportedError
from purecache.adapters.sglang import SglangCache
from purecache.replay import Player, Recording
from purecache.state import ConfigError

INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("torch", "sglang"))
REAL = pytest.param("real", marks=pytest.mark.skipif(not INSTALLED, reason="needs sglang and torch"))
KINDS = pytest.mark.parametrize(
    ("world", "page_size", "is_eagle"),
    [
        # One page size without sglang: each more costs half a minute of compiling.
        *(pytest.param("fake", 4, eagle) for eagle in (False, True)),
        *(pytest.param("real", size, eagle, marks=REAL.marks) for size in (1, 4) for eagle in (False, True)),
    ],
    indirect=["world"],
)
"""Worlds, with page sizes, and with or without EAGLE."""


@pytest.fixture(params=["fake", REAL])
def world(request, monkeypatch):
    if request.param == "real":
        arguments = SimpleNamespace(strip_thinking_cache=False, extra_metric_labels=None)
        monkeypatch.setattr("sglang.srt.server_args._global_server_args", arguments)
    return world_of(request.param, monkeypatch)


def pages(*numbers):
    """A prompt of pages that are named by a number."""
    return [number for number in numbers for _ in range(4)]


@pytest.fixture
def make(world):
    def make(page_size=4, is_eagle=False, **more):
        cache = SglangCache(world.params(page_size, is_eagle=is_eagle, **more))
        return Engine(world, cache, is_eagle)

    return make


@KINDS
def test_a_request_leaves_its_whole_pages(make, page_size, is_eagle):
    engine = make(page_size, is_eagle)
    req = engine.start(list(range(10)))
    assert req.prefix_indices.tolist() == engine.row(req, 10)
    assert len(req.prefix_indices) == 10
    assert req.cache_protected_len == engine.cache.protected_size() == (10 - is_eagle) // page_size * page_size
    for token in (70, 71, 72, 73):
        engine.decode(req, token)
    engine.check()
    engine.end(req)
    engine.check_idle()
    kept = (14 - is_eagle) // page_size * page_size
    assert engine.cache.evictable_size() == engine.cache.total_size() == kept
    longer = [*range(10), 70, 71, 72, 73, 5, 6]
    assert engine.length(longer) == kept
    second = engine.start(longer)
    assert len(second.prefix_indices) == 16
    engine.end(second)
    engine.check_idle()
    assert engine.evict() == engine.allocator.size - 64 + (16 - is_eagle) // page_size * page_size
    assert engine.allocator.available_size() == 64


def test_answers_are_on_the_allocators_device(make, world):
    engine = make(4)
    engine.run(list(range(9)))
    for tokens in ([], [5], list(range(9))):
        found = engine.found(tokens)
        assert str(found.device_indices.dtype).endswith("int64")
        assert str(found.device_indices.device) == str(engine.allocator.device)
        assert found.last_device_node == found.last_host_node == found.best_match_node
        assert (found.host_hit_length, found.mamba_branching_seqlen, found.cache_protected_len) == (0, None, None)
    right = found.device_indices.tolist()
    world.write(engine.rows, 0, 0, [0] * 8)  # the padding row is no one's
    found.device_indices[:].cpu().numpy()[:] = 0
    assert engine.found(list(range(9))).device_indices.tolist() == right
    slots, node = engine.cache.init_load_back(SimpleNamespace(best_match_node=found.best_match_node, host_hit_length=0))
    assert (slots.tolist(), node) == ([], found.best_match_node)


@KINDS
def test_a_key_ends_at_its_limit(make, page_size, is_eagle):
    engine = make(page_size, is_eagle)
    prompt = list(range(12))
    engine.run(prompt)
    for limit in (0, 1, 3, 4, 5, 9, 11, 12, 40):
        most = max(min(limit, 12) - is_eagle, 0) // page_size * page_size
        assert engine.length(prompt, limit=limit) == most
    req = engine.start(prompt, most=5)
    engine.check()
    engine.end(req)
    engine.check_idle()


@KINDS
@pytest.mark.parametrize("chunk", [4, 7])
def test_chunks(make, page_size, is_eagle, chunk):
    engine = make(page_size, is_eagle)
    req = engine.match(list(range(30)))
    engine.admit(req)
    lengths = []
    while req.fill_len < 30:
        engine.prefill(req, chunk)
        engine.check()
        engine.evict()
        lengths.append(req.cache_protected_len)
    whole = [(min(end, 30) - is_eagle) // page_size * page_size for end in range(chunk, 30 + chunk, chunk)]
    assert lengths == whole
    engine.end(req)
    engine.check_idle()


def test_chunks_of_a_request_are_no_uses_by_others(make):
    engine = make(eviction_policy="lfu")
    for _ in range(2):
        engine.run(pages(1, 2))
    engine.run(pages(5, 6, 7, 8), chunk=4)
    engine.evict(16)
    assert engine.length(pages(1, 2)) == 8
    assert engine.length(pages(5, 6, 7, 8)) == 0


def test_a_retracted_request_frees_what_is_its_own(make):
    engine = make()
    engine.run(pages(1, 2))
    req = engine.start([*pages(1, 2), 20, 21])
    engine.decode(req, 30)
    engine.decode(req, 31)
    assert (req.cache_protected_len, engine.cache.total_size()) == (8, 8)
    engine.retract(req)
    engine.check_idle()
    assert engine.cache.total_size() == 8
    req.init_next_round_input(engine.cache)
    assert engine.admit(req) == 8
    engine.prefill(req)
    engine.end(req)
    engine.check_idle()
    assert engine.length([*pages(1, 2), 20, 21, 30, 31]) == 12


@pytest.mark.parametrize("ends", ["first", "second"])
def test_locks_of_two_requests_with_one_last_node(make, ends):
    """One request waits at a node when another comes to it by its own tokens; each must keep a lock of its own."""
    engine = make(4)
    prompt = list(range(8))
    engine.run(prompt)
    waits = engine.match([*prompt, 50, 51, 52, 53, 54])
    engine.admit(waits)
    comes = engine.start(prompt)  # less of it is matched, since one token must be computed
    assert comes.last_node == waits.last_node
    engine.prefill(waits)
    first, second = (comes, waits) if ends == "first" else (waits, comes)
    engine.end(first)
    engine.check()
    engine.evict()
    engine.check()
    assert engine.cache.protected_size() == second.cache_protected_len
    engine.decode(second, 60)
    engine.end(second)
    engine.check_idle()


def test_locks_are_given_back_by_their_node(make):
    engine = make(4)
    engine.run(list(range(12)))
    deep, high = (engine.found(list(range(length))).last_device_node for length in (12, 4))
    locks = [engine.cache.inc_lock_ref(node) for node in (deep, high, deep)]
    assert [lock.delta for lock in locks] == [-12, 0, 0]
    assert [lock.to_dec_params().swa_uuid_for_lock for lock in locks] == [None] * 3
    assert engine.evict() == 0
    deltas = [
        engine.cache.dec_lock_ref(node, lock.to_dec_params()).delta
        for node, lock in zip((deep, deep), locks, strict=False)
    ]
    assert deltas == [0, 8]
    assert engine.cache.dec_lock_ref(high).delta == 4
    assert engine.cache.dec_lock_ref(high).delta == 0
    engine.check_idle()


def test_no_lock_is_kept_of_the_root(make):
    """There is room for so many locks, and nothing to protect."""
    engine = make()
    root = engine.cache.root_node
    for _ in range(3):
        assert engine.cache.inc_lock_ref(root).delta == 0
    assert engine.cache.dec_lock_ref(root).delta == 0
    for act in (engine.end, engine.retract):
        short = engine.start([1, 2, 3])  # no whole page
        assert short.last_node == root
        engine.decode(short, 4)
        engine.check()
        assert engine.cache.slots.receipt_of(root) is None
        act(short)
        engine.check_idle()
        assert engine.cache.slots.receipt_of(root) is None


def test_evict(make):
    engine = make()
    for number in (1, 3, 5):
        engine.run(pages(number, number + 1))
    seen = []
    engine.cache.metrics_collector = SimpleNamespace(
        observe_eviction_duration=lambda seconds: seen.append(seconds >= 0),
        increment_eviction_num_tokens=seen.append,
    )
    assert [engine.evict(number) for number in (0, 1, 5, 4)] == [0, 4, 8, 4]
    assert seen == [True, 4, True, 8, True, 4]
    assert [engine.length(pages(number, number + 1)) for number in (1, 3, 5)] == [0, 0, 8]
    assert "Available tokens: 64 (56 free + 8 evictable)" in engine.cache.available_and_evictable_str()


@pytest.mark.parametrize("policy", ["lru", "LFU", "slru", "mru", "fifo", "filo", "priority"])
def test_policies_have_sglangs_names(make, policy):
    engine = make(eviction_policy=policy)
    engine.run(pages(1, 2), priority=2)
    engine.run(pages(3))
    engine.run(pages(3, 4))
    assert engine.evict(1) == 4
    assert engine.evict() == 12
    engine.check_idle()


def test_priority_of_requests(make):
    engine = make(eviction_policy="priority")
    engine.run(pages(1), priority=2)
    engine.run(pages(2), priority=1)
    engine.run(pages(3), priority=None)
    for gone in (3, 2):
        assert engine.evict(1) == 4
        assert engine.length(pages(gone)) == 0
    assert engine.length(pages(1)) == 4


def test_namespaces(make):
    engine = make()
    engine.run(pages(1), extra_key="a")
    assert [engine.length(pages(1), extra_key=key) for key in (None, "a", "b")] == [0, 4, 0]


def test_insert_by_hand(make, world):
    engine = make(4)
    slots = engine.allocator.alloc(8).tolist()
    key = engine.key(list(range(9)))
    assert engine.cache.insert(world.insert_params(key, world.slots(slots))).prefix_len == 0
    assert engine.found(list(range(8))).device_indices.tolist() == slots
    more = engine.allocator.alloc(12).tolist()
    key = engine.key(list(range(12)))
    assert engine.cache.insert(world.insert_params(key, world.slots(more), 3)).prefix_len == 8
    assert engine.found(list(range(12))).device_indices.tolist() == slots + more[8:]


def test_finished_requests_may_be_kept_out(make):
    engine = make(disable_finished_insert=True)
    req = engine.start(pages(1))
    for _ in range(4):
        engine.decode(req, 2)
    engine.end(req)
    engine.check_idle()
    assert engine.length(pages(1, 2)) == 4


def test_a_request_ends_once(make):
    engine = make()
    req = engine.start(pages(1, 2))
    row = req.req_pool_idx
    engine.end(req)
    before = engine.sizes()
    req.req_pool_idx = row
    with pytest.raises(AssertionError):
        engine.cache.cache_finished_req(req)
    assert engine.sizes() == before == (56, 8, 0)


def test_disabled(make):
    engine = make(disable=True)
    req = engine.start(pages(1))
    assert req.prefix_indices.tolist() == engine.row(req, 4)
    engine.check()
    engine.end(req)
    engine.check_idle()
    assert engine.length(pages(1)) == 0
    assert engine.cache.is_chunk_cache()
    assert engine.evict() == 0


def test_reset(make):
    engine = make()
    engine.run(pages(1, 2))
    node = engine.found(pages(1)).last_device_node
    engine.cache.inc_lock_ref(node)
    engine.cache.reset()
    assert engine.cache.dec_lock_ref(node).delta == 0
    assert engine.sizes()[1:] == (0, 0)
    assert engine.length(pages(1, 2)) == 0


def test_what_kind_of_cache_it_is(make, capsys):
    cache = make(4, True).cache
    names = ("swa", "mamba", "streaming_session", "fast_match_prefix")
    assert [getattr(cache, f"supports_{name}")() for name in names] == [False] * 4
    assert (cache.is_tree_cache(), cache.is_chunk_cache(), cache.page_size, cache.is_eagle) == (True, False, 4, True)
    held = ("tokens", "full_tokens", "swa_tokens", "req_count", "mamba_slots")
    assert [getattr(cache, f"session_held_{name}")({1}) for name in held] == [0] * 5
    assert (cache.take_events(), cache.release_session("none"), cache.metrics_collector) == ([], None, None)
    cache.flush_write_through_acks()
    cache.pretty_print()
    assert "total tokens: 0" in capsys.readouterr().out


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_random_lives(make, page_size, is_eagle, seed):
    engine = make(page_size, is_eagle)
    compared = []
    Lives([engine], seed, compared.append).run(300)
    engine.cache.sanity_check()
    prefixes = [values[0] for values in compared if isinstance(values[0], int)]
    assert max(prefixes) > 0, "nothing was ever found"


# ---- in the server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """A stand-in for sglang's registry of backends."""
    module = ModuleType("sglang.srt.mem_cache.registry")
    backends, kinds = {}, []
    module.__dict__.update(
        backends=backends,
        kinds=kinds,
        get_radix_cache_factory=backends.get,
        register_radix_cache_backend=backends.setdefault,
        default_radix_cache_factory=lambda context: "sglang's own",
        BasePrefixCache=SimpleNamespace(register=kinds.append),
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sglang, "_options", sglang.Options())
    return module


def context(arguments=(), params=(), **more):
    given = {
        "server_args": SimpleNamespace(**{"page_size": 4, "chunked_prefill_size": 64, **dict(arguments)}),
        "params": FakeWorld().params(4, **dict(params)),
        "model_config": SimpleNamespace(context_len=1024),
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "enable_hierarchical_cache": False,
        "disable_radix_cache": False,
        "effective_chunked_prefill_size": 64,
    }
    return SimpleNamespace(**{**given, **more})


@pytest.fixture
def fake(monkeypatch):
    return world_of("fake", monkeypatch)


def test_build(fake, registry):
    for arguments in ({}, {"enable_unified_radix_tree": True}):
        cache = sglang.build(context(arguments), sglang.Options(warm=0))
        engine = Engine(fake, cache)
        engine.run(list(range(9)))
        assert engine.length(list(range(9))) == 8
    assert cache.cache.config.device_pages == 17


def test_a_server_records_its_cache(fake, registry, tmp_path):
    folder = tmp_path / "recordings"
    cache = sglang.build(context(), sglang.Options(warm=0, record=str(folder)))
    Engine(fake, cache).run(list(range(9)))
    cache.cache._driver._record.close()
    (file,) = folder.iterdir()
    report = Player(Recording(file)).verify()
    assert report.difference is None
    assert report.events > 3


def test_build_compiles_what_requests_need(fake, registry):
    cache = sglang.build(context(model_config=SimpleNamespace(context_len=32)))
    compiled = len(cache.cache.programs())
    engine = Engine(fake, cache)
    engine.run(list(range(24)), (30, 31, 32, 33), chunk=8)
    engine.retract(engine.start(list(range(26))))
    engine.evict()
    assert len(cache.cache.programs()) == compiled > 0


def test_sglangs_own_cache_stays_where_the_radix_cache_is_off(registry):
    for chunk in (64, None):
        off = context(disable_radix_cache=True, effective_chunked_prefill_size=chunk, is_hybrid_swa=True)
        assert sglang.build(off) == "sglang's own"


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"enable_hierarchical_cache": True}, UnsupportedError, "torch tensors"),
        ({"arguments": {"enable_lmcache": True}}, UnsupportedError, "torch tensors"),
        ({"is_hybrid_swa": True}, UnsupportedError, "sliding window"),
        ({"is_hybrid_ssm": True}, UnsupportedError, "recurrent"),
        ({"arguments": {"enable_hisparse": True}}, ArgumentsError, "disable_radix_cache"),
        ({"params": {"eviction_policy": "best"}}, ConfigError, "best"),
    ],
)
def test_what_is_refused(fake, registry, more, error, message):
    with pytest.raises(error, match=message):
        sglang.build(context(**more), sglang.Options(warm=0))


def test_pages_must_be_the_allocators(fake):
    rows, allocator = fake.rows(4, 16), fake.allocator(64, 4)
    with pytest.raises(ValueError, match="4 tokens, not 8"):
        SglangCache(InitParams(False, rows, allocator, 8))


def test_there_are_locks_for_all_rows(fake):
    cache = SglangCache(fake.params(size=64, rows=3000))
    assert cache.cache.config.max_receipts == 6002


def test_events_are_not_published(fake, registry, caplog):
    sglang.build(context(params={"enable_kv_cache_events": True}), sglang.Options(warm=0))
    assert "no KV cache events" in caplog.text


def test_install(registry):
    sglang.install()
    sglang.install(sglang.Options(warm=5))
    assert registry.backends == {"purecache": sglang.factory}
    assert registry.kinds == [SglangCache]
    assert sglang._options == sglang.Options(warm=5)


@pytest.mark.parametrize(("platforms", "then"), [(None, {"jax_platforms": "cpu"}), ("cuda,cpu", {})])
def test_jax_leaves_the_device_to_torch(monkeypatch, platforms, then):
    updates = {}
    config = SimpleNamespace(jax_platforms=platforms, update=updates.__setitem__)
    monkeypatch.setattr(sglang, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(sglang, "build", lambda context, options: (context, options))
    assert sglang.factory("context") == ("context", sglang._options)
    assert updates == {**then, "jax_cpu_enable_async_dispatch": False}


def test_the_plug_in_is_declared():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["sglang.srt.plugins"]["purecache"].split(":")
    assert getattr(import_module(module), name) is sglang.install


def test_tensors_of_another_device_are_noticed(fake):
    """The stand-ins must notice what torch would."""
    with pytest.raises(AssertionError, match="read this device"):
        fake.slots([1]).numpy()
    with pytest.raises(AssertionError, match="slots on cpu"):
        fake.allocator(8, 1).free(fake.slots([1]).cpu())
    assert fake.slots([1, 2])[1:].to("cpu").numpy() == np.asarray([2])
