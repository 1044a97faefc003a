"""What a report shows: plain data that recordings, runs and traces are turned into, and its form as JSON."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

FORMAT = "purecache report 1"
"""First entry of the JSON form."""
MOST_BYTES = 256 << 20
"""Size of the largest file that is read."""
SOURCES = ("recording", "run", "trace")
AXES = ("event", "seconds", "request")
OUTCOMES = ("ok", "part", "failed", "forgotten", "open", "unknown")
"""How a transfer ended: all pages arrived; some; none; a reset came first; it has not ended; nobody can tell."""


class ReportError(ValueError):
    """Data that is no report; the message says what is wrong."""


@dataclass(frozen=True)
class Stock:
    """The pages of one tier, pool and rank, and whose hands they are in."""

    tier: str
    """device, host or disk."""
    pool: str
    rank: int
    capacity: int
    """Pages; 0 where there is no limit."""
    accounts: dict[str, tuple[float, ...]]
    """Pages per account (free, evictable, protected, in_flight, lent, or used) at every sample."""


@dataclass(frozen=True)
class Transfer:
    """Pages that went, or should have gone, from one tier to another."""

    kind: str
    """backup, load_back, store or prefetch."""
    pool: str
    rank: int
    pages: int
    begun: float
    """On the axis of the report."""
    ended: float | None
    outcome: str
    """One of OUTCOMES."""


@dataclass(frozen=True)
class Prefix:
    """A run of pages that follow each other without a branch and are in the same tiers, at the end of the report."""

    parent: int
    """Index of the run above it; -1 at the top. It comes earlier."""
    rank: int
    depth: int
    """Pages above it."""
    pages: int
    tiers: tuple[str, ...]
    """Where its pages are: device, host, storage. Empty: on their way to one, or not known."""
    hits: int
    """Of its most used page."""
    heat: float | None = None
    """Place in the eviction orders: 0 would be evicted last, 1 first. None: not known."""
    label: str = ""
    """What may be said of its tokens."""
    locked: bool = False


@dataclass(frozen=True)
class Report:
    """One run, trace or recording. What is empty is not known, and left out of the page."""

    source: str
    """One of SOURCES."""
    title: str
    axis: str
    """What `at` counts: one of AXES."""
    at: tuple[float, ...]
    """When the samples were taken, rising."""
    page_size: int
    """Tokens per page."""
    stocks: tuple[Stock, ...] = ()
    found: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Tokens of prompts that were looked up, by where they were found (device, host, disk, computed: nowhere), since
    the beginning, at every sample."""
    counters: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Totals since the beginning at every sample, in pages or calls, named as in `PrefixCache.counters`."""
    transfers: tuple[Transfer, ...] = ()
    transfers_left_out: int = 0
    """Transfers that were seen and are not in the list."""
    prefixes: tuple[Prefix, ...] = ()
    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    """How often each transition answered what: {transition: {status: times}}."""
    figures: dict[str, str] = field(default_factory=dict)
    """Other results, each worth a line."""
    settings: dict[str, str] = field(default_factory=dict)
    """What was configured."""
    made: dict[str, str] = field(default_factory=dict)
    """How the report was made: command, versions."""
    notes: tuple[str, ...] = ()
    """What a reader must know: damage, what was left out and why."""

    def __post_init__(self) -> None:
        """Raise ReportError for parts that do not fit together."""
        _check(self.source in SOURCES, f"source must be one of {SOURCES}, got {self.source!r}")
        _check(self.axis in AXES, f"axis must be one of {AXES}, got {self.axis!r}")
        _check(bool(self.at), "there is no sample")
        _check(all(a < b for a, b in zip(self.at, self.at[1:], strict=False)), "the samples do not rise")
        lines = [line for stock in self.stocks for line in stock.accounts.values()]
        for line in (*lines, *self.found.values(), *self.counters.values()):
            _check(len(line) == len(self.at), f"a series has {len(line)} entries, there are {len(self.at)} samples")
        for number, prefix in enumerate(self.prefixes):
            _check(-1 <= prefix.parent < number, f"prefix {number} comes before the one above it")
            _check(prefix.pages > 0, f"prefix {number} has no page")
        for transfer in self.transfers:
            _check(transfer.outcome in OUTCOMES, f"a transfer ended as {transfer.outcome!r}")

    def last(self, name: str) -> float:
        """A counter at the end; 0 if it is not known."""
        return self.counters[name][-1] if name in self.counters else 0

    def tokens(self, where: str) -> float:
        """Tokens found somewhere until the end; 0 if that is not known."""
        return self.found[where][-1] if where in self.found else 0


def to_json(report: Report) -> str:
    """The report as JSON."""
    return json.dumps({"format": FORMAT} | asdict(report), allow_nan=False) + "\n"


def from_json(content: Any) -> Report:
    """The report again, of what `json.loads` made. Raises ReportError for anything else."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ReportError(f"this is not in the format {FORMAT!r}")
    return _built(Report, {name: value for name, value in content.items() if name != "format"}, "report")


def read_json(path: str | Path) -> Any:
    """What a JSON file holds. Raises OSError, or ReportError for one that is too large or is none."""
    path = Path(path)
    if path.stat().st_size > MOST_BYTES:
        raise ReportError(f"the file has more than {MOST_BYTES >> 20} MiB")
    try:
        return json.loads(path.read_bytes(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"this is no JSON: {error}") from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise ReportError(text)


def _built(wanted: Any, value: Any, where: str) -> Any:
    """A value of the type that a field of a dataclass has, of plain JSON."""
    origin, inside = typing.get_origin(wanted), typing.get_args(wanted)
    if is_dataclass(wanted) and isinstance(wanted, type):
        _check(isinstance(value, dict), f"{where} is no object")
        hints, known = typing.get_type_hints(wanted), {each.name for each in fields(wanted)}
        _check(value.keys() <= known, f"{where} has unknown fields {sorted(value.keys() - known)}")
        given = {name: _built(hints[name], each, f"{where}.{name}") for name, each in value.items()}
        try:
            return wanted(**given)
        except TypeError as error:
            raise ReportError(f"{where} lacks something: {error}") from error
    if origin is tuple:
        _check(isinstance(value, list), f"{where} is no list")
        return tuple(_built(inside[0], each, where) for each in value)
    if origin is dict:
        _check(isinstance(value, dict), f"{where} is no object")
        return {str(name): _built(inside[1], each, f"{where}.{name}") for name, each in value.items()}
    if origin is types.UnionType:
        return None if value is None else _built(inside[0], value, where)
    leaf: Any = int | float if wanted is float else wanted
    good = isinstance(value, leaf) and (wanted is bool or not isinstance(value, bool))
    _check(good, f"{where} is not of the kind that it should be: {value!r:.80}")
    return value
