"""What requests may say: JSON objects, checked field by field, with errors that name the field."""

from collections.abc import Callable, Mapping
from typing import Any

from purecache.namespaces import Namespace

MOST_BYTES = 4 << 20
"""Of a request: a prompt of half a million tokens. Reading JSON holds up the other threads of the process."""


class BodyError(ValueError):
    """A request that can't be understood; the message names the field."""


Check = Callable[[Any], Any]
REQUIRED: Any = object()
"""Default of a field that must be given."""


def fields_of(body: Any, known: Mapping[str, tuple[Check, Any]]) -> dict[str, Any]:
    """The fields of a JSON object: `known` has a check and a default for each. Raises BodyError."""
    if not isinstance(body, dict):
        raise BodyError("the body must be a JSON object")
    if unknown := set(body) - set(known):
        raise BodyError(f"unknown fields {sorted(unknown)}: there are {sorted(known)}")
    found = {}
    for name, (check, default) in known.items():
        if name not in body:
            if default is REQUIRED:
                raise BodyError(f"{name} is missing")
            found[name] = default
            continue
        try:
            found[name] = check(body[name])
        except BodyError as error:
            raise BodyError(f"{name}: {error}") from None
    return found


def tokens(value: Any) -> list[int]:
    """Token ids."""
    good = isinstance(value, list) and all(type(each) is int and -(2**31) <= each < 2**31 for each in value)
    if not good:
        raise BodyError("a list of token ids that fit into 32 bits is needed")
    return value


def number(value: Any) -> float:
    """A number."""
    if type(value) not in (int, float):
        raise BodyError(f"a number is needed, not {value!r}")
    return float(value)


def whole(value: Any) -> int:
    """A whole number that is not negative."""
    if type(value) is not int or value < 0:
        raise BodyError(f"a whole number from 0 on is needed, not {value!r}")
    return value


def text(value: Any) -> str:
    """A string of 1 to 1000 characters."""
    if type(value) is not str or not 0 < len(value) <= 1000:
        raise BodyError("a string of 1 to 1000 characters is needed")
    return value


def namespace(value: Any) -> Namespace:
    """A namespace: null, a string or number, or a list of those and of pairs of a name and one of those."""
    return tuple(_named(each) for each in value) if type(value) is list else _part(value)


def _named(value: Any) -> Any:
    if type(value) is not list:
        return _part(value)
    if len(value) != 2 or type(value[0]) is not str:
        raise BodyError("a part of a namespace is null, a string, a number, or a pair of a name and one of those")
    return value[0], _part(value[1])


def _part(value: Any) -> Any:
    if value is not None and type(value) not in (bool, int, str):
        raise BodyError("a part of a namespace is null, true, false, a whole number or a string")
    return value


def optional(check: Check) -> Check:
    """`check`, or null."""
    return lambda value: None if value is None else check(value)
