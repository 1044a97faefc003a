"""MooncakeStore over a real master and real processes that are killed, fill up, or whose files are damaged."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stores.engines.mooncake_server import SIZE, Cluster, content, main, poll_until, run_scenario, soon

from purecache.stores.envelope import TRAILER
from purecache.stores.guard import Guard, Kind, Request
from purecache.stores.interface import Fetch, Presence

YES, NO, UNKNOWN = Presence.YES, Presence.NO, Presence.UNKNOWN
HIT, MISSING, FAILED = Fetch.HIT, Fetch.MISSING, Fetch.FAILED
SEGMENT = 64 << 20
BLOCKED = 6.0
"""Seconds that a call may take which is the first to find the master dead. The engine takes 4.3."""


def put(store: Any, *keys: str) -> list[bool]:
    return store.put(keys, [memoryview(bytearray(content(key))) for key in keys], soon())


def get(store: Any, *keys: str) -> list[Fetch]:
    buffers = [memoryview(bytearray(SIZE)) for _ in keys]
    answers = store.get(keys, buffers, soon())
    for key, buffer, answer in zip(keys, buffers, answers, strict=True):
        assert answer is not HIT or buffer == content(key)
    return answers


def seconds_of(call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


def the_master_is_killed_and_restarted(cluster: Cluster) -> None:
    cluster.start_master()
    store = cluster.open(segment=SEGMENT, cooldown="1")
    assert put(store, "a", "b") == [True, True]
    cluster.kill_master()
    for losses in (1, 2):  # the engine answers the first call at once, and keeps later ones waiting
        seconds = 0.0
        while store.stats()["master_losses"] < losses:
            seconds = max(seconds, seconds_of(lambda: dead(store.exists(["a", "b"], soon()), UNKNOWN)))
            time.sleep(0.01)
        assert seconds < BLOCKED
        # While it cools down, none of these reaches the engine.
        calls = (
            lambda: dead(get(store, "a", "b"), FAILED),
            lambda: dead(put(store, "a", "c"), False),
            lambda: dead(store.exists(["a", "b"], soon()), UNKNOWN),
            lambda: dead(store.delete(["a", "b"], soon()), False),
            store.clear,
        )
        assert seconds_of(lambda calls=calls: [call() for call in calls]) < 0.5
        numbers = store.stats()
        assert (numbers["master_losses"], numbers["master_down"], numbers["objects"]) == (losses, 1, -1)
    cluster.start_master()
    poll_until(lambda: put(store, "c") == [True], "the store works again", 20.0)
    assert store.exists(["a", "b", "c"], soon()) == [NO, NO, YES]
    assert get(store, "a", "b", "c") == [MISSING, MISSING, HIT]
    assert put(store, "a") == [True]
    assert get(store, "a") == [HIT]


def dead(answers: list[Any], failure: Any) -> None:
    assert answers == [failure, failure]


def without_a_master_nothing_is_opened(cluster: Cluster) -> None:
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{cluster.port}: no master answers"):
        cluster.open()
    assert time.monotonic() - begin < 5


def the_owner_of_a_segment_is_killed(cluster: Cluster) -> None:
    cluster.start_master(1000, "--client_ttl=1")
    store = cluster.open()
    assert put(store, "a") == [False]  # nobody has lent anything
    with cluster.client(segment=SEGMENT) as owner:
        assert owner.put("a", "b") == [True, True]
        assert get(store, "a", "b", "c") == [HIT, HIT, MISSING]
        owner.kill()
        begin = time.monotonic()
        answers = get(store, "a", "b", "c")
        assert answers == [FAILED, FAILED, MISSING]
        assert put(store, "d") == [False]
        assert time.monotonic() - begin < 3
        poll_until(lambda: store.exists(["a", "b"], soon()) == [NO, NO], "the master has found out")
    assert get(store, "a", "b") == [MISSING, MISSING]
    assert store.stats()["master_losses"] == 0
    with cluster.client(segment=SEGMENT) as owner:
        poll_until(lambda: put(store, "a") == [True], "there is room again")
        assert owner.get("a") == ["HIT"]


def a_full_cluster_refuses_to_write(cluster: Cluster) -> None:
    """All that was written is leased, so that nothing can be evicted."""
    cluster.start_master(60_000)
    size = 1 << 20
    store = cluster.open(size, segment=16 << 20)
    guard = Guard(store)
    keys = [f"k{index}" for index in range(24)]
    buffers = [memoryview(bytearray(content(key, size))) for key in keys]
    done = store.put(keys, buffers, soon())
    assert 8 <= done.count(True) <= 16
    assert store.exists(keys, soon()) == [YES if each else NO for each in done]
    into = [memoryview(bytearray(size)) for _ in keys]
    assert store.get(keys, into, soon()) == [HIT if each else MISSING for each in done]
    assert all(a == b for a, b, each in zip(buffers, into, done, strict=True) if each)
    assert store.put(keys[:1], buffers[:1], soon()) == [True]  # it is there
    assert store.stats()["master_losses"] == 0
    assert not guard.breaker.is_open
    gone = [key for key, each in zip(keys, done, strict=True) if each][:4]
    assert store.delete(gone, soon()) == [True] * 4
    late = [key for key, each in zip(keys, done, strict=True) if not each][:2]
    assert store.put(late, [memoryview(bytearray(content(key, size))) for key in late], soon()) == [True, True]


def bits_that_flip_on_a_disk_are_noticed(cluster: Cluster) -> None:
    """Pages go to the disk, are evicted from memory, and are read from there: the engine calls that a success."""
    cluster.start_master(20, "--enable_offload=true", "--eviction_high_watermark_ratio=0.4", "--eviction_ratio=0.6")
    size, directory = 256 << 10, cluster.directory / "ssd"
    store = cluster.open(size, segment=16 << 20, ssd=str(directory))
    with pytest.raises(ValueError, match="another store has its ssd there"):
        cluster.open(size, segment=16 << 20, ssd=str(directory))
    guard = Guard(store, timeout=20.0)
    keys = [f"page{index}" for index in range(6)]
    pages = [memoryview(bytearray(content(key, size))) for key in keys]
    assert ask(guard, Kind.PUT, keys, pages) == [True] * 6
    number = 0

    def are_on_disk_only() -> bool:
        nonlocal number
        number += 8
        fill = [f"fill{number - index}" for index in range(8)]
        store.put(fill, [pages[0]] * 8, soon())
        found = store._client.batch_get_replica_desc([f"purecache/{key}" for key in keys]).values()
        return len(found) == 6 and all(each.is_local_disk_replica() for replicas in found for each in replicas)

    poll_until(are_on_disk_only, "the pages are on disk only", 30.0)
    assert read(guard, keys, pages) == [HIT] * 6
    damage(directory, keys[1])
    damage(directory, keys[4])
    assert read(guard, keys, pages) == [HIT, FAILED, HIT, HIT, FAILED, HIT]
    assert guard.stats()["get_corrupt"] == 2
    assert ask(guard, Kind.EXISTS, keys) == [YES, NO, YES, YES, NO, YES]
    assert ask(guard, Kind.PUT, [keys[1]], [pages[1]]) == [True]
    assert read(guard, keys, pages) == [HIT, HIT, HIT, HIT, MISSING, HIT]


FILES = {
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
}
"""The engine reads these from the environment: a file per object, written soon."""


def ask(guard: Guard, kind: Kind, keys: list[str], buffers: list[memoryview] | None = None) -> list[Any]:
    assert guard.start(Request(kind, 1, keys, buffers or []))
    assert guard.wait(20)
    (done,) = guard.poll()
    return done.answers


def read(guard: Guard, keys: list[str], pages: list[memoryview]) -> list[Fetch]:
    buffers = [memoryview(bytearray(len(page))) for page in pages]
    answers = ask(guard, Kind.GET, keys, buffers)
    assert all(
        buffer[:-TRAILER] == page[:-TRAILER]
        for buffer, page, answer in zip(buffers, pages, answers, strict=True)
        if answer is HIT
    )
    return answers


def damage(directory: Path, key: str) -> None:
    """Flip a bit in the middle of the one file of a key."""
    (file,) = [path for path in directory.rglob(f"*{key}*") if path.is_file()]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


SCENARIOS = {
    each.__name__: each
    for each in (
        the_master_is_killed_and_restarted,
        without_a_master_nothing_is_opened,
        the_owner_of_a_segment_is_killed,
        a_full_cluster_refuses_to_write,
        bits_that_flip_on_a_disk_are_noticed,
    )
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_real_mooncake_that_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable, value in FILES.items():
        monkeypatch.setenv(variable, value)
    run_scenario(__file__, name, tmp_path)


if __name__ == "__main__":
    main(SCENARIOS)
