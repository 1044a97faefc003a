"""The embedded store: exact LRU, its bound, sharing of a directory, damage, and refusals."""

import contextlib
import errno
import json
import math
import mmap
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
from crash_worker import BARE, content, page, read
from hypothesis import given
from hypothesis import strategies as st

from purecache.stores import envelope
from purecache.stores.interface import Fetch, Presence
from purecache.stores.local import BLOCK, LocalStore, LocalStoreError
from purecache.stores.local_index import Books

NEVER = math.inf
SIZE = 5000  # two blocks
SLOT = 2 * BLOCK


def store_of(directory, slots, **options):
    return LocalStore(directory, SIZE, slots * SLOT, **options)


@pytest.fixture
def opened():
    """Stores that are closed after the test."""
    stores = []

    def open_store(directory, slots=8, **options):
        stores.append(store_of(directory, slots, **options))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def put(store, *keys):
    return store.put(keys, [page(key, SIZE) for key in keys], NEVER)


def get(store, *keys):
    """Answers of a get; hits are compared with the content that belongs to the key."""
    answers = []
    for key, (answer, buffer) in zip(keys, read(store, keys, SIZE), strict=True):
        if answer == Fetch.HIT:
            assert envelope.is_intact(key, buffer)
            assert bytes(buffer) == bytes(page(key, SIZE))
        answers.append(answer)
    return answers


def present(store, keys):
    return {key for key, answer in zip(keys, store.exists(keys, NEVER), strict=True) if answer == Presence.YES}


def test_put_get_exists_delete_clear(tmp_path, opened):
    store = opened(tmp_path)
    assert put(store, "a", "b") == [True, True]
    assert store.exists(["a", "x", "b"], NEVER) == [Presence.YES, Presence.NO, Presence.YES]
    assert get(store, "x", "b", "y", "a") == [Fetch.MISSING, Fetch.HIT, Fetch.MISSING, Fetch.HIT]
    assert store.delete(["b", "x"], NEVER) == [True, True]
    assert get(store, "a", "b") == [Fetch.HIT, Fetch.MISSING]
    assert store.stats()["objects"] == 1
    assert store.stats()["bytes"] == SLOT
    assert store.stats()["capacity"] == 8 * SLOT
    store.clear()
    assert store.exists(["a"], NEVER) == [Presence.NO]
    counts = store.stats()
    assert (counts["objects"], counts["free"], counts["bytes"], counts["failures"]) == (0, 8, 0, 0)


def test_a_key_that_is_there_is_not_written_again(tmp_path, opened):
    store = opened(tmp_path)
    put(store, "a")
    assert store.put(["a", "b"], [page("other", SIZE), page("b", SIZE)], NEVER) == [True, True]
    assert store.put(["a"], [page("other", SIZE)], NEVER) == [True]
    assert get(store, "a", "b") == [Fetch.HIT, Fetch.HIT]


def test_a_key_twice_in_a_batch_takes_one_slot(tmp_path, opened):
    store = opened(tmp_path)
    assert put(store, "a", "a", "b") == [True] * 3
    assert (store.stats()["objects"], store.stats()["free"], store.stats()["pending"]) == (2, 6, 0)


def test_lengths(tmp_path, opened):
    store = opened(tmp_path)
    small, large = page("small", 300), page("large", SIZE + 1)
    assert store.put(["small", "large"], [small, large], NEVER) == [True, False]
    assert [answer for answer, _ in read(store, ["small", "large"], 301)] == [Fetch.FAILED, Fetch.MISSING]
    assert [answer for answer, _ in read(store, ["small"], 299)] == [Fetch.FAILED]
    assert [(answer, bytes(buffer)) for answer, buffer in read(store, ["small"], 300)] == [(Fetch.HIT, bytes(small))]


def test_a_batch_larger_than_the_store_is_kept_in_part(tmp_path, opened):
    store = opened(tmp_path)
    keys = [f"k{i}" for i in range(11)]
    answers = put(store, *keys)
    assert sum(answers) == 8
    assert present(store, keys) == {key for key, answer in zip(keys, answers, strict=True) if answer}
    # What is there and in the batch is not evicted for the rest of the batch.
    assert put(store, *keys) == answers
    assert (store.stats()["objects"], store.stats()["pending"], store.stats()["evictions"]) == (8, 0, 0)


