"""What the runs of the Engine ask for: lists of rounds as `engine_runs.Run` takes them. The same every time."""

from typing import Any

import numpy as np
from tiny_model import VOCABULARY

Rounds = list[list[tuple[str, list[int], int]]]

PAGES = {
    1: {"page_size": 1, "running": 4, "pool_tokens": 200, "context": 160},
    16: {"page_size": 16, "running": 1, "pool_tokens": 320, "context": 256},
}
"""Arguments per page size. On CPU, sglang-jax computes batches of several requests wrong if pages are longer than 1."""

PRESSURE = {"page_size": 1, "running": 4, "pool_tokens": 256, "context": 160, "conservativeness": 0.02, "chunk": 32}
"""A pool so small, and a scheduler so bold, that requests are retracted; prompts are computed in chunks."""


def conversations(page_size: int, seeds: tuple[int, ...] = (3,)) -> dict[str, Any]:
    """Conversations of several turns under two system prompts, far more tokens than the pool has; others per seed."""
    if page_size == 1:
        rounds = [talk(system=72, user=12, answer=6, turns=3, names=6, seed=seed) for seed in seeds]
    else:
        rounds = [talk(system=64, user=24, answer=8, turns=4, names=6, seed=seed) for seed in seeds]
    return PAGES[page_size] | {"rounds": [sentences for talked in rounds for sentences in talked]}


def pressure() -> dict[str, Any]:
    """Short prompts and long answers, several at a time."""
    return PRESSURE | {"rounds": talk(system=32, user=8, answer=60, turns=1, names=6)}


def sweep(page_size: int) -> Rounds:
    """Requests that have nothing to do with each other or the rest, and fill the pool more than twice."""
    random, longest = np.random.default_rng(99), PAGES[page_size]["context"] - 16
    prompts = random.integers(0, VOCABULARY, (3, longest)).tolist()
    return [[(f"sweep {n}", prompt, 1)] for n, prompt in enumerate(prompts)]


def talk(system: int, user: int, answer: int, turns: int, names: int, seed: int = 3) -> Rounds:
    """Every conversation says `user` tokens per turn, the first time behind one of two system prompts."""
    random = np.random.default_rng(seed)

    def tokens(number: int) -> list[int]:
        return random.integers(0, VOCABULARY, number).tolist()

    systems = [tokens(system), tokens(system)]
    return [
        [
            (f"conversation {seed}.{n}", (systems[n % 2] if turn == 0 else []) + tokens(user), answer)
            for n in range(names)
        ]
        for turn in range(turns)
    ]


def said_at_most(rounds: Rounds) -> int:
    """Tokens of all conversations together, at the end, a prompt shared by several counted each time."""
    return sum(len(tokens) + answer for sentences in rounds for _, tokens, answer in sentences)
