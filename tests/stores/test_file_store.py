"""FileStore: answers, order of eviction, restart, damage of every kind, several stores in one directory, full disks."""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.stores import files, files_quota
from purecache.stores.envelope import TRAILER, is_intact, seal
from purecache.stores.files import FileStore
from purecache.stores.interface import Fetch, Presence

LATER = float("inf")
SIZE = 256
YES, NO, UNKNOWN = Presence.YES, Presence.NO, Presence.UNKNOWN
HIT, MISSING, FAILED = Fetch.HIT, Fetch.MISSING, Fetch.FAILED


def sealed(key: str, size: int = SIZE) -> memoryview:
    buffer = memoryview(bytearray((key.encode() * size)[: size - TRAILER] + bytes(TRAILER)))
    seal(key, buffer)
    return buffer


def put(store: FileStore, *keys: str, size: int = SIZE) -> list[bool]:
    return store.put(keys, [sealed(key, size) for key in keys], LATER)


def get(store: FileStore, *keys: str, size: int = SIZE) -> list[Fetch]:
    buffers = [memoryview(bytearray(size)) for _ in keys]
    answers = store.get(keys, buffers, LATER)
    assert all(is_intact(key, b) for key, b, a in zip(keys, buffers, answers, strict=True) if a == HIT)
    return answers


def exists(store: FileStore, *keys: str) -> list[Presence]:
    return store.exists(keys, LATER)


def file_of(directory: Path, key: str) -> Path:
    """Where an object's file is, found the slow way."""
    (found,) = directory.glob(f"??/??/{key}.page")
    return found


def leftovers(directory: Path) -> list[Path]:
    return list(directory.rglob(".tmp-*"))


def set_age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def open_store(directory: Path, objects: int = 100, **options: int) -> FileStore:
    return FileStore(directory, objects * SIZE, **options)


def test_answers_stand_at_their_keys_with_holes(tmp_path: Path):
    store = open_store(tmp_path)
    assert put(store, "a", "c") == [True, True]
    assert exists(store, "a", "b", "c") == [YES, NO, YES]
    assert get(store, "c", "b", "a", "b") == [HIT, MISSING, HIT, MISSING]
    assert store.delete(["b", "a"], LATER) == [True, True]
    assert exists(store, "a", "c") == [NO, YES]
    numbers = {"objects": 1, "bytes": SIZE, "capacity": 100 * SIZE, "evictions": 0, "bad_files": 0, "swept_files": 0}
    assert store.stats() == numbers


@pytest.mark.parametrize("key", [".", "..", "...", "-", ".tmp-x", "x.page", "A" * 200])
def test_every_key_is_a_file_name(tmp_path: Path, key: str):
    store = open_store(tmp_path / "store")
    assert put(store, key) == [True]
    assert get(open_store(tmp_path / "store"), key) == [HIT]
    assert open_store(tmp_path / "store").stats()["objects"] == 1
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize("key", ["", "a/b", "../x", "a\0", "ä", "a\n", "A" * 201])
def test_what_is_no_key_is_a_mistake_of_the_caller(tmp_path: Path, key: str):
    with pytest.raises(ValueError, match="not a key"):
        open_store(tmp_path).exists([key], LATER)


def test_files_are_for_the_owner_only_and_describe_themselves(tmp_path: Path):
    old = os.umask(0)
    try:
        store = open_store(tmp_path / "new" / "store")
        put(store, "a")
    finally:
        os.umask(old)
    found = file_of(tmp_path / "new" / "store", "a")
    assert stat.S_IMODE(found.stat().st_mode) == 0o600
    assert all(stat.S_IMODE(found.parents[i].stat().st_mode) == 0o700 for i in range(3))
    assert is_intact("a", memoryview(found.read_bytes()))
    assert leftovers(tmp_path) == []


def test_what_is_there_is_not_written_again(tmp_path: Path):
    store = open_store(tmp_path)
    put(store, "a")
    inode = file_of(tmp_path, "a").stat().st_ino
    assert put(store, "a") == [True]
    assert put(open_store(tmp_path), "a") == [True]
    assert file_of(tmp_path, "a").stat().st_ino == inode


def test_a_wrong_length_fails_and_a_put_heals_it(tmp_path: Path):
    store = open_store(tmp_path)
    put(store, "a", "b")
    os.truncate(file_of(tmp_path, "a"), SIZE - 1)
    os.truncate(file_of(tmp_path, "b"), SIZE + 1)
    assert get(store, "a", "b") == [FAILED, FAILED]
    assert put(store, "a", "b") == [True, True]
    assert get(store, "a", "b") == [HIT, HIT]
    assert store.stats()["bytes"] == 2 * SIZE


