"""LmcacheFileStore over a fake of LMCache's client: what the real one does only in trouble. The real one:
test_lmcache_files.py."""

import importlib
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import FAILED, HIT, MISSING, NO, UNKNOWN, YES, Objects, over_clients, soon

from purecache.stores.registry import open_store

SIZE = 1000
OBJECTS = Objects(SIZE, careful=False)
put, get = OBJECTS.put, OBJECTS.get
MODULE = "purecache.stores.engines.lmcache_files"


class FakeClient:
    """Does at once what it is asked, and tells of it later. `script` says for a method what its next calls answer."""

    def __init__(self, base: str, workers: int, temporary: str, direct: bool, ahead: int):
        self.base, self.number = Path(base), 0
        self.done: list[tuple[int, Any, str, Any]] = []
        self.script: dict[str, list[Any]] = {}
        self.closed = 0
        self.event, self.signal = os.pipe()

    def event_fd(self) -> int:
        return self.event

    def path(self, key: str) -> Path:
        model, rank, group, name = key.split("@")
        return self.base / f"{model}@0x{rank}@{group}@{name}.data"

    def submit(self, method: str, answers: Any) -> int:
        self.number += 1
        action = self.script[method].pop(0) if self.script.get(method) else (True, "", answers)
        if isinstance(action, Exception):
            raise action
        self.done.append((self.number, *action))
        os.write(self.signal, b"x")
        return self.number

    def submit_batch_exists(self, keys: list[str]) -> int:
        return self.submit("exists", [self.path(key).exists() for key in keys])

    def submit_batch_set(self, keys: list[str], views: list[memoryview]) -> int:
        for key, view in zip(keys, views, strict=True):
            if not self.path(key).exists():  # as the real one
                self.path(key).write_bytes(view)
        return self.submit("set", None)

    def submit_batch_get(self, keys: list[str], views: list[memoryview]) -> int:
        for key, view in zip(keys, views, strict=True):
            view[:] = self.path(key).read_bytes()[: len(view)]
        return self.submit("get", [True] * len(keys))

    def submit_batch_delete(self, keys: list[str]) -> int:
        there = [self.path(key).exists() for key in keys]
        if not self.script.get("delete"):
            for key in keys:
                self.path(key).unlink(missing_ok=True)
        return self.submit("delete", there)

    def drain_completions(self) -> list[tuple[int, Any, str, Any]]:
        os.read(self.event, 1)
        done, self.done = self.done[::-1], []
        return [(10**6, True, "", None), *done]  # and one that nobody waits for

    def close(self) -> None:
        self.closed += 1
        os.close(self.event)
        os.close(self.signal)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    package, files = types.ModuleType("lmcache"), types.ModuleType("lmcache.lmcache_fs")
    files.__dict__["LMCacheFSClient"] = FakeClient
    with over_clients({"lmcache": package, "lmcache.lmcache_fs": files}, MODULE):
        opened = importlib.import_module(MODULE).LmcacheFileStore(tmp_path / "kv")
        yield opened
        opened.close()
        assert opened._client.closed == 1


TROUBLE = [(False, "worker died", None), (True, "", [1, 1]), (True, "", [True]), (1, "", None), RuntimeError("closed")]


@pytest.mark.parametrize("answer", TROUBLE)
def test_fake_answer_that_is_none_is_no_hit(store: Any, answer: Any):
    put(store, "a", "b")
    store._client.script["get"] = [answer]
    assert get(store, "a", "b") == [FAILED, FAILED]
    assert get(store, "a", "none", "b") == [HIT, MISSING, HIT]


@pytest.mark.parametrize("answer", [TROUBLE[0], TROUBLE[2], TROUBLE[3], TROUBLE[4]])
def test_fake_look_up_that_fails_is_unknown(store: Any, answer: Any):
    put(store, "a", "b")
    store._client.script["exists"] = [answer]
    assert store.exists(["a", "b"], soon()) == [UNKNOWN, UNKNOWN]
    store._client.script["exists"] = [(True, "", [1, True])]
    assert store.exists(["a", "b"], soon()) == [NO, YES]


def test_fake_put_and_delete_are_judged_by_the_files(store: Any):
    store._client.script["set"] = [(False, "disk full", None)]
    assert put(store, "a") == [True]  # it is there, whatever was said
    store._client.script["delete"] = [(True, "", [True, True])]
    assert store.delete(["a", "none"], soon()) == [False, True]
    store._client.submit_batch_set = lambda keys, views: store._client.submit("set", None)
    assert put(store, "b") == [False]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("lmcache://host/path", "absolute path"),
        ("lmcache:///x?workers=0", "at least 1"),
        ("lmcache:///x?workers=many", "workers"),
        ("lmcache:///x?direct=perhaps", "yes or no"),
        ("lmcache:///x?capacity=5", "unknown option capacity"),
    ],
)
def test_fake_urls_that_are_wrong(store: Any, url: str, error: str):
    with pytest.raises(ValueError, match=error):
        open_store(url, SIZE)


def test_fake_url_is_opened(store: Any, tmp_path: Path):
    opened = open_store(f"lmcache://{tmp_path}/other?workers=1&direct=true", SIZE)
    assert put(opened, "a") == [True]
    assert get(opened, "a") == [HIT]
    opened.close()
    opened.close()
