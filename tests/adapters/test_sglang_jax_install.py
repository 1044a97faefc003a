"""Where our cache is hooked into sglang-jax, with fakes of its modules; the real ones: tests/sglang_jax."""

import abc
import json
import runpy
import sys
import types
from enum import Enum, auto

import pytest

from purecache.adapters import sglang_jax, sglang_jax_install
from purecache.adapters.sglang_jax import Options, SglangJaxCache, Showing, parse
from purecache.adapters.sglang_jax_recurrent import SglangJaxRecurrentCache
from purecache.adapters.sglang_jax_window import SglangJaxWindowCache

SRT = "sgl_jax.srt"


class Answer(Enum):
    CONTINUE = auto()


class Cache(SglangJaxCache):
    """Knows only of prefetches: `loads` says what each request gets."""

    hicache_enabled = False

    def __init__(self, loads):
        self.loads, self.asked = loads, []
        self.prefetches = types.SimpleNamespace(knows=lambda rid: rid in self.loads)

    def ask_storage(self, req, tokens):
        self.asked.append((req.rid, tokens))

    def check_prefetch_progress(self, rid):
        return self.loads[rid] is not None

    def pop_prefetch_loaded_tokens(self, rid):
        return self.loads.pop(rid)


class Request:
    def __init__(self, rid):
        self.rid, self.matched = rid, 0

    def adjust_max_prefix_ids(self):
        return [1, 2]

    def init_next_round_input(self, cache):
        self.matched += 1


@pytest.fixture
def fakes(monkeypatch):
    """Modules with what is replaced in them."""

    class PrefillAdder:
        def __init__(self, cache):
            self.tree_cache, self.added = cache, []

        def add_one_req(self, req):
            self.added.append(req.rid)
            return "added"

    class Scheduler:
        def __init__(self, cache):
            self.tree_cache, self.queue = cache, []

        def _add_request_to_queue(self, req):
            self.queue.append(req.rid)

        def get_new_batch_prefill(self):
            return "batch"

    contents = {
        "mem_cache.registry": {"default_radix_cache_factory": lambda context: "own"},
        "mem_cache.kv_cache_builder": {"init_hicache": lambda cache, *rest: cache.append(rest)},
        "mem_cache.base_prefix_cache": {"BasePrefixCache": abc.ABCMeta("BasePrefixCache", (), {})},
        "mem_cache.swa_radix_cache": {"SWARadixCache": abc.ABCMeta("SWARadixCache", (), {})},
        "managers.schedule_policy": {"PrefillAdder": PrefillAdder, "AddReqResult": Answer},
        "managers.scheduler": {"Scheduler": Scheduler},
    }
    made = {}
    for name in ("sgl_jax", SRT, f"{SRT}.mem_cache", f"{SRT}.managers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, attributes in contents.items():
        module = made[name] = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, f"{SRT}.{name}", module)
    yield made
    sglang_jax.uninstall()


def replaced(fakes):
    registry, builder = fakes["mem_cache.registry"], fakes["mem_cache.kv_cache_builder"]
    policy, scheduler = fakes["managers.schedule_policy"], fakes["managers.scheduler"]
    return (
        registry.default_radix_cache_factory,
        builder.init_hicache,
        policy.PrefillAdder.add_one_req,
        scheduler.Scheduler._add_request_to_queue,
    )


def changed(before, after):
    return [old is not new for old, new in zip(before, after, strict=True)]


def test_what_is_replaced_comes_back_however_often_it_was_installed(fakes):
    before = replaced(fakes)
    sglang_jax.install()
    assert changed(before, replaced(fakes)) == [True, True, False, False]
    sglang_jax.install(Options(store="memory:"))
    assert changed(before, replaced(fakes)) == [True] * 4
    sglang_jax.uninstall()
    sglang_jax.uninstall()
    assert changed(before, replaced(fakes)) == [False] * 4


def test_the_scheduler_takes_each_cache_for_what_it_is(fakes):
    sglang_jax.install()
    base = fakes["mem_cache.base_prefix_cache"].BasePrefixCache
    windows = fakes["mem_cache.swa_radix_cache"].SWARadixCache
    kinds = (SglangJaxCache, SglangJaxWindowCache, SglangJaxRecurrentCache)
    assert [issubclass(kind, base) for kind in kinds] == [True, True, True]
    assert [issubclass(kind, windows) for kind in kinds] == [False, True, False]


