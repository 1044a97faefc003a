"""Recurrent layers: a gated delta rule behind a short causal convolution, one token at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from purecache.demo.hybrid_config import HybridConfig, Recurrent
from purecache.demo.hybrid_pools import States
from purecache.demo.model import rms_norm

TINY = 1e-6  # added to the squared length of a vector that is normalised


def normalised(x: jax.Array) -> jax.Array:
    """Vectors along the last axis scaled to length 1."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + TINY)


def recur(x: jax.Array, weights: Recurrent, config: HybridConfig, before: States) -> tuple[jax.Array, States]:
    """Let one token of each of G groups pass a layer: x float32[G, width] -> (float32[G, width], states after it).

    `before`, and the result, without the axis of layers: memory float32[G, heads, key_dim, value_dim], tail float32[G,
    taps - 1, channels]. A token lets the memory S of each head fade and replaces what S had under its key k:
    S <- a S; S <- S + b k (v - S^T k)^T; the output is S^T q.
    """
    shape = config.recurrent
    assert shape is not None
    groups, heads, key_dim = len(x), shape.heads, shape.key_dim
    taps = jnp.concatenate([before.tail, (x @ weights.qkv)[:, None]], axis=1)
    mixed = jax.nn.silu(jnp.sum(taps * weights.taps, axis=1)).reshape(groups, heads, -1)
    query = normalised(mixed[:, :, :key_dim]) * key_dim**-0.5
    key = normalised(mixed[:, :, key_dim : 2 * key_dim])
    value = mixed[:, :, 2 * key_dim :]
    speed, share = jnp.split(x @ weights.gates, 2, axis=-1)
    fade = jnp.exp(-jnp.exp(weights.fade) * jax.nn.softplus(speed + weights.fade_bias))
    memory = before.memory * fade[:, :, None, None]
    known = jnp.einsum("ghkv,ghk->ghv", memory, key)
    change = jax.nn.sigmoid(share)[..., None] * (value - known)
    memory = memory + key[..., None] * change[:, :, None, :]
    found = rms_norm(jnp.einsum("ghkv,ghk->ghv", memory, query), weights.norm, config.epsilon)
    gated = found.reshape(groups, -1) * jax.nn.silu(x @ weights.output_gate)
    return gated @ weights.output, States(memory, taps[:, 1:])
