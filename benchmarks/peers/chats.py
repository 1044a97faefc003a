"""Many chats at a time, each growing turn by turn: a workload that keeps a large cache full."""

import random

import numpy as np

from benchmarks.peers.workload import MOST_ID, Workload

USER, ANSWER, SPREAD = 81, 181, 1.0
"""Median tokens of a turn of the user and of an answer, and the deviation of their logarithm."""
TURNS = 3.5
"""Mean turns of a chat."""
LONGEST = 1 << 15
"""Most tokens of a chat."""


def chats(
    requests: int = 70_000, at_a_time: int = 2000, page: int = 16, capacity: int = 12_000_000, seed: int = 0
) -> Workload:
    """The second half is measured. A turn's prompt is all of its chat so far, and its answer is kept as well."""
    source, number = random.Random(seed), at_a_time
    running = [[chat, 0] for chat in range(at_a_time)]
    ids, prompts, wholes = [], [], []
    for _ in range(requests):
        place = source.randrange(at_a_time)
        chat, length = running[place]
        prompt = length + _tokens(source, USER)
        whole = prompt + _tokens(source, ANSWER)
        if whole > LONGEST:
            running[place], number = [number, 0], number + 1
            continue
        ids.append(np.array([chat], np.int64))
        prompts.append(prompt)
        wholes.append(whole)
        running[place][1] = whole
        if source.random() < 1 / TURNS:
            running[place], number = [number, 0], number + 1
    if number * LONGEST > MOST_ID:
        raise ValueError(f"{number} chats do not fit into 32-bit token ids")
    name = f"chats, page {page}, {capacity // 1_000_000}M tokens"
    lengths = np.array(prompts, np.int64), np.array(wholes, np.int64)
    return Workload(name, page, capacity, LONGEST, ids, *lengths, first=len(ids) // 2)


def _tokens(source: random.Random, median: int) -> int:
    return max(1, round(median * source.lognormvariate(0, SPREAD)))
