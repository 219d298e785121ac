"""The shape and features of a decoder, with the names of config.json."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding: pair i of a head's channels turns by `frequencies[i]` from position to position.

    Channels beyond 2 x len(frequencies) do not turn; without frequencies, no channel does.
    attention_factor: a factor of the turned channels (YaRN's attention factor).
    """

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0


class LayerNorms(NamedTuple):
    """The names of a layer's norms, by place; None where the layer has no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


PRE_NORMS = LayerNorms()


@dataclass(frozen=True)
class DeltaNet:
    """The shape of a gated delta net, and the layers that have it instead of attention."""

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int

    @property
    def num_channels(self) -> int:
        """Channels of all queries, keys and values together: those of the convolution."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_values

    @property
    def num_values(self) -> int:
        """Channels of all values together."""
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class Adapters:
    """LoRA: the linear layers of attention and MLP are frozen, and add alpha / rank (x A^T) B^T to their product."""

    rank: int
    alpha: float = 16.0


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
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
    # Each layer's rope.
    layer_ropes: tuple[Rope, ...]
    # How many tokens each layer's attention sees, the token itself included. None: all.
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    # A plain Llama has the values that follow. Qwen2 has biases of queries, keys and values.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    # Norms of queries and keys (Qwen3, Gemma 3): of each head, or with `qk_norm_over_heads` of all together (OLMo).
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    norms: LayerNorms = PRE_NORMS
    # Norms multiply by 1 + weight (Gemma 3, Qwen3.5).
    norm_adds_one: bool = False
    # Attention's output is multiplied by the sigmoid of a gate, which q_proj gives beside the query (Qwen3.5).
    attention_gate: bool = False
    # Some layers have it instead of attention (Qwen3.5).
    delta_net: DeltaNet | None = None
    activation: str = "silu"
    # Embeddings are multiplied by the square root of the hidden size (Gemma 3).
    scales_embeddings: bool = False
    query_multiplier: float = 1.0  # beside 1 / sqrt(head_dim) (Gemma 3)
    # In a folder: the prefix of the decoder's tensors, and, by regular expressions for their names, tensors outside the
    # model that are saved with it.
    weight_prefix: str = "model."
    passthrough_weights: tuple[str, ...] = ()
    # A value or reward model, with one number for each hidden state instead of logits.
    scalar_head: bool = False
    # An `extras.hf_models.types.HFModel`, if its modules are not minirl's.
    hf_backend: Any = None
    # With them only adapters and a scalar head are trained.
    adapters: Adapters | None = None

    @property
    def attention_windows(self) -> dict[int, int | None]:
        """The windows of the layers that have attention."""
        deltas = self.delta_net.layers if self.delta_net else ()
        return {layer: window for layer, window in enumerate(self.layer_windows) if layer not in deltas}
