"""A plain NumPy float64 forward pass of a Gemma 3 model, written from a GGUF file and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.quants import dequantize


class GemmaReference:
    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, Any], period: int = 6):
        self.tensors, self.period = tensors, period
        self.layers = metadata["gemma3.block_count"]
        self.heads = metadata["gemma3.attention.head_count"]
        self.kv_heads = metadata["gemma3.attention.head_count_kv"]
        self.depth = metadata["gemma3.attention.key_length"]
        self.window = metadata["gemma3.attention.sliding_window"]
        self.base = float(metadata["gemma3.rope.freq_base"])
        self.stretch = float(metadata.get("gemma3.rope.scaling.factor", 1.0))
        self.epsilon = float(metadata["gemma3.attention.layer_norm_rms_epsilon"])

    def tensor(self, name: str) -> np.ndarray:
        stored = self.tensors[f"{name}.weight"]
        return dequantize(stored.data, stored.tensor_type).astype(np.float64)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.epsilon) * self.tensor(name)

    def heads_of(self, x: np.ndarray, block: str, name: str, everywhere: bool) -> np.ndarray:
        """Queries or keys [n, heads, depth], normed and rotated: pairs are (i, i + depth / 2)."""
        x = self.norm(
            (x @ self.tensor(f"{block}.attn_{name}").T).reshape(len(x), -1, self.depth), f"{block}.attn_{name}_norm"
        )
        position = np.arange(len(x)) / (self.stretch if everywhere else 1.0)
        half, base = self.depth // 2, self.base if everywhere else 10_000.0
        angle = (position[:, None] * base ** (-np.arange(half) / half))[:, None, :]
        left, right = x[..., :half], x[..., half:]
        return np.concatenate(
            [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)], axis=-1
        )

    def attention(self, x: np.ndarray, block: str, everywhere: bool) -> np.ndarray:
        length = len(x)
        query = self.heads_of(x, block, "q", everywhere) / np.sqrt(self.depth)
        key = self.heads_of(x, block, "k", everywhere)
        value = (x @ self.tensor(f"{block}.attn_v").T).reshape(length, self.kv_heads, -1)
        back = np.arange(length)[:, None] - np.arange(length)
        hidden = (back < 0) | (back >= (length if everywhere else self.window))
        mixed = np.empty_like(query)
        for head in range(self.heads):
            shared = head * self.kv_heads // self.heads
            score = query[:, head] @ key[:, shared].T
            score[hidden] = -np.inf
            weight = np.exp(score - score.max(axis=-1, keepdims=True))
            mixed[:, head] = weight / weight.sum(axis=-1, keepdims=True) @ value[:, shared]
        return mixed.reshape(length, -1) @ self.tensor(f"{block}.attn_output").T

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits after every token, float64[n, vocabulary]."""
        embedding = self.tensor("token_embd")
        x = embedding[tokens] * np.sqrt(embedding.shape[1])
        for index in range(self.layers):
            block = f"blk.{index}"
            mixed = self.attention(self.norm(x, f"{block}.attn_norm"), block, index % self.period == self.period - 1)
            x = x + self.norm(mixed, f"{block}.post_attention_norm")
            fed = self.norm(x, f"{block}.ffn_norm")
            gate = fed @ self.tensor(f"{block}.ffn_gate").T
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            fed = (gate * (fed @ self.tensor(f"{block}.ffn_up").T)) @ self.tensor(f"{block}.ffn_down").T
            x = x + self.norm(fed, f"{block}.post_ffw_norm")
        return self.norm(x, "output_norm") @ embedding.T
