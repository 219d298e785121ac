"""The shape and features of a decoder, named as in config.json."""

from dataclasses import dataclass

import torch

from minirl.model import batch_invariance


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of low rope frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape and features of a decoder, named as in config.json; made by `weights.read_config`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    layer_windows: tuple[int | None, ...]  # tokens each layer sees, itself included; None: all
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    scalar_head: bool = False  # one number per state instead of logits: a value or reward model

    def is_batch_invariant(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this machine gives a token the same bits in any batch, by `batch_invariance.is_batch_invariant`."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layers = [(hidden, heads), (hidden, kv), (heads, hidden), (hidden, inner), (inner, hidden)]
        probe = batch_invariance.is_batch_invariant
        return probe(layers, dtype, device) and probe(
            [(hidden, self.vocab_size)], dtype, device, is_head=True
        )
