"""Hybrid models: kinds of layers, shapes and weights. Gemma 3 is one of them, without recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import jax

KV, WINDOW, STATE = "kv", "window", "state"
"""Names of the pools: keys and values of full layers, of window layers, states of recurrent layers."""


class Kind(Enum):
    """What a layer mixes tokens with. The value is the name of its pool."""

    FULL = KV
    """Attention to every token before."""
    WINDOW = WINDOW
    """Attention to the last `window` tokens, the own one included."""
    RECURRENT = STATE
    """A state of fixed size that every token changes."""


@dataclass(frozen=True)
class RecurrentShape:
    """The shape of the recurrent layers: a gated delta rule behind a short causal convolution."""

    heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    taps: int = 4  # width of the convolution: a token and the taps - 1 before it

    @property
    def channels(self) -> int:
        """Inputs of the convolution: queries, keys and values of all heads."""
        return self.heads * (2 * self.key_dim + self.value_dim)


@dataclass(frozen=True)
class HybridConfig:
    """The shape of a hybrid model."""

    kinds: tuple[Kind, ...]  # of the layers, from the first to the last
    width: int  # size of the residual stream
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # size of the feed-forward layers
    vocabulary: int
    context: int  # longest context in tokens the model was trained for
    window: int  # tokens that window layers attend to
    rope_base: float  # of full layers
    window_rope_base: float
    query_scale: float
    embedding_scale: float
    epsilon: float  # of the RMS norms
    rope_scale: float = 1.0  # positions of full layers are divided by it
    recurrent: RecurrentShape | None = None  # given if there are recurrent layers

    def layers_of(self, kind: Kind) -> int:
        """How many layers are of a kind."""
        return self.kinds.count(kind)

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools that the model needs."""
        return tuple(kind.value for kind in Kind if kind in self.kinds)

    @property
    def exact(self) -> bool:
        """Whether tokens are computed one at a time, so that results do not depend on where computing began.

        Without it they depend, in the last bits, on the grid of chunks. A state can be taken up only where it was
        kept, which may be off the grid.
        """
        return Kind.RECURRENT in self.kinds


class Attention(NamedTuple):
    """Weights of full and window layers, each float32 and stored [inputs, outputs]."""

    qkv: jax.Array  # [width, (heads + 2 * kv_heads) * head_dim]
    query_norm: jax.Array  # [head_dim]
    key_norm: jax.Array  # [head_dim]
    output: jax.Array  # [heads * head_dim, width]


class Recurrent(NamedTuple):
    """Weights of a recurrent layer, each float32 and stored [inputs, outputs]."""

    qkv: jax.Array  # [width, channels]
    taps: jax.Array  # [taps, channels]; the last one is for the token itself
    gates: jax.Array  # [width, 2 * heads]: how fast the state fades, how much of it is replaced
    fade: jax.Array  # [heads] logarithm of the speed of fading
    fade_bias: jax.Array  # [heads]
    output_gate: jax.Array  # [width, heads * value_dim]
    norm: jax.Array  # [value_dim]
    output: jax.Array  # [heads * value_dim, width]


class HybridLayer(NamedTuple):
    """Weights of one layer. Mixer and feed-forward layer have a norm before and one after them."""

    norm: jax.Array  # [width]
    mixer: Attention | Recurrent
    post_norm: jax.Array  # [width]
    feed_norm: jax.Array  # [width]
    gate_up: jax.Array  # [width, 2 * hidden]
    down: jax.Array  # [hidden, width]
    post_feed_norm: jax.Array  # [width]


class HybridWeights(NamedTuple):
    """All weights of a hybrid model, float32."""

    embedding: jax.Array  # [vocabulary, width]
    unembedding: jax.Array  # [vocabulary, width]
    norm: jax.Array  # [width]
    layers: tuple[HybridLayer, ...]
