"""How the arguments of a transition lie in its command vector, and where among them the prompts and namespaces are."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from purecache.entries import entries
from purecache.state.layout import Layout
from purecache.transitions import Prompt, Space

SAMPLE_SIZE = 16
"""Pages of the programs that `described` looks at."""


@dataclass(frozen=True)
class PromptPlace:
    """Where one `Prompt` (or a stack of them, one per lane) is: numbers of its leaves."""

    tokens: int
    pages: int
    namespace: int
    lanes: int


@dataclass(frozen=True)
class Arguments:
    """The leaves of the arguments of one program, in the order of its command vector."""

    lengths: tuple[int, ...]
    """int32 words of each."""
    arrays: tuple[bool, ...]
    """Which are arrays; the others are numbers."""
    prompts: tuple[PromptPlace, ...]
    namespaces: tuple[int, ...]
    """Which are namespaces outside of prompts."""

    @functools.cached_property
    def parts(self) -> list[slice]:
        """Where each leaf is in the vector."""
        ends = [sum(self.lengths[: leaf + 1]) for leaf in range(len(self.lengths))]
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]


@functools.lru_cache(maxsize=4096)
def arguments_of(layout: Layout, name: str, size: int) -> Arguments:
    """The arguments of a program. Raises KeyError for a name that a cache of this layout does not have."""
    given = entries(layout)[name].arguments(layout, size)
    leaves, prompts, namespaces = [], [], []
    for each in jax.tree.leaves(given, is_leaf=lambda part: isinstance(part, Prompt | Space)):
        if isinstance(each, Prompt):
            lanes = each.tokens.shape[0] if len(each.tokens.shape) == 2 else 1
            first = len(leaves)  # tokens, pages, namespace, rank
            prompts.append(PromptPlace(first, first + 1, first + 2, lanes))
        elif isinstance(each, Space):
            namespaces.append(len(leaves))
        leaves += jax.tree.leaves(each)
    shapes = [leaf.shape for leaf in leaves]
    lengths, arrays = tuple(math.prod(shape) for shape in shapes), tuple(map(bool, shapes))
    return Arguments(lengths, arrays, tuple(prompts), tuple(namespaces))


def described(layout: Layout) -> dict[str, list[int]]:
    """Name of every program, with the lengths of its arguments at one size: what two versions must have in common."""
    return {name: list(arguments_of(layout, name, SAMPLE_SIZE).lengths) for name in entries(layout)}


def sizes_of(layout: Layout, name: str, smallest: int, largest: int) -> Iterator[int]:
    """The sizes that there can be of a program."""
    size = smallest
    if not entries(layout)[name].sized:
        yield 0
        return
    while size <= largest:
        yield size
        size *= 2