def test_host_memory_of_another_cache_is_its_own_affair(fakes):
    sglang_jax.install()
    other = []
    fakes["mem_cache.kv_cache_builder"].init_hicache(other, "arguments", "mesh")
    fakes["mem_cache.kv_cache_builder"].init_hicache(Cache({}), "arguments", "mesh")
    assert other == [("arguments", "mesh")]


def test_a_request_asks_storage_when_it_is_queued_and_is_passed_over_until_the_answer(fakes):
    sglang_jax.install(Options(store="memory:"))
    cache = Cache({"late": None, "full": 8, "empty": 0})
    scheduler = fakes["managers.scheduler"].Scheduler(cache)
    requests = {rid: Request(rid) for rid in ("late", "full", "empty", "unknown")}
    for request in requests.values():
        scheduler._add_request_to_queue(request)
    assert scheduler.queue == list(requests)
    assert cache.asked == [(rid, [1, 2]) for rid in requests]
    adder = fakes["managers.schedule_policy"].PrefillAdder(cache)
    answers = [adder.add_one_req(request) for request in requests.values()]
    assert answers == [Answer.CONTINUE, "added", "added", "added"]
    assert adder.added == ["full", "empty", "unknown"]
    assert [request.matched for request in requests.values()] == [0, 1, 0, 0]


def test_other_caches_are_not_asked(fakes):
    sglang_jax.install(Options(store="memory:"))
    other = types.SimpleNamespace()
    fakes["managers.scheduler"].Scheduler(other)._add_request_to_queue(Request("r"))
    assert fakes["managers.schedule_policy"].PrefillAdder(other).add_one_req(Request("r")) == "added"


@pytest.mark.parametrize(("host", "ticks"), [(False, 1), (True, 0)])
def test_observers_hear_of_every_step_also_without_host_memory(fakes, monkeypatch, host, ticks):
    before = fakes["managers.scheduler"].Scheduler.get_new_batch_prefill
    sglang_jax.install(Options(show=Showing(metrics=0)))
    cache, ticked = Cache({}), []
    monkeypatch.setattr(Cache, "hicache_enabled", host)
    cache.check_hicache_events = lambda: ticked.append(1)
    scheduler = fakes["managers.scheduler"].Scheduler
    assert scheduler(cache).get_new_batch_prefill() == "batch"
    assert len(ticked) == ticks
    assert scheduler(types.SimpleNamespace()).get_new_batch_prefill() == "batch"
    sglang_jax.uninstall()
    assert scheduler.get_new_batch_prefill is before


def test_our_arguments_are_taken_and_the_servers_are_left():
    options, rest = parse(
        [
            "--model-path",
            "m",
            "--purecache-store",
            "memory:",
            "--port",
            "1",
            "--purecache-warm",
            "64",
            "--purecache-record",
            "kept",
            "--purecache-metrics",
            "9400",
            "--purecache-events",
            "tcp://127.0.0.1:5557",
            "--purecache-admin",
            "0",
        ]
    )
    show = Showing(metrics=9400, events="tcp://127.0.0.1:5557", admin=0)
    assert options == Options(store="memory:", warm=64, record="kept", show=show)
    assert rest == ["--model-path", "m", "--port", "1"]


def test_the_process_of_the_scheduler_installs_what_the_launcher_was_told(fakes, monkeypatch):
    before = replaced(fakes)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # elsewhere it also changes how this process runs the CPU backend
    monkeypatch.setenv(sglang_jax.INHERITED, json.dumps(["--purecache-store", "memory:", "--port", "1"]))
    runpy.run_module("purecache.adapters.sglang_jax", run_name="__mp_main__")
    assert changed(before, replaced(fakes)) == [True] * 4


def test_without_sglang_jax_nothing_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_jax", None)
    with pytest.raises(ImportError):
        sglang_jax.install()
    assert sglang_jax_install._undo == []


def test_weights_are_told_apart_by_their_files_or_by_name(tmp_path):
    arguments = types.SimpleNamespace(model_path=str(tmp_path / "model"), revision=None)
    revision = sglang_jax_install._revision
    assert revision(Options(), arguments) is None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"1")
    first = revision(Options(), arguments)
    (tmp_path / "model" / "weights").write_bytes(b"12")
    assert revision(Options(), arguments) != first
    assert revision(Options(revision="v2"), arguments) == "v2"
    assert revision(Options(), types.SimpleNamespace(model_path="org/model", revision="main")) == "main"
