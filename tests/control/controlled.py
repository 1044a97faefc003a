"""What the tests of the control of a cache share: a cache without bytes that a thread ticks."""

import threading
import time
from contextlib import contextmanager

import numpy as np
from support import new_cache, tiny

A, AB, ABC, D = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [4, 4]


def plain_cache(*prompts, **options):
    """A cache that has these prompts, without bytes."""
    cache = new_cache(tiny(**options), plane=False)[0]
    for prompt in prompts:
        run(cache, prompt)
    cache.drain()
    return cache


def run(cache, tokens, namespace=None):
    """A request from its beginning to its end."""
    match, receipt = cache.admit(tokens, namespace=namespace)
    new = cache.allocate(len(tokens) // cache.config.page_size - len(match.device_pages))
    return cache.finish(tokens, np.concatenate([match.device_pages, new]), receipt, namespace=namespace)


@contextmanager
def ticking(cache):
    """Ticks the cache on a thread of its own, as a scheduler does."""
    stop = threading.Event()

    def loop():
        while not stop.is_set():
            cache.tick()
            time.sleep(0.001)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()
