"""The states of cached sequences in layers with a gated delta net (see `rule`)."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirl.model.attention import upload
from minirl.model.batch_invariance import at_least_fp32
from minirl.model.config import DeltaNet

# Rows of a chunk; twice as many take a fifth longer on the CPU, in decoding and in training.
DELTA_CHUNK = 32


class DeltaStates(NamedTuple):
    """One layer's states of cached sequences, each in a slot: [slots, ...].

    inputs [.., kernel, channels]: the newest inputs of the convolution, that of position p at p % kernel.
    state [.., H, Dk, Dv]: S where the chunk of the newest row begins. keys [.., H, Dk, C], updates [.., H, C, Dv] and
    decays [.., H, C]: K^T, U and g of the rows since; later elements are finite.

    A decode step may run twice (to warm up a CUDA graph), so it overwrites what it stores, and S stays until the next
    step begins.
    """

    inputs: Tensor
    state: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor


class StateCache:
    """The states in all layers, of sequences in the rows of a cache: a sequence's slot has the number of its row.

    A prefill writes all states of its rows.
    chunk_size: a decode step may compute several tokens of a sequence if all of them are in one chunk of this size.
    """

    chunk_size = DELTA_CHUNK

    def __init__(self, shape: DeltaNet, num_rows: int, *, dtype: torch.dtype, device: torch.device):
        """Zeros, from which sequences begin. dtype: of the model."""
        self._device = device
        self._states: dict[int, DeltaStates] = {}
        heads = (num_rows, shape.num_value_heads)
        key_dim = shape.key_head_dim
        value_dim = shape.value_head_dim
        zeros = functools.partial(torch.zeros, dtype=at_least_fp32(dtype), device=device)
        for layer in shape.layers:
            self._states[layer] = DeltaStates(
                inputs=zeros(num_rows, shape.kernel_size, shape.num_channels, dtype=dtype),
                state=zeros(*heads, key_dim, value_dim),
                keys=zeros(*heads, key_dim, DELTA_CHUNK),
                updates=zeros(*heads, DELTA_CHUNK, value_dim),
                decays=zeros(*heads, DELTA_CHUNK),
            )

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(pool.nbytes for states in self._states.values() for pool in states)

    def layer(self, index: int) -> DeltaStates:
        """The states in one layer."""
        return self._states[index]

    def fork(self, parent: int, rows: Sequence[int]) -> None:
        """Copy the states of a row to other rows."""
        forks = upload(torch.tensor(rows), self._device)
        for states in self._states.values():
            for pool in states:
                pool[forks] = pool[parent].clone()

    def begin_step(self, rows: Tensor | np.ndarray, positions: Tensor | np.ndarray) -> None:
        """Advance the states of sequences whose next token begins a chunk. Called once before each decode step.

        rows, positions: those of the step's tokens, int64 [B] on the host.
        """
        begins_chunk = (positions > 0) & (positions % DELTA_CHUNK == 0)
        if not begins_chunk.any():
            return
        slots = upload(torch.as_tensor(rows[begins_chunk]), self._device)
        for states in self._states.values():
            state, keys, updates, decays = (pool[slots] for pool in states[1:])
            total = decays.cumsum(-1)
            states.state[slots] = next_state(state, keys, updates, total)


def next_state(state: Tensor, keys: Tensor, updates: Tensor, total: Tensor) -> Tensor:
    """The state [N, H, Dk, Dv] after a chunk, from the state before it, K^T, U and c."""
    end = total[..., -1:]  # [N, H, 1]
    k_out = keys * (end - total).exp()[..., None, :]
    kept = state * total.exp()[..., -1, None, None]
    return kept + k_out @ updates
