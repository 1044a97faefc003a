"""The workloads of `make bench-peers`, and how our side is driven, against a plain list of pages."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.peers import page_lru, recorded
from benchmarks.peers.chats import chats
from benchmarks.peers.ours import Purecache
from benchmarks.peers.replay import PHASES, replay
from benchmarks.peers.workload import Workload, numbered

BUILDERS: dict[str, Callable[[], Workload]] = {
    "documents": lambda: recorded.mooncake(None, recorded.SYNTHETIC, 16, 40),
    "sessions": lambda: recorded.agentic(None, 2_000_000, 40),
    "chats": lambda: chats(200, 20, 16, 10_000),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_requests_share_what_their_ids_share(name: str) -> None:
    workload = BUILDERS[name]()
    again = BUILDERS[name]()
    tokens = [workload.tokens(number) for number in range(len(workload))]
    assert [len(each) for each in tokens] == workload.wholes.tolist()
    assert (workload.prompts <= workload.wholes).all()
    assert all((one == again.tokens(number)).all() for number, one in enumerate(tokens))
    assert all((each >= 0).all() and each.dtype == np.int32 for each in tokens)
    one, other = tokens[-1], tokens[-2]
    shared = _common(workload.ids[-1].tolist(), workload.ids[-2].tolist()) * workload.block
    assert _common(one.tolist(), other.tolist()) == min(shared, len(one), len(other))


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def test_an_id_stands_for_all_before_it() -> None:
    first, second, third = numbered([["a", "b"], ["c", "b"], ["a", "b", "d"]], 16)
    assert first.tolist() == third[:2].tolist()
    assert not set(first.tolist()) & set(second.tolist())


def test_a_head_keeps_its_share_of_filling_requests() -> None:
    workload = chats(200, 20, 16, 10_000)
    head = workload.head(50)
    assert (len(head), head.first) == (50, 25)
    assert workload.head(None) is workload


@pytest.mark.parametrize("form", ["int32", "array('q')", "list"])
def test_our_hits_are_those_of_a_list_of_pages(form: str) -> None:
    """Small programs only: chats of up to 16 pages in a cache of 40, so that most of them are evicted."""
    workload = chats(400, 8, 16, 640)
    short = [number for number in range(len(workload)) if workload.wholes[number] <= 256]
    ids = [workload.ids[number] for number in short]
    workload = Workload("short", 16, 640, workload.block, ids, workload.prompts[short], workload.wholes[short])
    exact = page_lru.hits(workload)
    found = replay(Purecache(16, 640, form), workload)
    assert found["hits"] == exact.tolist()
    assert 0 < found["hit_rate"] == page_lru.hit_rate(workload, exact) < 1
    assert found["complete"]
    assert set(found["phases"]) == set(PHASES)
    assert found["us"] == pytest.approx(sum(found["phases"].values()))
