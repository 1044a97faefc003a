"""A plain NumPy float64 forward pass of a llama model, written from the tensors of a GGUF file and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.quants import dequantize


class ReferenceModel:
    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, Any]):
        self.tensors = tensors
        self.layers = metadata["llama.block_count"]
        self.heads = metadata["llama.attention.head_count"]
        self.kv_heads = metadata["llama.attention.head_count_kv"]
        self.base = float(metadata["llama.rope.freq_base"])
        self.epsilon = float(metadata["llama.attention.layer_norm_rms_epsilon"])

    def tensor(self, name: str) -> np.ndarray:
        stored = self.tensors[f"{name}.weight"]
        return dequantize(stored.data, stored.tensor_type).astype(np.float64)

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.epsilon) * weight

    def rope(self, x: np.ndarray) -> np.ndarray:
        """[n, heads, depth]: rotate the neighbouring pairs (2i, 2i + 1), as llama files in GGUF have them."""
        length, _, depth = x.shape
        angle = np.arange(length)[:, None] * self.base ** (-np.arange(0, depth, 2) / depth)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None, :]
        out = np.empty_like(x)
        out[..., 0::2], out[..., 1::2] = turned.real, turned.imag
        return out

    def attention(self, x: np.ndarray, block: str) -> np.ndarray:
        length = len(x)
        query = self.rope((x @ self.tensor(f"{block}.attn_q").T).reshape(length, self.heads, -1))
        key = self.rope((x @ self.tensor(f"{block}.attn_k").T).reshape(length, self.kv_heads, -1))
        value = (x @ self.tensor(f"{block}.attn_v").T).reshape(length, self.kv_heads, -1)
        mixed = np.empty_like(query)
        for head in range(self.heads):
            shared = head * self.kv_heads // self.heads
            score = query[:, head] @ key[:, shared].T / np.sqrt(query.shape[-1])
            score[np.triu_indices(length, 1)] = -np.inf
            weight = np.exp(score - score.max(axis=-1, keepdims=True))
            mixed[:, head] = weight / weight.sum(axis=-1, keepdims=True) @ value[:, shared]
        return mixed.reshape(length, -1) @ self.tensor(f"{block}.attn_output").T

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits after every token, float64[n, vocabulary]."""
        embedding = self.tensor("token_embd")
        x = embedding[tokens]
        for index in range(self.layers):
            block = f"blk.{index}"
            x = x + self.attention(self.norm(x, self.tensor(f"{block}.attn_norm")), block)
            fed = self.norm(x, self.tensor(f"{block}.ffn_norm"))
            gate = fed @ self.tensor(f"{block}.ffn_gate").T
            x = (
                x
                + (gate / (1 + np.exp(-gate)) * (fed @ self.tensor(f"{block}.ffn_up").T))
                @ self.tensor(f"{block}.ffn_down").T
            )
        return self.norm(x, self.tensor("output_norm")) @ embedding.T
