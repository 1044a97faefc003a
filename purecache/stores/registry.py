"""Open a store by a text: a URL, the name of a plug-in, or `module:Class`."""

import importlib
import importlib.metadata
import inspect
import re
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from purecache.stores.interface import Store
from purecache.stores.options import capacity_of, directory_of, parse_flag, parse_size, take_options

GROUP = "purecache.stores"
"""The group of entry points in which other packages name their store classes."""

_PASSWORD = re.compile(r"[^/]*://[^/@]*:[^/]*@")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
ENGINES = {
    "redis": ("redis", "redis"),
    "mooncake": ("mooncake", "mooncake"),
    "nixl": ("nixl_slab", "nixl"),
    "nixl+s3": ("nixl_objects", "nixl"),
    "hf3fs": ("hf3fs", "hf3fs"),
    "eic": ("eic", "eic"),
    "simm": ("simm", "simm"),
    "aibrix": ("aibrix", "aibrix"),
    "lmcache": ("lmcache_files", "lmcache"),
}
"""Scheme of a URL: module in `purecache.stores.engines`, and the page of docs/stores that says how it is installed."""
SCHEMES = ("memory", "local", "file", *_OBJECT_SCHEMES, *ENGINES)
"""What a URL of a store may begin with."""


def open_store(spec: str, object_bytes: int, **options: Any) -> Store:
    """The store that `spec` describes, for objects of `object_bytes` (page and trailer).

    - `memory:?capacity=1GiB`: in this process.
    - `local:///path?capacity=20GiB&direct=true`: on a disk of this machine (one big file; direct I/O or not).
    - `file:///path?capacity=20GiB&min_free=5GiB`: one file per object, also on shared file systems.
    - `s3://bucket/path?endpoint=http://host:port&region=...`, `gs://bucket/path`, `az://container/path`: see
      `ObjectStore`, also for `concurrency`, `request_seconds`, `connect_seconds` and `retries`.
    - `redis://host:port`, `mooncake://host:port`, `nixl:///path`, and other engines: see docs/stores.md.
    - `package.module:Class`, or the name of an entry point of the group `purecache.stores`: called with the keyword
      `object_bytes` and the options.

    Options stand behind the question mark or are given as keywords, under the same names; those behind the question
    mark reach a class as text. Raises ValueError for what it doesn't understand (it says what there is) and for a
    password in the address, which is no secret: it stands in errors. ImportError
    where a package lacks, TypeError where a class makes no `Store`, and what the store itself raises.
    """
    if object_bytes < 1:
        raise ValueError(f"object_bytes must be at least 1, not {object_bytes}")
    address, options = _split(spec, options)
    scheme, colon, _ = address.partition(":")
    if _PASSWORD.match(address):  # a URL is told in errors and logs
        raise ValueError(f"{scheme}: a password doesn't belong into the URL: give it as an option of the store")
    if not colon:
        return _call(address, _plug_in(address), object_bytes, options)
    if scheme == "memory":
        return _memory(address, object_bytes, options)
    if scheme == "local":
        return _local(address, object_bytes, options)
    if scheme == "file":
        return _files(address, object_bytes, options)
    if scheme in _OBJECT_SCHEMES:
        return _objects(address, options)
    if scheme in ENGINES:
        return _engine(scheme).open_url(address, object_bytes, options)
    if _CLASS.fullmatch(address):
        return _call(address, _class(address), object_bytes, options)
    raise ValueError(f"there is no store {address!r}: {_possible()}")


