"""What the tests of recordings share: lives of caches that are recorded, and their replays."""

import numpy as np
from support import new_cache, serve, settle, tiny

from purecache.replay import Player, Recorder, Recording

AB, CD = [1, 1, 2, 2], [3, 3, 4, 4]


def recording(cache, recorder, smallest=16):
    """Let a cache that did nothing yet be recorded."""
    driver = cache._driver
    driver._record = recorder
    recorder.begin(cache.config, smallest, lambda: driver._current[0])
    return recorder


def live(cache):
    """A few requests that meet, are evicted, come back from host, and a reset."""
    for number in range(6):
        serve(cache, [*AB, *CD[: 2 * (number % 3)], number], namespace="a" if number % 4 == 3 else None)
        settle(cache)
        cache.tick()
    match = cache.match(AB)
    receipt = cache.lock(match.device_node)
    cache.evict(8)
    cache.unlock(receipt)
    cache.drain()
    cache.evict(8)
    cache.load_back(cache.match(AB))
    cache.match_many([AB, CD, []])
    lent = cache.allocate(3)
    cache.reset()
    cache.release(lent)
    serve(cache, CD, rank=1)
    settle(cache)
    cache.drain()


def recorded(path, config=None, life=live, **options):
    """Record a life; the cache, and the recording."""
    cache, _ = new_cache(config or tiny(), check_laws=False)
    recorder = recording(cache, Recorder(path, **options))
    life(cache)
    assert recorder.close()
    assert (recorder.stopped, recorder.lost) == (None, 0)
    return cache, Recording(path)


def verified(recording):
    """Replay a recording, which must be equal to its end; the player."""
    player = Player(recording)
    report = player.verify()
    assert report.difference is None
    assert report.events == len(recording) > 0
    return player


def same_arrays(state, other, hashed):
    """Whether two states are the same, bit for bit; hashed: but for what a hashed recording has not."""
    for name in ("orders", "shelves", "ledger", *(() if hashed else ("tokens", "links", "nodes", "books"))):
        np.testing.assert_array_equal(getattr(state, name), getattr(other, name), err_msg=name)
    rows = [row for row in range(np.asarray(state.nodes).shape[0]) if not (hashed and 11 <= row < 15)]
    np.testing.assert_array_equal(np.asarray(state.nodes)[rows], np.asarray(other.nodes)[rows])
