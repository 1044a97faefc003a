"""Requests of a workload, whatever file they were read from."""

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 512
"""Tokens per block of the traces of Mooncake."""


@dataclass(frozen=True)
class Request:
    """One request."""

    tokens: int
    """Of its prompt."""
    blocks: Sequence[int]
    """Ids of its blocks; the last one may be partly filled. An id is known by what stands before it in `blocks`, and by
    the scope: the same id behind other ones is another prefix."""
    time: float = 0.0
    """Arrival, in seconds."""
    output: int = 0
    """Tokens of the answer. Where `blocks` goes on behind the prompt, these are ids of the answer."""
    scope: str = ""
    """Requests of different scopes (sessions with ids of their own, tenants) share nothing."""

    def whole(self, block: int) -> Sequence[int]:
        """The blocks of the prompt that are full: only those can be cached."""
        return self.blocks[: self.tokens // block]


@dataclass(frozen=True)
class Trace:
    """A workload in the order of arrival."""

    form: str
    """Format that it was read as."""
    block: int
    """Tokens per id: 1 where the ids are those of tokens."""
    requests: Sequence[Request]
