"""The states of cached sequences in all layers with a gated delta net."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minirl.extras.delta_net.indices import DELTA_CHUNK
from minirl.extras.delta_net.rule import DeltaStates, end_chunks, make_states
from minirl.model.attention import upload
from minirl.model.config import DeltaNet


class StateCache:
    """States of the sequences in `num_rows` rows of a cache, in each layer. A prefill writes all of a row's states.

    chunk_size: the most consecutive tokens of a sequence that one decode step may compute; the last one may end a block
    of so many tokens, but none after it.
    """

    chunk_size = DELTA_CHUNK

    def __init__(self, shape: DeltaNet, num_rows: int, *, dtype: torch.dtype, device: torch.device):
        self._device = device
        self._states = {
            layer: make_states(shape, num_rows, dtype=dtype, device=device) for layer in shape.layers
        }

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(pool.nbytes for states in self._states.values() for pool in states)

    def layer(self, index: int) -> DeltaStates:
        """The states of one layer."""
        return self._states[index]

    def fork(self, parent: int, rows: Sequence[int]) -> None:
        """Copy the states of a row to other rows."""
        forks = upload(torch.tensor(rows), self._device)
        for states in self._states.values():
            for pool in states:
                pool[forks] = pool[parent].clone()

    def begin_step(self, rows: Tensor | np.ndarray, positions: Tensor | np.ndarray) -> None:
        """Advance the states of sequences whose next token begins a chunk. Call it once before each decode step.

        rows, positions: those of the step's tokens, int64 [B] on the host.
        """
        begins_chunk = (positions > 0) & (positions % DELTA_CHUNK == 0)
        if begins_chunk.any():
            slots = upload(torch.as_tensor(rows[begins_chunk]), self._device)
            for states in self._states.values():
                end_chunks(states, slots)
