"""AibrixStore over a fake of AIBrix's manager: what the real one does only in trouble. The real one: test_aibrix.py."""

import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import FAILED, HIT, MISSING, NO, UNKNOWN, YES, Objects, over_clients, soon

from purecache.stores.interface import Fetch
from purecache.stores.registry import open_store

SIZE = 1000
OBJECTS = Objects(SIZE, careful=False)
put = OBJECTS.put
MODULE = "purecache.stores.engines.aibrix"
ENGINE = (MODULE, f"{MODULE}_blocks", f"{MODULE}_manager")


class FakeStatus:
    def __init__(self, code: str, value: Any = None):
        self.code, self.value = code, value

    def is_ok(self) -> bool:
        return self.code == "ok"

    def is_not_found(self) -> bool:
        return self.code == "not found"


class FakeTensor:
    def __init__(self, block: np.ndarray):
        self.block = block

    def reshape(self, _: int) -> "FakeTensor":
        return self

    def numpy(self) -> np.ndarray:
        return self.block


class FakeHandle:
    def __init__(self, manager: "FakeManager", blocks: list[np.ndarray]):
        self.manager, self.blocks, self.held = manager, blocks, True
        manager.held += 1

    def __len__(self) -> int:
        return len(self.blocks)

    def to_tensors(self) -> list[FakeTensor]:
        return [FakeTensor(block) for block in self.blocks]

    def release(self) -> None:
        if not self.held:
            raise ValueError("Reference count is already zero.")
        self.held = False
        self.manager.held -= 1


class FakeManager:
    """Prefix semantics as AIBrix has them. `script` says for a method what its next calls do instead of the usual."""

    def __init__(self, config: Any):
        self.size = config.block_spec.block_nbytes
        self.objects: dict[str, bytes] = {}
        self.script: dict[str, list[Any]] = {}
        self.calls: list[tuple[str, int]] = []
        self.held = 0

    def act(self, method: str, names: list[str]) -> Any:
        self.calls.append((method, len(names)))
        action = self.script[method].pop(0) if self.script.get(method) else None
        if isinstance(action, Exception):
            raise action
        return action

    def exists(self, prefix: None, names: list[str]) -> Any:
        if (action := self.act("exists", names)) is not None:
            return action
        count = next((i for i, name in enumerate(names) if name not in self.objects), len(names))
        return FakeStatus("ok", count) if count else FakeStatus("not found")

    def acquire(self, prefix: None, names: list[str]) -> Any:
        if (action := self.act("acquire", names)) is not None:
            return action
        blocks = [np.frombuffer(self.objects.get(name, bytes(self.size)), np.uint8).copy() for name in names]
        count = sum(name in self.objects for name in names)  # as AIBrix does where it reads several at once
        return FakeStatus("ok", (count, FakeHandle(self, blocks[:count]))) if count else FakeStatus("not found")

    def allocate_for(self, prefix: None, names: list[str]) -> Any:
        if (action := self.act("allocate_for", names)) is not None:
            return action
        return FakeStatus("ok", FakeHandle(self, [np.full(self.size, 7, np.uint8) for _ in names]))

    def put(self, prefix: None, names: list[str], handle: FakeHandle) -> Any:
        if (action := self.act("put", names)) is not None:
            handle.release()
            return action
        self.objects |= {name: block.tobytes() for name, block in zip(names, handle.blocks, strict=True)}
        handle.release()
        return FakeStatus("ok", len(names))

    def delete(self, prefix: None, names: list[str]) -> Any:
        if (action := self.act("delete", names)) is not None:
            return action
        for name in names:
            self.objects.pop(name, None)
        return FakeStatus("ok")

    def close(self) -> None:
        self.act("close", [])


def fake_spec(**options: Any) -> Any:
    return types.SimpleNamespace(block_nbytes=2 * options["tensor_spec"].head_size, **options)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    fake, torch = types.ModuleType("aibrix_kvcache"), types.ModuleType("torch")
    for name in ("KVCacheTensorSpec", "KVCacheConfig", "ModelSpec"):
        setattr(fake, name, types.SimpleNamespace)
    vars(fake).update(
        KVCacheBlockSpec=fake_spec,
        KVCacheBlockLayout=types.SimpleNamespace(NCLD=1),
        BlockHashes=lambda names, tokens: list(names),
        BaseKVCacheManager=FakeManager,
    )
    torch.__dict__["uint8"] = "uint8"
    with over_clients({"aibrix_kvcache": fake, "torch": torch}, *ENGINE):
        opened = importlib.import_module(MODULE).AibrixStore(tmp_path / "kv", SIZE)
        yield opened
        opened.close()


