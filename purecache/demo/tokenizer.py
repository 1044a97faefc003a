"""Tokenizers: what the demo asks of one, that of a SmolLM2 model rebuilt from its GGUF file, and plain bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from purecache.demo.weights import HOW_TO_GET_READERS, DemoError

CONTROL = 3  # the token type that GGUF gives to special tokens


class Tokenizer(Protocol):
    """What the demo asks of a tokenizer. Ids are int32[n]."""

    stop: int
    """The id that ends an answer."""

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text. Chat markers in it become their special ids."""
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, with the markers left in."""
        ...

    def message(self, role: str, content: str) -> np.ndarray:
        """Return the ids of one chat message; the one of role "system" begins a conversation."""
        ...

    def answer_start(self) -> np.ndarray:
        """Return the ids that make the model answer."""
        ...

    def answer_end(self) -> np.ndarray:
        """Return the ids that close an answer."""
        ...


class ChatTokenizer:
    """Byte-level BPE with the chat markers of SmolLM2."""

    def __init__(self, metadata: Mapping[str, Any]):
        """Build from GGUF metadata. Raises DemoError for another kind of tokenizer or a missing package."""
        if importlib.util.find_spec("tokenizers") is None:
            raise DemoError(HOW_TO_GET_READERS)
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # optional dependency: only the demo has it

        kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise DemoError(f"The demo knows only the tokenizer of SmolLM2 ('gpt2', 'smollm'), the file has {kind}.")
        words: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
        vocabulary = {word: index for index, word in enumerate(words)}
        # The stubs of tokenizers do not know that merges may be pairs; the library itself takes nothing else.
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))  # pyright: ignore
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
        types = metadata["tokenizer.ggml.token_type"]
        tokenizer.add_special_tokens([word for word, kind in zip(words, types, strict=True) if kind == CONTROL])
        self._tokenizer = tokenizer
        self.stop = int(metadata["tokenizer.ggml.eos_token_id"])
        """The id that ends an answer."""

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32[n]. Markers such as <|im_start|> become their special ids."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids, with the markers left in."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def message(self, role: str, content: str) -> np.ndarray:
        """Return the ids of one chat message, int32[n], closed by its end marker."""
        return self.encode(f"<|im_start|>{role}\n{content}<|im_end|>\n")

    def answer_start(self) -> np.ndarray:
        """Return the ids that make the model answer, int32[n]."""
        return self.encode("<|im_start|>assistant\n")

    def answer_end(self) -> np.ndarray:
        """Return the ids that close an answer, int32[n]."""
        return self.encode("<|im_end|>\n")


class ByteTokenizer:
    """Bytes as tokens, for models that were never trained on anything else."""

    stop = -1
    """No token ends an answer."""

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of a text, int32[n]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of the bytes; what is not text is written as \\\\x.."""
        return bytes(int(token) for token in tokens).decode(errors="backslashreplace")

    def message(self, role: str, content: str) -> np.ndarray:
        """Return one chat message, int32[n]."""
        return self.encode(f"{role}: {content}\n")

    def answer_start(self) -> np.ndarray:
        """Return what comes before an answer, int32[n]."""
        return self.encode("assistant: ")

    def answer_end(self) -> np.ndarray:
        """Return what comes after it, int32[n]."""
        return self.encode("\n")