def test_deadlines_in_the_past(tmp_path, opened):
    store = opened(tmp_path)
    put(store, "a")
    assert store.exists(["a"], 0.0) == [Presence.UNKNOWN]
    assert store.get(["a"], [memoryview(bytearray(SIZE))], 0.0) == [Fetch.FAILED]
    assert store.put(["b"], [page("b", SIZE)], 0.0) == [False]
    assert store.delete(["a"], 0.0) == [False]
    assert get(store, "a", "b") == [Fetch.HIT, Fetch.MISSING]


KEYS = [f"k{i}" for i in range(9)]
BATCHES = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "get", "delete", "reopen"]), BATCHES), max_size=30)


@given(STEPS)
def test_lru_is_exact_and_survives_a_restart(steps):
    """Against a model: 5 slots, batches of up to 4."""
    model: OrderedDict[str, None] = OrderedDict()
    with tempfile.TemporaryDirectory() as directory:
        store = store_of(directory, 5)
        for step, keys in steps:
            if step == "put":
                assert put(store, *keys) == [True] * len(keys)
                for key in [key for key in keys if key in model]:
                    model.move_to_end(key)
                for key in [key for key in keys if key not in model]:
                    model[key] = None
                while len(model) > 5:
                    model.popitem(last=False)
            elif step == "get":
                assert get(store, *keys) == [Fetch.HIT if key in model else Fetch.MISSING for key in keys]
                for key in [key for key in keys if key in model]:
                    model.move_to_end(key)
            elif step == "delete":
                assert store.delete(keys, NEVER) == [True] * len(keys)
                for key in keys:
                    model.pop(key, None)
            else:
                store.close()
                store = store_of(directory, 5)
            assert present(store, KEYS) == set(model)
            counts = store.stats()
            assert (counts["objects"], counts["free"], counts["pending"]) == (len(model), 5 - len(model), 0)
        store.close()


def test_reads_before_a_restart_keep_an_object(tmp_path, opened):
    store = opened(tmp_path)
    put(store, *"abcdefgh")
    get(store, "a", "b")
    store.close()
    store = opened(tmp_path)
    put(store, "i", "j")
    assert present(store, "abcdefghij") == set("abefghij")


def test_reads_are_not_written_to_the_index(tmp_path, opened):
    store = opened(tmp_path)
    put(store, "a")
    index = next(tmp_path.glob("index-*")) / "data.mdb"
    before = index.read_bytes()
    for _ in range(20):
        assert get(store, "a") == [Fetch.HIT]
    assert index.read_bytes() == before


def test_the_files_never_grow_and_are_private(tmp_path, opened):
    directory = tmp_path / "new"
    store = opened(directory)
    data = directory / "pages"
    assert data.stat().st_blocks * 512 >= 8 * SLOT
    for i in range(60):
        put(store, f"k{i}", f"l{i}")
        assert data.stat().st_size == 8 * SLOT
    assert store.stats()["evictions"] == 112
    assert stat.S_IMODE(directory.joinpath("owners").stat().st_mode) == 0o700
    for root, folders, names in os.walk(directory):
        assert all(stat.S_IMODE(os.stat(os.path.join(root, name)).st_mode) == 0o600 for name in names)
        assert all(stat.S_IMODE(os.stat(os.path.join(root, name)).st_mode) == 0o700 for name in folders)


def test_two_handles_of_one_process(tmp_path, opened):
    first, second = opened(tmp_path), opened(tmp_path)
    put(first, "a")
    put(second, "b")
    assert get(first, "a", "b") == get(second, "a", "b") == [Fetch.HIT, Fetch.HIT]
    first.close()
    first.close()
    assert first.exists(["a"], NEVER) == [Presence.UNKNOWN]
    assert first.put(["c"], [page("c", SIZE)], NEVER) == [False]
    assert get(second, "a", "b", "c") == [Fetch.HIT, Fetch.HIT, Fetch.MISSING]


