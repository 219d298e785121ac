"""The layer that some families have instead of attention: projections, convolution and norm around `delta_rule`.

In shapes: T tokens, C channels of a head.
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
from minirl.model.attention import DecodeLayout, Layout, PackedLayout, upload
from minirl.model.batch_invariance import activate, at_least_fp32
from minirl.model.config import ModelConfig
from minirl.model.layers import Linear


class GatedDeltaNet(nn.Module):
    """The gated delta rule on convolved queries, keys and values, with a gated norm of its outputs.

    recomputes: run the rule's forward again in backward, instead of keeping its inputs in fp32 and its chunks.
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
        self.in_proj_z = Linear(hidden_size, shape.num_values, bias=False)
        self.in_proj_b = Linear(hidden_size, num_heads, bias=False)
        self.in_proj_a = Linear(hidden_size, num_heads, bias=False)
        self.conv1d = nn.Conv1d(
            channels,
            channels,
            shape.kernel_size,
            groups=channels,
            bias=False,
        )
        self.dt_bias = nn.Parameter(torch.ones(num_heads))
        self.A_log = nn.Parameter(torch.zeros(num_heads))
        self.norm = nn.RMSNorm(shape.value_head_dim, config.rms_norm_eps)
        self.out_proj = Linear(shape.num_values, hidden_size, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """The layer's output [T, D] for x [T, D], whose last rows may be padding."""
        wide = at_least_fp32(x.dtype)
        num_rows = len(layout.positions)

        # The rule's inputs, without padding: [T', channels], and for each value head [T', heads].
        mixed = self.in_proj_qkv(x)[:num_rows]
        strength = self.in_proj_b(x).to(wide)
        beta = activate(strength, torch.sigmoid)[:num_rows]
        step = self.in_proj_a(x).to(wide) + self.dt_bias.to(wide)
        step = activate(step, F.softplus)[:num_rows]
        decay = -self.A_log.to(wide).exp() * step

        # [T', heads, C]
        if isinstance(layout, DecodeLayout):
            out = self._decoded(mixed, decay, beta, layout)
        elif self.recomputes:
            out = checkpoint(
                self._packed,
                mixed,
                decay,
                beta,
                layout,
                use_reentrant=False,
            )
        else:
            out = self._packed(mixed, decay, beta, layout)

        # Back to [T, heads x C], gated.
        weight = self.norm.weight.to(wide)
        normed = F.rms_norm(out, weight.shape, weight, self.norm.eps)
        normed = padding.pad_rows(normed.flatten(1), len(x))
        gate = activate(self.in_proj_z(x).to(wide), F.silu)
        gated = normed * gate
        return self.out_proj(gated.to(x.dtype))

    def _packed(self, mixed: Tensor, decay: Tensor, beta: Tensor, layout: PackedLayout) -> Tensor:
        """The rule's outputs [T', heads, C] for packed sequences. If the layout is cached, their states are stored."""
        # The convolution's inputs for each row, the oldest first.
        windows = layout.derive(index_windows, self.shape.kernel_size)  # [kernel, T']
        padded = F.pad(mixed, (0, 0, 0, 1))  # a row of zeros, before a sequence begins
        inputs = (padded[index] for index in windows)
        convolved = delta_rule.convolve(inputs, self.conv1d.weight)
        rows = self._rows(convolved, decay, beta)
        chunks = layout.derive(delta_rule.index_chunks)
        slot_mapping = layout.slot_mapping
        if slot_mapping is None:
            return delta_rule.run_chunks(rows, chunks)

        # The newest inputs of each sequence are those of its last row.
        states = slot_mapping.pool.states.layer(self.layer)
        last = layout.cu_seqlens[1:].long() - 1  # [sequences]
        newest = padded[windows[:, last]]  # [kernel, sequences, channels]
        places = self._places(slot_mapping.rows, layout.positions[last])
        states.inputs[places] = newest.transpose(0, 1)
        return delta_rule.run_chunks(rows, chunks, states, slot_mapping.rows, last)

    def _decoded(self, mixed: Tensor, decay: Tensor, beta: Tensor, layout: DecodeLayout) -> Tensor:
        """The rule's outputs [B, heads, C] for the next tokens of cached sequences. Their states keep the tokens."""
        states = layout.slot_mapping.pool.states.layer(self.layer)
        num_padded = delta_rule.padded_rows(self.shape, mixed.device)
        kernel_size = self.shape.kernel_size
        out = decay.new_empty(*decay.shape, self.shape.value_head_dim)
        for part in layout.derive(split_rounds):
            slots = layout.slot_mapping.rows[part]  # [n]
            positions = layout.positions[part]
            states.inputs[slots, positions % kernel_size] = mixed[part]
            places = self._places(slots, positions)
            window = states.inputs[places]  # [n, kernel, channels]
            convolved = delta_rule.convolve(window.unbind(1), self.conv1d.weight)
            rows = self._rows(convolved, decay[part], beta[part])
            out[part] = delta_rule.run_row(
                rows,
                states,
                slots,
                positions,
                num_padded=num_padded,
            )
        return out

    def _places(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Slots and places [n, kernel] of the convolution's newest inputs up to these positions, the oldest first."""
        ages = _ages(self.shape.kernel_size, slots.device)
        places = (positions[:, None] - ages) % len(ages)
        return slots[:, None], places

    def _rows(self, convolved: Tensor, decay: Tensor, beta: Tensor) -> DeltaRows:
        """The rule's inputs, from [T, channels] of queries, keys and values end to end."""
        shape = self.shape
        num_keys = shape.num_key_heads * shape.key_head_dim
        q, k, v = convolved.split([num_keys, num_keys, shape.num_values], 1)
        return DeltaRows(
            q=self._unit_heads(q) * shape.key_head_dim**-0.5,
            k=self._unit_heads(k),
            v=v.unflatten(1, (shape.num_value_heads, -1)),
            decay=decay,
            beta=beta,
        )

    def _unit_heads(self, x: Tensor) -> Tensor:
        """Queries or keys [T, key heads x C] as vectors of length 1 for each value head, [T, heads, C]."""
        num_heads = self.shape.num_key_heads
        vectors = delta_rule.normalized(x.unflatten(1, (num_heads, -1)))
        return vectors.repeat_interleave(self.shape.num_value_heads // num_heads, 1)


def _ages(size: int, device: torch.device) -> Tensor:
    """How many tokens before the newest one each place of a window is: size - 1 down to 0, int64 [size]."""
    return torch.arange(size - 1, -1, -1, device=device)


def index_windows(layout: PackedLayout, size: int) -> Tensor:
    """The rows of the last `size` tokens up to each computed one, int64 [size, T'].

    The oldest come first. T' stands for a token before the sequence begins.
    """
    ages = _ages(size, layout.device)[:, None]
    tokens = (layout.computed_tokens - ages).clamp(min=0)
    rows = layout.hidden_index[tokens]
    is_in_sequence = layout.positions >= ages
    return torch.where(is_in_sequence, rows, len(layout.positions))


def split_rounds(layout: DecodeLayout) -> Sequence[Tensor | slice]:
    """Split the tokens of a decode step into rounds, which have at most one token of each sequence, in their order."""
    if layout.tokens_per_sequence is None:
        return [slice(None)]
    device = layout.positions.device
    tokens = torch.arange(len(layout.positions)).split(layout.tokens_per_sequence)
    rounds = pack_sequence(tokens, enforce_sorted=False)
    return upload(rounds.data, device).split(rounds.batch_sizes.tolist())
