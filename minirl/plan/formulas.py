"""Bytes that a model of a given shape takes: parameters, cache, activations, logits.

These are the formulas of docs/memory.md, for CUDA; on the CPU `needs.CPU_FACTOR` multiplies them. Letters: D hidden
size, F width of the MLP, Q and K channels of all query and key heads, L layers, V words in the vocabulary, C channels
of a head.
"""

import functools
import math

import torch
from torch import Tensor

from minirl.model.attention import PAGED_BLOCK
from minirl.model.config import ModelConfig
from minirl.model.delta_rule import CHUNK, make_states
from minirl.model.logprobs import chunk_width
from minirl.model.padding import next_power_of_two
from minirl.model.transformer import on_meta

_on_meta = functools.cache(on_meta)


@functools.cache
def num_parameters(config: ModelConfig) -> int:
    """Parameters of a model of this shape; tied ones count once."""
    return sum(map(torch.numel, _on_meta(config).parameters()))


@functools.cache
def num_trained_parameters(config: ModelConfig) -> int:
    """Its trained parameters: all, or those of adapters and of a scalar head."""
    return sum(p.numel() for p in _on_meta(config).parameters() if p.requires_grad)


@functools.cache
def num_decoding_parameters(config: ModelConfig, decode_group: int) -> float:
    """The parameters that a rank decodes from: its rows. The first of an adapter's two matrices is whole."""
    whole = sum(map(torch.numel, _first_matrices(config)))
    return whole + (num_parameters(config) - whole) / decode_group


def _first_matrices(config: ModelConfig) -> list[Tensor]:
    """A [r, in] of each adapter."""
    return [p for name, p in _on_meta(config).named_parameters() if name.endswith("lora_A")]


@functools.cache
def pinned_bytes(config: ModelConfig, itemsize: int, *, num_shards: int = 1, of_trained: bool = False) -> int:
    """A rank's shards of a model's parameters in pinned memory: torch rounds each up to a power of two."""
    parameters = [p for p in _on_meta(config).parameters() if p.requires_grad or not of_trained]
    shards = [math.ceil(len(p) / num_shards) * p[0].numel() for p in parameters]
    return sum(next_power_of_two(itemsize * num_values) for num_values in shards)


@functools.cache
def layer_parameters(config: ModelConfig) -> int:
    """Parameters of one layer of a model of this shape, on average."""
    layers = _on_meta(config).model.layers
    return sum(parameter.numel() for parameter in layers.parameters()) // len(layers)


def num_gathers(config: ModelConfig) -> int:
    """How often ranks that decode together gather columns of activations, embedding and logits in a step."""
    # Before and after the last projection; after the first, all heads if they are split or share a norm.
    attention = 2 + config.fused_qkv + 3 * config.qk_norm_over_heads
    num_attention = len(config.attention_windows)
    delta_net = 4 + 1
    num_layers = config.num_hidden_layers
    return num_attention * attention + (num_layers - num_attention) * delta_net + 2 * num_layers + 2


