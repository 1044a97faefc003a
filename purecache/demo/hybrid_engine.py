"""The compiled programs of a hybrid model, behind calls that take requests' tokens, pages and slots."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from purecache.demo.engine import Geometry, Span
from purecache.demo.hybrid_config import KV, STATE, WINDOW, HybridConfig, HybridWeights
from purecache.demo.hybrid_memory import HybridLease
from purecache.demo.hybrid_model import forward
from purecache.demo.hybrid_pools import HybridRows, Pools, make_pools, write
from purecache.demo.memory import pages_for
from purecache.demo.weights import DemoError


@dataclass(frozen=True)
class HybridSpan(Span):
    """Rows of one request for one program run, with what the request holds in the other pools."""

    windows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32[m] window pages of the request by page of its context, -1 where it has none; behind the end: none."""
    slot: int = -1
    """Slot with the state before `start`, which gets the state after the rows."""


class PoolsOwner(Protocol):
    """Keeps the pools. Whoever donates them to a program puts the program's result back."""

    pools: Any


class HybridPrograms:
    """Compiled prefill and decode for one hybrid model. The same object serves runs with and without a cache."""

    def __init__(self, weights: HybridWeights, config: HybridConfig, geometry: Geometry):
        if geometry.context > config.context:
            raise DemoError(f"The model was trained for contexts of up to {config.context} tokens: lower --context.")
        self.config, self.geometry, self._weights = config, geometry, weights
        self._forward = jax.jit(partial(_greedy, config=config, block=geometry.block))
        self._write = jax.jit(write, donate_argnums=0)

    def pools(self, pages: Mapping[str, int]) -> dict[str, Any]:
        """Return empty device pools of that many pages (slots) each."""
        return make_pools(self.config, pages, self.geometry.page_size)

    def start_of(self, position: int) -> int:
        """Where computing must begin for the token at a position: there, or at the begin of its chunk."""
        chunk = self.geometry.chunk
        return position if self.config.exact else position // chunk * chunk

    def span(self, lease: HybridLease, tokens: np.ndarray, start: int, first: int) -> HybridSpan:
        """Rows of the request that holds a lease; see Span."""
        return HybridSpan(tokens, start, first, lease.pages, lease.windows, lease.slot)

    def digest(self, memory: PoolsOwner, lease: HybridLease, filled: int) -> bytes:
        """A digest of all that a request with so many computed tokens can read; b"" where its bits mean nothing.

        That is the keys and values of all tokens in full layers, those of the last window in window layers, its states.
        """
        if not self.config.exact:
            return b""
        size, total = self.geometry.page_size, hashlib.blake2b(digest_size=16)
        oldest = max(0, filled - self.config.window + 1)
        for name, table, first in ((KV, lease.pages, 0), (WINDOW, lease.windows, oldest)):
            for array in jax.tree.leaves(memory.pools.get(name, ())):
                pages = np.asarray(array)[:, table[first // size : pages_for(filled, size)]]
                rows = pages.reshape(len(pages), -1, *pages.shape[3:])
                total.update(rows[:, first % size : filled - first // size * size].tobytes())
        for array in jax.tree.leaves(memory.pools.get(STATE, ())):
            total.update(np.asarray(array)[:, lease.slot].tobytes())
        return total.digest()

    def warm(self, memory: PoolsOwner) -> None:
        """Compile both programs by running them on nothing. The pools keep what they hold."""
        self._run(memory, [], groups=1, rows=self.geometry.chunk)
        self._run(memory, [], groups=self.geometry.batch, rows=1)

    def prefill(self, memory: PoolsOwner, span: HybridSpan) -> tuple[int, jax.Array]:
        """Compute up to `chunk` tokens of one request, from a place that `start_of` gives.

        Returns the most likely token after the last of them, and its logits, float32[vocabulary].
        """
        if span.start != self.start_of(span.start):
            raise ValueError(f"a prefill chunk starts at a multiple of {self.geometry.chunk}, not at {span.start}")
        tokens, logits = self._run(memory, [span], groups=1, rows=self.geometry.chunk)
        return int(tokens[0]), logits[0]

    def decode(self, memory: PoolsOwner, spans: Sequence[HybridSpan]) -> np.ndarray:
        """Compute one token of each of up to `batch` requests. Returns the tokens that follow, int32[len(spans)]."""
        tokens, _ = self._run(memory, spans, groups=self.geometry.batch, rows=1)
        return tokens[: len(spans)]

    def _run(
        self, memory: PoolsOwner, spans: Sequence[HybridSpan], groups: int, rows: int
    ) -> tuple[np.ndarray, jax.Array]:
        # Fresh arrays for every run: a NumPy argument must not change while a program may still read it.
        batch = HybridRows.empty(groups, rows, self.geometry.table)
        for group, span in enumerate(spans):
            count = len(span.tokens)
            batch.tokens[group, :count] = span.tokens
            batch.start[group] = span.start
            batch.first[group] = span.first
            batch.end[group] = span.start + count
            batch.tables[group, : len(span.pages)] = span.pages
            batch.windows[group, : len(span.windows)] = span.windows
            batch.slots[group] = span.slot
        tokens, logits, fresh = self._forward(self._weights, pools=memory.pools, rows=batch)
        memory.pools = self._write(memory.pools, fresh, batch)
        return np.asarray(tokens), logits


def _greedy(
    weights: HybridWeights, pools: Pools, rows: HybridRows, config: HybridConfig, block: int
) -> tuple[jax.Array, jax.Array, Any]:
    logits, fresh = forward(weights, config, pools, rows, block)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits, fresh
