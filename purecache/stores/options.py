"""The options of a store in a URL: parsing them, with errors that say what there is."""

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}iB": 1024**_power}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)")
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")


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


def take_options(address: str, options: Mapping[str, Any], known: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Parse the options of a store. Raises ValueError for unknown ones and bad values.

    Errors never tell a value of an option that the store knows as text: it may be a secret.
    """
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


def capacity_of(address: str, options: Mapping[str, Any], object_bytes: int) -> int:
    """The option `capacity` (bytes), which must hold at least one object. Raises ValueError otherwise."""
    if "capacity" not in options:
        raise ValueError(f"{address}: say how much it may hold, as in {address}?capacity=20GiB")
    if options["capacity"] < object_bytes:
        raise ValueError(
            f"{address}: a capacity of {options['capacity']} bytes holds no object of {object_bytes} bytes"
        )
    return options["capacity"]


def directory_of(address: str) -> str:
    """The directory of a URL with an absolute path and no host. Raises ValueError for others."""
    parts = urlsplit(address)
    if parts.netloc or not parts.path.startswith("/") or parts.path == "/" or parts.fragment:
        raise ValueError(f"{address}: write an absolute path behind three slashes, as in {parts.scheme}:///path")
    return unquote(parts.path)


def host_of(address: str, port: int | None = None) -> tuple[str, int]:
    """Host and port of a URL such as `redis://host:6379`. Raises ValueError without a host, or without a port where
    `port` gives none."""
    parts = urlsplit(address)
    try:
        found = parts.port or port
    except ValueError:
        found = None
    if not parts.hostname or found is None:
        example = f"{parts.scheme}://host:{port or 'port'}"
        raise ValueError(f"{address}: say which host and port, as in {example}")
    return parts.hostname, found
