"""The shape and features of a decoder, with the names of config.json."""

from dataclasses import dataclass

import torch

from minirl.model import batch_invariance, portable_attention


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3 stretches the low rope frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape and features of a decoder, read from config.json by `families.read_config`."""

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
    # How many tokens each layer sees, the token itself included. None: all.
    layer_windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    # A value or reward model, with one number for each hidden state instead of logits.
    scalar_head: bool = False

    def is_batch_invariant(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a token has the same bits in any batch on this machine, measured on all products."""
        hidden = self.hidden_size
        inner = self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        layers = [(hidden, queries), (hidden, keys), (queries, hidden), (hidden, inner), (inner, hidden)]
        head = [(hidden, self.vocab_size)]
        if not batch_invariance.is_batch_invariant(layers, dtype, device):
            return False
        if not batch_invariance.is_batch_invariant(head, dtype, device, is_head=True):
            return False
        return portable_attention.min_queries(self.head_dim, dtype) is not None
