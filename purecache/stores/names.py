"""Names of objects: which objects hold a page, and all that their bytes depend on besides the tokens.

A page key says whose tokens they are. A name adds an `ObjectRecord`: weights, dtype, layout and part of the model. The
short name `page key.pool.digest` goes to the store, the full one (`format_name`) is for manifests and people; both are
read back exactly. `objects_of` is the one function that says which objects a page has, for put, query, get and delete.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol, get_origin
from urllib.parse import quote, unquote

MAX_NAME = 200
"""Longest key that a store takes, in characters."""
FORMAT_VERSION = 1
"""Of the bytes of an object: raise it where a page is laid out anew without a change of the layout's name."""
DIGEST_CHARACTERS = 32

_DOMAIN = b"purecache-object-v1"
_POOL = re.compile(r"[A-Za-z0-9_-]{1,48}", re.ASCII)
_PAGE_KEY = re.compile(r"[A-Za-z0-9._-]{1,118}", re.ASCII)
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARACTERS}}}", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_PAIR = re.compile(r"(-?[0-9]{1,18})\.(-?[0-9]{1,18})", re.ASCII)


@dataclass(frozen=True)
class ObjectRecord:
    """What the bytes of an object depend on, besides the tokens and the namespace, which are in the page key.

    Raises TypeError or ValueError for fields of another type or range.
    """

    model: str
    """Name of the model."""
    revision: str
    """Version of its weights, such as a commit: another one makes other pages."""
    kv_dtype: str
    """Of the pool, with the scheme of quantization where there is one."""
    layout: str
    """Order of axes within the bytes, such as `layer,kv,token,head,dim`."""
    page_size: int
    """Tokens, or bigrams."""
    layers: tuple[int, int]
    """[first, end) of the model's layers."""
    heads: tuple[int, int] = (0, 1)
    """[first, end) of the model's KV heads; (0, 1) where there are none, as in MLA."""
    tp: tuple[int, int] = (0, 1)
    """Rank and ranks of tensor parallelism; (0, 1) where only `heads` matters."""
    cp: tuple[int, int] = (0, 1)
    """Rank and ranks of context parallelism."""
    pool: str = "kv"
    """Letters, digits, `_` and `-`, up to 48: it is part of the short name."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = get_origin(field.type) or field.type
            numbers = value if wanted is tuple else [value] if wanted is int else []
            if type(value) is not wanted or any(type(number) is not int for number in numbers):
                raise TypeError(f"{field.name} must be {field.type}, with plain ints, not {value!r}")
            if any(number >= 2**31 for number in numbers) or (wanted is tuple and len(numbers) != 2):
                raise ValueError(f"{field.name} must be {field.type} below 2**31, not {value!r}")
        for name in ("layers", "heads"):
            first, end = getattr(self, name)
            if not 0 <= first < end:
                raise ValueError(f"{name} must be a range [first, end) of at least one, not {(first, end)}")
        for name in ("tp", "cp"):
            rank, ranks = getattr(self, name)
            if not 0 <= rank < ranks:
                raise ValueError(f"{name} must be (rank, ranks) with 0 <= rank < ranks, not {(rank, ranks)}")
        if self.page_size < 1 or self.format_version < 1:
            raise ValueError("page_size and format_version must be at least 1")
        _checked_pool(self.pool)

    @property
    def digest(self) -> str:
        """32 hex characters (128 bits) of the tagged record; another one where any field differs."""
        return _digest_of(self)

    def objects(self, page_key: str, pool: str) -> tuple[str, ...]:
        """One object per page and pool."""
        return (short_name(page_key, pool, _in_pool(self, pool).digest),)


@lru_cache(maxsize=4096)
def _digest_of(record: ObjectRecord) -> str:
    return blake2b(_DOMAIN + _tagged(record), digest_size=DIGEST_CHARACTERS // 2).hexdigest()


@lru_cache(maxsize=4096)
def _in_pool(record: ObjectRecord, pool: str) -> ObjectRecord:
    return replace(record, pool=pool)


def _tagged(record: ObjectRecord) -> bytes:
    """Name, type and content of every field, each with its length: no two records share an encoding."""
    parts = [part for field in fields(record) for part in (field.name, *_text_of(getattr(record, field.name)))]
    contents = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(content).to_bytes(8, "little") + content for content in contents)


def _text_of(value: object) -> tuple[str, str]:
    """Tag and text of a field's value."""
    if isinstance(value, tuple):
        return "p", ".".join(map(str, value))
    return ("i" if isinstance(value, int) else "s"), str(value)


