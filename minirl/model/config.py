"""A decoder's shape and features. Fields are named after the corresponding config.json keys, where those exist."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding: channel pair i rotates by `frequencies[i]` radians per position.

    Channels beyond 2 x len(frequencies) are not rotated; with empty `frequencies`, no channel is rotated.
    attention_factor: factor by which the rotated channels are multiplied (YaRN's attention factor).
    """

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0


class LayerNorms(NamedTuple):
    """The name of a layer's norm at each position; None where the layer has no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


PRE_NORMS = LayerNorms()


@dataclass(frozen=True)
class DeltaNet:
    """The shape of a model's Gated DeltaNet layers, and the indices of the layers that use one instead of attention."""

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int

    @property
    def num_channels(self) -> int:
        """Total number of query, key and value channels, all of which are convolved."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_channels

    @property
    def num_value_channels(self) -> int:
        """Total number of value channels."""
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class Adapters:
    """LoRA settings.

    Each linear layer in attention and the MLP is frozen, and a trained term alpha / rank (x A^T) B^T is added to the
    layer's output.
    """

    rank: int
    alpha: float = 16.0


def is_adapter(name: str) -> bool:
    """Return whether a parameter with this name belongs to an adapter."""
    return name.endswith((".lora_A", ".lora_B"))


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape and features, read from config.json by `families.read_config`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    # The RoPE of each layer.
    layer_ropes: tuple[Rope, ...]
    # Each layer's window size in tokens, including the token itself; None for full attention.
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    # The defaults below describe a plain Llama. Qwen2 has q, k and v biases.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    # Whether queries and keys are normalized: each head separately (Qwen3, Gemma 3), or all heads together if
    # `qk_norm_over_heads` is set (OLMo).
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    norms: LayerNorms = PRE_NORMS
    # Whether norms multiply by 1 + weight instead of by weight (Gemma 3, Qwen3.5).
    norm_adds_one: bool = False
    # Whether q_proj also outputs a gate, whose sigmoid multiplies the attention output (Qwen3.5).
    attention_gate: bool = False
    # Set if some layers use a Gated DeltaNet instead of attention (Qwen3.5).
    delta_net: DeltaNet | None = None
    activation: str = "silu"
    # Whether embeddings are multiplied by the square root of the hidden size (Gemma 3).
    scales_embeddings: bool = False
    query_multiplier: float = 1.0  # factor for queries, in addition to 1 / sqrt(head_dim) (Gemma 3)
    # The name prefix of the decoder's tensors in a checkpoint, and regular expressions that match the names of tensors
    # that are saved with the model although the model does not use them.
    weight_prefix: str = "model."
    passthrough_weight_patterns: tuple[str, ...] = ()
    # Whether this is a value or reward model, which outputs one number per hidden state instead of logits.
    scalar_head: bool = False
    # An `extras.hf_models.types.HFModel` if the model is built from transformers modules, else None.
    hf_backend: Any = None
    # If set, only the adapters and, if there is one, the scalar head are trained.
    adapters: Adapters | None = None

    @property
    def attention_windows(self) -> dict[int, int | None]:
        """Each attention layer's window size, keyed by layer index."""
        delta_net_layers = self.delta_net.layers if self.delta_net else ()
        return {
            layer: window for layer, window in enumerate(self.layer_windows) if layer not in delta_net_layers
        }
