"""What a run of a trace found, as data: `purecache trace --json FILE` writes it, `purecache report` draws it.

The JSON is one object with the fields of `Outcome`; dataclasses are objects, tuples are arrays. Pages are of
`trace.page_tokens` tokens. Times of the series are seconds of the trace's own clock since its first request; in a run
of one request after the other they are their arrival times.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "purecache-trace-1"
"""`Outcome.format` of this version; a reader refuses others."""
SOURCES = ("device", "host", "disk", "computed")
"""Where the tokens of prompts come from."""
LINKS = ("backup", "load_back", "store", "prefetch")
"""Device to host, host to device, host to disk, disk to host."""


@dataclass(frozen=True)
class TraceFacts:
    """What was replayed."""

    name: str
    """File name, without the folder."""
    form: str
    """Format that it was read as: mooncake, qwen, tokens, kv-cache-tester, generated."""
    requests: int
    tokens: int
    """Of all prompts together."""
    output_tokens: int
    page_tokens: int
    pages: int
    """Whole pages of all prompts together."""
    distinct_pages: int
    """Different ones: what an endless cache holds in the end."""
    seconds: float
    """From the first arrival to the last."""


@dataclass(frozen=True)
class Setting:
    """The configuration of the run. Capacities in pages."""

    device_pages: int
    host_pages: int
    disk_pages: int
    policy: str
    write: str
    """Write policy, a value of `WritePolicy`."""
    prefetch: str
    """wait, best-effort or off: what is done about pages that only the disk has."""
    concurrent: int
    """Requests that run at the same time at most; 1: one after the other, whatever their arrival times."""
    speed: float
    """How much faster than recorded the requests arrive."""
    model: str
    bytes_per_page: int
    flops_per_second: float
    """Peak times efficiency."""
    host_bandwidth: float
    """Bytes per second between host and device."""
    disk_bandwidth: float
    """Bytes per second from the disk to the host."""
    disk_latency: float
    """Seconds until the first byte."""
    decode_seconds: float
    """Per output token of a request."""


@dataclass(frozen=True)
class Share:
    """A part of all prompts."""

    tokens: int
    pages: int
    """Whole pages; of what was computed, also those that were begun."""
    rate: float
    """Tokens, of those of all prompts."""


@dataclass(frozen=True)
class Moved:
    """What went over a link."""

    pages: int
    bytes: int
    seconds: float
    """Bytes over bandwidth, with the latency of each transfer."""


@dataclass(frozen=True)
class Refusals:
    """What could not be done, and was done without."""

    too_large: int
    """Requests that the device cannot hold at all: computed, and not cached."""
    waited: int
    """Requests that waited until a running one gave its pages back."""
    loads: int
    """Load backs that found no room, or were below the threshold: computed again."""
    backup_pages: int
    """Pages that found no room on host."""
    prefetches: int
    """Prefetches that found no room on host."""
    prefetches_late: int
    """Prefetches that their request did not wait for (best-effort)."""


@dataclass(frozen=True)
class Latency:
    """Times by the model of `purecache.traces.latency`, in seconds. Not measured on any device."""

    ttft_mean: float
    """From arrival to the first token: queue, prefetch, load back and prefill."""
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    queue_mean: float
    """From arrival until its prefill could begin."""
    prefill: float
    """Of all requests together: computing what was not found."""
    saved: dict[str, float]
    """By tier (device, host, disk): time of computing what was found there, less the time of loading that."""
    prefill_without: float
    """Computing all prompts whole: prefill + what was found, however it was loaded."""


@dataclass(frozen=True)
class Hot:
    """A stretch of pages that were always used together: a node of the tree of all prompts, runs joined."""

    id: int
    parent: int
    """`id` of the stretch above it, or -1."""
    depth: int
    """Tokens above it."""
    tokens: int
    uses: int
    """Requests whose prompts pass through it."""


@dataclass(frozen=True)
class Moment:
    """One row of the time series: the stretch of requests since the row before, and what there is at its end."""

    requests: int
    """Requests so far."""
    time: float
    """Seconds of the trace's clock."""
    hits: dict[str, int]
    """By source (`SOURCES`): tokens of the prompts of this stretch."""
    moved: dict[str, int]
    """By link (`LINKS`): pages in this stretch."""
    evicted: dict[str, int]
    """By tier (device, host, disk): pages in this stretch."""
    pages: dict[str, dict[str, int]]
    """By tier: pages now. Of device and host, by account (free, evictable, protected, in_flight, lent); of the disk
    by free and used."""
    running: int
    """Requests that run now."""
    refused: int
    """Refusals of all kinds in this stretch."""


@dataclass(frozen=True)
class Outcome:
    """All of a run."""

    trace: TraceFacts
    setting: Setting
    hits: dict[str, Share]
    """By source (`SOURCES`)."""
    moved: dict[str, Moved]
    """By link (`LINKS`)."""
    evicted: dict[str, int]
    """By tier (device, host, disk): pages."""
    dropped: int
    """Pages that left the device without a copy on host."""
    refusals: Refusals
    latency: Latency
    series: tuple[Moment, ...]
    hot: tuple[Hot, ...]
    """The stretches with the most tokens times uses, and all that is above them; parents before children."""
    format: str = field(default=FORMAT)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))


def read_outcome(path: str | Path) -> dict[str, Any]:
    """The JSON object of a file that `--json` wrote. Raises ValueError if it is not one of this format."""
    try:
        found = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: no outcome of `purecache trace`: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path}: not an outcome of `purecache trace` in the format {FORMAT}")
    return found
