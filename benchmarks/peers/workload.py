"""Requests as every peer gets them: token ids that are written out when their turn comes."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

MOST_ID = 2**31 - 1
"""Token ids are int32."""


@dataclass(frozen=True)
class Workload:
    """Requests with the setting they are run in. Uses nothing of any cache."""

    name: str
    page: int
    capacity: int
    """Tokens."""
    block: int
    """Tokens per id."""
    ids: Sequence[np.ndarray]
    """Per request, int64[blocks]: an id stands for its block and all that is before it."""
    prompts: np.ndarray
    """int64[requests]: tokens of the prompt."""
    wholes: np.ndarray
    """int64[requests]: tokens of prompt and answer, as far as they are known: what is inserted in the end."""
    first: int = 0
    """First request that is measured. Those before it fill the cache."""
    origin: str = "generated"
    """Where the requests come from: a trace, or a stand-in."""

    def __len__(self) -> int:
        return len(self.prompts)

    def tokens(self, request: int) -> np.ndarray:
        """int32[whole]: token ids of prompt and answer."""
        whole = int(self.wholes[request])
        ids = self.ids[request][: -(-whole // self.block)]
        offsets = np.arange(min(self.block, whole), dtype=np.int32)
        return (ids.astype(np.int32)[:, None] * np.int32(self.block) + offsets).reshape(-1)[:whole]

    def usable(self, request: int) -> int:
        """Tokens of a request that a cache can give: one of the prompt is computed in any case."""
        return (int(self.prompts[request]) - 1) // self.page * self.page

    def head(self, requests: int | None) -> "Workload":
        """The first requests; of those that fill the cache, a share as large as before."""
        if requests is None or requests >= len(self):
            return self
        first = self.first * requests // len(self)
        cut = (self.ids[:requests], self.prompts[:requests], self.wholes[:requests])
        return replace(self, ids=cut[0], prompts=cut[1], wholes=cut[2], first=first)

    def about(self) -> dict[str, str | int | float]:
        """What a table says above itself."""
        measured = self.prompts[self.first :]
        return {
            "workload": self.name,
            "origin": self.origin,
            "page": self.page,
            "capacity": self.capacity,
            "requests": len(measured),
            "filling": self.first,
            "mean_prompt": float(measured.mean()),
        }


def numbered(paths: Iterable[Sequence[object]], block: int) -> list[np.ndarray]:
    """Ids for requests whose blocks are named by what they hold: equal where all before them is equal, too.

    Raises ValueError where token ids would not fit into 32 bits.
    """
    numbers: dict[tuple[int, object], int] = {}
    found = []
    for path in paths:
        above, ids = -1, np.empty(len(path), np.int64)
        for place, content in enumerate(path):
            above = numbers.setdefault((above, content), len(numbers))
            ids[place] = above
        found.append(ids)
    if (len(numbers) + 1) * block > MOST_ID:
        raise ValueError(f"{len(numbers)} blocks of {block} tokens do not fit into 32-bit token ids")
    return found


def buffer(tokens: np.ndarray) -> array:
    """Tokens as sglang's scheduler has them: int64, in an `array('q')`."""
    return array("q", tokens.astype(np.int64).tobytes())