def test_threads(tmp_path, opened):
    """8 threads, 2 handles, 16 slots, 40 keys: no wrong byte, no lost slot."""
    stores = [opened(tmp_path, 16), opened(tmp_path, 16)]
    errors, hits = [], []

    def work(number):
        try:
            for i in range(40):
                keys = [f"k{(number * 7 + i * 3 + j) % 40}" for j in range(4)]
                put(stores[number % 2], *keys)
                hits.append(get(stores[(number + i) % 2], *keys).count(Fetch.HIT))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sum(hits) > 500
    counts = stores[0].stats()
    assert (counts["pending"], counts["objects"] + counts["free"], counts["failures"]) == (0, 16, 0)


def test_two_processes(tmp_path, opened):
    store = opened(tmp_path)
    put(store, "a")
    code = "print(get(store, 'a', 'c'), put(store, 'b'))"
    assert in_process(tmp_path, code) == "[1, 0] [True]"
    assert get(store, "a", "b") == [Fetch.HIT, Fetch.HIT]


def in_process(directory, code, before=""):
    """What `code` prints in another process, with `store` open there."""
    script = (
        f"import math, os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {before}\n"
        "import crash_worker; from crash_worker import page, read\n"
        "from purecache.stores.local import LocalStore, LocalStoreError\n"
        f"put = lambda store, *keys: store.put(keys, [page(key, {SIZE}) for key in keys], math.inf)\n"
        f"get = lambda store, *keys: [int(answer) for answer, _ in read(store, keys, {SIZE})]\n"
        f"try:\n    store = LocalStore({str(directory)!r}, {SIZE}, {8 * SLOT})\n"
        "except LocalStoreError as error:\n    print(error); raise SystemExit\n"
        f"{code}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=BARE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_slot_used_anew_during_a_read_is_not_a_hit(tmp_path, opened, monkeypatch):
    """Also when the same key comes back to the same slot."""
    store, other = opened(tmp_path, 1), opened(tmp_path, 1)
    put(store, "a")
    original = os.preadv

    def evict_first(file, buffers, offset):
        monkeypatch.setattr(os, "preadv", original)
        put(other, "b")
        put(other, "a")
        return original(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", evict_first)
    assert get(store, "a") == [Fetch.MISSING]
    assert get(store, "a") == [Fetch.HIT]


def test_the_second_writer_of_a_key_gives_its_slot_back(tmp_path, opened, monkeypatch):
    store, other = opened(tmp_path), opened(tmp_path)
    original = os.pwrite

    def be_slower(file, buffer, offset):
        monkeypatch.setattr(os, "pwrite", original)
        assert put(other, "a") == [True]
        return original(file, buffer, offset)

    monkeypatch.setattr(os, "pwrite", be_slower)
    assert put(store, "a") == [True]
    counts = store.stats()
    assert (counts["objects"], counts["pending"], counts["free"]) == (1, 0, 7)
    assert get(store, "a") == [Fetch.HIT]


def test_short_transfers_are_continued(tmp_path, opened, monkeypatch):
    store = opened(tmp_path)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, buffer, offset: pwrite(file, buffer[:999], offset))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:777]], offset))
    assert put(store, "a") == [True]
    assert get(store, "a") == [Fetch.HIT]


def test_errors_of_single_pages_are_holes(tmp_path, opened, monkeypatch):
    store = opened(tmp_path)
    pwrite, preadv, calls = os.pwrite, os.preadv, []

    def second_fails(function):
        def call(file, data, offset):
            calls.append(offset)
            if len(calls) == 2:
                raise OSError(errno.EIO, "bad sector")
            return function(file, data, offset)

        return call

    monkeypatch.setattr(os, "pwrite", second_fails(pwrite))
    assert put(store, "a", "b", "c") == [True, False, True]
    assert (store.stats()["pending"], store.stats()["free"]) == (0, 6)
    put(store, "b")
    calls.clear()
    monkeypatch.setattr(os, "preadv", second_fails(preadv))
    assert get(store, "a", "b", "c") == [Fetch.HIT, Fetch.FAILED, Fetch.HIT]


