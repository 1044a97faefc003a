"""The tokenizer of a Gemma 3 model, rebuilt from the metadata of its GGUF file."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from purecache.demo.tokenizer import CONTROL
from purecache.demo.weights import HOW_TO_GET_READERS, DemoError

USER_DEFINED = 4  # the token type that GGUF gives to words that are never split
SPACE = "\u2581"  # stands for a space in the words of the vocabulary
END_OF_TURN = "<end_of_turn>"


class GemmaTokenizer:
    """Byte-pair encoding with scores (SentencePiece) and the chat markers of Gemma."""

    def __init__(self, metadata: Mapping[str, Any]):
        """Build from GGUF metadata. Raises DemoError for another kind of tokenizer or a missing package."""
        if importlib.util.find_spec("tokenizers") is None:
            raise DemoError(HOW_TO_GET_READERS)
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers  # optional: only the demo has it

        if (kind := metadata.get("tokenizer.ggml.model")) != "llama":
            raise DemoError(
                f"The demo knows only the SentencePiece tokenizer of Gemma ('llama'), the file has {kind!r}."
            )
        words: list[str] = metadata["tokenizer.ggml.tokens"]
        vocabulary = {word: index for index, word in enumerate(words)}
        unknown = words[int(metadata["tokenizer.ggml.unknown_token_id"])]
        # The stubs of tokenizers do not know that merges may be pairs; the library itself takes nothing else.
        model = models.BPE(
            vocab=vocabulary,
            merges=merges(words, metadata["tokenizer.ggml.scores"]),  # pyright: ignore
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)  # pyright: ignore
        tokenizer.decoder = decoders.Sequence(  # pyright: ignore
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        types = metadata["tokenizer.ggml.token_type"]
        whole = [word for word, kind in zip(words, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
        tokenizer.add_tokens([AddedToken(word, normalized=False) for word in whole])
        self._tokenizer = tokenizer
        self._begin = [int(metadata["tokenizer.ggml.bos_token_id"])]
        self.stop = vocabulary.get(END_OF_TURN, int(metadata["tokenizer.ggml.eos_token_id"]))
        """The id that ends an answer."""

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32[n]. Markers such as <start_of_turn> become their special ids."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids, with the markers left in."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def message(self, role: str, content: str) -> np.ndarray:
        """Return the ids of one chat message, int32[n], closed by its end marker.

        A system prompt begins the text. Gemma has no role for it: it is given as a message of the user.
        """
        system = role == "system"
        text = self.encode(f"<start_of_turn>{'user' if system else role}\n{content}{END_OF_TURN}\n")
        return np.concatenate([np.asarray(self._begin, np.int32), text]) if system else text

    def answer_start(self) -> np.ndarray:
        """Return the ids that make the model answer, int32[n]."""
        return self.encode("<start_of_turn>model\n")

    def answer_end(self) -> np.ndarray:
        """Return the ids that close an answer, int32[n]."""
        return self.encode(f"{END_OF_TURN}\n")


def merges(words: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of words that make another word, the best first.

    A SentencePiece vocabulary has scores of words and no merges: of all neighbours that make a word, those of the word
    with the highest score are merged first.
    """
    rank = {word: index for index, word in enumerate(words)}
    found: list[tuple[float, int, int, int]] = []
    for index, word in enumerate(words):
        pairs = [(word[:cut], word[cut:]) for cut in range(1, len(word))]
        pairs = [(rank[left], rank[right]) for left, right in pairs if left in rank and right in rank]
        found += [(-scores[index], index, *pair) for pair in pairs]
    return [(words[left], words[right]) for _, _, left, right in sorted(found)]
