"""Where prefixes begin: namespaces by name, which a digest does not tell."""

from dataclasses import dataclass
from typing import Any

from purecache.namespaces import Namespace, encoded_namespace

_LENGTH = 8


@dataclass(frozen=True)
class Origin:
    """What a namespace digest was made from."""

    namespace: Namespace
    no_rank: bool
    """Whether callers gave the rank None."""
    first_token: int | None
    """Of a tree of bigrams."""


def origin_as_json(origin: Origin) -> list[Any]:
    """Plain data for JSON."""
    return [encoded_namespace(origin.namespace).hex(), origin.no_rank, origin.first_token]


def origin_from_json(value: Any) -> Origin:
    """The origin again. Raises ValueError or TypeError for anything else."""
    name, no_rank, first = value
    namespace, rest = _decoded(bytes.fromhex(name))
    if rest:
        raise ValueError("something follows the name of a namespace")
    return Origin(namespace, bool(no_rank), None if first is None else int(first))


def _decoded(content: bytes) -> tuple[Any, bytes]:
    """The first value of what `encoded_namespace` made, and the bytes behind it."""
    tag, start = content[:1], 1 + _LENGTH
    if tag == b"n":
        return None, content[1:]
    length = int.from_bytes(content[1:start], "little")
    inside, rest = content[start : start + length], content[start + length :]
    if len(content) < start + length:
        raise ValueError("the name of a namespace is cut off")
    if tag == b"t":
        parts = []
        while inside:
            part, inside = _decoded(inside)
            parts.append(part)
        return tuple(parts), rest
    if tag == b"y":
        return inside, rest
    text = inside.decode()
    if tag == b"b" and text in ("True", "False"):
        return text == "True", rest
    if tag == b"i":
        return int(text), rest
    if tag == b"s":
        return text, rest
    raise ValueError(f"no namespace has the tag {tag!r}")
