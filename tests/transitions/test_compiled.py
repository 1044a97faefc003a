"""What the compiled programs look like: state updated in place, no memory and no copy that grows with the capacity."""

import functools
import re
import time

import jax
import numpy as np
import pytest

from purecache import PrefixCache
from purecache.answers import Node
from purecache.entries import TABLE
from purecache.programs import Program, ProgramTable
from purecache.state import CacheConfig, as_jax, empty_state

SIZE = 8
CAPACITIES = (1000, 8000)
WHOLE_STATE = {"reset"}
"""Transitions whose work is proportional to the capacity, by design."""
COPY = re.compile(r"= s32\[([\d,]*)\]\S* copy(?:-start)?\(")


def state_of(pages):
    return as_jax(empty_state(CacheConfig(page_size=4, device_pages=pages, host_pages=2 * pages)))


@functools.cache
def program(name, pages):
    state = state_of(pages)
    return Program(name, TABLE[name], state.layout, SIZE, jax.eval_shape(lambda: state)), state


def big_copies(compiled, state, capacity):
    """The instructions that copy an array as large as one of the state's that grow with the capacity."""
    sizes = {leaf.size for leaf in jax.tree.leaves(state) if leaf.size >= capacity}
    shapes = COPY.findall(compiled.as_text())
    return [shape for shape in shapes if shape and np.prod([int(n) for n in shape.split(",")]) in sizes]


@pytest.mark.parametrize("name", TABLE)
def test_every_program_updates_the_state_in_place(name):
    temporary = []
    for pages in CAPACITIES:
        made, state = program(name, pages)
        report = made.report()
        assert report["aliased_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        temporary.append(report["temp_bytes"])
        if name not in WHOLE_STATE:
            assert not big_copies(made.compiled, state, pages)
    if name not in WHOLE_STATE:
        assert temporary[0] == temporary[1]


@pytest.mark.parametrize("name", sorted(set(TABLE) - WHOLE_STATE))
def test_every_program_is_one_native_function(name):
    """Its entry computation calls one function; the scalars at most are copied on the way out."""
    text = program(name, CAPACITIES[0])[0].compiled.as_text()
    entry = text[text.index("ENTRY") :]
    steps = re.findall(r" (?!parameter|get-tuple-element|tuple|constant|bitcast)([a-z-]+)\(", entry)
    assert steps.count("call") == 1
    assert set(steps) <= {"call", "copy"}
    assert 'xla_cpu_small_call="true"' in entry


def test_the_search_for_copies_finds_one():
    """Writing an entry and handing out the old array as well is what makes XLA copy."""
    _, state = program("lock", CAPACITIES[0])

    def careless(state):
        return state.replace(nodes=state.nodes.at[0, 0].add(1)), state.nodes

    compiled = jax.jit(careless, donate_argnums=0).lower(state).compile()
    assert big_copies(compiled, state, CAPACITIES[0])


def test_the_number_of_programs_is_bounded():
    table = ProgramTable(state_of(100), smallest=16)
    assert table.largest == 512
    sized = sum(entry.sized for entry in TABLE.values())
    assert table.bound() == 6 * sized + len(TABLE) - sized
    for pages in (0, 1, 15, 16, 17, 511, 512, 513, 100_000):
        assert table.bucket(pages) in table.buckets()
        assert table.bucket(pages) >= min(pages, table.largest)
    assert sorted({table.bucket(pages) for pages in range(2000)}) == table.buckets()


def seconds(cache, turns=200):
    """Time of an insert of four new pages and the eviction of as many, in a full cache: the least of a few runs."""
    best = float("inf")
    for run in range(5):
        start = time.perf_counter()
        for turn in range(turns):
            pages = cache.allocate(4)
            first = 1_000_000 * (run + 1) + 100 * turn
            cache.insert(np.arange(first, first + 4, dtype=np.int32), pages)
        best = min(best, time.perf_counter() - start)
    return best


def test_time_does_not_grow_with_the_capacity():
    caches = []
    for nodes in (8_000, 256_000):
        cache = PrefixCache(CacheConfig(page_size=1, device_pages=nodes), smallest=4096)
        number = 4000
        for first in range(0, nodes, number):
            pages = cache.allocate(min(number, nodes - first))
            cache.insert(np.arange(first, first + len(pages), dtype=np.int32) - 2**30, pages)
        assert cache.free_pages() == 0
        caches.append(cache)
    ratios = []
    for _ in range(4):
        small, large = (seconds(cache) for cache in caches)
        ratios.append(large / small)
        if ratios[-1] < 3:
            return
    pytest.fail(f"a cache 32 times as large is slower by {ratios}")


def test_a_call_finds_the_program_that_was_compiled_ahead():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    cache = PrefixCache(CacheConfig(page_size=4, device_pages=33))
    cache._programs.get("lock")
    assert any("backend_compile" in name for name in compiled)
    compiled.clear()
    cache.lock(Node(cache.config.layout.root(0), clock=0))
    assert not any("backend_compile" in name for name in compiled)
