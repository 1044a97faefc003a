"""Read a Gemma 3 model from a GGUF file: five of six layers look back a window of tokens, the others everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from purecache.demo.hybrid_config import Attention, HybridConfig, HybridLayer, HybridWeights, Kind
from purecache.demo.weights import DemoError, dequantised, transposed

PERIOD = 6
"""One layer in as many is full, unless the file says otherwise."""
WINDOW_ROPE_BASE = 10_000.0
DEEPEST = 62
"""Layers of the largest model (27B), which alone scales queries by the width of the model and not of a head."""


def gemma_config(metadata: Mapping[str, Any], vocabulary: int) -> HybridConfig:
    """Take the hyperparameters from the metadata of a GGUF file of architecture gemma3.

    `vocabulary`: rows of the embedding. Raises DemoError for a variant that would be computed wrongly.
    """

    def get(key: str, otherwise: Any = None) -> Any:
        if otherwise is None:
            return metadata[f"gemma3.{key}"]
        return metadata.get(f"gemma3.{key}", otherwise)

    if get("final_logit_softcapping", 0.0):
        raise DemoError("The demo does not know Gemma 3 models with a cap on the logits.")
    if get("attention.key_length") != get("attention.value_length"):
        raise DemoError("The demo does not know models whose keys and values differ in size.")
    layers, width, heads = (int(get(key)) for key in ("block_count", "embedding_length", "attention.head_count"))
    depth = int(get("attention.key_length"))
    scaled = get("rope.scaling.type", "none") == "linear"
    return HybridConfig(
        kinds=_kinds(get("attention.sliding_window_pattern", PERIOD), layers),
        width=width,
        heads=heads,
        kv_heads=int(get("attention.head_count_kv")),
        head_dim=depth,
        hidden=int(get("feed_forward_length")),
        vocabulary=vocabulary,
        context=int(get("context_length")),
        window=int(get("attention.sliding_window")),
        rope_base=float(get("rope.freq_base", 1e6)),
        window_rope_base=float(get("rope.freq_base_swa", WINDOW_ROPE_BASE)),
        query_scale=(width / heads if layers == DEEPEST else depth) ** -0.5,
        embedding_scale=width**0.5,
        epsilon=float(get("attention.layer_norm_rms_epsilon")),
        rope_scale=float(get("rope.scaling.factor", 1.0)) if scaled else 1.0,
    )


def _kinds(pattern: Any, layers: int) -> tuple[Kind, ...]:
    """Kinds of the layers by the pattern of the file: a period, or one flag per layer that is set for windows."""
    if isinstance(pattern, int):
        windows = [(index + 1) % pattern != 0 for index in range(layers)]
    else:
        windows = [bool(flag) for flag in pattern]
    if len(windows) != layers:
        raise DemoError(f"The file has {layers} layers and a pattern of windows for {len(windows)}.")
    return tuple(Kind.WINDOW if window else Kind.FULL for window in windows)


def gemma_weights(tensors: Mapping[str, Any], config: HybridConfig) -> HybridWeights:
    """Dequantise all tensors of a model to float32 and put them on the default device.

    Norms in the file have one added to the weight already, and rotary pairs are halves of a head.
    """

    def get(name: str) -> np.ndarray:
        return dequantised(tensors[f"{name}.weight"])

    def layer(index: int) -> HybridLayer:
        def mine(name: str) -> np.ndarray:
            return get(f"blk.{index}.{name}")

        return HybridLayer(
            norm=jnp.asarray(mine("attn_norm")),
            mixer=Attention(
                qkv=transposed(mine("attn_q"), mine("attn_k"), mine("attn_v")),
                query_norm=jnp.asarray(mine("attn_q_norm")),
                key_norm=jnp.asarray(mine("attn_k_norm")),
                output=transposed(mine("attn_output")),
            ),
            post_norm=jnp.asarray(mine("post_attention_norm")),
            feed_norm=jnp.asarray(mine("ffn_norm")),
            gate_up=transposed(mine("ffn_gate"), mine("ffn_up")),
            down=transposed(mine("ffn_down")),
            post_feed_norm=jnp.asarray(mine("post_ffw_norm")),
        )

    embedding = jnp.asarray(get("token_embd"))
    return HybridWeights(
        embedding=embedding,
        unembedding=jnp.asarray(get("output")) if "output.weight" in tensors else embedding,
        norm=jnp.asarray(get("output_norm")),
        layers=tuple(layer(index) for index in range(len(config.kinds))),
    )
