"""The gated delta rule of packed sequences by the kernels of flash-linear-attention (the extra `fla`), in 16 bits."""

import torch
from torch import Tensor

from minirl.extras.delta_net.rule import DeltaRows, DeltaStates
from minirl.model.attention import PackedLayout


def run_packed(
    rows: DeltaRows, layout: PackedLayout, dtype: torch.dtype, states: DeltaStates | None = None
) -> Tensor:
    """The outputs [T', H, Dv] of packed sequences, in the dtype of `rows`: `rule.run_chunks` in other roundings.

    dtype: what queries, keys and values are rounded to. states: take the state after each sequence, in front of a chunk
    without rows. Then no tokens are shared.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, decay, beta = (x[layout.hidden_index][None] for x in rows)
    out, ended = chunk_gated_delta_rule(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        decay,
        beta,
        scale=1.0,
        output_final_state=True,
        cu_seqlens=layout.cu_seqlens.long(),
    )
    if states is not None:
        states.state[layout.slots] = ended
        # Rows of zeros change no state: the rows to come continue a chunk that began with them.
        for pool in (states.keys, states.updates, states.decays):
            pool[layout.slots] = 0
    return out[0, layout.computed_tokens].to(rows.v.dtype)
