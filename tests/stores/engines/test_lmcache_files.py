"""LmcacheFileStore over LMCache's real file connector: in an environment of its own, see environments.py."""

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import FAILED, HIT, MISSING, Objects, flip, soon

from purecache.stores.envelope import TRAILER
from purecache.stores.registry import open_store
from purecache.stores.staging import StagingRing
from purecache.testing import check_store

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed here: make test-stores runs this where it is", allow_module_level=True)
from purecache.stores.engines import lmcache_files
from purecache.stores.engines.lmcache_files import CHUNK, LmcacheFileStore

SIZE = 4096 + TRAILER
OBJECTS = Objects(SIZE, careful=False)
page, put, get = OBJECTS.content, OBJECTS.put, OBJECTS.get
KILLED = """
import sys, time
from purecache.stores.engines.lmcache_files import LmcacheFileStore
store, size = LmcacheFileStore(sys.argv[1], direct=sys.argv[2] == "True"), int(sys.argv[3])
for first in range(0, 10**6, 8):
    keys = [f"k{i}" for i in range(first, first + 8)]
    assert all(store.put(keys, [memoryview(key.encode() * size)[:size] for key in keys], time.monotonic() + 60))
    print(first + 8, flush=True)
"""


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def direct(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def store(direct: bool, tmp_path: Path) -> Iterator[LmcacheFileStore]:
    opened = LmcacheFileStore(tmp_path / "kv", direct=direct)
    yield opened
    opened.close()


@pytest.mark.parametrize("size", [4096, SIZE])
def test_the_contract(direct: bool, size: int, tmp_path: Path):
    numbers = iter(range(1000))
    check_store(lambda: LmcacheFileStore(tmp_path / f"kv{next(numbers)}", direct=direct), size)


def test_the_url(tmp_path: Path):
    opened: Any = open_store(f"lmcache://{tmp_path}/kv?workers=2&direct=true", SIZE)
    assert put(opened, "a") == [True]
    assert len(list(Path(tmp_path, "kv").glob("purecache-direct@*"))) == 1
    opened.close()


def test_holes_in_large_batches(store: LmcacheFileStore):
    OBJECTS.check_holes(store, 3 * CHUNK)


def test_a_writer_is_killed_and_another_process_reads(direct: bool, tmp_path: Path):
    """Whatever a process that was killed had answered True for is there, and nothing that is not whole."""
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "kv"), str(direct), str(SIZE)]
    writer = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        written = [int(line) for line in (next(each) for each in [numbers_of(writer)] * 20)]
    finally:
        writer.kill()
        writer.wait()
    store = LmcacheFileStore(tmp_path / "kv", direct=direct)
    keys = [f"k{i}" for i in range(written[-1] + 64)]
    assert get(store, *keys[: written[-1]]) == [HIT] * written[-1]
    assert FAILED not in get(store, *keys)
    assert store.stats()["objects"] >= written[-1]
    store.clear()
    assert store.stats()["objects"] == 0
    assert not list(Path(tmp_path, "kv", "tmp").iterdir())
    store.close()


def numbers_of(writer: subprocess.Popen[str]) -> Iterator[str]:
    """Lines that are numbers; LMCache writes others."""
    assert writer.stdout is not None
    for line in writer.stdout:
        if line.strip().isdigit():
            yield line


def files_of(root: Path) -> list[Path]:
    return sorted(root.glob("kv/*.data"))


def test_a_damaged_file_is_noticed_removed_and_written_again(direct: bool, tmp_path: Path):
    """Through the guard, as in a cache: LMCache calls flipped bits a hit."""
    store = LmcacheFileStore(tmp_path / "kv", direct=direct)
    OBJECTS.check_that_damage_is_healed(store, lambda: flip(*files_of(tmp_path), 1000))


@pytest.mark.parametrize("damage", ["short", "empty", "long"])
def test_a_file_that_is_not_whole_is_a_failure_and_can_be_replaced(
    store: LmcacheFileStore, tmp_path: Path, damage: str
):
    put(store, *"abcde")
    path = files_of(tmp_path)[2]
    content = path.read_bytes()
    path.write_bytes({"short": content[:100], "empty": b"", "long": content + bytes(4096)}[damage])
    assert sorted(get(store, *"abcde")) == [HIT] * 4 + [FAILED]
    assert put(store, *"abcde") == [True] * 5
    assert get(store, *"abcde") == [HIT] * 5


def test_a_damaged_length_is_a_failure_and_can_be_replaced(tmp_path: Path):
    """With direct I/O the length stands in the last bytes of the file."""
    store = LmcacheFileStore(tmp_path / "kv", direct=True)
    put(store, "a", "b")
    flip(files_of(tmp_path)[0], -16)
    assert sorted(get(store, "a", "b")) == [HIT, FAILED]
    assert put(store, "a", "b") == [True, True]
    assert get(store, "a", "b") == [HIT, HIT]
    store.close()


def test_a_file_that_can_not_be_written_fails_alone(store: LmcacheFileStore, tmp_path: Path):
    """Of a batch LMCache only says that one failed."""
    put(store, "in the way")
    path = files_of(tmp_path)[0]
    store.delete(["in the way"], soon())
    path.mkdir()
    (path / "file").touch()  # an empty one LMCache would remove
    assert put(store, "a", "in the way", "b") == [True, False, True]
    assert get(store, "a", "in the way", "b") == [HIT, FAILED, HIT]


def test_many_threads_share_one_client(store: LmcacheFileStore):
    """Each gets the answers to its own calls, whoever of them listens."""
    wrong: list[str] = []

    def work(number: int) -> None:
        keys = [f"t{number}-{i}" for i in range(CHUNK)]
        for turn in range(10):
            if not all(put(store, *keys)) or get(store, *keys, "none") != [HIT] * CHUNK + [MISSING]:
                wrong.append(f"thread {number}, turn {turn}")
            store.delete(keys, soon())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_pages_of_the_staging_ring_are_used_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ring = StagingRing(4, 8192)
    store = LmcacheFileStore(tmp_path / "kv")
    buffers = [ring.sealed(slot) for slot in ring.acquire(4) or []]
    buffers[0][:] = page("a", 8192 + TRAILER)
    seen: list[memoryview] = []
    call = store._call
    monkeypatch.setattr(store, "_call", lambda what, names, *views: (seen.extend(*views), call(what, names, *views))[1])
    assert store.put(["a"], buffers[:1], soon()) == [True]
    assert store.get(["a"], buffers[1:2], soon()) == [HIT]
    assert buffers[1] == buffers[0]
    assert [view.obj for view in seen] == [ring.region.obj] * 2
    store.close()


def test_deadlines_between_calls(store: LmcacheFileStore):
    keys = [f"k{i}" for i in range(4 * CHUNK)]
    put(store, *keys)
    buffers = [memoryview(bytearray(SIZE)) for _ in keys]
    now = iter([0.0, 0.5, 2.0, 2.0, 2.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmcache_files.time, "monotonic", lambda: next(now))
        answers = store.get(keys, buffers, 1.0)
    assert answers == [HIT] * (2 * CHUNK) + [FAILED] * (2 * CHUNK)


def test_files_of_another_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A later LMCache may name its files otherwise, where this store would look in vain."""
    monkeypatch.setattr(LmcacheFileStore, "_path", lambda self, name: str(tmp_path / f"{name}.other"))
    with pytest.raises(RuntimeError, match=r"doesn't name its files as 0\.5\.6"):
        LmcacheFileStore(tmp_path / "kv")