def test_a_read_in_pieces_and_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, whole = open_store(tmp_path), os.preadv
    put(store, "a")
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:100]], at))
    assert get(store, "a") == [HIT]
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, buffers, at) if at < 100 else 0)
    assert get(store, "a") == [HIT]
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:100]], at) if at < 200 else 0)
    assert get(store, "a") == [FAILED]


def test_the_least_recently_used_goes_first_and_exists_is_no_use(tmp_path: Path):
    store = open_store(tmp_path, 3)
    for key in "abc":
        put(store, key)
    get(store, "a")
    exists(store, "b")
    put(store, "d")
    assert exists(store, *"abcd") == [YES, NO, YES, YES]
    assert store.stats()["evictions"] == 1


def test_of_a_batch_the_head_stays_longest_and_nothing_of_it_is_evicted(tmp_path: Path):
    store = open_store(tmp_path, 3)
    assert put(store, *"abcd") == [True, True, True, False]
    put(store, "x", "y")
    assert exists(store, *"abc") == [YES, NO, NO]
    assert put(store, "z", size=4 * SIZE) == [False]
    assert exists(store, *"axy") == [YES, YES, YES]


STEPS = st.lists(st.tuples(st.sampled_from(["put", "get", "delete", "reopen"]), st.sampled_from("abcdef")), max_size=25)


@given(STEPS)
def test_against_a_list_in_order_of_use(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str]]):
    directory = tmp_path_factory.mktemp("model")
    store, model, changed = open_store(directory, 3), [], True
    for what, key in steps:
        used = [*(other for other in model if other != key), key]
        if what == "put":
            assert put(store, key) == [True]
            model = used[-3:]
        elif what == "get":
            assert get(store, key) == [HIT if key in model else MISSING]
            model = used if key in model else model
        elif what == "delete":
            assert store.delete([key], LATER) == [True]
            model = used[:-1]
        elif changed:
            for age, name in enumerate(reversed(model)):
                set_age(file_of(directory, name), 1000 + age)
            store = open_store(directory, 3)
        assert exists(store, *"abcdef") == [YES if key in model else NO for key in "abcdef"]
        assert store.stats()["bytes"] == len(model) * SIZE
    shutil.rmtree(directory)


def test_recency_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = open_store(tmp_path, 3)
    put(store, *"abc")
    for age, key in enumerate("abc"):
        set_age(file_of(tmp_path, key), 1000 - age)  # a is the oldest
    get(store, "a")  # written less than a minute ago: not set again
    assert time.time() - file_of(tmp_path, "a").stat().st_mtime > 900
    store = open_store(tmp_path, 3)
    assert get(store, "a") == [HIT]  # the first hit since the start
    assert time.time() - file_of(tmp_path, "a").stat().st_mtime < 100
    store = open_store(tmp_path, 3)
    put(store, "d")
    assert exists(store, *"abcd") == [YES, NO, YES, YES]
    monkeypatch.setattr(files_quota, "TOUCH_SECONDS", 0.0)
    set_age(file_of(tmp_path, "a"), 1000)
    get(store, "a")
    get(store, "a")
    assert time.time() - file_of(tmp_path, "a").stat().st_mtime < 100


def test_a_smaller_capacity_after_a_restart(tmp_path: Path):
    put(open_store(tmp_path), *"abcdef")
    for age, key in enumerate("abcdef"):
        set_age(file_of(tmp_path, key), 1000 - age)
    store = open_store(tmp_path, 2)
    assert exists(store, *"abcdef") == [NO, NO, NO, NO, YES, YES]
    assert store.stats()["objects"] == 2