def _split(spec: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The address, and the options of both places. Only the address may be told in errors: options hold secrets."""
    address, mark, query = spec.partition("?")
    merged: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if mark and query else []
    except ValueError:
        raise ValueError(f"{address}: behind the question mark there must be name=value&name=value") from None
    for name, value in [*pairs, *options.items()]:
        if name in merged:
            raise ValueError(f"{address}: the option {name} is given twice")
        merged[name] = value
    return address, merged


def _memory(address: str, object_bytes: int, options: dict[str, Any]) -> Store:
    if address.strip("/") != "memory:":
        raise ValueError(f"{address}: memory has no path; write memory:?capacity=1GiB")
    options = take_options(address, options, {"capacity": parse_size})
    return _module("memory").MemoryStore(capacity_of(address, options, object_bytes))


def _local(address: str, object_bytes: int, options: dict[str, Any]) -> Store:
    directory = directory_of(address)
    options = take_options(address, options, {"capacity": parse_size, "direct": parse_flag})
    capacity = capacity_of(address, options, object_bytes)
    make = _module("local").LocalStore
    return make(directory, object_bytes, capacity, direct=options.get("direct", False))


def _files(address: str, object_bytes: int, options: dict[str, Any]) -> Store:
    directory = directory_of(address)
    options = take_options(address, options, {"capacity": parse_size, "min_free": parse_size})
    capacity = capacity_of(address, options, object_bytes)
    return _module("files").FileStore(directory, capacity, min_free_bytes=options.get("min_free", 0))


def _objects(address: str, options: dict[str, Any]) -> Store:
    parts = urlsplit(address)
    if not parts.netloc:
        raise ValueError(f"{address}: say which bucket, as in {parts.scheme}://bucket/path")
    own = {"concurrency": int, "request_seconds": float, "connect_seconds": float, "retries": int}
    config = {name: value for name, value in options.items() if name not in own}
    settings = take_options(address, {name: value for name, value in options.items() if name in own}, own)
    # The path is ours to join, so that no store resolves it in its own way.
    url = urlunsplit((parts.scheme, parts.netloc, "", "", ""))
    return _module("objects").ObjectStore(url, unquote(parts.path), **settings, **config)


def _module(name: str) -> ModuleType:
    """A module of a built-in store, imported only when it is used: each needs packages of its own."""
    try:
        return importlib.import_module(f"purecache.stores.{name}")
    except ImportError as error:
        raise ImportError(f"this store needs {error.name or error}: pip install 'purecache[store]'") from error


def _engine(scheme: str) -> Any:
    module, page = ENGINES[scheme]
    try:
        return importlib.import_module(f"purecache.stores.engines.{module}")
    except ImportError as error:
        raise ImportError(f"{scheme}: {error}; docs/stores/{page}.md says how to install what it needs") from error


def _plug_in(name: str) -> Any:
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name == name:
            try:
                return point.load()
            except (ImportError, AttributeError) as error:
                raise ImportError(f"the store {name!r} ({point.value}) can't be loaded: {error}") from error
    raise ValueError(f"there is no store {name!r}: {_possible()}")


def _class(address: str) -> Any:
    module, _, path = address.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{address}: {error}; {_possible()}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            classes = [name for name, value in vars(found).items() if inspect.isclass(value)]
            raise ValueError(f"{address}: no such class; there are {', '.join(classes) or 'none'}")
        found = getattr(found, name)
    return found


def _call(address: str, make: Any, object_bytes: int, options: dict[str, Any]) -> Store:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        signature = None  # not written in Python, or not callable: let the call say so
    if signature is not None:
        try:
            signature.bind(object_bytes=object_bytes, **options)
        except TypeError as error:
            raise ValueError(f"{address}: {error}; it takes {signature}") from None
    store = make(object_bytes=object_bytes, **options)
    if not isinstance(store, Store):
        raise TypeError(f"{address} makes a {type(store).__name__}, which is no purecache.stores.Store")
    return store


def _possible() -> str:
    """What there is, for an error."""
    names = sorted({point.name for point in importlib.metadata.entry_points(group=GROUP)})
    plug_ins = f"the plug-ins {', '.join(names)}" if names else f"plug-ins (entry points of {GROUP}; there is none)"
    return f"there are URLs of {', '.join(SCHEMES)}; {plug_ins}; and module:Class"
