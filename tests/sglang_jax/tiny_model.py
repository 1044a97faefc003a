"""A tiny model in the shape of Qwen2 with random weights, written to a folder that sglang-jax can load. No tokenizer.

The weights are large, so that attention is sharp and answers are varied: a wrong page in the cache changes an answer.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 512
LAYERS = 2
WIDTH = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 128
MLP_WIDTH = 512
POSITIONS = 2048
"""The longest context the model is made for, in tokens."""

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": MLP_WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors (float32) into `folder`; the same `seed` gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weights(seed: int) -> dict[str, np.ndarray]:
    """All tensors of the model under their usual names: float32, matrices as [outputs, inputs]."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    found = {
        "model.embed_tokens.weight": random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32),
        "model.norm.weight": np.ones(WIDTH, np.float32),
        "lm_head.weight": matrix(VOCABULARY, WIDTH),
    }
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        found |= {
            f"{name}.input_layernorm.weight": np.ones(WIDTH, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(WIDTH, np.float32),
            f"{name}.self_attn.q_proj.weight": matrix(queries, WIDTH, gain=1.5),
            f"{name}.self_attn.q_proj.bias": np.zeros(queries, np.float32),
            f"{name}.self_attn.k_proj.weight": matrix(keys, WIDTH, gain=1.5),
            f"{name}.self_attn.k_proj.bias": np.zeros(keys, np.float32),
            f"{name}.self_attn.v_proj.weight": matrix(keys, WIDTH, gain=2.0),
            f"{name}.self_attn.v_proj.bias": np.zeros(keys, np.float32),
            f"{name}.self_attn.o_proj.weight": matrix(WIDTH, queries, gain=2.0),
            f"{name}.mlp.gate_proj.weight": matrix(MLP_WIDTH, WIDTH),
            f"{name}.mlp.up_proj.weight": matrix(MLP_WIDTH, WIDTH),
            f"{name}.mlp.down_proj.weight": matrix(WIDTH, MLP_WIDTH),
        }
    return found
