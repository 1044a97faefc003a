"""AibrixStore over the real AIBrix (RocksDB and files): in an environment of its own, see environments.py."""

import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import FAILED, HIT, MISSING, NO, UNKNOWN, YES, Objects, flip, soon

from purecache.stores.envelope import TRAILER
from purecache.stores.interface import Fetch
from purecache.stores.registry import open_store
from purecache.testing import check_store

if importlib.util.find_spec("aibrix_kvcache") is None:
    pytest.skip("AIBrix is not installed here: make test-stores runs this where it is", allow_module_level=True)
from purecache.stores.engines import aibrix
from purecache.stores.engines.aibrix import CHUNK, AibrixStore

SIZE = 4096 + TRAILER
OBJECTS = Objects(SIZE, careful=False)
page, put, get = OBJECTS.content, OBJECTS.put, OBJECTS.get
OTHER_PROCESS = """
import sys, time
from purecache.stores.engines.aibrix import AibrixStore
store = AibrixStore(sys.argv[1], int(sys.argv[3]), sys.argv[2])
keys = [f"k{i}" for i in range(40)]
late = time.monotonic() + 60
size = int(sys.argv[3])
assert all(store.put(keys, [memoryview(key.encode() * size)[:size] for key in keys], late))
print("written", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["ROCKSDB", "SHFS"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def store(backend: str, tmp_path: Path) -> Iterator[AibrixStore]:
    opened = AibrixStore(tmp_path / "kv", SIZE, backend)
    yield opened
    opened.close()


def test_the_contract(backend: str, tmp_path: Path):
    numbers = iter(range(1000))
    check_store(lambda: AibrixStore(tmp_path / f"kv{next(numbers)}", 4096, backend))


def test_the_url(backend: str, tmp_path: Path):
    opened: Any = open_store(f"aibrix:?backend={backend.lower()}&root={tmp_path}/kv", SIZE)
    assert put(opened, "a") == [True]
    assert list(Path(tmp_path, "kv").glob(f"purecache{SIZE}_*"))
    opened.close()


def test_holes_in_large_batches(store: AibrixStore):
    """More keys than one call takes, with every third missing: AIBrix by itself answers for a prefix."""
    keys, found = OBJECTS.check_holes(store, 3 * CHUNK)
    assert get(store, *keys[::-1]) == found[::-1]


def test_a_process_that_was_killed_left_its_pages(backend: str, tmp_path: Path):
    arguments = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "kv"), backend, str(SIZE)]
    writer = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
    finally:
        writer.kill()
        writer.wait()
    store = AibrixStore(tmp_path / "kv", SIZE, backend)
    keys = [f"k{i}" for i in range(40)]
    assert get(store, "none", *keys) == [MISSING] + [HIT] * 40
    assert store.stats()["objects"] == 40
    store.close()


def test_a_store_of_another_size_is_another_store(backend: str, store: AibrixStore, tmp_path: Path):
    put(store, "a")
    other = AibrixStore(tmp_path / "kv", 2 * SIZE, backend)
    assert other.exists(["a"], soon()) == [NO]
    assert other.put(["a"], [page("b", 2 * SIZE)], soon()) == [True]
    assert get(store, "a") == [HIT]
    other.clear()
    assert get(store, "a") == [HIT]
    other.close()


def test_smaller_objects_keep_their_length(store: AibrixStore):
    """Of a cache with several pools the store takes the largest page, and smaller ones."""
    assert store.put(["small", "none"], [page("small", 100), page("large", SIZE + 1)], soon()) == [True, False]
    buffers = [memoryview(bytearray(size)) for size in (100, 99, SIZE)]
    assert store.get(["small"] * 3, buffers, soon()) == [HIT, FAILED, FAILED]
    assert buffers[0] == page("small", 100)


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("kv/*/*/*/*") if path.is_file())


def test_a_damaged_file_is_noticed_removed_and_written_again(tmp_path: Path):
    """Through the guard, as in a cache: AIBrix calls flipped bits a hit."""
    store = AibrixStore(tmp_path / "kv", SIZE, "SHFS")
    OBJECTS.check_that_damage_is_healed(store, lambda: flip(*files_of(tmp_path), 1000))


@pytest.mark.parametrize("damage", ["short", "empty", "length"])
def test_a_file_that_is_not_whole_is_a_failure_and_can_be_replaced(tmp_path: Path, damage: str):
    store = AibrixStore(tmp_path / "kv", SIZE, "SHFS")
    put(store, *"abcde")
    path = files_of(tmp_path)[2]
    if damage == "length":
        flip(path, 0)
    else:
        path.write_bytes(path.read_bytes()[: 100 if damage == "short" else 0])
    assert sorted(get(store, *"abcde")) == [HIT] * 4 + [FAILED]
    assert sorted(store.exists(list("abcde"), soon())) == [NO] + [YES] * 4
    assert put(store, *"abcde") == [True] * 5
    assert get(store, *"abcde") == [HIT] * 5
    store.close()


def test_a_file_that_can_not_be_written_fails_alone(tmp_path: Path):
    """AIBrix raises AttributeError then, out of the whole batch, and keeps the memory of the blocks."""
    store = AibrixStore(tmp_path / "kv", SIZE, "SHFS")
    put(store, "a")
    path = files_of(tmp_path)[0]
    store.delete(["a"], soon())
    path.parent.rmdir()
    path.parent.write_text("in the way")
    others = [f"k{i}" for i in range(8)]
    free = len(store._manager._allocator)
    answers = put(store, *others, "a")
    assert answers[-1] is False
    assert answers[:-1].count(True) >= 6  # one or two may be meant for the same folder
    assert get(store, *others, "a") == [HIT if each else MISSING for each in answers]
    assert len(store._manager._allocator) == free
    store.close()


def test_no_block_stays_reserved(store: AibrixStore):
    keys = [f"k{i}" for i in range(2 * CHUNK)]
    put(store, *keys[::2])
    get(store, *keys)
    store.exists(keys, soon())
    store.delete(keys[::4], soon())
    put(store, *keys)
    assert len(store._manager._allocator) == 0


def test_deadlines_between_calls(store: AibrixStore):
    keys = [f"k{i}" for i in range(2 * CHUNK)]
    put(store, *keys)
    late = time.monotonic() + 0.004
    answers = get_until(store, keys, late)
    assert time.monotonic() < late + 5
    assert set(answers) <= {HIT, FAILED}
    assert get_until(store, keys, time.monotonic() - 1) == [FAILED] * len(keys)


def get_until(store: AibrixStore, keys: list[str], deadline: float) -> list[Fetch]:
    return store.get(keys, [memoryview(bytearray(SIZE)) for _ in keys], deadline)


def test_the_process_keeps_its_environment_and_event_loops(store: AibrixStore):
    assert not [name for name in os.environ if name.startswith("AIBRIX_KV_CACHE_OL_")]
    assert "uvloop" not in type(asyncio.get_event_loop_policy()).__module__
    assert put(store, "a") == [True]


def test_a_second_process_can_not_open_rocksdb(tmp_path: Path):
    store = AibrixStore(tmp_path / "kv", SIZE, "ROCKSDB")
    with pytest.raises(Exception, match="lock"):
        AibrixStore(tmp_path / "kv", SIZE, "ROCKSDB")
    assert put(store, "a") == [True]
    store.close()


def test_clear_that_fails_makes_failures(store: AibrixStore, monkeypatch: pytest.MonkeyPatch):
    put(store, "a")

    def fail(path: Path) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(aibrix.shutil, "rmtree", fail)
        store.clear()
    assert (store.exists(["a"], soon()), get(store, "a"), put(store, "a")) == ([UNKNOWN], [FAILED], [False])
    store.clear()
    assert store.exists(["a"], soon()) == [NO]
    assert put(store, "a") == [True]
