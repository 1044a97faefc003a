"""A plain NumPy float64 forward pass of a hybrid model: every layer over the whole text, no pages, no chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from purecache.demo.hybrid_config import Attention, HybridConfig, HybridWeights, Kind, Recurrent


def array(value: Any) -> np.ndarray:
    return np.asarray(value, np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class HybridReference:
    def __init__(self, weights: HybridWeights, config: HybridConfig):
        self.weights, self.config = weights, config

    def norm(self, x: np.ndarray, weight: Any) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config.epsilon) * array(weight)

    def rope(self, x: np.ndarray, kind: Kind) -> np.ndarray:
        """[n, heads, depth]: rotate pairs (i, i + depth / 2)."""
        length, _, depth = x.shape
        base = self.config.rope_base if kind is Kind.FULL else self.config.window_rope_base
        stretch = self.config.rope_scale if kind is Kind.FULL else 1.0
        angle = np.arange(length)[:, None] / stretch * base ** (-np.arange(0, depth, 2) / depth)
        turned = (x[..., : depth // 2] + 1j * x[..., depth // 2 :]) * np.exp(1j * angle)[:, None, :]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def attention(self, x: np.ndarray, weights: Attention, kind: Kind) -> np.ndarray:
        config, length = self.config, len(x)
        sizes = np.cumsum([config.heads, config.kv_heads]) * config.head_dim
        parts = np.split(x @ array(weights.qkv), sizes, axis=1)
        query, key, value = (part.reshape(length, -1, config.head_dim) for part in parts)
        query = self.rope(self.norm(query, weights.query_norm), kind) * config.query_scale
        key = self.rope(self.norm(key, weights.key_norm), kind)
        mixed = np.zeros_like(query)
        for token in range(length):
            first = 0 if kind is Kind.FULL else max(0, token - config.window + 1)
            for head in range(config.heads):
                shared = head * config.kv_heads // config.heads
                score = key[first : token + 1, shared] @ query[token, head]
                weight = np.exp(score - score.max())
                mixed[token, head] = weight / weight.sum() @ value[first : token + 1, shared]
        return mixed.reshape(length, -1) @ array(weights.output)

    def recurrent(self, x: np.ndarray, weights: Recurrent) -> np.ndarray:
        shape = self.config.recurrent
        assert shape is not None
        inputs = np.concatenate([np.zeros((shape.taps - 1, shape.channels)), x @ array(weights.qkv)])
        memory = np.zeros((shape.heads, shape.key_dim, shape.value_dim))
        rows = []
        for token, row in enumerate(x):
            mixed = (inputs[token : token + shape.taps] * array(weights.taps)).sum(axis=0)
            mixed = mixed * sigmoid(mixed)
            gates = row @ array(weights.gates)
            found = np.zeros((shape.heads, shape.value_dim))
            for head, part in enumerate(mixed.reshape(shape.heads, -1)):
                query, key, value = np.split(part, [shape.key_dim, 2 * shape.key_dim])
                query = query / np.sqrt((query**2).sum() + 1e-6) / np.sqrt(shape.key_dim)
                key = key / np.sqrt((key**2).sum() + 1e-6)
                slowed = np.log1p(np.exp(gates[head] + array(weights.fade_bias)[head]))
                memory[head] *= np.exp(-np.exp(array(weights.fade)[head]) * slowed)
                share = sigmoid(gates[shape.heads + head])
                memory[head] += share * np.outer(key, value - memory[head].T @ key)
                found[head] = memory[head].T @ query
            gate = row @ array(weights.output_gate)
            rows.append(self.norm(found, weights.norm).reshape(-1) * gate * sigmoid(gate))
        return np.stack(rows) @ array(weights.output)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits after every token, float64[n, vocabulary]."""
        x = array(self.weights.embedding)[tokens] * self.config.embedding_scale
        for kind, layer in zip(self.config.kinds, self.weights.layers, strict=True):
            y = self.norm(x, layer.norm)
            if isinstance(layer.mixer, Recurrent):
                y = self.recurrent(y, layer.mixer)
            else:
                y = self.attention(y, layer.mixer, kind)
            x = x + self.norm(y, layer.post_norm)
            gate, up = np.split(self.norm(x, layer.feed_norm) @ array(layer.gate_up), 2, axis=1)
            x = x + self.norm((gelu(gate) * up) @ array(layer.down), layer.post_feed_norm)
        return self.norm(x, self.weights.norm) @ array(self.weights.unembedding).T