def test_the_scan_takes_whatever_it_finds(tmp_path: Path):
    put(open_store(tmp_path), *"abcdefghij")
    whole = {key: file_of(tmp_path, key) for key in "abcdefghij"}
    os.truncate(whole["a"], SIZE - 1)
    os.truncate(whole["b"], 10)
    for key, offset in ("c", SIZE - TRAILER), ("d", SIZE - TRAILER + 8):  # magic and version
        with whole[key].open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff")
    whole["e"].unlink()
    whole["e"].mkdir()  # a directory where a file should be
    os.rename(whole["f"], whole["g"].with_name("f.page"))  # where nobody looks for it
    whole["i"].unlink()
    os.mkfifo(whole["i"])  # opening it to read would wait for a writer
    whole["j"].rename(tmp_path / "elsewhere")
    whole["j"].symlink_to(tmp_path / "elsewhere")
    (whole["g"].parent / os.fsdecode(b"\xff\xfe.page")).write_bytes(b"")
    (whole["g"].parent / "README").write_bytes(b"")
    (tmp_path / "zz").mkdir()
    (tmp_path / "lost+found").write_bytes(b"")
    free = next(f"{i:02x}" for i in range(256) if not (tmp_path / f"{i:02x}").exists())
    (tmp_path / free).write_bytes(b"a file where a directory should be")
    store = open_store(tmp_path)
    assert (store.stats()["objects"], store.stats()["bad_files"]) == (2, 10)
    assert get(store, *"gh") == [HIT, HIT]
    assert get(store, *"abefij") == [FAILED, FAILED, MISSING, MISSING, MISSING, FAILED]
    assert exists(store, *"egij") == [NO, YES, NO, NO]
    assert put(store, *"abcdef") == [True, True, True, True, False, True]  # 'e' is taken by a directory
    assert get(store, *"abcdf") == [HIT] * 5
    assert leftovers(tmp_path) == []
    store.clear()
    assert exists(store, *"abcdefgh") == [NO] * 8
    assert store.stats()["objects"] == store.stats()["bytes"] == 0
    assert (tmp_path / "lost+found").exists()
    assert (whole["g"].parent / "README").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give up its rights")
def test_unreadable_files_and_directories(tmp_path: Path):
    store = open_store(tmp_path)
    put(store, *"abc")
    os.chmod(tmp_path, 0o777)
    for path in (*tmp_path.glob("??"), *tmp_path.glob("??/??")):
        os.chmod(path, 0o755)
    os.chmod(file_of(tmp_path, "a"), 0o000)
    os.chmod(file_of(tmp_path, "b"), 0o644)
    closed = file_of(tmp_path, "c").parents[1]
    for path in tmp_path.parents:
        if path != Path("/") and path.stat().st_mode & 0o5 != 0o5 and path.name.startswith(("pytest", "test")):
            os.chmod(path, 0o755)
    os.chmod(closed, 0o000)
    os.seteuid(65534)
    try:
        if not os.access(tmp_path, os.R_OK | os.X_OK, effective_ids=True):
            pytest.skip("the temporary directory can't be reached without root")
        other = open_store(tmp_path)
        numbers = other.stats()
        answers = get(other, *"abc"), exists(other, *"abc"), put(other, *"abc"), other.delete(list("abc"), LATER)
        other.clear()
    finally:
        os.seteuid(0)
        os.chmod(closed, 0o700)
    assert (numbers["objects"], numbers["bad_files"]) == (1, 1)
    assert answers[0] == [FAILED, HIT, FAILED]
    assert answers[1] == [YES, YES, UNKNOWN]
    assert answers[2] == [False, True, False]
    assert answers[3] == [False, False, False]
    assert exists(store, *"abc") == [YES, YES, YES]


def test_a_file_that_disappears_during_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(open_store(tmp_path), *"abc")
    whole, seen = os.open, []

    def opens(path: str, *rest: int) -> int:
        if path.endswith(".page") and not seen:
            seen.append(path)
            os.unlink(path)
        return whole(path, *rest)

    monkeypatch.setattr(os, "open", opens)
    store = open_store(tmp_path)
    assert seen
    assert (store.stats()["objects"], store.stats()["bad_files"]) == (2, 0)


def test_a_directory_that_disappears_during_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(open_store(tmp_path), *"abc")
    whole, seen = os.scandir, []

    def scans(path: str):
        if path != str(tmp_path) and not seen:
            seen.append(path)
            shutil.rmtree(path)
        return whole(path)

    monkeypatch.setattr(os, "scandir", scans)
    assert open_store(tmp_path).stats()["objects"] == 2


def test_old_temporary_files_are_swept_and_young_ones_left(tmp_path: Path):
    put(open_store(tmp_path), "a")
    below = file_of(tmp_path, "a").parent
    old, young, above = below / ".tmp-old-1", below / ".tmp-young-1", tmp_path / ".tmp-old-2"
    for path in (old, young, above):
        path.write_bytes(b"half an obj")
    set_age(old, files_quota.TEMPORARY_SECONDS + 60)
    set_age(above, files_quota.TEMPORARY_SECONDS + 60)
    assert open_store(tmp_path).stats()["swept_files"] == 2
    assert leftovers(tmp_path) == [young]