@dataclass(frozen=True)
class ObjectName:
    """A page key and the whole record of one object."""

    page_key: str
    record: ObjectRecord

    @property
    def short(self) -> str:
        """The key of the object in a store."""
        return short_name(self.page_key, self.record.pool, self.record.digest)


def short_name(page_key: str, pool: str, digest: str) -> str:
    """`page key.pool.digest`. Raises ValueError for parts that are not such."""
    if not _PAGE_KEY.fullmatch(page_key):
        raise ValueError(f"a page key is 1 to 118 letters, digits and `._-`, not {page_key!r}")
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"a digest is {DIGEST_CHARACTERS} hex characters, not {digest!r}")
    return f"{page_key}.{_checked_pool(pool)}.{digest}"


def parse_short(text: str) -> tuple[str, str, str]:
    """Page key, pool and digest of a short name. Raises ValueError for anything else."""
    parts = text.rsplit(".", 2)
    if len(parts) != 3 or short_name(*parts) != text:
        raise ValueError(f"{text!r} is no short name of an object")
    return parts[0], parts[1], parts[2]


def format_name(name: ObjectName) -> str:
    """All of a name as one line of ASCII: `page key;model=s:...;layers=p:0.32;...`, its text percent-encoded."""
    values = [(field.name, *_text_of(getattr(name.record, field.name))) for field in fields(name.record)]
    return ";".join([_quoted(name.page_key), *(f"{key}={tag}:{_quoted(text)}" for key, tag, text in values)])


def parse_name(text: str) -> ObjectName:
    """The name that `format_name` wrote as `text`. Raises ValueError for any other text."""
    page_key, *parts = text.split(";")
    values = {}
    for part in parts:
        key, _, tagged = part.partition("=")
        tag, _, content = tagged.partition(":")
        values[key] = _value_of(tag, unquote(content, "utf-8", "surrogatepass"))
    try:
        name = ObjectName(unquote(page_key, "utf-8", "surrogatepass"), ObjectRecord(**values))
    except TypeError as error:
        raise ValueError(f"{text!r} is no name of an object: {error}") from None
    if format_name(name) != text:  # one text per name: no other order, no needless escapes, no `+1` or `007`
        raise ValueError(f"{text!r} is not how its name is written")
    return name


def _value_of(tag: str, text: str) -> str | int | tuple[int, int]:
    pair = _PAIR.fullmatch(text)
    if tag == "s":
        return text
    if tag == "i" and _NUMBER.fullmatch(text):
        return int(text)
    if tag == "p" and pair:
        return int(pair[1]), int(pair[2])
    raise ValueError(f"{tag}:{text!r} is no value of a name")


def _quoted(text: str) -> str:
    return quote(text, "", "utf-8", "surrogatepass")


def _checked_pool(pool: str) -> str:
    if not _POOL.fullmatch(pool):
        raise ValueError(f"a pool is named by 1 to 48 letters, digits, `_` and `-`, not {pool!r}")
    return pool


class Naming(Protocol):
    """Which objects hold a page: an `ObjectRecord` (one), `HeadGroups` (one per group), or `SglangFiles`."""

    def objects(self, page_key: str, pool: str) -> tuple[str, ...]:
        """Names of the objects, in the order of their bytes in the page. Raises ValueError for a bad key or pool."""
        ...


def objects_of(page_key: str, naming: Naming | Mapping[str, Naming], pools: Sequence[str] = ("kv",)) -> tuple[str, ...]:
    """The names of all objects of a page in `pools`, pool by pool. Everything that touches a store asks this.

    `naming` may be one per pool, where pools differ in dtype, layers or heads. Raises ValueError for a bad key or pool,
    KeyError for a pool without a naming.
    """
    if isinstance(pools, str):
        raise TypeError(f"pools is a sequence of names, such as ({pools!r},)")
    per_pool = naming if isinstance(naming, Mapping) else dict.fromkeys(pools, naming)
    return tuple(name for pool in pools for name in per_pool[pool].objects(page_key, pool))


