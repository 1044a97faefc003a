"""Small worlds to explore: a configuration, and the few prompts that callers may use in it."""

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from purecache.check.signatures import mix, page_signature, root_signature, space_signature
from purecache.state import CacheConfig, CacheState, empty_state
from purecache.state.pools import Checkpoint, PoolSpec, Window


@dataclass(frozen=True)
class World:
    """What is explored: every state that calls within these bounds can lead to.

    contents: the pages that prompts are made of. depth: most pages of a prompt. namespaces: how many there are, each
    with all prompts, in every rank. priorities: those that requests have. times: how many there are, the first is 0.
    storage: whether pages are stored and prefetched. control: whether tiers are made smaller and larger, and prompts
    are forgotten. one_bucket: let all pages collide in the hash table. exact: tell states apart that differ in node
    ids. events: the kinds of events that happen, () for all.
    """

    name: str
    about: str
    config: CacheConfig
    contents: tuple[tuple[int, ...], ...] = ((0,), (1,))
    depth: int = 2
    namespaces: int = 1
    priorities: tuple[int, ...] = (0,)
    times: int = 1
    storage: bool = False
    control: bool = False
    one_bucket: bool = False
    exact: bool = False
    events: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        layout = self.config.layout
        if any(len(page) != layout.page_size for page in self.contents):
            raise ValueError(f"world {self.name}: every page of contents must have {layout.page_size} tokens")
        if layout.rows + layout.ranks * layout.levels > 120 or layout.buckets + layout.rows > 10_000:
            raise ValueError(f"world {self.name}: too large to be packed into bytes: lower the pages")

    @cached_property
    def size(self) -> int:
        """Pages that the transitions are compiled for."""
        return max(self.depth, self.config.device_pages, self.config.host_pages)

    @cached_property
    def hit_cap(self) -> int:
        """Hits beyond this make no difference: they are compared with a threshold or choose one of `levels` lists."""
        return max(self.config.backup_hits, self.config.layout.levels) + 1

    @cached_property
    def start(self) -> CacheState:
        """The empty cache."""
        state = empty_state(self.config)
        if self.one_bucket:
            state.books[self.config.layout.hash_keys : self.config.layout.retention] = 0
        return state

    @cached_property
    def prompts(self) -> "Prompts":
        """Every prompt of the world."""
        return _prompts_of(self)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a world as arrays; `number` of them."""

    tokens: np.ndarray = field(repr=False)
    """[number, size * page_size]."""
    pages: np.ndarray = field(repr=False)
    """[number]."""
    spaces: np.ndarray = field(repr=False)
    """[number, 4]: namespaces."""
    ranks: np.ndarray = field(repr=False)
    """[number]."""
    signatures: np.ndarray = field(repr=False)
    """[number, size, WORDS]: of each prefix; zero beyond the prompt."""

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.pages)


def _prompts_of(world: World) -> Prompts:
    size, width = world.size, world.config.page_size
    rows: list[tuple[Any, ...]] = []
    for rank, space, length in itertools.product(
        range(world.config.ranks), range(world.namespaces), range(1, world.depth + 1)
    ):
        for path in itertools.product(world.contents, repeat=length):
            tokens = np.zeros(size * width, np.int32)
            tokens[: length * width] = np.ravel(path)
            words = np.array([space, 0, 0, 0], np.int32)
            signature, along = root_signature(np.array([rank], np.int32))[0], np.zeros((size, 2), np.uint32)
            for place, page in enumerate(path):
                own = page_signature(np.array(page, np.int32)[None])[0]
                own = mix(own, space_signature(words[None])[0]) if place == 0 else own
                signature = along[place] = mix(signature, own)
            rows.append((tokens, length, words, rank, along))
    tokens, pages, spaces, ranks, signatures = (np.array(column) for column in zip(*rows, strict=True))
    return Prompts(tokens, pages.astype(np.int32), spaces, ranks.astype(np.int32), signatures)


_LEAST = CacheConfig(
    page_size=1, device_pages=2, host_pages=1, levels=2, max_operations=2, max_receipts=1, load_back_threshold=0
)
_PAIR = replace(_LEAST, host_pages=2)
_DEEP = replace(_PAIR, device_pages=3, max_receipts=2)
_WINDOW = replace(_LEAST, pools=(PoolSpec("window", Window(1), 1, 1),))
_RECURRENT = replace(_LEAST, pools=(PoolSpec("state", Checkpoint(), 2, 1),))
_TWO_PAGES = ((0, 0), (0, 1))
"""Pages of two tokens that begin alike."""

_ALL = (
    World("least", "two prompts' worth of device pages, one host page, one receipt", _LEAST),
    World("write-back", "as least, copied to host when evicted", replace(_LEAST, write="write_back")),
    World("bucket", "as least, with every page in one bucket of the hash table", _LEAST, one_bucket=True),
    World("priority", "as least, evicted by priority", replace(_LEAST, policy="priority"), priorities=(0, 1)),
    World("fifo", "as least, evicted first in, first out", replace(_LEAST, policy="fifo")),
    World(
        "retention",
        "as least, evicted by deadline: three priorities, two times",
        replace(_LEAST, policy="retention", levels=3, retention=(0, 1, 2)),
        priorities=(-1, 0, 1),
        times=2,
    ),
    World(
        "exclusive",
        "as pair-back, with pages on one tier only",
        replace(_PAIR, write="write_back", exclusive=True),
    ),
    World("exact", "as least, telling states apart that differ in node ids", _LEAST, exact=True),
    World("storage", "as least, with stores and prefetches", _LEAST, storage=True),
    World("control", "as least, with tiers made smaller and larger, and prompts forgotten", _LEAST, control=True),
    World(
        "control-storage",
        "as control, with stores and prefetches, evicted first in, first out",
        replace(_LEAST, policy="fifo"),
        storage=True,
        control=True,
    ),
    World(
        "control-window",
        "as control, with a pool of sliding-window KV",
        replace(_LEAST, pools=(PoolSpec("window", Window(1), 1, 1),)),
        control=True,
    ),
    World("pair", "two pages on device, two on host", _PAIR),
    World("pair-back", "as pair, copied to host when evicted", replace(_PAIR, write="write_back")),
    World(
        "spaces",
        "pages of two tokens, two namespaces",
        replace(_LEAST, page_size=2),
        contents=_TWO_PAGES,
        namespaces=2,
    ),
    World("ranks", "two ranks, of one device page and one host page each", replace(_LEAST, ranks=2, device_pages=1)),
    World("external", "an allocator outside has the device pages", replace(_LEAST, external_pages=True)),
    World("window", "a pool of sliding-window KV: one page of window", _WINDOW),
    World("window-storage", "as window, with stores and prefetches of both pools", _WINDOW, storage=True),
    World("recurrent", "a pool of recurrent states", _RECURRENT),
    World("recurrent-storage", "as recurrent, with stores and prefetches of both pools", _RECURRENT, storage=True),
    World("deep", "prompts of three pages, three device pages, two receipts, storage", _DEEP, depth=3, storage=True),
    World(
        "deep-back",
        "as deep, copied to host when evicted, by the policy of fewest hits",
        replace(_DEEP, write="write_back", policy="lfu"),
        depth=3,
        storage=True,
    ),
)
WORLDS = {world.name: world for world in _ALL}
"""The worlds that `purecache check` knows, by name."""
