"""A workload for who has no trace."""

import random
from collections.abc import Iterator

from purecache.workloads.request import BLOCK, Request


def generated(calls: int, seed: int = 0, block: int = BLOCK) -> Iterator[Request]:
    """Conversations that begin with one of a few system prompts and grow turn by turn, several at a time.

    Two requests arrive per second on average.
    """
    source, made, clock = random.Random(seed), iter(range(1 << 62)), random.Random(seed + 1)
    systems = [[next(made) for _ in range(source.randint(1, 4))] for _ in range(5)]
    open_ones: list[list[int]] = []
    time = 0.0
    for _ in range(calls):
        if not open_ones or source.random() < 0.25:
            open_ones.append(list(source.choice(systems)))
        talk = source.choice(open_ones)
        talk += [next(made) for _ in range(source.randint(1, 6))]
        time += clock.expovariate(2)
        yield Request(len(talk) * block - source.randrange(block), tuple(talk), time, clock.randint(1, 800))
        if len(talk) > 40 or source.random() < 0.15:
            open_ones.remove(talk)