@dataclass(frozen=True)
class HeadGroups:
    """Names without topology: one object per group of heads, so that TP 4 reads what TP 8 wrote.

    `record` is that of a rank, with its `heads` [a, b); `group` is the heads per object, see `heads_per_group`. Heads
    must be the slowest axis of the bytes that are cut. Raises ValueError for a rank that cuts a group.
    """

    record: ObjectRecord
    group: int

    def __post_init__(self) -> None:
        if self.group < 1 or any(edge % self.group for edge in self.record.heads):
            raise ValueError(f"heads {self.record.heads} are not made of groups of {self.group}")

    def __len__(self) -> int:
        """Groups of this rank."""
        first, end = self.record.heads
        return (end - first) // self.group

    def objects(self, page_key: str, pool: str) -> tuple[str, ...]:
        """One object per group of the rank's heads, in ascending order, without its TP rank."""
        return tuple(short_name(page_key, pool, _digest_of(record)) for record in _groups(self, pool))

    def byte_ranges(self, size: int) -> tuple[slice, ...]:
        """Where each object lies in `size` bytes of the rank. Raises ValueError where heads are no whole bytes."""
        return parts_of(size, len(self))


@lru_cache(maxsize=1024)
def _groups(naming: HeadGroups, pool: str) -> tuple[ObjectRecord, ...]:
    starts = range(*naming.record.heads, naming.group)
    heads = [(start, start + naming.group) for start in starts]
    return tuple(replace(naming.record, heads=pair, tp=(0, 1), pool=pool) for pair in heads)


def parts_of(size: int, count: int) -> tuple[slice, ...]:
    """`count` equal parts of `size` bytes. Raises ValueError where they would not be equal."""
    if size % count:
        raise ValueError(f"{size} bytes can't be cut into {count} equal parts")
    return tuple(slice(start, start + size // count) for start in range(0, size, size // count)) if size else ()


def heads_per_group(kv_heads: int, ranks: Sequence[int]) -> int:
    """Heads per object for which every number of ranks in `ranks` holds whole groups.

    Ranks beyond the heads hold copies of one head. Raises ValueError where a number of ranks can't share the heads.
    """
    for number in ranks:
        if number < 1 or (kv_heads % number and number % kv_heads):
            raise ValueError(f"{kv_heads} KV heads can't be shared by {number} ranks")
    return kv_heads // math.lcm(*(min(number, kv_heads) for number in ranks))


def heads_of_rank(kv_heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """[first, end) of the KV heads of a rank; ranks beyond the heads hold copies of one head."""
    heads_per_group(kv_heads, (ranks,))
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in [0, {ranks}), not {rank}")
    if ranks > kv_heads:
        rank, ranks = rank // (ranks // kv_heads), kv_heads
    each = kv_heads // ranks
    return rank * each, (rank + 1) * each


@dataclass(frozen=True)
class SglangFiles:
    """Names of the files of sglang's file backend, for its directories.

    They say nothing of the revision, dtype, layout or page size: a directory of its own per deployment must. (rank,
    ranks) each; with `mla`, all ranks of tensor parallelism share one file. Raises ValueError for names no store takes.
    """

    model: str
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    mla: bool = False

    def __post_init__(self) -> None:
        self.objects("0" * 64, "0" * 48)

    @property
    def suffix(self) -> str:
        """What follows the page key and the pool."""
        parts = [self.model.replace("/", "-")]
        parts += [] if self.mla else [f"{self.tp[0]}_{self.tp[1]}"]
        parts += [f"{self.pp[1]}_{self.pp[0]}"] if self.pp[1] > 1 else []  # ranks before rank: so it is there
        parts += [f"cp{self.cp[0]}_{self.cp[1]}"] if self.cp[1] > 1 else []
        return "_" + "_".join(parts) + ".bin"

    def objects(self, page_key: str, pool: str) -> tuple[str, ...]:
        """One file per page and pool."""
        name = page_key + ("" if _checked_pool(pool) == "kv" else f".{pool}") + self.suffix
        if len(name) > MAX_NAME or not re.fullmatch(r"[A-Za-z0-9._-]+", name, re.ASCII):
            raise ValueError(f"{name!r} is no key for a store: {MAX_NAME} letters, digits and `._-` at most")
        return (name,)