def cached_bytes(config: ModelConfig, dtype: torch.dtype, *, tokens: int, requests: int) -> float:
    """The key/value cache. A layer with a window keeps no more blocks than the requests' windows touch."""
    channels = config.num_key_value_heads * config.head_dim
    cached = 0
    for window in config.attention_windows.values():
        in_windows = tokens if window is None else requests * ((window - 1) // PAGED_BLOCK + 2) * PAGED_BLOCK
        cached += min(tokens, in_windows)
    return 2 * dtype.itemsize * channels * cached


def state_bytes(config: ModelConfig, dtype: torch.dtype, *, requests: int) -> float:
    """The states in the layers with a gated delta net: one for each request, and one for a stem."""
    if config.delta_net is None:
        return 0.0
    states = make_states(config.delta_net, requests + 1, dtype=dtype, device=torch.device("meta"))
    return float(len(config.delta_net.layers) * sum(pool.nbytes for pool in states))


def decode_logits_bytes(config: ModelConfig) -> float:
    """A request's logits in a decode step: in fp32, and 16 bytes for each 512 of them."""
    return config.vocab_size * (4 + 16 / 512)


def layer_bytes(config: ModelConfig, dtype: torch.dtype) -> float:
    """The bytes that a layer keeps of a token for backward (A), on average."""
    queries, keys = _channels(config)
    adapters = sum(map(len, _first_matrices(config))) / config.num_hidden_layers
    # Up, gate and their product, or up and its activation. Only the kernel of silu keeps no activation of the gate.
    num_inner = 3 if config.activation == "silu" else 4
    inner = (num_inner if config.gated_mlp else 2) * config.intermediate_size
    # The input of a norm, in fp32 if it adds one.
    of_norm = max(1, 4 // dtype.itemsize) if config.norm_adds_one else 1
    normed = of_norm * sum(name is not None for name in config.norms) * config.hidden_size
    mixing: float = (6 if config.attention_gate else 4) * queries
    mixing += of_norm * (queries + keys) * config.qk_norm
    if (delta := config.delta_net) is not None:
        of_delta = delta.num_channels + (1 + 16 / dtype.itemsize) * delta.num_values
        mixing += len(delta.layers) / config.num_hidden_layers * (of_delta - mixing)
    return dtype.itemsize * (2 * config.hidden_size + normed + inner + mixing + adapters)


def activation_bytes(
    config: ModelConfig, dtype: torch.dtype, *, tokens: int, recompute_layers: bool
) -> float:
    """The most that forward and backward of a microbatch take, besides the gradients.

    It peaks either in the head, with what all layers keep, or in the last layer, with the head's gradient.
    """
    num_layers, hidden = config.num_hidden_layers, config.hidden_size
    layer = tokens * layer_bytes(config, dtype)
    kept = num_layers * layer
    in_layer = 0.4 * layer
    if recompute_layers:
        kept = tokens * dtype.itemsize * num_layers * hidden
        in_layer = 1.4 * layer
    in_layer += tokens * _rule_bytes(config, is_backward=True)
    if config.scalar_head:
        return kept + in_layer
    head_gradient = 0 if config.adapters else dtype.itemsize * config.vocab_size * hidden
    return kept + head_gradient + max(in_layer, _head_backward_bytes(config, dtype, tokens))


def _head_backward_bytes(config: ModelConfig, dtype: torch.dtype, tokens: int) -> float:
    """Gradients in fp32 of the states and of one vocabulary chunk of the head, and logits in fp32.

    The chunk's gradient is computed after the logits are freed; the gradient of the logits is in the head's dtype.
    """
    width = chunk_width(tokens, config.vocab_size)
    states = 4 * tokens * config.hidden_size
    logit_gradient = dtype.itemsize * tokens * width
    return states + logit_gradient + max(4 * tokens * width, states, 4 * width * config.hidden_size)


def forward_bytes(config: ModelConfig, dtype: torch.dtype, *, tokens: int) -> float:
    """The most that a forward pass without gradient takes: in the MLP or the attention of a layer, or in the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = _channels(config)
    mlp = 3 * inner + 4 * hidden
    attention = 2 * hidden + queries + 2 * keys + 12 * queries / dtype.itemsize
    tables = 12 * rope_channels(config)
    mixing = max(dtype.itemsize * max(mlp, attention), _rule_bytes(config, is_backward=False))
    layers = tokens * (mixing + tables)
    if config.scalar_head:
        return layers
    logits = 4 * tokens * chunk_width(tokens, config.vocab_size)
    return max(layers, 2 * tokens * dtype.itemsize * hidden + logits)


def _rule_bytes(config: ModelConfig, *, is_backward: bool) -> float:
    """The peak of a layer's convolution and gated delta rule for each token; measured, in fp32."""
    delta = config.delta_net
    if delta is None:
        return 0.0
    heads = delta.num_value_heads * (delta.key_head_dim + delta.value_head_dim)
    if not is_backward:
        return 4.0 * (4 * delta.num_channels + 9 * heads)
    return 4.0 * (9 * delta.num_channels + 9 * heads + 7 * delta.num_value_heads * CHUNK)


def rope_channels(config: ModelConfig) -> int:
    """The channels of a head that the model's different ropes turn, summed over the ropes."""
    return sum(2 * len(rope.frequencies) for rope in config.ropes)


def _channels(config: ModelConfig) -> tuple[int, int]:
    """Channels of all query heads together, and of all key heads."""
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
