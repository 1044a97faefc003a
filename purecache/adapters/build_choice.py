"""Which kind of cache a server's arguments ask for: the dispatch of sglang's `build_kv_cache` as a table."""

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from purecache.adapters.build_arguments import Facts
from purecache.adapters.build_exclusions import RULES, ArgumentsError


class UnsupportedError(ValueError):
    """purecache has no such cache (yet); the message says what to do instead."""


class Kind(enum.StrEnum):
    """The caches that the servers know. All but the first two are trees."""

    CHUNK = "chunk"
    SWA_CHUNK = "swa_chunk"
    CPP_RADIX = "cpp_radix"
    UNIFIED = "unified"
    HI_RADIX = "hi_radix"
    HI_MAMBA = "hi_mamba"
    SWA = "swa"
    MAMBA = "mamba"
    LMCACHE = "lmcache"
    RADIX = "radix"


class Component(enum.StrEnum):
    """What a tree keeps for a prefix: KV of full attention, of a sliding window, states of recurrent layers."""

    FULL = "full"
    SWA = "swa"
    MAMBA = "mamba"


class Place(enum.StrEnum):
    """Where a cache keeps pages."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


@dataclass(frozen=True)
class Way:
    """One row of the dispatch: the first whose condition holds is taken."""

    number: int
    kind: Kind
    when: str
    host_class: str
    applies: Callable[[Facts], bool]


WAYS = (
    Way(1, Kind.SWA_CHUNK, "no radix cache, chunked prefill, window model", "SWAChunkCache",
        lambda f: f.disable_radix_cache and f.chunked_prefill_size is not None and f.hybrid_swa),
    Way(1, Kind.CHUNK, "no radix cache, chunked prefill", "ChunkCache",
        lambda f: f.disable_radix_cache and f.chunked_prefill_size is not None),
    Way(2, Kind.CPP_RADIX, "C++ tree by environment", "RadixCacheCpp", lambda f: f.cpp_radix),
    Way(3, Kind.UNIFIED, "unified tree by environment or argument", "UnifiedRadixCache", lambda f: f.unified),
    Way(4, Kind.HI_MAMBA, "hierarchical, recurrent model", "HiMambaRadixCache, in 0.5.14 UnifiedRadixCache",
        lambda f: f.hierarchical and f.hybrid_recurrent),
    Way(4, Kind.UNIFIED, "hierarchical, window model", "UnifiedRadixCache",
        lambda f: f.hierarchical and f.hybrid_swa),
    Way(4, Kind.HI_RADIX, "hierarchical", "HiRadixCache", lambda f: f.hierarchical),
    Way(5, Kind.SWA, "window model", "SWARadixCache", lambda f: f.hybrid_swa),
    Way(6, Kind.MAMBA, "recurrent model", "MambaRadixCache", lambda f: f.hybrid_recurrent),
    Way(7, Kind.LMCACHE, "LMCache", "LMCRadixCache", lambda f: f.enable_lmcache),
    Way(8, Kind.RADIX, "otherwise", "RadixCache", lambda f: True),
)  # fmt: skip
"""The dispatch of sglang's `build_kv_cache`, in its order."""

NOTES = {
    Kind.CPP_RADIX: "the C++ tree is not used: purecache's own tree takes its place",
    Kind.LMCACHE: "LMCache is not used, nor its configuration file: purecache's host tier takes its place",
}
"""What a server should tell its user about a choice."""


@dataclass(frozen=True)
class Choice:
    """Which cache a server gets."""

    way: int
    kind: Kind
    components: tuple[Component, ...]
    places: tuple[Place, ...]
    storage: str | None
    """The server's name of the storage; None without one."""
    disabled: bool
    """The tree neither keeps nor finds prefixes: the radix cache was switched off and prefill has no chunks."""
    sessions: bool
    """Streaming sessions are wrapped around the cache."""
    note: str | None

    @property
    def ours(self) -> bool:
        """purecache stands behind it. Otherwise the server's own chunk cache (or disabled tree) stays."""
        return self.kind not in (Kind.CHUNK, Kind.SWA_CHUNK) and not self.disabled


def dispatch(facts: Facts) -> Choice:
    """The first way of `WAYS` that applies, checked by nothing."""
    way = next(way for way in WAYS if way.applies(facts))
    chunk = way.kind in (Kind.CHUNK, Kind.SWA_CHUNK)
    optional = ((Component.SWA, facts.hybrid_swa), (Component.MAMBA, facts.hybrid_recurrent))
    host = facts.hierarchical or way.kind is Kind.LMCACHE
    lower = ((Place.HOST, host), (Place.STORAGE, host and facts.storage is not None))
    if facts.disable_radix_cache:
        lower = ()
    return Choice(
        way=way.number,
        kind=way.kind,
        components=() if chunk else (Component.FULL, *(part for part, there in optional if there)),
        places=(Place.DEVICE, *(place for place, there in lower if there)),
        storage=facts.storage if lower and host else None,
        disabled=facts.disable_radix_cache and not chunk,
        sessions=facts.enable_streaming_session,
        note=NOTES.get(way.kind),
    )


def choose(
    arguments: Any,
    *,
    hybrid_swa: bool = False,
    hybrid_recurrent: bool = False,
    environment: Mapping[str, str],
    keeps: Collection[Component] = (Component.FULL,),
) -> Choice:
    """The cache that a server's arguments ask for.

    arguments: `ServerArgs` of sglang or sglang-jax, or a mapping or any object with some of their fields.
    hybrid_swa, hybrid_recurrent: the model has layers with a sliding window, recurrent layers.
    environment: as `os.environ`. keeps: the components that the adapter for this server has.
    Raises ArgumentsError for arguments that exclude each other, UnsupportedError for a tree that purecache hasn't got.
    """
    facts = Facts.read(arguments, hybrid_swa=hybrid_swa, hybrid_recurrent=hybrid_recurrent, environment=environment)
    if broken := tuple(rule for rule in RULES if rule.broken(facts)):
        raise ArgumentsError(broken)
    choice = dispatch(facts)
    missing = [part for part in choice.components if part not in keeps]
    if choice.ours and missing:
        raise UnsupportedError("; ".join(UNSUPPORTED[part] for part in missing))
    if choice.ours and {Component.SWA, Component.MAMBA} <= set(choice.components):
        raise UnsupportedError(
            "this model has both sliding windows and recurrent layers, and no server has an allocator for both:"
            " use --disable-radix-cache"
        )
    return choice


UNSUPPORTED = {
    Component.SWA: (
        "purecache keeps no pages of a sliding window in this server yet, and this model has some: use the server's"
        " own tree (no purecache) or --disable-radix-cache"
    ),
    Component.MAMBA: (
        "purecache keeps no states of recurrent layers in this server yet, and this model has some: use the server's"
        " own tree (no purecache) or --disable-radix-cache"
    ),
}
