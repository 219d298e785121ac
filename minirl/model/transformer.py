"""A single decoder for all supported families, operating on packed tokens. Parameters have Hugging Face names.

`Transformer.forward(tokens, positions, layout)` is the only forward pass; training, scoring, prefill and decoding pass
different layouts. The forward pass returns hidden states, and callers compute the logits in chunks (`training.scoring`,
`generation.sampling`).

The base architecture is Llama: each layer adds attention over the normed residual stream, then a gated MLP. The other
families' features are each controlled by a field of `config.ModelConfig` (`qk_norm`, `attention_gate`, `norms`,
`delta_net`, `scales_embeddings`), never by the family's name; `families` sets the fields for each family. Norm
statistics, RoPE tables and rotations are computed in fp32 (fp64 in an fp64 model).

Shapes: T tokens, D hidden size, C channels per head.
"""

import functools
import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minirl.errors import refuse
from minirl.model import batch_invariance, padding, portable_attention
from minirl.model.attention import Layout, attend
from minirl.model.config import Adapters, ModelConfig, is_adapter
from minirl.model.layers import ACTIVATIONS, GatedActivation, Linear, RMSNorm
from minirl.model.logprobs import VOCAB_CHUNK
from minirl.model.rotation import rope_table, rotate
from minirl.model.shards import ShardGroup


class Attention(nn.Module):
    """Grouped-query self-attention with RoPE; optionally with biases, q/k norm, a sliding window and an output gate."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        hidden_size = config.hidden_size
        head_dim = config.head_dim
        q_size = config.num_attention_heads * head_dim
        kv_size = config.num_key_value_heads * head_dim
        self.config = config
        self.layer = layer
        self.q_proj = Linear(hidden_size, q_size * (1 + config.attention_gate), config.qkv_bias)
        self.k_proj = Linear(hidden_size, kv_size, config.qkv_bias)
        self.v_proj = Linear(hidden_size, kv_size, config.qkv_bias)
        self.o_proj = Linear(q_size, hidden_size, config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(q_size if config.qk_norm_over_heads else head_dim, config)
            self.k_norm = RMSNorm(kv_size if config.qk_norm_over_heads else head_dim, config)

    def forward(self, x: Tensor, rotation: Tensor, layout: Layout) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self._split_heads(self.v_proj(x))
        if self.config.attention_gate:
            query_and_gate = q.unflatten(1, (-1, 2, self.config.head_dim))  # each head's query, then its gate
            q = query_and_gate[:, :, 0].flatten(1)
            gate = query_and_gate[:, :, 1].flatten(1)
        if self.config.qk_norm:
            q = self._normalize_heads(q, self.q_norm)
            k = self._normalize_heads(k, self.k_norm)
        q = rotate(self._split_heads(q), rotation, self.config.query_multiplier)
        k = rotate(self._split_heads(k), rotation)
        window = self.config.layer_windows[self.layer]
        out = attend(q, k, v, layout, layer=self.layer, window=window).flatten(1)
        if self.config.attention_gate:
            out = out * batch_invariance.apply_activation(gate, torch.sigmoid)
        return self.o_proj(out)

    def _normalize_heads(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Normalize x [T, heads x C] in groups of the norm's size: per head, or over all heads."""
        norm_dim = len(norm.weight)
        norm_groups = x.unflatten(1, (-1, norm_dim))
        return norm(norm_groups).flatten(1)

    def _split_heads(self, x: Tensor) -> Tensor:
        """View [T, heads x C] as [T, heads, C]."""
        return x.view(len(x), -1, self.config.head_dim)


