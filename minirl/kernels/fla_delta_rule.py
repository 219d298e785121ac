"""The gated delta rule of packed sequences by the kernels of flash-linear-attention (the extra `fla`), in 16 bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model.delta_rule import DeltaRows, DeltaStates, RoundIndex


def run_segments(
    rows: DeltaRows,
    index: RoundIndex,
    dtype: torch.dtype,
    states: DeltaStates | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """The outputs [T', H, Dv] of packed sequences, in the dtype of `rows`: `delta_rule.run_chunks` in other roundings.

    dtype: what queries, keys and values are rounded to.
    states, slots int64 [sequences]: where the state after each sequence goes, in front of a chunk without rows.
    Then no tokens are shared.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    outputs: list[Tensor] = []
    ended = rows.v.new_zeros(1, *rows.k.shape[1:], rows.v.shape[-1])
    for part in index.rounds:
        q, k, v, decay, beta = (x[part.rows][None] for x in rows)
        out, ended = chunk_gated_delta_rule(
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            decay,
            beta,
            scale=1.0,
            initial_state=ended[part.previous],
            output_final_state=True,
            cu_seqlens=F.pad(part.lengths.cumsum(0), (1, 0)),
        )
        outputs.append(out[0])
    if states is not None:
        states.state[slots] = ended
        # Rows of zeros change no state: the rows to come continue a chunk that began with them.
        for pool in (states.keys, states.updates, states.decays):
            pool[slots] = 0
    return torch.cat(outputs)[index.places].to(rows.v.dtype)