def test_a_shortened_data_file_fails_and_is_made_anew(tmp_path, opened):
    store = opened(tmp_path)
    put(store, *"abc")
    os.truncate(tmp_path / "pages", SLOT)
    assert get(store, *"abc") == [Fetch.HIT, Fetch.FAILED, Fetch.FAILED]
    store.close()
    store = opened(tmp_path)
    assert get(store, *"abc") == [Fetch.MISSING] * 3
    assert put(store, *"abc") == [True] * 3


def test_an_index_that_fails_gives_no_exception_and_loses_no_slot(tmp_path, opened, monkeypatch):
    """The publishing transaction fails (as on a full disk): False, and the slots return with the next put."""
    store = opened(tmp_path)

    def fail(self):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        pwrite = os.pwrite

        def write_then_fail(file, data, offset):
            patch.setattr(Books, "save", fail)
            return pwrite(file, data, offset)

        patch.setattr(os, "pwrite", write_then_fail)
        assert put(store, "a", "b") == [False, False]
        assert store.delete(["a"], NEVER) == [True]
        store.clear()
    assert (store.stats()["pending"], store.stats()["failures"]) == (2, 2)
    assert put(store, "c") == [True]
    assert (store.stats()["pending"], store.stats()["objects"]) == (0, 1)


def damage_garbage(index):
    (index / "data.mdb").write_bytes(b"garbage!" * 4096)


def damage_empty(index):
    (index / "data.mdb").write_bytes(b"")


def damage_short(index):
    os.truncate(index / "data.mdb", 2 * BLOCK)


def damage_delete_file(index):
    (index / "data.mdb").unlink()


def damage_delete_all(index):
    damage_delete_file(index)
    (index / "lock.mdb").unlink()
    index.rmdir()


def damage_version(index):
    data = (index / "data.mdb").read_bytes()
    facts = (1).to_bytes(8, "little") + (8).to_bytes(8, "little")
    assert facts in data
    (index / "data.mdb").write_bytes(data.replace(facts, (2).to_bytes(8, "little") + facts[8:]))


def damage_meta(index):
    (index.parent / "meta.json").write_text("{")


def damage_first_pages(index):
    data = bytearray((index / "data.mdb").read_bytes())
    for start in (0, BLOCK):  # behind the magic numbers: flags, roots, last page
        data[start + 40 : start + 160] = b"\xee" * 120
    (index / "data.mdb").write_bytes(data)


