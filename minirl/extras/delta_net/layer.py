"""The Gated DeltaNet layer, which some families use instead of attention: projections, convolution and norm.

Shapes: T tokens, C channels per head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from minirl.extras.delta_net import rule as delta_rule
from minirl.extras.delta_net.rule import DeltaRows
from minirl.model import padding
from minirl.model.attention import DecodeLayout, Layout, PackedLayout, to_device
from minirl.model.batch_invariance import apply_activation, at_least_fp32
from minirl.model.config import ModelConfig
from minirl.model.layers import Linear


class GatedDeltaNet(nn.Module):
    """The gated delta rule on convolved queries, keys and values, followed by a gated norm.

    recomputes: whether backward reruns the rule's forward instead of saving its fp32 inputs and chunks.
    """

    def __init__(self, config: ModelConfig, layer: int, *, recomputes: bool):
        super().__init__()
        shape = config.delta_net
        assert shape is not None
        self.layer = layer
        self.shape = shape
        self.recomputes = recomputes
        hidden_size = config.hidden_size
        num_heads = shape.num_value_heads
        channels = shape.num_channels
        self.in_proj_qkv = Linear(hidden_size, channels, bias=False)
        self.in_proj_z = Linear(hidden_size, shape.num_value_channels, bias=False)
        self.in_proj_b = Linear(hidden_size, num_heads, bias=False)
        self.in_proj_a = Linear(hidden_size, num_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.kernel_size, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(num_heads))
        self.A_log = nn.Parameter(torch.zeros(num_heads))
        self.norm = nn.RMSNorm(shape.value_head_dim, config.rms_norm_eps)
        self.out_proj = Linear(shape.num_value_channels, hidden_size, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Return the layer's output [T, D] for x [T, D], whose last rows may be padding."""
        upcast_dtype = at_least_fp32(x.dtype)
        num_rows = len(layout.positions)

        # The rule's inputs without padding: `mixed` [T', channels], and one number per value head [T', heads].
        mixed = self.in_proj_qkv(x)[:num_rows]
        beta_logits = self.in_proj_b(x).to(upcast_dtype)
        beta = apply_activation(beta_logits, torch.sigmoid)[:num_rows]
        time_step = self.in_proj_a(x).to(upcast_dtype) + self.dt_bias.to(upcast_dtype)
        time_step = apply_activation(time_step, F.softplus)[:num_rows]
        decay = -self.A_log.to(upcast_dtype).exp() * time_step

        # The rule's outputs, [T', heads, C].
        if isinstance(layout, DecodeLayout):
            out = self._run_decode(mixed, decay, beta, layout)
        elif self.recomputes:
            out = checkpoint(self._run_packed, mixed, decay, beta, layout, use_reentrant=False)
        else:
            out = self._run_packed(mixed, decay, beta, layout)

        # Normalize, pad and gate the outputs, [T, heads x C].
        weight = self.norm.weight.to(upcast_dtype)
        normed = F.rms_norm(out, weight.shape, weight, self.norm.eps)
        normed = padding.pad_rows(normed.flatten(1), len(x))
        gate = apply_activation(self.in_proj_z(x).to(upcast_dtype), F.silu)
        gated = normed * gate
        return self.out_proj(gated.to(x.dtype))

    def _run_packed(self, mixed: Tensor, decay: Tensor, beta: Tensor, layout: PackedLayout) -> Tensor:
        """Return the rule's outputs [T', heads, C] for packed sequences; store the final states if there is a cache."""
        # The convolution's inputs for each row, oldest first.
        windows = layout.memoize(index_windows, self.shape.kernel_size)  # [kernel, T']
        padded = F.pad(mixed, (0, 0, 0, 1))  # a row of zeros, for tokens before the beginning of a sequence
        inputs = (padded[index] for index in windows)
        convolved = delta_rule.convolve(inputs, self.conv1d.weight)
        rows = self._delta_rows(convolved, decay, beta)
        chunks = layout.memoize(delta_rule.index_chunks)
        slot_mapping = layout.slot_mapping
        if slot_mapping is None:
            return delta_rule.run_chunks(rows, chunks)

        # A sequence's newest inputs are the inputs of its last row.
        states = slot_mapping.pool.recurrent_states.layers[self.layer]
        last_rows = layout.cu_seqlens[1:].long() - 1  # [sequences]
        newest_inputs = padded[windows[:, last_rows]]  # [kernel, sequences, channels]
        window_index = self._window_index(slot_mapping.rows, layout.positions[last_rows])
        states.inputs[window_index] = newest_inputs.transpose(0, 1)
        return delta_rule.run_chunks(rows, chunks, states, slot_mapping.rows, last_rows)

    def _run_decode(self, mixed: Tensor, decay: Tensor, beta: Tensor, layout: DecodeLayout) -> Tensor:
        """Return the rule's outputs [B, heads, C] for the next tokens of cached sequences, and update their states."""
        states = layout.slot_mapping.pool.recurrent_states.layers[self.layer]
        num_padded = delta_rule.padded_rows(self.shape, mixed.device)
        kernel_size = self.shape.kernel_size
        out = decay.new_empty(*decay.shape, self.shape.value_head_dim)
        for token_index in layout.memoize(split_rounds):
            slots = layout.slot_mapping.rows[token_index]  # [n]
            positions = layout.positions[token_index]
            states.inputs[slots, positions % kernel_size] = mixed[token_index]
            window_index = self._window_index(slots, positions)
            window = states.inputs[window_index]  # [n, kernel, channels]
            convolved = delta_rule.convolve(window.unbind(1), self.conv1d.weight)
            rows = self._delta_rows(convolved, decay[token_index], beta[token_index])
            out[token_index] = delta_rule.run_row(rows, states, slots, positions, num_padded=num_padded)
        return out

    def _window_index(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices [n, kernel] of the newest convolution inputs up to these positions, oldest first."""
        ages = _window_ages(self.shape.kernel_size, slots.device)
        offsets = (positions[:, None] - ages) % len(ages)
        return slots[:, None], offsets

    def _delta_rows(self, convolved: Tensor, decay: Tensor, beta: Tensor) -> DeltaRows:
        """Build the rule's inputs from concatenated queries, keys and values [T, channels]."""
        shape = self.shape
        num_keys = shape.num_key_heads * shape.key_head_dim
        q, k, v = convolved.split([num_keys, num_keys, shape.num_value_channels], 1)
        return DeltaRows(
            q=self._normalize_heads(q) * shape.key_head_dim**-0.5,
            k=self._normalize_heads(k),
            v=v.unflatten(1, (shape.num_value_heads, -1)),
            decay=decay,
            beta=beta,
        )

    def _normalize_heads(self, x: Tensor) -> Tensor:
        """Scale queries or keys [T, key heads x C] to unit length; repeat them for the value heads: [T, heads, C]."""
        num_heads = self.shape.num_key_heads
        vectors = delta_rule.normalize(x.unflatten(1, (num_heads, -1)))
        return vectors.repeat_interleave(self.shape.num_value_heads // num_heads, 1)


def _window_ages(size: int, device: torch.device) -> Tensor:
    """Return the age of each input in a window, in tokens: size - 1 down to 0 (the newest input), int64 [size]."""
    return torch.arange(size - 1, -1, -1, device=device)


def index_windows(layout: PackedLayout, size: int) -> Tensor:
    """Return the rows of the last `size` tokens up to and including each computed token: int64 [size, T'].

    The oldest token comes first. Row T' stands for a token before the beginning of the sequence.
    """
    ages = _window_ages(size, layout.device)[:, None]
    tokens = (layout.computed_tokens - ages).clamp(min=0)
    rows = layout.hidden_index[tokens]
    is_in_sequence = layout.positions >= ages
    return torch.where(is_in_sequence, rows, len(layout.positions))


def split_rounds(layout: DecodeLayout) -> Sequence[Tensor | slice]:
    """Split a decode step's tokens into rounds, each with at most one token per sequence, in order."""
    if layout.tokens_per_sequence is None:
        return [slice(None)]
    device = layout.positions.device
    tokens = torch.arange(len(layout.positions)).split(layout.tokens_per_sequence)
    rounds = pack_sequence(tokens, enforce_sorted=False)
    return to_device(rounds.data, device).split(rounds.batch_sizes.tolist())