def get(store: Any, *keys: str) -> list[Fetch]:
    answers = OBJECTS.get(store, *keys)
    assert store._manager.held == 0
    return answers


def test_fake_hits_behind_a_hole_are_not_taken_for_a_prefix(store: Any):
    """An object that goes between the look-up and the read: the others come, whatever AIBrix counts."""
    put(store, *"abcd")
    store._manager.script["exists"] = [FakeStatus("ok", 4)]
    del store._manager.objects[next(iter(list(store._manager.objects)[1:]))]
    assert get(store, *"abcd") == [HIT, FAILED, HIT, HIT]


@pytest.mark.parametrize(
    "answer",
    [FakeStatus("timeout"), FakeStatus("error"), OSError("no"), FakeStatus("ok", -900), FakeStatus("ok", True)],
)
def test_fake_look_up_that_fails_is_unknown_and_never_a_hit(store: Any, answer: Any):
    put(store, *"abc")
    store._manager.script["exists"] = [answer]
    assert store.exists(list("abc"), soon()) == [UNKNOWN, YES, YES]
    store._manager.script["exists"] = [answer]
    assert get(store, *"abc") == [FAILED, HIT, HIT]
    store._manager.script["exists"] = [answer]
    assert put(store, "a", "d") == [False, True]


def test_fake_lack_of_memory_removes_nothing(store: Any):
    """Only an object of which AIBrix says that it isn't there, and is, is taken for damaged."""
    put(store, "a")
    for trouble in (FakeStatus("out of memory"), FakeStatus("timeout"), RuntimeError("no")):
        store._manager.script["acquire"] = [trouble]
        assert get(store, "a") == [FAILED]
    assert get(store, "a") == [HIT]
    store._manager.script["acquire"] = [FakeStatus("not found")]
    assert get(store, "a") == [FAILED]
    assert get(store, "a") == [MISSING]


def test_fake_put_that_fails_is_tried_one_by_one(store: Any):
    store._manager.script["put"] = [FakeStatus("error"), None, FakeStatus("ok", 0)]
    assert put(store, *"abc") == [True, False, True]
    assert store._manager.held == 0
    assert store.exists(list("abc"), soon()) == [YES, NO, YES]


def test_fake_put_that_raises_releases_its_memory(store: Any, monkeypatch: pytest.MonkeyPatch):
    def fail(self: FakeManager, prefix: None, names: list[str], handle: FakeHandle) -> None:
        raise AttributeError("result not found")

    monkeypatch.setattr(FakeManager, "put", fail)
    assert put(store, "a", "b") == [False, False]
    assert store._manager.held == 0


def test_fake_memory_that_is_not_enough_is_a_failure(store: Any):
    few = FakeHandle(store._manager, [np.zeros(store._manager.size, np.uint8)])
    store._manager.script["allocate_for"] = [FakeStatus("ok", few), FakeStatus("out of memory")]
    assert put(store, "a", "b") == [False, True]
    assert store._manager.held == 0


def test_fake_delete_is_believed_only_when_it_is_gone(store: Any):
    put(store, "a", "b")
    store._manager.script["delete"] = [FakeStatus("ok"), None]
    assert store.delete(["a", "b", "none"], soon()) == [False, True, True]


def test_fake_long_run_of_missing_objects_costs_one_look_up_each(store: Any):
    put(store, "a")
    store._manager.calls.clear()
    keys = ["a", *(f"k{i}" for i in range(30))]
    assert store.exists(keys, soon()) == [YES] + [NO] * 30
    assert sum(size for _, size in store._manager.calls) < 2 * len(keys)


def test_fake_close_that_raises(store: Any):
    store._manager.script["close"] = [RuntimeError("no")]
    store.close()
    assert store.exists(["a"], soon()) == [UNKNOWN]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("aibrix:?backend=ROCKSDB", "say where"),
        ("aibrix:///path?root=/x", "the path is an option"),
        ("aibrix:?root=x", "absolute"),
        ("aibrix:?root=/x&backend=PRIS", "must be one of ROCKSDB, SHFS"),
        ("aibrix:?root=/x&ttl=0", "at least 1"),
        ("aibrix:?root=/x&ttl=5&backend=SHFS", "only ROCKSDB has a ttl"),
        ("aibrix:?root=/x&size=5", "unknown option size"),
    ],
)
def test_fake_urls_that_are_wrong(store: Any, url: str, error: str):
    with pytest.raises(ValueError, match=error):
        open_store(url, SIZE)


def test_fake_url_is_opened(store: Any, tmp_path: Path):
    opened = open_store(f"aibrix:?backend=shfs&root={tmp_path}/other", SIZE)
    assert put(opened, "a") == [True]
    opened.close()
