"""Random requests for a `Scheduling`: shared prefixes, conversations, aborts at any stage, retractions, flushes."""

import random

from purecache.testing.scheduling import Scheduling
from purecache.testing.stand_ins import Request

_TOKENS = range(1, 10)  # few, so that prompts often begin alike


class Workload:
    """What the users of one server do. `event` does one thing and checks everything; `finish` ends all of it."""

    def __init__(self, run: Scheduling, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.longest = run.allocator.size_per_rank * 2 // 3
        self.documents = [self._tokens(self.random.randint(2, self.longest)) for _ in range(4)]
        self.spaces = [(None, rank) for rank in range(run.dp_size)] * 3
        self.spaces += [("adapter", rank) for rank in range(run.dp_size)]
        self.spaces += [(None, None), ("adapter", None)]

    def event(self) -> str:
        """One thing happens; returns what."""
        chance = self.random.random()
        if chance < 0.33:
            name, _ = "submit", self.submit()
        elif chance < 0.38 and self.run.requests:
            name, _ = "abort", self.run.abort(self.random.choice(self.run.requests))
        elif chance < 0.40:
            name, _ = "retract", self.run.retract()
        elif chance < 0.46:
            name, _ = "drain", self.run.drain()
        elif chance < 0.49:
            name, _ = "flush", self.run.flush()
        else:
            name, _ = "step", self.run.step(retract=self.random.random() < 0.1)
        self.run.check()
        return name

    def finish(self) -> None:
        """Everything that was submitted ends; then the cache is emptied."""
        self.run.drain()
        assert self.run.flush()
        self.run.check()

    def submit(self) -> Request:
        """A request whose prompt begins like another, or like what was said in an earlier one."""
        earlier = [each.origin_input_ids + each.output_ids for each in self.run.requests[-6:]]
        base = self.random.choice(self.documents + earlier)
        prompt = base[: self.random.randint(1, len(base))] if self.random.random() < 0.5 else base
        prompt = (prompt + self._tokens(self.random.randint(0, 5)))[: self.longest]
        extra_key, rank = self.random.choice(self.spaces)
        logprobs = self.random.randint(0, len(prompt)) if self.random.random() < 0.1 else None
        new = self.random.randint(1, max(2, self.longest // 6))
        return self.run.submit(prompt, new, extra_key=extra_key, dp_rank=rank, logprob_start_len=logprobs)

    def _tokens(self, number: int) -> list[int]:
        return self.random.choices(_TOKENS, k=number)
