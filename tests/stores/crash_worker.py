"""A process that writes to and reads from a local store until it is killed; starts fast.

`import purecache` loads JAX, which takes seconds. The stores need none of it: in processes started with `BARE`, a bare
package of that name is put in place before the first import, and lets `purecache.stores` load alone.
"""

import hashlib
import importlib.util
import math
import os
import random
import sys
import time
import types

BARE = {**os.environ, "PURECACHE_TESTS_BARE": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
"""The environment of a process that imports no JAX; with the option -S it starts faster still."""
if "PURECACHE_TESTS_BARE" in os.environ:
    bare = types.ModuleType("purecache")
    found = importlib.util.find_spec("purecache")  # which imports nothing, and finds an installed package, too
    assert found is not None
    bare.__path__ = list(found.submodule_search_locations or ())
    sys.modules["purecache"] = bare

from purecache.stores import envelope  # noqa: E402
from purecache.stores.interface import Fetch  # noqa: E402
from purecache.stores.local import LocalStore  # noqa: E402

PAGE = 16 * 1024
SIZE = PAGE + envelope.TRAILER
BATCH = 8


def content(key, size):
    """`size` bytes that belong to a key; every 64 bytes differ."""
    block = hashlib.shake_128(key.encode()).digest(min(size, 1024))
    return (block * (size // len(block) + 1))[:size]


def page(key, size):
    """A sealed page of `size` bytes with its trailer."""
    buffer = memoryview(bytearray(content(key, size)))
    envelope.seal(key, buffer)
    return buffer


def read(store, keys, size):
    """Answers and buffers of a get."""
    buffers = [memoryview(bytearray(size)) for _ in keys]
    return list(zip(store.get(keys, buffers, math.inf), buffers, strict=True))


def check(store, keys):
    """Numbers of hits, of hits whose trailer says no, and of those that it lets pass with bytes of something else."""
    hits = torn = wrong = 0
    for key, (answer, buffer) in zip(keys, read(store, keys, SIZE), strict=True):
        if answer == Fetch.HIT:
            hits += 1
            if not envelope.is_intact(key, buffer):
                torn += 1
            elif buffer[:PAGE] != content(key, PAGE):
                wrong += 1
    return hits, torn, wrong


def open_store(directory, slots):
    """The store of the workers."""
    return LocalStore(directory, SIZE, slots * (PAGE + 4096))


def main(directory, seed, seconds, slots, slow):
    """Put and get random batches of three times as many keys as there are slots.

    Prints at first the number of slots reclaimed, and at the end sums of all. With `slow`, some reads take 1 ms longer
    than here: a slow disk, under which the slots are used anew meanwhile.
    """
    chance = random.Random(seed)
    if slow:
        preadv = os.preadv
        os.preadv = lambda *args: (time.sleep(0.001 * (chance.random() < 0.2)), preadv(*args))[1]
    store = open_store(directory, slots)
    pages = {}
    print(store.stats()["reclaimed"], flush=True)
    totals = [0, 0, 0]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        keys = [f"k{chance.randrange(3 * slots)}" for _ in range(BATCH)]
        for key in keys:
            if key not in pages:
                pages[key] = page(key, SIZE)
        store.put(keys, [pages[key] for key in keys], math.inf)
        keys = [f"k{chance.randrange(3 * slots)}" for _ in range(3 * BATCH)]
        totals = [total + number for total, number in zip(totals, check(store, keys), strict=True)]
    numbers = store.stats()
    store.close()
    print(*totals, numbers["evictions"], numbers["failures"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "slow")
