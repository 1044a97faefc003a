"""Run by `test_two_processes`, twice: one of two JAX processes that share a cache. Prints what it found as JSON."""

import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import WORDS, content, path_of, read_page, shared_programs, tiny, write_pages

from purecache import PrefixCache
from purecache.answers import Refusal
from purecache.effects import AgreedPlane, DivergedError, Gate, Interpreter, agreed

STEPS = 60
FORMS = {"slots": {}, "staged": {"host_form": "arrays", "copies": "fused"}}


class Uneven(Gate):
    """Keeps completions back by a schedule of this process, and fails pages if it is told to."""

    def __init__(self, seed):
        self.random, self.fails, self.holds = np.random.default_rng(seed), 0.0, 0.6

    def failing(self, transfer):
        return self.random.random(len(transfer.target)) < self.fails

    def held(self, transfer):
        return self.random.random() < self.holds


def digest(state):
    """Of all arrays of a state."""
    summed = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(state):
        summed.update(np.asarray(leaf).tobytes())
    return summed.hexdigest()


def cache_of(process, **form):
    """A cache whose plane agrees with the other process, and the gate of this one."""
    config, gate = tiny(), Uneven(100 + process)
    pool = jnp.full((config.ranks * config.device_pages, WORDS), -1, jnp.int32)
    sizes = {"host_pages": config.host_pages, "device_pages": config.device_pages, "ranks": config.ranks}
    plane = agreed(Interpreter(pool, gate=gate, batch_pages=4, **sizes, **form), window=2)
    assert isinstance(plane, AgreedPlane)
    return shared_programs(PrefixCache(config, plane, smallest=16), 16), gate


def wrong_pages(cache, rank, path, pages):
    """How many of the pages of a prefix do not hold what was computed."""
    return sum(
        not np.array_equal(read_page(cache, rank, page), content(path[: depth + 2])) for depth, page in enumerate(pages)
    )


def loaded(cache, match, waits):
    """What a load back brought; `waits`: tick until one that does not hold up others has ended."""
    if not waits:
        return cache.load_back(match)
    begun = cache.begin_load_back(match)
    while not isinstance(begun, Refusal):
        cache.tick()
        if (answer := cache.loaded(begun)) is not None:
            return answer
    return begun


def request(cache, tokens, rank=0, waits=False):
    """Serve one request as a scheduler does. Returns its match, what was loaded, and the number of wrong pages.

    Few methods are used: both processes compile each of them.
    """
    path = path_of(cache.config, tokens, None, rank)
    match, receipt = cache.admit(tokens, rank=rank)
    pages, there, load = match.device_pages, match.length // cache.config.page_size, None
    new = cache.allocate(len(path) - 1 - there, rank=rank)
    if new is not None and there > len(pages):
        load = loaded(cache, match, waits)
        more = cache.allocate(there - len(pages), rank=rank) if isinstance(load, Refusal) else load.pages
        if more is not None and not isinstance(load, Refusal):
            pages = np.concatenate([pages, more])
        new = None if more is None else np.concatenate([more, new])[len(pages) - len(match.device_pages) :]
    wrong = wrong_pages(cache, rank, path, pages)
    new = np.zeros(0, np.int32) if new is None else new
    whole = len(pages) + len(new)
    write_pages(cache, rank, new, [path[: n + 1] for n in range(len(pages) + 1, whole + 1)])
    cache.finish(tokens[: whole * cache.config.page_size], np.concatenate([pages, new]), receipt, rank=rank)
    return match, load, wrong


def lives(process, **form):
    """A long life of the same requests in both processes, while transfers end differently in each."""
    cache, gate = cache_of(process, **form)
    inputs, found = np.random.default_rng(7), {"digests": [], "broken": [], "wrong": 0, "hits": 0}
    gate.fails = 0.15 * process
    for _ in range(STEPS):
        rank, first, length = int(inputs.integers(2)), int(inputs.integers(3)), int(inputs.integers(1, 5))
        tokens = [first + 1, *range(10, 9 + 2 * length)]
        match, _, wrong = request(cache, tokens, rank, waits=bool(inputs.integers(2)))
        found["hits"] += match.host_length
        found["wrong"] += wrong
        if inputs.random() < 0.3:
            cache.evict(int(inputs.integers(1, 5)), rank=rank)
        cache.tick()
        found["digests"].append(digest(cache.state))
        found["broken"] += cache.violations()
    cache.drain()
    found["digests"].append(digest(cache.state))
    return found | {"in_flight": cache._driver.plane.in_flight, "counters": cache.counters()}


