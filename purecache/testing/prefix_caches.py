"""Checks for whoever implements a prefix cache of the shape that sglang-jax's scheduler uses."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

from purecache.testing.admission import Tally
from purecache.testing.memory import HostTier
from purecache.testing.scheduling import Scheduling
from purecache.testing.situations import SITUATIONS
from purecache.testing.stand_ins import CacheInitParams
from purecache.testing.state_scheduling import StateScheduling
from purecache.testing.state_situations import STATE_SITUATIONS
from purecache.testing.tier_situations import TIER_SITUATIONS
from purecache.testing.window_scheduling import WindowScheduling
from purecache.testing.window_situations import WINDOW_SITUATIONS
from purecache.testing.workload import Workload


def check_prefix_cache(
    make_cache: Callable[[CacheInitParams], Any],
    *,
    seeds: Iterable[int] = range(6),
    steps: int = 80,
    tokens: int | None = None,
    page_size: int = 1,
    dp_size: int = 1,
    is_eagle: bool = False,
    host: HostTier | None = None,
    overlap: bool = False,
    vocabulary: Any = None,
    skip: Collection[str] = (),
    window: int | None = None,
    window_tokens: int | None = None,
    states: int | None = None,
    interval: int | None = None,
) -> Tally:
    """Check that a prefix cache does what sglang-jax's scheduler relies on. Raises AssertionError saying what is wrong.

    `make_cache(params)` makes a cache; params has what sglang-jax's CacheInitParams has. It is called about 25 times
    and once per seed. First come simple situations; `skip` has names of those to leave out: "twice" is
    cache_finished_req called again, "deep" a prompt of 1,200 pages, "full" loading from the host when the device is
    full, and so on. Then come random lives of requests, `steps` events per seed. All but "deep" have `tokens` slots per
    rank.

    A cache with a host tier says so by `hicache_enabled`; it must have room for 24 pages, and think a few tokens worth
    loading. `host` tells how to look into it. With `overlap`, forwards take the arrays of the pool away while the
    scheduler prepares the next batch. `vocabulary` has the classes for keys and parameters, if the cache wants its own:
    RadixKey, MatchPrefixParams, EvictParams, InsertParams.

    `window`: the model has sliding windows of so many tokens, and a pool of `window_tokens` slots per rank for them;
    the cache is then one for an allocator of two pools (`purecache.testing.window_pools`). `states`: the model has
    recurrent layers, and so many states per rank, which the table of rows has (`purecache.testing.state_rows`); with
    `interval`, requests take a snapshot every so many tokens.

    Returns how often what has happened in the random lives.
    """
    if not __debug__:
        raise RuntimeError("check_prefix_cache consists of assertions: run it without -O")

    given = {"page_size": page_size, "dp_size": dp_size, "is_eagle": is_eagle, "overlap": overlap}
    given |= {"tokens": tokens or max(16 * page_size, 40), "host": host, "vocabulary": vocabulary}
    kind, situations, chunks = Scheduling, (*SITUATIONS, *TIER_SITUATIONS), (None, 2 * page_size, 3 * page_size + 1)
    if window is not None:
        # The window's pool may be smaller than a prompt: without chunks it could never be computed.
        kind, chunks = WindowScheduling, (4 * page_size, 2 * page_size, 3 * page_size + 1)
        given |= {"window": window, "window_tokens": window_tokens, "chunk": chunks[0]}
        situations = (*WINDOW_SITUATIONS, *TIER_SITUATIONS)
    if states is not None:
        kind, situations = StateScheduling, STATE_SITUATIONS
        given |= {"states": states, "interval": interval}
    opened: list[Scheduling] = []

    def start(**settings: Any) -> Scheduling:
        opened.append(kind(make_cache, **{**given, **settings}))
        return opened[-1]

    tally = Tally()
    try:
        for check in situations:
            name = check.__name__.removeprefix("_")
            if name not in skip:
                _say_where(f"[{name}]", functools.partial(check, start), opened)
                _close(opened)
        for seed in seeds:
            chunk = chunks[seed % 3]
            policy = ("fcfs", "lpm", "dfs-weight")[seed // 3 % 3]
            run = start(seed=seed, chunk=chunk, policy=policy, twice=0.0 if "twice" in skip else 0.2)
            workload = Workload(run, seed)
            for number in range(steps):
                _say_where(f"[seed {seed}, event {number}]", workload.event, opened)
            _say_where(f"[seed {seed}, at the end]", workload.finish, opened)
            tally.add(run.tally)
            _close(opened)
    except BaseException:
        # Closed nevertheless; but a cache that is wrong may not even close, which must not hide what is wrong.
        with contextlib.suppress(Exception):
            _close(opened)
        raise
    return tally


def _say_where(where: str, what: Callable[[], Any], opened: list[Scheduling]) -> None:
    try:
        what()
    except AssertionError as error:
        calls = ", ".join(opened[-1].caller.history) if opened else ""
        raise AssertionError(f"{where} {error}\nThe last calls were: {calls}") from error


def _close(opened: list[Scheduling]) -> None:
    while opened:
        opened.pop().close()
