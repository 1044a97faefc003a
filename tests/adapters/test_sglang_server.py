"""The cache for sglang inside sglang: beside its own RadixCache, under its policies, registry and sessions."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sglang", reason="needs sglang")

from sglang.srt import plugins, server_args
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, zero_match_result
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.session.streaming_session import StreamingSession
from sglang_engine import Engine, Lives
from sglang_worlds import RealWorld

from purecache.adapters import sglang
from purecache.adapters.build import UnsupportedError
from purecache.adapters.sglang import SglangCache

KINDS = pytest.mark.parametrize(("page_size", "is_eagle"), [(1, False), (4, False), (1, True), (4, True)])
CACHES = (SglangCache, RadixCache)


@pytest.fixture(autouse=True)
def arguments(monkeypatch):
    """What sglang's parts ask of the arguments of the server."""
    given = SimpleNamespace(
        page_size=4,
        speculative_algorithm=None,
        strip_thinking_cache=False,
        extra_metric_labels=None,
        stat_loggers=None,
        enable_dsa_prefill_context_parallel=False,
        dsa_prefill_cp_mode=None,
        enable_prefill_context_parallel=False,
        disaggregation_mode="null",
    )
    monkeypatch.setattr(server_args, "_global_server_args", given)
    return given


@pytest.fixture
def world():
    return RealWorld()


def pages(*numbers):
    return [number for number in numbers for _ in range(4)]


def twins(world, page_size=4, is_eagle=False, **more):
    """Our cache and sglang's, with equal pools."""
    return [Engine(world, kind(world.params(page_size, is_eagle=is_eagle, **more)), is_eagle) for kind in CACHES]


def same(answers):
    first, *others = answers
    assert all(other == first for other in others), answers


# ---- beside sglang's own tree ----------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("seed", range(8))
def test_it_answers_as_sglangs_own_tree(world, page_size, is_eagle, seed):
    engines, compared = twins(world, page_size, is_eagle), []
    for engine in engines:
        engine.room = 1 << 30  # both evict all, or else they differ in how much more than a page

    def compare(answers):
        same(answers)
        compared.append(answers[0])

    Lives(engines, seed, compare).run(400)
    assert max(answer for answer in compared if isinstance(answer, int)) >= page_size
    assert any(sizes[2] for sizes in compared if isinstance(sizes, tuple) and len(sizes) == 3)


@pytest.mark.parametrize("policy", ["lru", "mru", "fifo", "filo", "lfu", "priority"])
def test_it_evicts_in_sglangs_order(world, policy):
    """Prompts of one page each, so that both evict the same."""
    engines = twins(world, eviction_policy=policy)
    for number, priority in ((1, 3), (2, 1), (3, 2), (4, 1), (2, 1), (1, 0), (2, 2), (3, 0), (5, 1)):
        for engine in engines:
            engine.run(pages(number), priority=priority)
    order = []
    for _ in range(5):
        same([engine.evict(1) for engine in engines])
        gone = [[number for number in range(1, 6) if not _peek(engine, number)] for engine in engines]
        same(gone)
        order.append(gone[0])
    assert [len(gone) for gone in order] == [1, 2, 3, 4, 5]


def _peek(engine, number):
    """Whether a page is there, without making it younger."""
    if isinstance(engine.cache, RadixCache):
        return any(child.key.token_ids[0] == number for child in engine.cache.root_node.children.values())
    return engine.cache.cache.peek(pages(number), rank=0).device_length > 0


def test_a_forced_miss(world):
    engine = twins(world)[0]
    engine.run(pages(1, 2))
    missed = zero_match_result(engine.cache, engine.found(pages(1, 2)))
    assert (len(missed.device_indices), missed.last_device_node) == (0, engine.cache.root_node)


# ---- under sglang's policies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "fcfs"])
def test_schedule_policies_order_requests_as_ever(world, policy):
    orders = []
    for engine in twins(world):
        engine.run(pages(1, 2, 3))
        engine.run(pages(1, 2, 4))
        engine.run(pages(5))
        prompts = [pages(5, 9), pages(1, 2, 4, 9), pages(7), pages(1, 2, 4, 8), pages(1, 2, 3, 9), pages(1, 2, 4, 6)]
        queue = [world.req(tokens) for tokens in prompts]
        for number, req in enumerate(queue):
            req.rid = str(number)
        SchedulePolicy(policy, engine.cache, False, False, False).calc_priority(queue)
        orders.append([(req.rid, req.num_matched_prefix_tokens) for req in queue])
    same(orders)
    assert len(orders[0]) == 6


def test_prefill_adder_leaves_the_locks_of_what_it_takes(world):
    """In batches: some fit, one is cut into chunks, some find no room."""
    outcomes = []
    for engine in twins(world, size=128):
        engine.run(pages(1, 2, 3))
        outcome = []
        for prompts in (
            [pages(1, 2, 3, 4)],
            [pages(1, 2, 8, 9, 10), pages(1, 5)],
            [pages(1, 2, 8, 9), pages(*range(9))],
        ):
            adder = PrefillAdder(4, engine.cache, engine.allocator, None, 1.0, 64, 12)
            reqs = [world.req(tokens) for tokens in prompts]
            for req in reqs:
                req.init_next_round_input(engine.cache)
                result = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
                outcome.append((result, req.fill_len, engine.sizes()))
            for req in adder.can_run_list:
                engine.rows.alloc([req])
                engine.running.append(req)
                req.kv_committed_len = req.kv_allocated_len = len(req.prefix_indices)
                engine.prefill(req)
                outcome.append((req.cache_protected_len, engine.sizes()))
            engine.check()
        outcomes.append(outcome)
        for req in list(engine.running):
            engine.end(req)
        engine.check_idle()
    same(outcomes)
    assert {result for result, *_ in outcomes[0] if isinstance(result, AddReqResult)} >= {AddReqResult.CONTINUE}