def one_failure(process, **form):
    """Every backup fails in process 1 only, and later every load back."""
    cache, gate = cache_of(process, **form)
    found = []
    for kind in ("backup", "load back"):
        tokens = [5, 5, 6, 6] if kind == "backup" else [7, 7, 8, 8]
        gate.fails = float(process and kind == "backup")
        request(cache, tokens)
        cache.drain()
        cache.evict(4, rank=0)
        gate.fails = float(process and kind == "load back")
        match, load, wrong = request(cache, tokens)
        cache.drain()
        found.append([kind, match.length, match.host_length, isinstance(load, Refusal), wrong])
    return {"found": found, "digests": [digest(cache.state)], "broken": cache.violations()}


def reset(process):
    """A reset with transfers in flight, and a request after it."""
    cache, _ = cache_of(process)
    request(cache, [1, 1, 2, 2])
    before = cache._driver.plane.in_flight
    cache.reset()
    request(cache, [1, 1, 2, 2])
    cache.drain()
    return {"before": before, "digests": [digest(cache.state)], "broken": cache.violations()}


def sharded(process, fails, **form):
    """Pages of one global array, whose heads are spread over the processes, to host and back; compares own shards."""
    mesh = Mesh(np.array(jax.devices("cpu")), ("heads",))
    placed = NamedSharding(mesh, PartitionSpec(None, "heads"))

    def pool_of(seed):
        values = np.random.default_rng(seed).integers(0, 2**31, (16, 2, WORDS), np.int32)
        return values, jax.make_array_from_callback(values.shape, placed, lambda index: values[index])

    (values, pool), (others, other) = pool_of(0), pool_of(1)
    gate = Uneven(200 + process)
    own = Interpreter(pool, host_pages=6, device_pages=8, ranks=2, batch_pages=4, gate=gate, **form)
    cache = shared_programs(PrefixCache(tiny(), agreed(own), smallest=16), 16)
    tokens = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    _, receipt = cache.admit(tokens)
    pages = cache.allocate(5)
    cache.finish(tokens, pages, receipt)
    cache.drain()
    gate.holds = 0.0
    cache.evict(8)
    match, receipt = cache.admit(tokens)
    cache.pool = other
    gate.fails = float(process and fails)
    load = cache.load_back(match)
    cache.finish([], np.zeros(0, np.int32), receipt)
    (shard,) = cache.pool.addressable_shards
    (mine, theirs), here = (each[:, shard.index[1]] for each in (values, others)), np.asarray(shard.data)
    found = {"hit": match.host_length, "digests": [digest(cache.state)], "broken": cache.violations()}
    if isinstance(load, Refusal):
        return found | {"loaded": 0, "equal": np.array_equal(here, theirs)}
    theirs[load.pages] = mine[pages]
    return found | {"loaded": len(load.pages), "equal": np.array_equal(here, theirs)}


def diverged(process):
    """Whether a process is told that the other one was given something else."""
    cache, _ = cache_of(process)
    request(cache, [1 + process, 1, 2, 2][: 4 - 2 * process])
    try:
        cache.tick()
    except DivergedError:
        return True
    return False


def main():
    process, port = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    found = {"processes": jax.process_count(), "devices": len(jax.devices("cpu")), "reset": reset(process)}
    for name, form in FORMS.items():
        found[name] = lives(process, **form)
        found[f"failures, {name}"] = one_failure(process, **form)
        found[f"sharded, {name}"] = [sharded(process, fails, **form) for fails in (False, True)]
    print(json.dumps(found | {"diverged": diverged(process)}))


if __name__ == "__main__":
    main()
