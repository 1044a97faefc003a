"""Shapes of common models, and the bytes of KV that one token takes.

The numbers are those of each model's `config.json` (`num_hidden_layers`, `num_key_value_heads`, `head_dim`,
`kv_lora_rank` and `qk_rope_head_dim`, `sliding_window`), parameters those of its model card.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What planning needs of a model."""

    name: str
    active: float
    """Parameters that one token passes: of a mixture of experts, the active ones."""
    layers: int
    """All attention layers."""
    heads: int
    """Query heads."""
    head_dim: int
    kv_heads: int = 0
    """0 for latent attention."""
    latent: int = 0
    """Numbers per token and layer of latent attention (MLA): rank and rotary part."""
    window_layers: int = 0
    """Layers that see only a window."""
    window: int = 0
    """Tokens of the window."""

    def bytes_per_token(self, element: float = 2) -> float:
        """Bytes that every token of a prefix takes in the layers of full attention, at `element` bytes per number.

        `2 x KV heads x head_dim` numbers per layer (keys and values), or `latent` of them with MLA.
        """
        return (self.layers - self.window_layers) * self._numbers * element

    def window_bytes(self, element: float = 2) -> float:
        """Bytes of the windows: per prefix, however long it is."""
        return self.window_layers * self.window * self._numbers * element

    def flops(self, tokens: float) -> float:
        """Operations of a prefill of `tokens` from nothing.

        `2 x parameters` per token, and in every layer of full attention `2 x heads x head_dim x tokens^2`: products of
        queries and keys, and of weights and values, half of them masked. Windows are left out: they are small.
        """
        width = self.heads * self.head_dim
        return 2 * self.active * tokens + 2 * width * (self.layers - self.window_layers) * tokens**2

    @property
    def _numbers(self) -> int:
        return self.latent or 2 * self.kv_heads * self.head_dim


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("Llama-3.1-8B", 8.03e9, 32, 32, 128, kv_heads=8),
        ModelShape("Llama-3.1-70B", 70.6e9, 80, 64, 128, kv_heads=8),
        ModelShape("Qwen3-8B", 8.2e9, 36, 32, 128, kv_heads=8),
        ModelShape("Qwen3-32B", 32.8e9, 64, 64, 128, kv_heads=8),
        ModelShape("Qwen3-235B-A22B", 22e9, 94, 64, 128, kv_heads=4),
        ModelShape("DeepSeek-V3", 37e9, 61, 128, 128, latent=512 + 64),
        ModelShape("gpt-oss-120b", 5.1e9, 36, 64, 64, kv_heads=8, window_layers=18, window=128),
        ModelShape("Gemma-3-27B", 27e9, 62, 32, 128, kv_heads=16, window_layers=52, window=1024),
    )
}
"""By name. DeepSeek-V3's query heads count with the 128 numbers of their non-rotary part."""
