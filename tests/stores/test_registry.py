"""open_store: every kind of spec, third-party classes, and errors that say what is possible."""

import importlib
import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purecache.stores import Fetch, Presence, Store
from purecache.stores.options import parse_flag, parse_size
from purecache.stores.registry import GROUP, open_store

LATER = float("inf")
THIRD_PARTY = """
from purecache.stores.interface import Fetch, Presence, Store

class Outer:
    class Nested: ...

class Theirs(Store):
    def __init__(self, object_bytes, host="nowhere", port=1):
        self.arguments = object_bytes, host, port
    def exists(self, keys, deadline): return [Presence.NO] * len(keys)
    def get(self, keys, buffers, deadline): return [Fetch.MISSING] * len(keys)
    def put(self, keys, buffers, deadline): return [False] * len(keys)
    def delete(self, keys, deadline): return [True] * len(keys)
    def clear(self): pass
    def stats(self): return {"objects": 0}
    def close(self): pass

class Other:
    def __init__(self, object_bytes): pass

number = 7
"""


def works(store: Store) -> bool:
    """Whether an object comes back."""
    buffer = memoryview(bytearray(256))
    assert store.put(["a"], [memoryview(b"x" * 256)], LATER) == [True]
    assert store.exists(["a", "b"], LATER) == [Presence.YES, Presence.NO]
    assert store.get(["a"], [buffer], LATER) == [Fetch.HIT]
    store.close()
    return bytes(buffer) == b"x" * 256


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with stores of somebody else."""
    (tmp_path / "their_stores.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_stores", raising=False)
    return "their_stores"


@pytest.fixture
def plug_ins(third_party: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint(name, f"{third_party}:{target}", GROUP)
        for name, target in (("theirs", "Theirs"), ("gone", "Gone"))
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == GROUP else [])


def test_memory():
    for spec in "memory:?capacity=1KiB", "memory://?capacity=1KiB", "memory:///?capacity=1024":
        store = open_store(spec, 256)
        assert store.stats()["capacity"] == 1024
        assert works(store)
    assert open_store("memory:", 256, capacity=2048).stats()["capacity"] == 2048


def test_files(tmp_path: Path):
    store = open_store(f"file://{tmp_path}/with%20space?capacity=2KB&min_free=1KiB", 256)
    assert store.stats()["capacity"] == 2000
    assert works(store)
    assert len(list((tmp_path / "with space").glob("??/??/a.page"))) == 1


def test_local_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []
    module = types.ModuleType("purecache.stores.local")
    module.LocalStore = lambda *rest, **options: calls.append((rest, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    open_store("local:///a/b%20c?capacity=1MiB&direct=true", 256)
    open_store("local:///d", 256, capacity="1MiB")
    assert calls == [(("/a/b c", 256, 1 << 20), {"direct": True}), (("/d", 256, 1 << 20), {"direct": False})]


def test_local_is_a_store(tmp_path: Path):
    pytest.importorskip("purecache.stores.local", reason="needs lmdb")
    store = open_store(f"local://{tmp_path}/store?capacity=1MiB", 4096)
    buffer = memoryview(bytearray(4096))
    assert store.get(["a"], [buffer], LATER) == [Fetch.MISSING]
    store.close()


def test_a_package_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch):
    """As if neither lmdb nor obstore nor xxhash were installed."""
    for name in "lmdb", "obstore", "xxhash":
        monkeypatch.setitem(sys.modules, name, None)
    for name in "local", "files", "files_quota", "objects", "envelope":
        monkeypatch.delitem(sys.modules, f"purecache.stores.{name}", raising=False)
    for spec in "local:///x?capacity=1MiB", "file:///x?capacity=1MiB", "s3://bucket/x":
        with pytest.raises(ImportError, match=r"needs (lmdb|obstore|xxhash).*pip install 'purecache\[store\]'"):
            open_store(spec, 256)
    assert open_store("memory:?capacity=1KiB", 256).stats()["capacity"] == 1024


def test_object_stores_keep_their_path_and_settings():
    pytest.importorskip("obstore")
    spec = "s3://bucket/some/path?endpoint=http://127.0.0.1:9&region=here&concurrency=4&retries=0&connect_seconds=0.5"
    store: Any = open_store(spec, 256, access_key_id="me", secret_access_key="secret")
    assert store._name("k") == "some/path/k.page"
    assert store._slots._value == 4
    assert store._store.config["endpoint"] == "http://127.0.0.1:9"
    assert store._store.config["access_key_id"] == "me"
    assert store._store.retry_config["max_retries"] == 0
    assert store.exists(["k"], LATER) == [
        Presence.UNKNOWN
    ]  # refused at once: plain http is allowed, no deadline needed
    store.close()
    other: Any = open_store("gs://bucket", 256, skip_signature="true")
    assert other._name("k") == "k.page"
    other.close()
    azure: Any = open_store("az://container/path?account_name=me&skip_signature=true", 256)
    assert azure._name("k") == "path/k.page"
    azure.close()


def test_a_class_of_somebody_else(third_party: str):
    store: Any = open_store(f"{third_party}:Theirs", 256)
    assert isinstance(store, Store)
    assert store.arguments == (256, "nowhere", 1)
    store = open_store(f"{third_party}:Theirs?host=there", 256, port=5)
    assert store.arguments == (256, "there", 5)
    with pytest.raises(ValueError, match=r"no such class; there are .*Theirs"):
        open_store(f"{third_party}:Thiers", 256)
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'hots'; it takes \(object_bytes, host="):
        open_store(f"{third_party}:Theirs?hots=there", 256)
    with pytest.raises(TypeError, match=r"makes a Other, which is no purecache"):
        open_store(f"{third_party}:Other", 256)
    with pytest.raises(ValueError, match="it takes"):
        open_store(f"{third_party}:Outer.Nested", 256)
    with pytest.raises(TypeError, match="not callable"):
        open_store(f"{third_party}:number", 256)
    with pytest.raises(ImportError, match=r"no_such_module"):
        open_store("no_such_module:Theirs", 256)


@pytest.mark.usefixtures("plug_ins")
def test_a_plug_in():
    store: Any = open_store("theirs?host=there", 256, port=5)
    assert store.arguments == (256, "there", 5)
    with pytest.raises(ImportError, match=r"'gone' .*can't be loaded"):
        open_store("gone", 256)
    with pytest.raises(ValueError, match=r"no store 'their': .*s3.*the plug-ins gone, theirs; and module:Class"):
        open_store("their", 256)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("memory:", r"memory:\?capacity=20GiB"),
        ("memory:/tmp?capacity=1KiB", "memory has no path"),
        ("memory:?capacity=255", "a capacity of 255 bytes holds no object of 256 bytes"),
        ("memory:?capacity=1Gib", "capacity: not a size: '1Gib'; write a number and one of B, KB, KiB, MB, MiB"),
        ("memory:?capacity=1KiB&capacity=2KiB", "given twice"),
        ("memory:?capacity", "name=value"),
        ("memory:?capacity=1KiB&direct=1", "unknown option direct; there are capacity"),
        ("file:///x?capacity=1KiB&minfree=1", "unknown option minfree; there are capacity, min_free"),
        ("file:///x", "say how much"),
        ("file://x/y?capacity=1KiB", "three slashes, as in file:///path"),
        ("file:x?capacity=1KiB", "three slashes"),
        ("local:///?capacity=1KiB", "three slashes"),
        ("local:///x?capacity=1KiB&direct=maybe", "direct: not a yes or no: 'maybe'; write one of 1, true, yes"),
        ("s3:///path", "which bucket"),
        ("s3://bucket?foo=1", "'foo' is not valid"),
        ("s3://bucket?concurrency=many", "concurrency: invalid literal"),
        ("s3://bucket?concurrency=0", "concurrency"),
        ("ftp://host", "no store 'ftp://host': there are URLs of memory, local, file, s3"),
        ("", "no store ''"),
        ("nobody", "no store 'nobody'"),
    ],
)
def test_mistakes_say_what_is_possible(spec: str, says: str):
    with pytest.raises(ValueError, match=says):
        open_store(spec, 256)


def test_no_secret_in_an_error():
    for spec in "s3://bucket?secret_access_key=hidden&foo=1", "ftp://host?password=hidden", "file:///x?key=hidden":
        with pytest.raises(ValueError, match=r".") as caught:
            open_store(spec, 256)
        error: BaseException | None = caught.value
        while error is not None:
            assert "hidden" not in str(error)
            error = error.__cause__


def test_the_size_of_an_object():
    with pytest.raises(ValueError, match="object_bytes"):
        open_store("memory:?capacity=1KiB", 0)


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("7B", 7), ("2KB", 2000), ("2 KiB", 2048), ("1.5MiB", 3 << 19), ("20GiB", 20 << 30), ("1TB", 10**12)],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1G", "1gib", "1 PiB", "1e9", "nan", "0x10", "1.", "1,5GB", "\u0661GB"]
)
def test_what_is_no_size(text: str):
    with pytest.raises(ValueError, match="write a number and one of"):
        parse_size(text)


@given(st.integers(0, 10**15), st.sampled_from(["", "B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_whole_sizes_are_exact(number: int, unit: str):
    power, base = " KMGT".index((unit + " ")[0].replace("B", " ")), 1024 if "i" in unit else 1000
    assert parse_size(f"{number}{unit}") == number * base**power
    assert parse_size(number) == number


def test_flags():
    assert [parse_flag(text) for text in ("1", "True", "yes", True)] == [True] * 4
    assert [parse_flag(text) for text in ("0", "false", "NO", False)] == [False] * 4
    with pytest.raises(ValueError, match="write one of"):
        parse_flag("")


def test_the_module_of_a_class_is_imported_anew_only_once(third_party: str):
    first = type(open_store(f"{third_party}:Theirs", 256))
    assert first is importlib.import_module(third_party).Theirs is type(open_store(f"{third_party}:Theirs", 256))
