"""Workloads: calls whose prompts are lists of block ids. An id stands for the whole prefix up to its block."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512
"""Tokens per block of the traces of Mooncake."""


@dataclass(frozen=True)
class Call:
    """One request."""

    tokens: int
    """Of its prompt."""
    blocks: tuple[int, ...]
    """Ids of its blocks; the last one may be partly filled."""

    def whole(self, block: int) -> tuple[int, ...]:
        """The blocks that are full: only those can be cached."""
        return self.blocks[: self.tokens // block]


def mooncake(path: str | Path) -> Iterator[Call]:
    """Calls of a trace in Mooncake's format: a JSON object per line with `input_length` and `hash_ids`.

    (kvcache-ai/Mooncake, FAST25-release/traces; blocks of 512 tokens.) Raises ValueError for other files.
    """
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                yield Call(int(row["input_length"]), tuple(map(int, row["hash_ids"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a call of a Mooncake trace: {error!r}") from None


def generated(calls: int, seed: int = 0, block: int = BLOCK) -> Iterator[Call]:
    """Conversations that begin with one of a few system prompts and grow turn by turn, several at a time."""
    source, made = random.Random(seed), iter(range(1 << 62))
    systems = [[next(made) for _ in range(source.randint(1, 4))] for _ in range(5)]
    open_ones: list[list[int]] = []
    for _ in range(calls):
        if not open_ones or source.random() < 0.25:
            open_ones.append(list(source.choice(systems)))
        talk = source.choice(open_ones)
        talk += [next(made) for _ in range(source.randint(1, 6))]
        yield Call(len(talk) * block - source.randrange(block), tuple(talk))
        if len(talk) > 40 or source.random() < 0.15:
            open_ones.remove(talk)
