"""The states of cached sequences in Gated DeltaNet layers (see `rule`)."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirl.model.attention import to_device
from minirl.model.batch_invariance import at_least_fp32
from minirl.model.config import DeltaNet

# Number of rows per chunk. Twice as many rows would slow down decoding and training on the CPU by a fifth.
DELTA_CHUNK = 32


class DeltaStates(NamedTuple):
    """One layer's states for cached sequences: tensors [slots, ...] with one slot per sequence.

    inputs [.., kernel, channels]: a ring buffer of the newest convolution inputs; position p is in row p % kernel.
    state [.., H, Dk, Dv]: S at the start of the newest row's chunk. keys [.., H, Dk, C], updates [.., H, C, Dv] and
    decays [.., H, C]: K^T, U and g of the chunk's rows so far; later elements are arbitrary but finite.

    A decode step may run twice, as a warmup before CUDA graph capture. The second run overwrites the values that the
    first run stored, and S changes only at the beginning of the next step.
    """

    inputs: Tensor
    state: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor


class StateCache:
    """The states of all layers for the sequences in a cache. A sequence's slot has the same index as its row.

    A prefill overwrites all states in its rows.
    layers: each layer's states, keyed by layer index.
    chunk_size: a decode step may compute several tokens of a sequence if they all lie in one chunk of this size.
    """

    chunk_size = DELTA_CHUNK

    def __init__(self, shape: DeltaNet, num_rows: int, *, dtype: torch.dtype, device: torch.device):
        """Allocate zero-initialized states for all rows. dtype: the model's dtype."""
        self._device = device
        self.layers: dict[int, DeltaStates] = {}
        head_shape = (num_rows, shape.num_value_heads)
        key_dim = shape.key_head_dim
        value_dim = shape.value_head_dim
        zeros = functools.partial(torch.zeros, dtype=at_least_fp32(dtype), device=device)
        for layer in shape.layers:
            self.layers[layer] = DeltaStates(
                inputs=zeros(num_rows, shape.kernel_size, shape.num_channels, dtype=dtype),
                state=zeros(*head_shape, key_dim, value_dim),
                keys=zeros(*head_shape, key_dim, DELTA_CHUNK),
                updates=zeros(*head_shape, DELTA_CHUNK, value_dim),
                decays=zeros(*head_shape, DELTA_CHUNK),
            )

    @property
    def nbytes(self) -> int:
        """Total size of the states in bytes."""
        return sum(pool.nbytes for states in self.layers.values() for pool in states)

    def fork(self, parent: int, rows: Sequence[int]) -> None:
        """Copy the states of one row to other rows."""
        forks = to_device(torch.tensor(rows), self._device)
        for states in self.layers.values():
            for pool in states:
                pool[forks] = pool[parent].clone()

    def begin_step(self, rows: Tensor | np.ndarray, positions: Tensor | np.ndarray) -> None:
        """Advance the states of sequences whose next token begins a chunk. Call once before each decode step.

        rows, positions: cache rows and positions of the step's tokens, int64 [B] on the host.
        """
        begins_chunk = (positions > 0) & (positions % DELTA_CHUNK == 0)
        if not begins_chunk.any():
            return
        slots = to_device(rows[begins_chunk], self._device)
        for states in self.layers.values():
            state, keys, updates, decays = (pool.index_select(0, slots) for pool in states[1:])
            cum_decay = decays.cumsum(-1)
            states.state[slots] = next_state(state, keys, updates, cum_decay)


def next_state(state: Tensor, keys: Tensor, updates: Tensor, cum_decay: Tensor) -> Tensor:
    """Return the state [N, H, Dk, Dv] after a chunk, given the state before the chunk, K^T, U and c."""
    total_decay = cum_decay[..., -1:]  # [N, H, 1]
    k_out = keys * (total_decay - cum_decay).exp()[..., None, :]
    decayed_state = state * cum_decay.exp()[..., -1, None, None]
    return decayed_state + k_out @ updates
