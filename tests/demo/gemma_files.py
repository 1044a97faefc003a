"""Tiny Gemma 3 models with random weights, as GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

WORDS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "\n\n"]
CONTROL, USER_DEFINED, BYTE, NORMAL = 3, 4, 6, 1
LETTERS = [chr(code) for code in range(33, 127)] + ["\u2581", "\n"]
MERGED = [
    "th",
    "he",
    "the",
    "\u2581the",
    "in",
    "an",
    "and",
    "\u2581and",
    "er",
    "us",
    "user",
    "mo",
    "de",
    "mode",
    "model",
]


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Words, scores and types: markers, bytes, letters, and words that grow out of them."""
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [*WORDS, *raw, *LETTERS, *MERGED]
    types = [CONTROL] * 6 + [USER_DEFINED] + [BYTE] * len(raw) + [NORMAL] * (len(LETTERS) + len(MERGED))
    scores = [0.0] * (len(words) - len(MERGED)) + [-float(index) for index in range(len(MERGED))]
    return words, scores, types


def write_gemma(path: Path, layers: int = 4, period: int | None = 3, window: int = 10, stretch: float = 1.0) -> Path:
    """Write a model with heads whose total is not the width. Some tensors are quantised."""
    width, heads, kv_heads, depth, hidden = 64, 4, 2, 32, 96
    words, scores, types = vocabulary()
    writer = GGUFWriter(str(path), "gemma3")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(depth)
    writer.add_value_length(depth)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(window)
    if period is not None:
        writer.add_uint32("gemma3.attention.sliding_window_pattern", period)
    if stretch != 1.0:
        writer.add_string("gemma3.rope.scaling.type", "linear")
        writer.add_float32("gemma3.rope.scaling.factor", stretch)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    source = np.random.default_rng(0)

    def matrix(name: str, outputs: int, inputs: int, quantised: bool = False, size: float = 1.0) -> None:
        data = source.normal(0, size / inputs**0.5, (outputs, inputs)).astype(np.float32)
        if quantised:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", data)

    def vector(name: str, size: int, about: float = 1.0) -> None:
        writer.add_tensor(f"{name}.weight", (about * source.uniform(0.7, 1.4, size)).astype(np.float32))

    matrix("token_embd", len(words), width, quantised=True)
    vector("output_norm", width)
    for index in range(layers):
        block = f"blk.{index}"
        for name, outputs in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{block}.attn_{name}", outputs * depth, width, quantised=name == "v")
        matrix(f"{block}.attn_output", width, heads * depth)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            vector(f"{block}.{name}", width)
        for name in ("attn_q_norm", "attn_k_norm"):
            vector(f"{block}.{name}", depth, about=1.5)
        matrix(f"{block}.ffn_gate", hidden, width, quantised=True)
        matrix(f"{block}.ffn_up", hidden, width)
        matrix(f"{block}.ffn_down", width, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