def test_two_stores_in_one_directory(tmp_path: Path):
    one, two = open_store(tmp_path), open_store(tmp_path)
    put(one, "a", "b")
    assert exists(two, "a", "b", "c") == [YES, YES, NO]  # written by another
    assert get(two, "b") == [HIT]
    assert two.stats()["objects"] == 2
    assert put(two, "b") == [True]
    two.delete(["a"], LATER)
    os.unlink(file_of(tmp_path, "b"))
    assert get(one, "a", "b") == [MISSING, MISSING]  # vanished under us
    assert one.stats()["objects"] == one.stats()["bytes"] == 0
    assert exists(two, "b") == [NO]
    assert two.stats()["objects"] == 0
    assert put(one, "a", "b") == [True, True]


def test_a_put_of_what_another_left_damaged_writes_it(tmp_path: Path):
    one = open_store(tmp_path)
    put(open_store(tmp_path), "a")
    file_of(tmp_path, "a").write_bytes(bytes(SIZE))  # as after a power failure
    assert put(one, "a") == [True]
    assert get(one, "a") == [HIT]


def _hammer(directory: Path, seed: int, wrong: "multiprocessing.Queue[str]") -> None:
    store = FileStore(directory, 20 * SIZE)
    for step in range(300):
        key = f"k{(seed * 31 + step * 7) % 40}"
        put(store, key)
        other = f"k{(seed * 17 + step * 11) % 40}"
        buffer = memoryview(bytearray(SIZE))
        answer = store.get([other], [buffer], LATER)[0]
        if answer == FAILED or (answer == HIT and not is_intact(other, buffer)):
            wrong.put(f"{other}: {answer}")
        if step % 50 == 49:
            store.delete([key], LATER)


def test_several_processes_write_and_evict_in_one_directory(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    wrong = context.Queue()
    workers = [context.Process(target=_hammer, args=(tmp_path, seed, wrong)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert wrong.empty()
    assert leftovers(tmp_path) == []
    assert open_store(tmp_path).stats()["bad_files"] == 0


def test_several_threads(tmp_path: Path):
    store, wrong = open_store(tmp_path, 20), []

    def work(seed: int) -> None:
        for step in range(150):
            put(store, f"k{(seed * 31 + step * 7) % 40}")
            other = f"k{(seed * 17 + step * 11) % 40}"
            wrong.extend(answer for answer in get(store, other) if answer == FAILED)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    exists(store, *(f"k{i}" for i in range(40)))  # lets go of what was evicted while it was written
    assert store.stats()["bytes"] == sum(path.stat().st_size for path in tmp_path.glob("??/??/*.page"))
    assert store.stats()["bytes"] <= 20 * SIZE


def test_a_killed_writer_leaves_only_temporary_files(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        worker = context.Process(target=_write_for_ever, args=(tmp_path,))
        worker.start()
        while not list(tmp_path.glob("??/??/*")):
            time.sleep(0.01)
        time.sleep(0.05)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
    store = FileStore(tmp_path, 1 << 30)
    assert store.stats()["objects"] > 0
    assert store.stats()["bad_files"] == 0
    for path in tmp_path.glob("??/??/*.page"):
        assert is_intact(path.name.removesuffix(".page"), memoryview(path.read_bytes()))


def _write_for_ever(directory: Path) -> None:
    store, pid = FileStore(directory, 1 << 30), os.getpid()
    for number in range(10**9):
        put(store, f"{pid}-{number}", size=1 << 16)


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path):
    """A limit on the length of files is a full disk that everybody has."""
    store = open_store(tmp_path, 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * SIZE, hard))
    try:
        answers = store.put(["a", "b", "c"], [sealed("a"), sealed("b", 20 * SIZE), sealed("c")], LATER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answers == [True, False, True]
    assert leftovers(tmp_path) == []
    assert store.stats()["bytes"] == 2 * SIZE
    assert put(store, "b", size=20 * SIZE) == [True]


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 1 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"can't mount a tmpfs: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk(small_disk: Path):
    store = FileStore(small_disk / "store", 1 << 30)
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - (1 << 16)))
    assert put(store, "a", size=1 << 17) == [False]  # nothing to evict
    assert leftovers(small_disk) == []
    assert put(store, "b", "c", size=1 << 14) == [True, True]
    assert put(store, "d", "e", "f", size=1 << 14) == [True, True, True]  # 'b' and 'c' make room
    assert leftovers(small_disk) == []
    assert exists(store, *"def") == [YES, YES, YES]
    assert NO in exists(store, *"bc")
    assert store.stats()["evictions"] >= 1
    assert put(store, *"ghijkl", size=1 << 14)[-1] is False  # a batch doesn't evict itself
    assert leftovers(small_disk) == []


def test_the_minimum_of_free_space(small_disk: Path):
    store = FileStore(small_disk / "store", 1 << 30, min_free_bytes=1 << 19)
    names = [f"k{i}" for i in range(40)]
    assert all(put(store, name, size=1 << 15) == [True] for name in names)  # evicts, then goes on
    numbers = os.statvfs(small_disk)
    assert numbers.f_bavail * numbers.f_frsize >= 1 << 19
    assert store.stats()["evictions"] > 20
    assert exists(store, "k0", "k39") == [NO, YES]
    (small_disk / "ballast").write_bytes(bytes(numbers.f_bavail * numbers.f_frsize))
    assert put(store, "late", size=1 << 15) == [False]  # evicting all of ours isn't enough
    assert store.stats()["objects"] == 0
    os.unlink(small_disk / "ballast")
    assert put(store, "late", size=1 << 15) == [True]


def test_an_eviction_that_frees_no_space(small_disk: Path):
    store = FileStore(small_disk / "store", 1 << 30, min_free_bytes=1 << 19)
    assert put(store, *(f"k{i}" for i in range(15)), size=1 << 15) == [True] * 15
    for number, path in enumerate((small_disk / "store").glob("??/??/*.page")):
        os.link(path, small_disk / f"held{number}")  # as a reader does that has the file open
    (small_disk / "ballast").write_bytes(bytes(1 << 15))
    assert put(store, "late", size=1 << 15) == [False]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EMFILE])