@pytest.mark.parametrize("is_insert", [True, False])
def test_release_kv_cache(world, is_insert):
    for engine in twins(world):
        req = engine.start(pages(1, 2))
        engine.decode(req, 7)
        release_kv_cache(req, engine.cache, is_insert=is_insert)
        engine.running.remove(req)
        engine.check_idle()
        assert len(engine.rows.free_slots) == 16


# ---- in sglang's registry --------------------------------------------------------------------------------------------


@pytest.fixture
def backends(monkeypatch):
    monkeypatch.setattr(registry, "_RADIX_CACHE_REGISTRY", {})
    monkeypatch.setattr(sglang, "_options", sglang.Options())


def context(world, sessions=False, params=(), **more):
    given = {
        "server_args": SimpleNamespace(
            radix_cache_backend="purecache", enable_streaming_session=sessions, page_size=4, enable_lmcache=False
        ),
        "params": world.params(4, **dict(params)),
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "enable_hierarchical_cache": False,
        "disable_radix_cache": False,
        "effective_chunked_prefill_size": 64,
        "tp_worker": None,
        "model_config": SimpleNamespace(context_len=64),
        "tp_size": 1,
        "tp_rank": 0,
        "tp_group": None,
    }
    return registry.TreeCacheBuildContext(**{**given, **more})


def test_the_registry_makes_it(world, backends):
    sglang.install(sglang.Options(warm=0))
    sglang.install(sglang.Options(warm=0))
    assert registry.registered_radix_cache_backends() == ["purecache"]
    cache = registry.create_tree_cache(context(world))
    assert isinstance(cache, SglangCache)
    assert isinstance(cache, BasePrefixCache)
    engine = Engine(world, cache)
    engine.run(pages(1, 2, 3))
    engine.check_idle()
    off = registry.create_tree_cache(context(world, disable_radix_cache=True, params={"disable": True}))
    assert type(off).__name__ == "ChunkCache"
    with pytest.raises(UnsupportedError, match="torch tensors"):
        registry.create_tree_cache(context(world, enable_hierarchical_cache=True))


def test_sglang_loads_the_plug_in(backends, monkeypatch, caplog):
    plug_in = SimpleNamespace(name="purecache", value="purecache.adapters.sglang:install", dist=None)
    plug_in.load = lambda: sglang.install
    monkeypatch.setattr(plugins, "entry_points", lambda group: [plug_in] if group == "sglang.srt.plugins" else [])
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    with caplog.at_level(logging.INFO):
        plugins.load_plugins()
    assert registry.get_radix_cache_factory("purecache") is sglang.factory
    assert "Failed" not in caplog.text


def test_eviction_metrics_are_sglangs(world, monkeypatch):
    pytest.importorskip("prometheus_client")
    cache = SglangCache(world.params(4, enable_metrics=True))
    assert type(cache.metrics_collector).__name__ == "RadixCacheMetricsCollector"
    engine = Engine(world, cache)
    engine.run(pages(1, 2))
    counted = []
    monkeypatch.setattr(cache.metrics_collector, "increment_eviction_num_tokens", counted.append)
    assert (engine.evict(8), counted) == (8, [8])


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_streaming_sessions(world, backends):
    """Turns of two sessions over one prompt, and what others do meanwhile, as with sglang's own tree."""
    sglang.install(sglang.Options(warm=0))
    outcomes = []
    for name in ("purecache", None):
        given = context(world, sessions=True)
        given.server_args.radix_cache_backend = name
        cache = registry.create_tree_cache(given)
        assert isinstance(cache, StreamingSession)
        outcomes.append(_turns(world, Engine(world, cache)))
    same(outcomes)


def _turns(world, engine):
    outcome = []
    talks = {name: _Talk(name) for name in "ab"}
    history = {name: pages(1, 2) for name in talks}

    def note(*more):
        engine.check()
        outcome.append((engine.sizes(), engine.cache.session_held_tokens(set()), *more))

    def turn(name, answers, chunk=None):
        req = engine.start(history[name], chunk, session=talks[name])
        for answer in answers:
            engine.decode(req, answer)
        req.finished_reason = SimpleNamespace(is_error=False)
        history[name] = [*req.origin_input_ids, *req.output_ids, 3, 3, 3]
        matched = req.cache_protected_len
        engine.end(req)
        note(matched, req.req_pool_idx)

    turn("a", [5, 5, 5])
    waits = engine.match(pages(1, 2, 9))
    engine.admit(waits)  # at the node that session a holds
    engine.prefill(waits)
    turn("b", [6])
    turn("a", [5, 5, 5, 5, 5])
    engine.evict()
    note()
    turn("b", [6, 6], chunk=4)
    engine.cache.release_session("a")
    note()
    engine.end(waits)
    engine.evict()
    note()
    turn("b", [6])
    engine.cache.release_session("b")
    engine.cache.release_session("b")
    engine.check_idle()
    engine.evict()
    assert engine.allocator.available_size() == 64
    assert len(engine.rows.free_slots) == 16
    return outcome


class _Talk:
    """A streaming session, as requests know it."""

    streaming = True

    def __init__(self, session_id):
        self.session_id = session_id

    def finish_req(self, req):
        pass
