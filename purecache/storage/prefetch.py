"""What is known of one prefetch while it is under way."""

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Names = list[tuple[str, ...]]
"""The objects of each page."""
Present = dict[int, np.ndarray]
"""Per pool bool[n]: which of the pages that it was asked for storage has, as a whole."""


class Stage(enum.Enum):
    """Where a prefetch stands."""

    QUERY = 0
    READ = 1
    ENDED = 2


@dataclass(eq=False)
class Share:
    """What a prefetch brings of one pool: an operation of the cache, whose host pages are filled from storage."""

    pool: int
    operation: tuple[int, int]
    """Its number and generation."""
    first: int
    """Page of the prompt that `pages[0]` is for."""
    pages: np.ndarray
    """int32[n]: reserved host pages, local to the rank; NONE where the cache has the value."""
    wanted: np.ndarray
    """int[m]: positions in `pages` of those that are read, ascending."""
    names: Names
    """Their objects."""
    ok: np.ndarray = field(init=False)
    """bool[n]: which have landed."""
    resolved: int = 0
    """How many of the wanted ones arrived or failed."""
    issued: int = 0
    """How many were asked for so far."""
    starved: float | None = None
    """Since when there has been no buffer for it."""

    def __post_init__(self) -> None:
        self.ok = np.zeros(len(self.pages), bool)

    @property
    def complete(self) -> bool:
        """Whether nothing is waited for."""
        return self.resolved == len(self.wanted)

    def stop(self) -> None:
        """Ask for nothing more."""
        self.resolved += len(self.wanted) - self.issued
        self.issued = len(self.wanted)


@dataclass(eq=False)
class Prefetch:
    """One prefetch. Ask `StorageTier.progress` about it, and match once it has ended."""

    prompt: tuple[Any, ...] = field(repr=False)
    """Pieces of the prompt, as programs take it. Not for logs."""
    usable: int
    """Pages of the prompt that the cache could use."""
    end: int
    """Pages that it can use at best when this has ended."""
    asked_for: dict[int, tuple[int, Names]]
    """Per pool, the pages of the prompt that storage is asked for: the first of them, and the objects of each."""
    stage: Stage = Stage.QUERY
    loaded: int = 0
    """Tokens that more of the prompt is usable; known when it has ended."""
    asked: float | None = None
    """When the scheduler asked for the first time, in its own clock."""
    shares: list[Share] = field(default_factory=list)
    """What is under way, kv first."""

    @property
    def rank(self) -> int:
        """Data-parallel rank."""
        return int(self.prompt[3])
