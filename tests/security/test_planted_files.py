"""What somebody else has put into a store's directory: a miss, never followed outside, never waited for."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from purecache.stores import envelope
from purecache.stores.files import FileStore
from purecache.stores.guard import Guard, Kind, Request
from purecache.stores.interface import Fetch
from purecache.stores.local import LocalStore, LocalStoreError
from purecache.stores.names import ObjectRecord

PAGE = 4096
SIZE = PAGE + envelope.TRAILER
NEVER = float("inf")
RECORD = ObjectRecord(model="m", revision="r", kv_dtype="int8", layout="bytes", page_size=16, layers=(0, 1))
OTHER_MODEL = ObjectRecord(model="m2", revision="r", kv_dtype="int8", layout="bytes", page_size=16, layers=(0, 1))
PAGE_KEY, OTHER_PAGE = "a" * 64, "b" * 64
(MINE,) = RECORD.objects(PAGE_KEY, "kv")
(OF_OTHER_TOKENS,) = RECORD.objects(OTHER_PAGE, "kv")
(OF_OTHER_MODEL,) = OTHER_MODEL.objects(PAGE_KEY, "kv")


def sealed(key, byte):
    buffer = memoryview(bytearray([byte]) * SIZE)
    envelope.seal(key, buffer)
    return buffer


def files_with(directory, *keys):
    """A file store with an object per key."""
    store = FileStore(directory, 1 << 20)
    assert store.put(keys, [sealed(key, number) for number, key in enumerate(keys, 1)], NEVER) == [True] * len(keys)
    return store


def path_of(directory, key) -> Path:
    return next(Path(directory).rglob(f"{key}.page"))


def asked(store, key):
    """What a scheduler gets of an object, by way of the guard that is around every store; and how often it was bad."""
    guard, buffer, done = Guard(store, timeout=20), memoryview(bytearray(SIZE)), []
    assert guard.start(Request(Kind.GET, 1, [key], [buffer]))
    end = time.monotonic() + 10
    while not done:
        guard.wait(0.1)
        done = guard.poll()
        assert time.monotonic() < end, "something in the directory is waited for"
    return done[0].answers[0], guard.stats()["get_corrupt"]


@pytest.mark.parametrize("victim", [OF_OTHER_TOKENS, OF_OTHER_MODEL])
def test_a_copy_of_another_object_is_no_page(tmp_path, victim):
    """Of other tokens or another tenant, and of another model: a trailer names the object that it belongs to."""
    store = files_with(tmp_path, MINE, victim)
    shutil.copy(path_of(tmp_path, victim), path_of(tmp_path, MINE))
    assert asked(store, MINE) == (Fetch.FAILED, 1)
    assert not list(tmp_path.rglob(f"{MINE}.page"))  # and it is removed
    assert asked(FileStore(tmp_path, 1 << 20), victim) == (Fetch.HIT, 0)


def test_a_huge_file_is_not_read(tmp_path, monkeypatch):
    store, read = files_with(tmp_path, MINE), []
    os.truncate(path_of(tmp_path, MINE), 1 << 40)  # takes no room
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *rest: read.append(preadv(*rest)) or read[-1])
    assert asked(store, MINE) == (Fetch.FAILED, 0)
    assert asked(FileStore(tmp_path, 1 << 20), MINE)[0] is Fetch.FAILED
    assert sum(read) <= 2 * envelope.TRAILER


def as_link(path, outside):
    path.rename(outside)
    path.symlink_to(outside)


def as_link_to_a_device(path, outside):
    path.unlink()
    path.symlink_to("/dev/zero")


def as_pipe(path, outside):
    path.unlink()
    os.mkfifo(path)


def as_directory(path, outside):
    path.unlink()
    path.mkdir()


def as_link_of_the_directory(path, outside):
    path.parent.rename(outside)
    path.parent.symlink_to(outside)


def as_link_of_the_upper_directory(path, outside):
    top = path.parents[1]
    top.rename(outside)
    top.symlink_to(outside)


PLANTS = [
    as_link,
    as_link_to_a_device,
    as_pipe,
    as_directory,
    as_link_of_the_directory,
    as_link_of_the_upper_directory,
]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("opened", ["before", "after"])
def test_what_is_no_file_of_the_directory_is_a_miss_and_is_left_alone(tmp_path, plant, opened):
    directory, outside = tmp_path / "store", tmp_path / "outside"
    store = files_with(directory, MINE)
    plant(path_of(directory, MINE), outside)
    if opened == "after":
        store = FileStore(directory, 1 << 20)
        assert store.stats()["objects"] == 0
    before = snapshot(outside)
    assert asked(store, MINE)[0] is not Fetch.HIT
    for work in (
        lambda: store.put([MINE], [sealed(MINE, 9)], NEVER),
        lambda: store.delete([MINE], NEVER),
        lambda: store.put([MINE], [sealed(MINE, 9)], NEVER),
        store.clear,
        lambda: FileStore(directory, SIZE).put([OF_OTHER_TOKENS], [sealed(OF_OTHER_TOKENS, 9)], NEVER),
    ):
        work()
        assert snapshot(outside) == before


def snapshot(outside):
    """Everything below a path, with its bytes."""
    paths = [outside, *outside.rglob("*")] if outside.exists() else []
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def local(directory):
    return LocalStore(directory, SIZE, 4 * 2 * 4096)


def local_with(directory):
    store = local(directory)
    assert store.put([MINE], [sealed(MINE, 1)], NEVER) == [True]
    store.close()


def index_elsewhere(directory, outside):
    """A description that leads out of the directory."""
    meta = json.loads((directory / "meta.json").read_bytes())
    shutil.copytree(directory / meta["index"], outside / "index-00000000")
    (directory / "index-x").mkdir()
    meta["index"] = f"index-x/../../{outside.name}/index-00000000"
    (directory / "meta.json").write_text(json.dumps(meta))


def moved_and_linked(name):
    def plant(directory, outside):
        path = next(directory.glob(name))
        path.rename(outside / path.name)
        path.symlink_to(outside / path.name)

    plant.__name__ = f"link_for_{name}"
    return plant


def linked(name):
    def plant(directory, outside):
        (outside / "precious").write_bytes(b"precious")
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(outside / "precious")
        if name.endswith(".new"):  # what makes the store be made anew
            os.truncate(directory / "pages", 5)

    plant.__name__ = f"link_at_{name}"
    return plant


def pipe(name):
    def plant(directory, outside):
        next(directory.glob(name)).unlink()
        os.mkfifo(directory / name.replace("index-*", next(directory.glob("index-*")).name))

    plant.__name__ = f"pipe_at_{name}"
    return plant


LOCAL_PLANTS = [
    index_elsewhere,
    *map(moved_and_linked, ("pages", "meta.json", "owners", "index-*", "index-*/data.mdb", "index-*/lock.mdb")),
    *map(linked, ("pages.new", "meta.json.new", "setup.lock")),
    *map(pipe, ("meta.json", "pages", "setup.lock", "index-*/data.mdb", "index-*/lock.mdb")),
]


@pytest.mark.parametrize("plant", LOCAL_PLANTS, ids=lambda plant: plant.__name__)
def test_a_local_store_does_not_leave_its_directory(tmp_path, plant):
    directory, outside = tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    local_with(directory)
    plant(directory, outside)
    before = snapshot(outside)
    began = time.monotonic()
    try:
        store = local(directory)
    except LocalStoreError:
        pass
    else:
        assert store.put([MINE], [sealed(MINE, 2)], NEVER) == [True]
        store.close()
    assert time.monotonic() - began < 10
    assert snapshot(outside) == before


def test_a_description_of_any_size_is_not_read(tmp_path):
    local_with(tmp_path)
    with (tmp_path / "meta.json").open("r+b") as file:
        file.truncate(1 << 40)
    store = local(tmp_path)  # it is no description, so the store begins anew
    assert store.put([MINE], [sealed(MINE, 2)], NEVER) == [True]
    store.close()


@pytest.mark.parametrize("make", [lambda path: FileStore(path, 1 << 20), local], ids=["files", "local"])
def test_a_directory_that_everyone_may_write_to_is_warned_of(tmp_path, make, caplog):
    make(tmp_path / "own").close()
    assert not caplog.records
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    make(shared).close()
    assert "may be written to by everyone" in caplog.text
