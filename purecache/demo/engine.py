"""The two compiled programs of the engine, prefill and decode, behind calls that take requests' tokens and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from purecache.demo.memory import Lease, PoolOwner, pages_for
from purecache.demo.model import Pool, Rows, forward, make_pool, write
from purecache.demo.weights import DemoError, ModelConfig, Weights


@dataclass(frozen=True)
class Geometry:
    """The fixed shapes of the programs. Raises DemoError when they do not fit together."""

    page_size: int = 16  # tokens
    chunk: int = 64  # tokens of one prefill step; chunks start at its multiples
    batch: int = 4  # requests of one decoding step
    context: int = 8192  # longest context in tokens
    block: int = 128  # tokens of context per step of the attention loop

    def __post_init__(self) -> None:
        """Check the sizes against each other."""
        for name in ("page_size", "chunk", "batch", "context", "block"):
            if getattr(self, name) < 1:
                raise DemoError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}.")
        if self.block % self.page_size:
            raise DemoError(
                f"The attention block of {self.block} tokens must be a multiple of the page size {self.page_size}: "
                "choose a page size that is a power of two up to it."
            )

    @property
    def table(self) -> int:
        """Entries of a page table: the pages of the longest context, rounded up to whole blocks."""
        return pages_for(self.context, self.block) * (self.block // self.page_size)


@dataclass(frozen=True)
class Span:
    """Rows of one request for one program run: computes tokens at positions start .. start + len(tokens)."""

    tokens: np.ndarray  # int32[n], n at most the rows of the program
    start: int  # position of the first
    first: int  # first position whose keys and values are written
    pages: np.ndarray  # int32[m] pages of the request


class Programs:
    """Compiled prefill and decode for one model. The same object serves runs with and without a cache."""

    def __init__(self, weights: Weights, config: ModelConfig, geometry: Geometry):
        if geometry.context > config.context:
            raise DemoError(f"The model was trained for contexts of up to {config.context} tokens: lower --context.")
        self.config, self.geometry, self._weights = config, geometry, weights
        self._forward = jax.jit(partial(_greedy, config=config, block=geometry.block))
        self._write = jax.jit(write, donate_argnums=0)

    def pool(self, pages: int) -> Pool:
        """Return an empty device pool of that many pages."""
        return make_pool(self.config, pages, self.geometry.page_size)

    def start_of(self, position: int) -> int:
        """Where computing must begin for the token at a position: at the begin of its chunk."""
        return position // self.geometry.chunk * self.geometry.chunk

    def span(self, lease: Lease, tokens: np.ndarray, start: int, first: int) -> Span:
        """Rows of the request that holds a lease; see Span."""
        return Span(tokens, start, first, lease.pages)

    def digest(self, memory: PoolOwner, lease: Lease, filled: int) -> bytes:
        """Nothing: keys and values of a prefill and of decoding differ in their last bits."""
        return b""

    def warm(self, memory: PoolOwner) -> None:
        """Compile both programs by running them on nothing. The pool keeps what it holds."""
        self._run(memory, [], groups=1, rows=self.geometry.chunk)
        self._run(memory, [], groups=self.geometry.batch, rows=1)

    def prefill(self, memory: PoolOwner, span: Span) -> tuple[int, jax.Array]:
        """Compute up to `chunk` tokens of one request from a multiple of `chunk` on.

        Returns the most likely token after the last of them, and its logits, float32[vocabulary].
        """
        if span.start % self.geometry.chunk:
            raise ValueError(f"a prefill chunk starts at a multiple of {self.geometry.chunk}, not at {span.start}")
        tokens, logits = self._run(memory, [span], groups=1, rows=self.geometry.chunk)
        return int(tokens[0]), logits[0]

    def decode(self, memory: PoolOwner, spans: Sequence[Span]) -> np.ndarray:
        """Compute one token of each of up to `batch` requests. Returns the tokens that follow, int32[len(spans)]."""
        tokens, _ = self._run(memory, spans, groups=self.geometry.batch, rows=1)
        return tokens[: len(spans)]

    def _run(self, memory: PoolOwner, spans: Sequence[Span], groups: int, rows: int) -> tuple[np.ndarray, jax.Array]:
        # Fresh arrays for every run: a NumPy argument must not change while a program may still read it.
        batch = Rows(
            tokens=np.zeros((groups, rows), np.int32),
            start=np.zeros(groups, np.int32),
            first=np.zeros(groups, np.int32),
            end=np.zeros(groups, np.int32),
            tables=np.zeros((groups, self.geometry.table), np.int32),
        )
        for group, span in enumerate(spans):
            count = len(span.tokens)
            batch.tokens[group, :count] = span.tokens
            batch.start[group] = span.start
            batch.first[group] = span.first
            batch.end[group] = span.start + count
            batch.tables[group, : len(span.pages)] = span.pages
        tokens, logits, keys, values = self._forward(self._weights, memory.pool, batch)
        memory.pool = self._write(memory.pool, keys, values, batch)
        return np.asarray(tokens), logits


def _greedy(
    weights: Weights, pool: Pool, rows: Rows, config: ModelConfig, block: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    logits, keys, values = forward(weights, config, pool, rows, block)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits, keys, values