def test_whatever_the_file_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    """Every call that touches a file fails: an answer for every key, never an exception."""
    store = open_store(tmp_path, 2)
    put(store, "a", "b")

    def fails(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    for name in ("open", "lstat", "unlink", "replace", "scandir", "statvfs", "mkdir", "fstat", "utime"):
        monkeypatch.setattr(os, name, fails)
    assert exists(store, "a", "x") == [UNKNOWN, UNKNOWN]
    assert get(store, "a", "x") == [FAILED, FAILED]
    assert put(store, "a", "x") == [False, False]
    assert store.delete(["a", "x"], LATER) == [False, False]
    store.clear()
    monkeypatch.undo()
    assert store.stats()["bytes"] == 2 * SIZE
    assert get(store, "a", "b") == [HIT, HIT]


@pytest.mark.parametrize("name", ["write", "close", "replace"])
def test_a_late_failure_of_a_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    store, whole, close = open_store(tmp_path), getattr(os, name), os.close
    put(store, "a")

    def fails(*rest: object) -> None:
        if name == "close":
            close(rest[0])  # as NFS does: the descriptor is gone, and so is what was written
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(files.os, name, fails)
    assert put(store, "x", "y") == [False, False]
    monkeypatch.setattr(files.os, name, whole)
    assert leftovers(tmp_path) == []
    assert store.stats()["objects"] <= 1
    assert put(store, "x", "a") == [True, True]
    assert get(store, "x", "a") == [HIT, HIT]


def test_too_late_and_closed(tmp_path: Path):
    store, past = open_store(tmp_path), time.monotonic() - 1
    put(store, "a")
    for deadline in (past, LATER):
        if deadline == LATER:
            store.close()
            store.close()
        assert store.exists(["a"], deadline) == [UNKNOWN]
        assert store.get(["a"], [sealed("a")], deadline) == [FAILED]
        assert store.put(["a"], [sealed("a")], deadline) == [False]
        assert store.delete(["a"], deadline) == [False]


def test_a_deadline_in_the_middle_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = open_store(tmp_path)
    put(store, *"abc")
    clock = iter([0.0, 0.5, 1.5, 2.0])
    with monkeypatch.context() as patch:
        patch.setattr(files.time, "monotonic", lambda: next(clock))
        answers = store.exists(list("abc"), 1.0)
    assert answers == [YES, YES, UNKNOWN]


def test_mistakes_of_the_constructor(tmp_path: Path):
    with pytest.raises(ValueError, match="capacity_bytes must be above 64"):
        FileStore(tmp_path, 64)
    with pytest.raises(ValueError, match="min_free_bytes"):
        FileStore(tmp_path, 1000, -1)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="needs a directory it can write to"):
        FileStore(tmp_path / "file", 1000)


def test_files_from_the_future_are_usable_and_count_as_recent(tmp_path: Path):
    """The clock of a file server, or of this machine, may have jumped."""
    store = open_store(tmp_path, 3)
    put(store, *"abc")
    set_age(file_of(tmp_path, "a"), -1e9)
    set_age(file_of(tmp_path, "b"), 2e9)
    set_age(file_of(tmp_path, "c"), 1000)
    again = open_store(tmp_path, 3)
    assert put(again, "d") == [True]
    assert exists(again, *"abcd") == [YES, NO, YES, YES]
    assert get(again, *"acd") == [HIT, HIT, HIT]