DAMAGES = [
    damage_first_pages,
    damage_garbage,
    damage_empty,
    damage_short,
    damage_delete_file,
    damage_delete_all,
    damage_version,
    damage_meta,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unusable_index_is_an_empty_one(tmp_path, opened, damage):
    store = opened(tmp_path)
    put(store, *"abc")
    store.close()
    damage(next(tmp_path.glob("index-*")))
    store = opened(tmp_path)
    assert store.stats()["objects"] == 0
    assert put(store, *"abcdefghij")[:8] == [True] * 8
    assert get(store, "a", "h") == [Fetch.HIT, Fetch.HIT]
    store.close()
    assert len(list(tmp_path.glob("index-*"))) == 1
    assert get(opened(tmp_path), "a", "h") == [Fetch.HIT, Fetch.HIT]


def test_whoever_has_a_deleted_index_open_notices(tmp_path, opened):
    store = opened(tmp_path)
    put(store, "a")
    damage_delete_all(next(tmp_path.glob("index-*")))
    other = opened(tmp_path)
    assert put(other, "b") == [True]
    assert store.exists(["a"], NEVER) == [Presence.UNKNOWN]
    assert store.get(["a"], [memoryview(bytearray(SIZE))], NEVER) == [Fetch.FAILED]
    assert put(store, "c") == [False]
    store.close()
    assert get(other, "b") == [Fetch.HIT]


def test_geometry_and_format_are_checked(tmp_path, opened):
    opened(tmp_path).close()
    with pytest.raises(LocalStoreError, match="give another directory, or delete this one"):
        LocalStore(tmp_path, SIZE + 1, 8 * SLOT)
    with pytest.raises(LocalStoreError, match="'slots': 8"):
        LocalStore(tmp_path, SIZE, 9 * SLOT)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(LocalStoreError, match="'format': 99"):
        opened(tmp_path)
    assert os.listdir(tmp_path / "owners") == []


@pytest.mark.parametrize(("size", "capacity"), [(0, 10 * SLOT), (SIZE, SLOT - 1), (SIZE, -1)])
def test_wrong_sizes(tmp_path, size, capacity):
    with pytest.raises(ValueError, match="bytes"):
        LocalStore(tmp_path / "s", size, capacity)
    assert not (tmp_path / "s").exists()


def test_a_directory_of_something_else_is_refused(tmp_path, opened):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(LocalStoreError, match=r"thesis\.tex"):
        opened(tmp_path)
    assert not (tmp_path / "pages").exists()


def test_a_lost_meta_file_of_a_store_in_use_is_not_guessed(tmp_path, opened):
    store = opened(tmp_path)
    put(store, "a")
    (tmp_path / "meta.json").unlink()
    with pytest.raises(LocalStoreError, match="close the store everywhere"):
        opened(tmp_path)
    assert get(store, "a") == [Fetch.HIT]


def test_reservations_of_a_dead_process_are_reclaimed_when_slots_run_out(tmp_path, opened):
    """The other process dies in the middle of a put, with this store open all the time."""
    store = opened(tmp_path)
    code = "os.pwrite = lambda *_: os._exit(0); put(store, *'uvwxyz')"
    assert in_process(tmp_path, code) == ""
    assert store.stats()["pending"] == 6
    assert len(os.listdir(tmp_path / "owners")) == 2
    assert put(store, "a", "b") == [True, True]
    assert store.stats()["reclaimed"] == 0
    assert put(store, "c", "d") == [True, True]
    counts = store.stats()
    assert (counts["reclaimed"], counts["pending"], counts["evictions"], counts["objects"]) == (6, 0, 0, 4)


def test_reservations_of_a_dead_process_are_reclaimed_at_open(tmp_path, opened):
    in_process(tmp_path, "os.pwrite = lambda *_: os._exit(0); put(store, *'uvwxyz')")
    store = opened(tmp_path)
    counts = store.stats()
    assert (counts["reclaimed"], counts["pending"], counts["free"]) == (6, 0, 8)
    assert len(os.listdir(tmp_path / "owners")) == 1


def test_reservations_of_a_slow_writer_are_left_alone(tmp_path, opened, monkeypatch):
    """All slots are being written by one handle: another one has no room, and takes nothing away."""
    store, other = opened(tmp_path, 2), opened(tmp_path, 2)
    original, answers = os.pwrite, []

    def meanwhile(file, buffer, offset):
        monkeypatch.setattr(os, "pwrite", original)
        answers.append(put(other, "x"))
        answers.append(opened(tmp_path, 2).stats()["reclaimed"])
        return original(file, buffer, offset)

    monkeypatch.setattr(os, "pwrite", meanwhile)
    assert put(store, "a", "b") == [True, True]
    assert answers == [[False], 0]
    assert get(store, "a", "b") == [Fetch.HIT, Fetch.HIT]


def test_a_writer_that_lost_its_reservation_publishes_nothing(tmp_path, opened, monkeypatch):
    """Someone deletes the file of a living owner in the middle of its put, and all slots go to another one."""
    store, other = opened(tmp_path, 2), opened(tmp_path, 2)
    original = os.pwrite

    def lose(file, buffer, offset):
        monkeypatch.setattr(os, "pwrite", original)
        done = original(file, buffer, offset)
        (tmp_path / "owners" / store._owners.id.hex()).unlink()
        assert put(other, "x", "y") == [True, True]
        return done

    monkeypatch.setattr(os, "pwrite", lose)
    assert put(store, "a") == [False]
    assert get(other, "x", "y", "a") == [Fetch.HIT, Fetch.HIT, Fetch.MISSING]
    counts = other.stats()
    assert (counts["reclaimed"], counts["objects"], counts["pending"], counts["free"]) == (1, 2, 0, 0)


def test_a_reservation_that_is_over_leaves_the_next_one_alone(tmp_path, opened):
    store, other = opened(tmp_path, 1), opened(tmp_path, 1)
    first = store._index.reserve([b"a"], (), ()).answers[0]
    assert other._index.reclaim({store._owners.id}) == 1
    second = other._index.reserve([b"b"], (), ()).answers[0]
    assert (first.slot, second.slot) == (0, 0)
    assert store._index.publish([(b"a", SIZE, first)], [first]) == [False]
    assert other._index.counts() == {"objects": 0, "pending": 1, "free": 0, "slots": 1}
    assert other._index.publish([(b"b", SIZE, second)], []) == [True]
    assert present(store, "ab") == {"b"}


def test_slots_that_do_not_exist_are_not_written(tmp_path, opened):
    """An index damaged in a way that its sums don't show."""
    store = opened(tmp_path)
    put(store, *"abcdefgh")
    store.delete(["a"], NEVER)
    with store._index._writing() as books:
        assert books.take() == 0
        books.free(9)
    assert put(store, "x") == [False]
    assert (tmp_path / "pages").stat().st_size == 8 * SLOT
    assert get(store, *"bcdefgh") == [Fetch.HIT] * 7


def test_a_forked_child_gets_answers_and_does_no_harm(tmp_path):
    """It ends in the usual way, which frees all objects."""
    code = (
        "put(store, 'a'); get(store, 'a')\n"
        "if os.fork() == 0:\n"
        "    print(get(store, 'a'), put(store, 'b')); store.close()\n"
        f"    try: LocalStore({str(tmp_path)!r}, {SIZE}, {8 * SLOT})\n"
        "    except LocalStoreError as error: print('spawn' in str(error))\n"
        "    sys.exit()\n"
        "os.wait(); print(get(store, 'a', 'b'), put(store, 'c'), store.stats()['failures'])"
    )
    assert in_process(tmp_path, code).splitlines() == ["[2] [False]", "True", "[1, 0] [True] 0"]


def test_a_forked_child_does_not_keep_a_dead_parent_alive(tmp_path, opened):
    """The parent dies within a put, when it has a child that lives on until its input ends."""
    script = (
        f"put = lambda key: store.put([key], [crash_worker.page(key, {SIZE})], float('inf'))\n"
        "def fork_and_die(*_):\n"
        "    if os.fork():\n        os._exit(0)\n"
        "    print('child', flush=True); sys.stdin.read(); os._exit(0)\n"
        "os.pwrite = fork_and_die\nput('a')\n"
    )
    start = f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import crash_worker\n"
    start += f"store = crash_worker.LocalStore({str(tmp_path)!r}, {SIZE}, {8 * SLOT})\n"
    command = [sys.executable, "-c", start + script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=BARE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "child\n"
        process.wait(30)
        counts = opened(tmp_path).stats()
        assert (counts["reclaimed"], counts["pending"]) == (1, 0)


def aligned(size, shift=0):
    return memoryview(mmap.mmap(-1, size + BLOCK))[shift : shift + size]


@pytest.mark.parametrize("size", [64, BLOCK, BLOCK + 64, 300 * 1024 + 64])
@pytest.mark.parametrize("shift", [0, 1])
def test_direct(tmp_path, monkeypatch, size, shift):
    """Aligned and other buffers, with a tail and without; what is written directly is what others read."""
    store = LocalStore(tmp_path, size, 4 * (size + BLOCK), direct=True)
    if store._pages._direct is None:
        pytest.skip("the file system of the temporary directory has no direct I/O")
    plain = LocalStore(tmp_path, size, 4 * (size + BLOCK))
    source, target = aligned(size, shift), aligned(size, shift)
    source[:] = content("a", size)
    monkeypatch.delattr(os, "pwrite")  # the way of buffered writes
    assert store.put(["a"], [source], NEVER) == [True]
    assert store.put(["b"], [memoryview(bytes(source))], NEVER) == [True]
    for reader in (store, plain):
        for key in ("a", "b"):
            target[:] = bytes(size)
            assert reader.get([key], [target], NEVER) == [Fetch.HIT]
            assert target == source
    store.close()
    plain.close()


def test_direct_falls_back_where_the_file_system_refuses(tmp_path, opened, monkeypatch):
    store = opened(tmp_path, direct=True)

    def refuse(*_):
        raise OSError(errno.EINVAL, "no direct I/O")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        assert put(store, "a") == [True]
    assert get(store, "a") == [Fetch.HIT]
    original = os.open

    def open_without(path, flags, *args, **options):
        return refuse() if flags & os.O_DIRECT else original(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_without)
    assert get(opened(tmp_path, direct=True), "a") == [Fetch.HIT]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't mount a tmpfs: {done.stderr}")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


def test_a_disk_too_small_is_told_at_creation(small_disk, opened):
    with pytest.raises(LocalStoreError, match="make room, or lower capacity_bytes"):
        store_of(small_disk, 300)
    assert sum(path.stat().st_blocks for path in small_disk.rglob("*") if path.is_file()) == 0
    store = opened(small_disk, 8, direct=True)  # also: what failed is no obstacle
    assert put(store, "a") == [True]
    assert get(store, "a") == [Fetch.HIT]


def fill_up(path):
    with open(path, "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(BLOCK))


def test_a_disk_that_is_full_later_costs_no_exception(small_disk, opened):
    store = opened(small_disk, 64)
    put(store, "a")
    fill_up(small_disk / "filler")
    answers = [put(store, f"{'key' * 50}{i}", f"{'lock' * 40}{i}") for i in range(100)]
    assert [False, False] in answers
    assert get(store, "a")[0] in (Fetch.HIT, Fetch.MISSING)
    (small_disk / "filler").unlink()
    assert put(store, "b") == [True]
    assert get(store, "b") == [Fetch.HIT]
    counts = store.stats()
    assert counts["objects"] + counts["free"] == 64
    assert counts["pending"] == 0


NOBODY = "os.setgid(65534), os.setuid(65534)"


@pytest.fixture
def public():
    """A directory that everyone can reach."""
    if os.geteuid() != 0:
        pytest.skip("dropping root needs root")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def as_nobody(directory, code):
    # Modules are read while we may still do so.
    return in_process(directory, code, before=f"import crash_worker, purecache.stores.local; {NOBODY}")


def test_a_read_only_directory_is_refused(public):
    assert "no permission" in as_nobody(public, "print('opened')")
    assert "no permission" in as_nobody(public / "below", "print('opened')")
    assert os.listdir(public) == []


def test_a_store_of_someone_else_is_refused(public, opened):
    store = opened(public)
    put(store, "a")
    before = sorted(path.name for path in public.rglob("*"))
    assert "no permission" in as_nobody(public, "print('opened')")
    assert sorted(path.name for path in public.rglob("*")) == before
    assert get(store, "a") == [Fetch.HIT]


def test_another_user_has_a_store_of_their_own(public):
    os.chmod(public, 0o777)
    assert as_nobody(public / "mine", "print(put(store, 'a'), get(store, 'a'))") == "[True] [1]"


def test_the_store_needs_no_jax(tmp_path):
    assert in_process(tmp_path, "print(put(store, 'a'), 'jax' in sys.modules)") == "[True] False"


def test_clock_jumps_change_nothing(tmp_path, opened, monkeypatch):
    """The order of use is counted, not timed."""
    store = opened(tmp_path, 3)
    for key, now in (("a", 4e9), ("b", 0.0), ("c", 2e9)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        assert put(store, key) == [True]
        for file in tmp_path.rglob("*"):
            os.utime(file, (now, now))
    assert get(store, "a") == [Fetch.HIT]
    assert put(store, "d") == [True]
    assert present(store, "abcd") == {"a", "c", "d"}
    store.close()
    again = opened(tmp_path, 3)
    assert put(again, "e") == [True]
    assert present(again, "abcde") == {"a", "d", "e"}
