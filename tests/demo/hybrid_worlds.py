"""What tests of hybrid models share: an owner of pools, prefill chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from purecache.demo.hybrid_engine import HybridPrograms, HybridSpan


@dataclass
class Owner:
    pools: Any

    @classmethod
    def of(cls, programs: HybridPrograms, **pages: int) -> Owner:
        return cls(programs.pools(pages))

    def arrays(self, *names: str) -> list[np.ndarray]:
        """All arrays of the named pools (of all pools), copied."""
        return [np.array(array) for name in names or self.pools for array in jax.tree.leaves(self.pools[name])]


def by_token(array: np.ndarray) -> np.ndarray:
    """Keys or values [layers, pages, page_size, ...] as [layers, tokens, ...], for pages in the order of their ids."""
    return array.reshape(len(array), -1, *array.shape[3:])


def prefill(programs: HybridPrograms, owner: Owner, span: HybridSpan) -> np.ndarray:
    """Compute a span of any length; returns the logits after its last token."""
    logits, chunk = None, programs.geometry.chunk
    for at in range(0, len(span.tokens), chunk):
        start = span.start + at
        piece = replace(span, tokens=span.tokens[at : at + chunk], start=start, first=max(start, span.first))
        _, logits = programs.prefill(owner, piece)
    assert logits is not None
    return np.asarray(logits)
