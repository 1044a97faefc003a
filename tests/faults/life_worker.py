"""A process with a cache over a local store that ends, forks or hangs in the way that its first argument says.

Imported by no test: run it as `python life_worker.py HOW DIRECTORY`. It prints what it did, and what it found.
"""

import os
import signal
import sys
import threading
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[levels]) for levels in (0, 1, 2)]

import conftest  # noqa: E402, F401 (the settings of JAX)
from support import serve  # noqa: E402
from tiers import ABCD, EFGH, OBJECT, attached, emptied, prefetched, sound, stored  # noqa: E402

from purecache.stores.local import LocalStore  # noqa: E402

warnings.simplefilter("ignore")


class Slow(LocalStore):
    """A local store whose calls never return once it is told so."""

    hangs = False

    def exists(self, keys, deadline):
        answers = super().exists(keys, deadline)
        self.wait()
        return answers

    def get(self, keys, buffers, deadline):
        self.wait()
        return super().get(keys, buffers, deadline)

    def put(self, keys, buffers, deadline):
        answers = super().put(keys, buffers, deadline)
        self.wait()
        return answers

    def wait(self):
        if self.hangs:
            threading.Event().wait()


def say(*words):
    print(*words, flush=True)


def in_flight(directory):
    """A cache with a prefetch, a store, a backup and a load under way, whose store hangs for ever."""
    store = Slow(directory, OBJECT, 64 * 4096)
    cache, tier, _ = attached(store)
    for tokens in ABCD, EFGH:  # host memory has room for one of them
        stored(cache, tier, tokens)
        emptied(cache)
    assert prefetched(tier, cache, ABCD) == 8
    store.hangs = True
    tier.prefetch(EFGH)
    serve(cache, [9, 9, 8, 8])
    cache.drain()  # its store begins
    cache.tick()
    cache.begin_load_back(cache.match(ABCD))
    serve(cache, [7, 9])
    assert tier.in_flight >= 2
    assert cache._driver.plane.in_flight >= 1
    say("in flight")
    return cache, tier


def leave(directory):
    in_flight(directory)
    sys.exit(3)


def fail(directory):
    kept = in_flight(directory)
    raise LookupError(f"the engine failed with {len(kept)} things in flight")


def interrupted(directory):
    """Ctrl-C while a step waits for something else."""
    cache, _ = in_flight(directory)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        cache.tick()


def fork(directory):
    """A child that touches everything of its parent's, and leaves; its parent goes on."""
    store = LocalStore(directory, OBJECT, 64 * 4096)
    cache, tier, _ = attached(store)
    stored(cache, tier, ABCD)
    tier.prefetch(EFGH)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # so that a child that hangs dies, and is told of
        for name, method in {
            "match": lambda: cache.match(ABCD),
            "tick": cache.tick,
            "drain": cache.drain,
            "prefetch": lambda: tier.prefetch(EFGH),
            "counters": tier.counters,
            "guard": tier.guard.poll,
        }.items():
            try:
                method()
            except RuntimeError as error:
                say(name, "spawn" in str(error))
        say("closed", tier.guard.close(5))
        os._exit(0)  # as children of multiprocessing do; JAX alone does not survive the end of the interpreter here
    _, status = os.waitpid(child, 0)
    say("child", os.waitstatus_to_exitcode(status))
    emptied(cache)
    stored(cache, tier, EFGH)
    emptied(cache)
    assert prefetched(tier, cache, ABCD) == 8
    sound(cache, tier)
    tier.detach()
    say("parent is sound")


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
