"""NixlSlabStore with a real NIXL agent: the contract, restarts, damage, and memory that NIXL doesn't know."""

import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from purecache.stores.interface import Fetch, Presence
from purecache.stores.local import LocalStore, LocalStoreError
from purecache.stores.registry import open_store
from purecache.testing.stores import check_store

try:
    from purecache.stores.engines import nixl_slab
except ImportError as error:
    pytest.skip(f"needs NIXL ({error}): pip install --no-deps nixl-cu12==1.5.1", allow_module_level=True)

SIZE = 9000  # two blocks and a rest
SLOT = 12288
HIT, MISSING, FAILED = Fetch.HIT, Fetch.MISSING, Fetch.FAILED
MODES = [("aio", True), ("uring", True), ("uring", False), ("aio", False)]
Open = Callable[..., nixl_slab.NixlSlabStore]


def content(key: str) -> bytes:
    return (key.encode() + b"/") * SIZE


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def put(store: Any, *keys: str) -> list[bool]:
    return store.put(keys, [memoryview(bytearray(content(key)[:SIZE])) for key in keys], soon())


def get(store: Any, *keys: str) -> list[Fetch]:
    """Answers of a get; hits are compared, and nothing may be written behind the buffers."""
    memory = [bytearray(b"\xa5" * (SIZE + 5000)) for _ in keys]
    answers = store.get(keys, [memoryview(each)[:SIZE] for each in memory], soon())
    for key, each, answer in zip(keys, memory, answers, strict=True):
        assert answer != HIT or each[:SIZE] == content(key)[:SIZE]
        assert each[SIZE:] == b"\xa5" * 5000
    return answers


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    stores: list[nixl_slab.NixlSlabStore] = []

    def open_slab(slots: int = 200, **options: Any) -> nixl_slab.NixlSlabStore:
        stores.append(nixl_slab.NixlSlabStore(tmp_path / "store", SIZE, slots * SLOT, **options))
        return stores[-1]

    yield open_slab
    for store in stores:
        store.close()


@pytest.mark.parametrize(("engine", "direct"), MODES[:3])
def test_the_contract(tmp_path: Path, engine: str, direct: bool):
    numbers = itertools.count()
    query = f"capacity={40 * 8192}&engine={engine}&direct={direct}"
    check_store(lambda: open_store(f"nixl://{tmp_path}/{next(numbers)}?{query}", 5000), 5000, bounded=True)


@pytest.mark.parametrize(("engine", "direct"), MODES)
def test_holes_over_several_groups(opened: Open, engine: str, direct: bool):
    store = opened(engine=engine, direct=direct)
    keys = [f"k{i}" for i in range(150)]
    assert put(store, *keys[1::2]) == [True] * 75
    assert get(store, *keys) == [MISSING, HIT] * 75
    assert store.exists(keys[:2], soon()) == [Presence.NO, Presence.YES]


def parts(monkeypatch: pytest.MonkeyPatch, store: nixl_slab.NixlSlabStore) -> list[int]:
    """The lengths of what NIXL is asked to move."""
    moved, start = list[int](), store._slab._agent.start

    def watches(operation: str, address: int, nbytes: int, *rest: Any) -> Any:
        moved.append(nbytes)
        return start(operation, address, nbytes, *rest)

    monkeypatch.setattr(store._slab._agent, "start", watches)
    return moved


@pytest.mark.parametrize(
    ("direct", "shift", "known", "moved"),
    [
        (True, 0, True, [8192, 4096]),
        (True, 8, True, [SLOT]),
        (True, 0, False, [SLOT]),
        (False, 8, True, [SIZE]),
        (False, 0, False, [SIZE]),
    ],
)
def test_registered_memory_is_used_in_place(
    opened: Open, monkeypatch: pytest.MonkeyPatch, direct: bool, shift: int, known: bool, moved: list[int]
):
    store = opened(engine="uring", direct=direct)
    region = memoryview(mmap.mmap(-1, 4 * SLOT))
    if known:
        store.register(region)
        store.register(region)  # twice is no harm
    first, second = (region[start + shift : start + shift + SIZE] for start in (0, 2 * SLOT))
    first[:] = content("a")[:SIZE]
    seen = parts(monkeypatch, store)
    assert store.put(["a"], [first], soon()) == [True]
    region[SIZE + shift : 2 * SLOT] = b"\xa5" * (2 * SLOT - SIZE - shift)
    assert store.get(["a"], [second], soon()) == [HIT]
    assert seen == moved * 2
    assert second == first
    assert bytes(region[2 * SLOT + shift + SIZE :]) == bytes(2 * SLOT - SIZE - shift)
    assert get(store, "a") == [HIT]


def test_a_slab_that_lost_its_end_fails_page_by_page(opened: Open, tmp_path: Path):
    for engine, direct in MODES:
        store = opened(slots=40, engine=engine, direct=direct)
        store.clear()
        keys = [f"k{i}" for i in range(40)]
        put(store, *keys)
        os.truncate(tmp_path / "store" / "pages", 25 * SLOT + 4096)
        answers = get(store, *keys)
        assert (answers.count(HIT), answers.count(FAILED)) == (25, 15)
        store.close()
        assert get(opened(slots=40), *keys) == [MISSING] * 40  # made anew when it is opened


