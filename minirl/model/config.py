"""The shape and features of a decoder, with the names of config.json."""

from dataclasses import dataclass

import torch

from minirl.model import batch_invariance, delta_rule, portable_attention
from minirl.model.delta_rule import DeltaNet


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3 stretches the low rope frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


# The linear layers of a decoder layer, which can have adapters.
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# A product with a matrix of one row is a matrix-vector product, which is not batch-invariant.
MIN_ADAPTER_RANK = 8


@dataclass(frozen=True)
class Adapters:
    """LoRA: the layers named `targets` are frozen, and add alpha / rank (x A^T) B^T to their product."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def padded_rank(self) -> int:
        """Rows of A and columns of B: those beyond the rank are 0."""
        return max(self.rank, MIN_ADAPTER_RANK)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.endswith((".lora_A", ".lora_B"))


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
    # How many tokens each layer's attention sees, the token itself included. None: all.
    layer_windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    # The share of a head's channels that rope rotates, the first ones.
    partial_rotary_factor: float = 1.0
    # Whether the weights of norms are what they add to 1.
    norm_adds_one: bool = False
    # Whether attention's output is multiplied by the sigmoid of a gate, which q_proj gives beside the query.
    attention_gate: bool = False
    # Some layers have it instead of attention.
    delta_net: DeltaNet | None = None
    # In a folder: what the decoder's tensors begin with, and those that the model has not and that are saved with it.
    weight_prefix: str = "model."
    kept_weights: tuple[str, ...] = ()
    # A value or reward model, with one number for each hidden state instead of logits.
    scalar_head: bool = False
    # With them only adapters and a scalar head are trained.
    adapters: Adapters | None = None

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rope rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def attention_windows(self) -> dict[int, int | None]:
        """The windows of the layers that have attention."""
        deltas = self.delta_net.layers if self.delta_net else ()
        return {layer: window for layer, window in enumerate(self.layer_windows) if layer not in deltas}

    def is_batch_invariant(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a token has the same bits in any batch on this machine, measured on all products."""
        hidden = self.hidden_size
        inner = self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        layers = [(hidden, queries), (hidden, keys), (queries, hidden), (hidden, inner), (inner, hidden)]
        if self.attention_gate:
            layers.append((hidden, 2 * queries))
        delta = self.delta_net
        if delta is not None:
            layers += [(hidden, delta.num_channels), (hidden, delta.num_values), (delta.num_values, hidden)]
            layers.append((hidden, delta.num_value_heads))
        if self.adapters is not None:
            rank = self.adapters.padded_rank
            layers += [shape for num_in, num_out in layers for shape in ((num_in, rank), (rank, num_out))]
        head = [(hidden, self.vocab_size)]
        if not batch_invariance.is_batch_invariant(layers, dtype, device):
            return False
        if not batch_invariance.is_batch_invariant(head, dtype, device, is_head=True):
            return False
        if delta is not None and not delta_rule.is_batch_invariant(delta):
            return False
        return portable_attention.min_queries(self.head_dim, dtype) is not None
