"""One decoder for every supported family, on packed streams. Config keys and parameter names are Hugging Face's.

`Transformer.forward(tokens, positions, layout)` is the only forward: training, scoring, prefill and decode differ in
their layout. It returns hidden states; logits are made where they are consumed, a few rows at a time (`scoring`,
`sampling`). The model branches on features (bias, q/k norm, window, rope scaling), never on a family's name; which
features a family has is said in `weights`. Norm statistics, rope tables and rotations are fp32 (fp64 in an fp64 model).
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minirl.model import batch_invariance, padding
from minirl.model.attention import Layout, attend
from minirl.model.config import ModelConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in fp32 and rounded once.

    Hugging Face rounds before the scale too; in 16 bits the two differ in the last bit.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(nn.Linear):
    """`nn.Linear` with batch-invariant products (`numerics`)."""

    def forward(self, x: Tensor) -> Tensor:
        return batch_invariance.linear(x, self.weight, self.bias)


@functools.cache
def rope_table(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and signed sin [max_position_embeddings, C] in fp32, for `rotate`, looked up by position.

    A table, since the vectorised cosine and its scalar tail differ in the last bit. One for all models of a shape, and
    no buffer: it must survive the meta device and never be cast.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    if (scaling := config.rope_scaling) is not None:
        length = scaling.original_max_position_embeddings
        wavelength = 2 * math.pi / frequency
        smooth = (length / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        smooth = smooth.clamp(0, 1)  # 0: long waves, fully stretched; 1: short waves, as they are
        frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    angle = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).to(device), torch.cat([-sin, sin], -1).to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, C] by the angles of cos and signed sin [T, 1, C]; halves pair up, as in Hugging Face."""
    wide = x.to(batch_invariance.at_least_fp32(x.dtype))
    return (wide * cos + wide.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query self-attention with rope, optional biases, q/k norm and window."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.window, self.head_dim = layer, config.layer_windows[layer], config.head_dim
        heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, heads, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.o_proj = Linear(heads, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        q, k, v = (
            proj(x).view(len(x), -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.o_proj(attend(q, k, v, layout, layer=self.layer, window=self.window).flatten(1))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(batch_invariance.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layout)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm (a container: `Transformer` runs them)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """A causal language model (`lm_head`), or with `config.scalar_head` a value or reward model (`score`).

    `recompute_layers` trades a second forward for the layers' activations in backward.
    """

    def __init__(self, config: ModelConfig, *, recompute_layers: bool = False):
        super().__init__()
        self.config = config
        self.recompute_layers = recompute_layers
        self.model = Decoder(config)
        if config.scalar_head:
            self.score = Linear(config.hidden_size, 1, bias=False)
        else:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Hidden states [T, D] after the final norm, for tokens and positions int64 [T]. Not collective."""
        places = padding.pad_rows(positions)
        cos, sin = (table[places][:, None] for table in rope_table(self.config, tokens.device))  # [T, 1, C]
        x = self.model.embed_tokens(padding.pad_rows(tokens))
        for layer in self.model.layers:
            if self.recompute_layers and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, layout, use_reentrant=False)
            else:
                x = layer(x, cos, sin, layout)
        return self.model.norm(x[: len(tokens)])