class MLP(nn.Module):
    """The feed-forward block: the down-projection of activation(gate) x up."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden_size = config.hidden_size
        intermediate_size = config.intermediate_size
        self.activate = functools.partial(
            batch_invariance.apply_activation, function=ACTIVATIONS[config.activation]
        )
        self.gate_proj = Linear(hidden_size, intermediate_size, config.mlp_bias)
        self.up_proj = Linear(hidden_size, intermediate_size, config.mlp_bias)
        self.down_proj = Linear(intermediate_size, hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        # On the CPU, recomputing the activation would take at least 4% of the MLP's time.
        if x.device.type == "cpu":
            return self.down_proj(self.activate(gate) * up)
        return self.down_proj(GatedActivation.apply(gate, up, self.activate))


_NO_NORM = nn.Identity()


class DecoderLayer(nn.Module):
    """A decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    `config.norms` may instead place norms after attention and the MLP, or on both sides of attention and the MLP. Some
    layers use a Gated DeltaNet instead of attention. is_recomputed: whether backward reruns the whole layer.
    """

    def __init__(self, config: ModelConfig, layer: int, *, is_recomputed: bool = False):
        super().__init__()
        self.has_attention = layer in config.attention_windows
        if self.has_attention:
            self.self_attn = Attention(config, layer)
        else:
            from minirl.extras.delta_net.layer import GatedDeltaNet

            self.linear_attn = GatedDeltaNet(config, layer, recomputes=not is_recomputed)
        self.mlp = MLP(config)
        self.norms = config.norms
        for name in filter(None, config.norms):
            self.add_module(name, RMSNorm(config.hidden_size, config))

    def forward(self, x: Tensor, rotation: Tensor, layout: Layout) -> Tensor:
        before_attention, after_attention, before_mlp, after_mlp = (
            _NO_NORM if name is None else getattr(self, name) for name in self.norms
        )
        out = before_attention(x)
        out = self.self_attn(out, rotation, layout) if self.has_attention else self.linear_attn(out, layout)
        x = x + after_attention(out)
        return x + after_mlp(self.mlp(before_mlp(x)))


class Decoder(nn.Module):
    """The embedding, the layers and the final norm, which `Transformer.forward` runs."""

    def __init__(self, config: ModelConfig, *, recompute_layers: bool):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, is_recomputed=recompute_layers)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config)


class Transformer(nn.Module):
    """A causal language model with `lm_head`, or, with `config.scalar_head`, a value or reward model with `score`.

    recompute_layers: whether backward reruns each layer's forward instead of saving its activations.
    shard_group: the ranks that share the linear layers (`shards.shard_layers`), or None. With a shard group, each
        forward is collective and needs a pass begun by `ShardGroup.begin_forward_pass`.
    min_rows: minimum number of rows that the layers compute, including padding. Layers without rows fail, because [0,
        heads x C] has no unique view as [0, heads, C].
    """

    shard_group: ShardGroup | None = None
    min_rows = 1

    def __init__(self, config: ModelConfig, *, recompute_layers: bool = False):
        super().__init__()
        self.config = config
        self.recompute_layers = recompute_layers
        self.model = Decoder(config, recompute_layers=recompute_layers)
        if config.scalar_head:
            self.score = Linear(config.hidden_size, 1, bias=False)
        else:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
            self.tie_weights()
        if config.adapters is not None:
            add_adapters(self, self.layers, config.adapters)

    def tie_weights(self) -> None:
        """Tie the head to the embedding if the config says so. Call again after replacing either weight."""
        if self.config.tie_word_embeddings and not self.config.scalar_head:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, whose linear layers may get adapters or be sharded."""
        return self.model.layers

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The token embedding."""
        return self.model.embed_tokens

    @property
    def head(self) -> Tensor:
        """The weight [V, D] that maps hidden states to logits."""
        return self.lm_head.weight

    def forward(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Return the hidden states [T, D] after the final norm, for tokens and positions int64 [T].

        Collective among the ranks of `shard_group`, if set.
        """
        positions = padding.pad_rows(positions, self.min_rows)
        cos_sin_by_rope = {
            rope: rope_table(rope, self.config.max_position_embeddings, tokens.device)[:, positions]
            for rope in set(self.config.layer_ropes)
        }
        x = self.embed_tokens(padding.pad_rows(tokens, self.min_rows))
        if self.config.scales_embeddings:
            # Round the factor to the hidden states' dtype, to match how Gemma was trained.
            embedding_scale = math.sqrt(self.config.hidden_size)
            x = x * torch.tensor(embedding_scale, dtype=x.dtype, device="cpu").item()
        for layer, rope in zip(self.layers, self.config.layer_ropes, strict=True):
            if self.recompute_layers and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos_sin_by_rope[rope], layout, use_reentrant=False)
            else:
                x = layer(x, cos_sin_by_rope[rope], layout)
        return self.model.norm(x[: len(tokens)])


def add_adapters(model: nn.Module, layers: nn.ModuleList, adapters: Adapters) -> None:
    """Add adapters to the linear layers in `layers`, and freeze all other parameters except a scalar head.

    Raises InputError if `layers` contains no linear layers.
    """
    linear_layers = [module for module in layers.modules() if isinstance(module, Linear)]
    refuse(
        not linear_layers,
        "--lora-rank: this model's layers have no nn.Linear to adapt; drop the flag",
    )
    for module in linear_layers:
        module.add_adapter(adapters)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name == "score.weight")


def make_meta_model(config: ModelConfig, *, recompute_layers: bool = False) -> Transformer:
    """Build a model on the meta device: parameters have no values and take no memory."""
    if config.hf_backend is not None:
        return config.hf_backend.make_model(config, recompute_layers=recompute_layers)
    with torch.device("meta"):
        return Transformer(config, recompute_layers=recompute_layers)


def is_batch_invariant(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, num_shards: int = 1
) -> bool:
    """Return whether the model is batch-invariant: a token's results are bitwise identical in any batch.

    Measures all of the model's matmuls on this machine. num_shards: number of parts into which decoding splits a
    layer's output columns.
    """
    if config.hf_backend is not None and not config.hf_backend.is_exact:
        return False
    model = make_meta_model(config)
    parameters = model.layers.parameters()
    # Expert weights are stacked: [experts, out, in].
    layers = [(weight.shape[-1], weight.shape[-2]) for weight in parameters if weight.ndim > 1]
    head = [] if config.scalar_head else [chunk.t().shape for chunk in model.head.split(VOCAB_CHUNK)]
    is_invariant = (
        batch_invariance.is_batch_invariant(layers, dtype, device, num_shards=num_shards)
        and batch_invariance.is_batch_invariant(head, dtype, device, is_head=True)
        and portable_attention.min_invariant_queries(config.head_dim, dtype) is not None
    )
    if is_invariant and config.delta_net is not None:
        from minirl.extras.delta_net.rule import min_batch_rows

        return min_batch_rows(config.delta_net) is not None
    return is_invariant
