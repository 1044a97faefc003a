"""What the situations in which caches are checked are made of."""

from collections.abc import Callable
from typing import Any

from purecache.testing.scheduling import Scheduling
from purecache.testing.stand_ins import Request

Start = Callable[..., Scheduling]
"""Starts a scheduler with a new cache; keywords are settings of it."""

Situation = Callable[[Start], None]
"""Raises AssertionError if what must hold does not."""

EVERYTHING = 1 << 30
"""More tokens than there are."""


def prompt_of(run: Scheduling, pages: int, rest: int = 1, begin: int = 1) -> list[int]:
    """A prompt of whole pages and some tokens; others with another `begin` differ in all pages."""
    number = pages * run.page_size + rest
    return [begin * 1000 + at for at in range(number)]


def complete(run: Scheduling, prompt: list[int], new_tokens: int = 1, **keywords: Any) -> Request:
    """Run a request alone from beginning to end."""
    request = run.submit(prompt, new_tokens, **keywords)
    run.drain()
    return request


def find(run: Scheduling, tokens: list[int], extra_key: str | None = None, dp_rank: int | None = None) -> Any:
    """What the cache has of some tokens."""
    return run.caller.match(run.caller.key(tokens, extra_key, dp_rank))