@pytest.mark.parametrize("engine", list(nixl_slab.ENGINES))
def test_an_error_is_that_of_one_page_and_comes_when_nothing_runs(opened: Open, tmp_path: Path, engine: str):
    """Fails with NIXL's engine posix_aio, which therefore is not offered."""
    store = opened(engine=engine)
    keys = [f"k{i}" for i in range(64)]
    put(store, *keys)
    os.truncate(tmp_path / "store" / "pages", 63 * SLOT)
    region = memoryview(mmap.mmap(-1, 64 * SLOT))
    store.register(region)
    buffers = [region[i * SLOT : i * SLOT + SIZE] for i in range(64)]
    for _ in range(5):
        assert store.get(keys, buffers, soon()) == [*[HIT] * 63, FAILED]
        region[:] = bytes(64 * SLOT)
        assert get(store, *keys[:32]).count(FAILED) <= 1  # time for what would come late
        assert bytes(region) == bytes(64 * SLOT)


def test_a_transfer_that_cannot_start_fails_alone(opened: Open, monkeypatch: pytest.MonkeyPatch):
    store = opened()
    assert put(store, "a", "b") == [True, True]
    start = store._slab._agent.start
    calls = itertools.count()

    def refuses(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise OSError("no")
        return start(*arguments)

    monkeypatch.setattr(store._slab._agent, "start", refuses)
    assert put(store, "c", "d", "e") == [True, False, True]
    assert get(store, "c", "d", "e", "a") == [HIT, MISSING, HIT, HIT]
    assert store.stats()["pending"] == 0


def test_a_second_process_finds_the_pages(opened: Open, tmp_path: Path):
    store = opened(direct=True)
    put(store, "a", "b")
    store.close()
    text = (
        "import sys, time; from purecache.stores.registry import open_store\n"
        f"store = open_store('nixl://{tmp_path}/store?capacity={200 * SLOT}&engine=uring', {SIZE})\n"
        f"buffers = [memoryview(bytearray({SIZE})) for _ in 'abc']\n"
        "answers = store.get(['a', 'none', 'b'], buffers, time.monotonic() + 20)\n"
        f"right = [bytes(buffers[i]) == ((key + '/') * {SIZE}).encode()[:{SIZE}] for i, key in ((0, 'a'), (2, 'b'))]\n"
        "store.close(); sys.exit(0 if ([int(each) for each in answers], right) == ([1, 0, 1], [True, True]) else 1)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_files_are_those_of_a_local_store(opened: Open, tmp_path: Path):
    store = opened()
    put(store, "a")
    store.close()
    local = LocalStore(tmp_path / "store", SIZE, 200 * SLOT)
    assert put(local, "b") == [True]
    assert get(local, "a", "b") == [HIT, HIT]
    local.close()
    assert get(opened(engine="uring"), "b", "a") == [HIT, HIT]


def test_no_group_is_begun_after_the_deadline(opened: Open, monkeypatch: pytest.MonkeyPatch):
    store = opened()
    keys = [f"k{i}" for i in range(150)]
    put(store, *keys)
    wait = store._slab._agent.wait

    def slow(handle: Any) -> bool:
        time.sleep(0.004)
        return wait(handle)

    monkeypatch.setattr(store._slab._agent, "wait", slow)
    buffers = [memoryview(bytearray(SIZE)) for _ in keys]
    answers = store.get(keys, buffers, soon(0.1))
    assert answers[:64] == [HIT] * 64
    assert answers[-1] == FAILED


def test_a_call_that_waits_for_another_keeps_its_deadline(opened: Open):
    store = opened()
    put(store, "a")
    with store._slab._turn:
        before = time.monotonic()
        assert store.get(["a"], [memoryview(bytearray(SIZE))], before + 0.2) == [FAILED]
        assert time.monotonic() - before < 0.7
    assert get(store, "a") == [HIT]


def test_threads(opened: Open):
    store, wrong = opened(engine="uring"), []

    def work(number: int) -> None:
        keys = [f"{number}-{i}" for i in range(20)]
        for _ in range(5):
            wrong.extend(each for each in put(store, *keys) if each is not True)
            wrong.extend(each for each in get(store, *keys) if each is not HIT)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nixl://host/dir?capacity=1GiB", "absolute path"),
        ("nixl:///dir", "how much it may hold"),
        ("nixl:///dir?capacity=1GiB&engine=fast", "no engine 'fast'; there are aio"),
        ("nixl:///dir?capacity=1GiB&depth=1", "unknown option depth"),
    ],
)
def test_mistakes(url: str, message: str):
    with pytest.raises(ValueError, match=message):
        open_store(url, SIZE)


def test_an_agent_that_cannot_be_made_is_told_at_opening(opened: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl_slab, "ENGINES", {"aio": "no_such_parameter"})
    monkeypatch.setattr(nixl_slab, "Agent", lambda *_: (_ for _ in ()).throw(OSError("NIXL can't load it")))
    with pytest.raises(LocalStoreError, match="NIXL can't load it"):
        opened()
