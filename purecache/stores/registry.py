"""Open a store by a text: a URL, the name of a plug-in, or `module:Class`."""

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from purecache.stores.interface import Store

GROUP = "purecache.stores"
"""The group of entry points in which other packages name their store classes."""

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}iB": 1024**_power}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)")
_PASSWORD = re.compile(r"[^/]*://[^/@]*:[^/]*@")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")
_OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
SCHEMES = ("memory", "local", "file", *_OBJECT_SCHEMES)
"""What a URL of a store may begin with."""


def open_store(spec: str, object_bytes: int, **options: Any) -> Store:
    """The store that `spec` describes, for objects of `object_bytes` (page and trailer).

    - `memory:?capacity=1GiB`: in this process.
    - `local:///path?capacity=20GiB&direct=true`: on a disk of this machine (one big file; direct I/O or not).
    - `file:///path?capacity=20GiB&min_free=5GiB`: one file per object, also on shared file systems.
    - `s3://bucket/path?endpoint=http://host:port&region=...`, `gs://bucket/path`, `az://container/path`: see
      `ObjectStore`, also for `concurrency`, `request_seconds`, `connect_seconds` and `retries`.
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
    if _CLASS.fullmatch(address):
        return _call(address, _class(address), object_bytes, options)
    raise ValueError(f"there is no store {address!r}: {_possible()}")


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `20GiB`, `1.5 GB` or `4096`. Raises ValueError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"not a size: {text!r}; write a number and one of {', '.join(filter(None, _UNITS))}")
    number, unit = match[1], _UNITS[match[2]]
    return int(number) * unit if "." not in number else int(float(number) * unit)


def parse_flag(text: str | bool) -> bool:
    """True or False from text. Raises ValueError for anything but 1, true, yes, 0, false, no."""
    lower = str(text).lower()
    if lower not in _TRUE + _FALSE:
        raise ValueError(f"not a yes or no: {text!r}; write one of {', '.join(_TRUE + _FALSE)}")
    return lower in _TRUE


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


def _take(address: str, options: dict[str, Any], known: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Parse the options of a built-in store. Raises ValueError for unknown ones and bad values."""
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"{address}: unknown option {', '.join(unknown)}; there are {', '.join(known)}")
    parsed = {}
    for name, value in options.items():
        try:
            parsed[name] = known[name](value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{address}: {name}: {error}") from None
    return parsed


def _capacity(address: str, options: dict[str, Any], object_bytes: int) -> int:
    if "capacity" not in options:
        raise ValueError(f"{address}: say how much it may hold, as in {address}?capacity=20GiB")
    if options["capacity"] < object_bytes:
        raise ValueError(
            f"{address}: a capacity of {options['capacity']} bytes holds no object of {object_bytes} bytes"
        )
    return options["capacity"]


def _directory(address: str) -> str:
    parts = urlsplit(address)
    if parts.netloc or not parts.path.startswith("/") or parts.path == "/" or parts.fragment:
        raise ValueError(f"{address}: write an absolute path behind three slashes, as in {parts.scheme}:///path")
    return unquote(parts.path)


def _memory(address: str, object_bytes: int, options: dict[str, Any]) -> Store:
    if address.strip("/") != "memory:":
        raise ValueError(f"{address}: memory has no path; write memory:?capacity=1GiB")
    options = _take(address, options, {"capacity": parse_size})
    return _module("memory").MemoryStore(_capacity(address, options, object_bytes))


def _local(address: str, object_bytes: int, options: dict[str, Any]) -> Store:
    directory = _directory(address)
    options = _take(address, options, {"capacity": parse_size, "direct": parse_flag})
    capacity = _capacity(address, options, object_bytes)
    make = _module("local").LocalStore
    return make(directory, object_bytes, capacity, direct=options.get("direct", False))


def _files(address: str, object_bytes: int, options: dict[str, Any]) -> Store:
    directory = _directory(address)
    options = _take(address, options, {"capacity": parse_size, "min_free": parse_size})
    capacity = _capacity(address, options, object_bytes)
    return _module("files").FileStore(directory, capacity, min_free_bytes=options.get("min_free", 0))


def _objects(address: str, options: dict[str, Any]) -> Store:
    parts = urlsplit(address)
    if not parts.netloc:
        raise ValueError(f"{address}: say which bucket, as in {parts.scheme}://bucket/path")
    own = {"concurrency": int, "request_seconds": float, "connect_seconds": float, "retries": int}
    config = {name: value for name, value in options.items() if name not in own}
    settings = _take(address, {name: value for name, value in options.items() if name in own}, own)
    # The path is ours to join, so that no store resolves it in its own way.
    url = urlunsplit((parts.scheme, parts.netloc, "", "", ""))
    return _module("objects").ObjectStore(url, unquote(parts.path), **settings, **config)


def _module(name: str) -> ModuleType:
    """A module of a built-in store, imported only when it is used: each needs packages of its own."""
    try:
        return importlib.import_module(f"purecache.stores.{name}")
    except ImportError as error:
        raise ImportError(f"this store needs {error.name or error}: pip install 'purecache[store]'") from error


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
