"""MooncakeStore over a real master and real client processes, with TCP."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from stores.engines.mooncake_server import SIZE, Client, Cluster, content, main, run_scenario, soon

from purecache.stores.engines.mooncake_memory import address_of
from purecache.stores.engines.mooncake_objects import Layout
from purecache.stores.interface import Fetch, Presence
from purecache.stores.staging import StagingRing
from purecache.testing.stores import check_store

YES, NO = Presence.YES, Presence.NO
HIT, MISSING, FAILED = Fetch.HIT, Fetch.MISSING, Fetch.FAILED
SEGMENT = 64 << 20
LAYOUTS: list[dict[str, Any]] = [{"objects": "page"}, {"objects": "k"}, {"objects": "k_v", "layers": 4}]


def page(key: str, size: int = SIZE) -> memoryview:
    return memoryview(bytearray(content(key, size)))


def get(store: Any, *keys: str) -> list[Fetch]:
    buffers = [memoryview(bytearray(SIZE)) for _ in keys]
    answers = store.get(keys, buffers, soon())
    for key, buffer, answer in zip(keys, buffers, answers, strict=True):
        assert answer is not HIT or buffer == content(key)
    return answers


def conforms_with_one_object(cluster: Cluster) -> None:
    check(cluster, {"objects": "page"})


def conforms_with_two_objects_in_pieces(cluster: Cluster) -> None:
    check(cluster, {"objects": "k_v", "layers": 3})


def check(cluster: Cluster, options: dict[str, Any]) -> None:
    """The conformance kit, in a cluster that has something of others in it. The stores share a client that stays open:
    to close one takes a second."""
    from purecache.stores.engines.mooncake import MooncakeStore
    from purecache.stores.engines.mooncake_client import connect

    cluster.start_master()
    client = Kept(connect(("127.0.0.1", cluster.port))[0])
    metrics = ("127.0.0.1", cluster.metrics_port)
    made: list[Any] = []

    def make() -> Any:
        layout = Layout("ours", options["objects"], options.get("layers", 1))
        made.append(MooncakeStore(client, layout, object_bytes=SIZE, metrics=metrics))
        made[-1].clear()
        return made[-1]

    with cluster.client(segment=SEGMENT, prefix="theirs", **options) as other:
        assert other.put("a", "b") == [True, True]
        check_store(make, SIZE)
        assert client.closed == len(made) > 10
        assert other.get("a", "b") == ["HIT", "HIT"]


class Kept:
    """A client that is not closed."""

    def __init__(self, client: Any) -> None:
        self.client, self.closed = client, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def close(self) -> None:
        self.closed += 1


def two_processes_share_pages(cluster: Cluster) -> None:
    share(cluster, {"objects": "page"})


def two_processes_share_pages_named_k_and_v(cluster: Cluster) -> None:
    share(cluster, {"objects": "k_v", "layers": 4})


def share(cluster: Cluster, options: dict[str, Any]) -> None:
    cluster.start_master()
    with cluster.client(segment=SEGMENT, **options) as owner, cluster.client(**options) as reader:
        check_sharing(owner, reader)


def check_sharing(owner: Client, reader: Client) -> None:
    keys = [f"k{index}" for index in range(12)]
    holes = {0, 5, 6, 11}
    wanted = [index not in holes for index in range(12)]
    assert owner.put(*[key for key, there in zip(keys, wanted, strict=True) if there]) == [True] * 8
    assert reader.exists(*keys) == ["YES" if there else "NO" for there in wanted]
    assert reader.get(*keys) == ["HIT" if there else "MISSING" for there in wanted]
    assert reader.put("fromreader") == [True]
    assert owner.get("fromreader", "k1") == ["HIT", "HIT"]
    assert reader.delete("k1", "k0") == [True, True]  # leased, and never there
    assert owner.exists("k1", "k2") == ["NO", "YES"]


def objects_have_the_names_and_bytes_of_k_and_v(cluster: Cluster) -> None:
    cluster.start_master()
    store = cluster.open(segment=SEGMENT, objects="k_v", layers=2, prefix="a.b/c")
    ring = StagingRing(1, 8 * 100 + 3)
    store.register(ring.region)
    (slot,) = ring.acquire(1) or []
    sealed = ring.sealed(slot)
    sealed[:] = random.Random(1).randbytes(len(sealed))
    assert store.put(["key"], [sealed], soon()) == [True]
    whole, half = bytes(sealed), (8 * 100 + 3) // 4
    raw = store._client
    assert raw.get("a.b/c/key_k") == whole[:half] + whole[2 * half : 3 * half]
    assert raw.get("a.b/c/key_v") == whole[half : 2 * half] + whole[3 * half :]
    assert store.stats()["objects"] == 1
    raw.batch_remove(["a.b/c/key_k"], True)
    before = bytes(sealed)
    assert store.exists(["key"], soon()) == [NO]
    assert store.get(["key"], [memoryview(bytearray(len(sealed)))], soon()) == [MISSING]
    assert store.stats()["objects"] == 0
    assert store.put(["key"], [sealed], soon()) == [True]
    assert bytes(sealed) == before
    raw.batch_remove(["a.b/c/key_v"], True)
    assert store.exists(["key"], soon()) == [NO]
    assert store.delete(["key"], soon()) == [True]
    assert raw.batch_is_exist(["a.b/c/key_k", "a.b/c/key_v"]) == [0, 0]
    store.close()


def objects_of_another_length_are_replaced(cluster: Cluster) -> None:
    """Also under a lease; a put of what is there changes nothing."""
    cluster.start_master(lease_ms=60_000)
    stores = [
        cluster.open(segment=0 if index else SEGMENT, prefix=f"layout{index}", **layout)
        for index, layout in enumerate(LAYOUTS)
    ]
    for store in stores:
        assert store.put(["a", "b"], [page("other", SIZE // 2), page("b")], soon()) == [True, True]
        assert store.exists(["a", "b"], soon()) == [YES, YES]
        assert get(store, "a", "b") == [FAILED, HIT]
        assert store.put(["b", "a", "c"], [page("B"), page("a"), page("c")], soon()) == [True, True, True]
        assert get(store, "a", "b", "c") == [HIT, HIT, HIT]  # b is what was written first
        assert store.delete(["a"], soon()) == [True]
        assert get(store, "a", "b") == [MISSING, HIT]


def clear_takes_only_what_is_under_the_prefix(cluster: Cluster) -> None:
    cluster.start_master(lease_ms=60_000)
    prefixes = ["a.b", "axb", "a.b/c", "x/a.b", "a.bc"]
    stores = {prefix: cluster.open(segment=SEGMENT if prefix == "a.b" else 0, prefix=prefix) for prefix in prefixes}
    for store in stores.values():
        assert store.put(["k"], [page("k")], soon()) == [True]
        assert store.exists(["k"], soon()) == [YES]
    numbers = stores["a.b"].stats()
    assert (numbers["objects"], numbers["cluster_objects"]) == (1, 5)
    assert numbers["capacity"] == SEGMENT
    assert numbers["bytes"] >= 5 * SIZE
    stores["a.b"].clear()
    assert [store.exists(["k"], soon()) for store in stores.values()] == [[NO], [YES], [YES], [YES], [YES]]
    assert stores["a.b"].stats()["objects"] == 0


def a_transfer_engine_of_the_process_is_used(cluster: Cluster) -> None:
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

    cluster.start_master()
    with cluster.client(segment=SEGMENT) as owner:
        assert owner.put("a") == [True]
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        store = cluster.open(engine=engine)
        region = StagingRing(1, SIZE).region
        store.register(region)
        address = address_of(region)
        assert engine.register_memory(address, region.nbytes) != 0  # it is registered with this very engine
        assert get(store, "a", "b") == [HIT, MISSING]
        assert store.put(["b"], [page("b")], soon()) == [True]
        assert owner.get("b") == ["HIT"]


def many_small_pieces_go_over_tcp(cluster: Cluster) -> None:
    """Of which the engine loses some, or waits for 60 s, where a call has more of them than it queues."""
    cluster.start_master()
    options = {"objects": "k_v", "layers": 32, "size": 16 << 10}
    with cluster.client(segment=SEGMENT, **options) as owner, cluster.client(**options) as other:
        keys = [f"k{index}" for index in range(48)]
        assert other.put(*keys) == [True] * 48
        assert owner.get(*keys) == ["HIT"] * 48


def pins_keep_pages_in_memory(cluster: Cluster) -> None:
    """What isn't pinned is evicted, although it came first."""
    cluster.start_master(20, "--eviction_high_watermark_ratio=0.8", "--eviction_ratio=0.2")
    size = 256 << 10
    plain = cluster.open(size, segment=16 << 20, prefix="plain")
    hard = cluster.open(size, prefix="hard", hard_pin=True)
    soft = cluster.open(size, prefix="soft", soft_pin="60")
    for store in (plain, hard, soft):
        assert store.put(["a", "b"], [page("a", size), page("b", size)], soon()) == [True, True]
    written, end = 0, soon()
    while written < 96:
        time.sleep(0.03)  # longer than a lease; eviction works beside the writers
        written += plain.put([f"k{written}-{index}" for index in range(6)], [page("k", size)] * 6, soon()).count(True)
        assert time.monotonic() < end
    assert plain.exists(["a", "b"], soon()) == [NO, NO]
    assert hard.exists(["a", "b"], soon()) == [YES, YES]
    assert soft.exists(["a", "b"], soon()) == [YES, YES]


SCENARIOS = {
    each.__name__: each
    for each in (
        conforms_with_one_object,
        conforms_with_two_objects_in_pieces,
        two_processes_share_pages,
        two_processes_share_pages_named_k_and_v,
        objects_have_the_names_and_bytes_of_k_and_v,
        objects_of_another_length_are_replaced,
        clear_takes_only_what_is_under_the_prefix,
        a_transfer_engine_of_the_process_is_used,
        many_small_pieces_go_over_tcp,
        pins_keep_pages_in_memory,
    )
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_real_mooncake(name: str, tmp_path: Path):
    run_scenario(__file__, name, tmp_path)


if __name__ == "__main__":
    main(SCENARIOS)
