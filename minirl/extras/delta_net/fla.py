"""The gated delta rule of packed sequences by the kernels of flash-linear-attention (the extra `fla`), in 16 bits."""

import functools

import torch
from torch import Tensor

from minirl.extras.delta_net.rule import DeltaRows, DeltaStates
from minirl.model.attention import PackedLayout
from minirl.ranks.process_group import print0


@functools.cache
def is_used(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether fla computes the rule of such tensors: on CUDA in 16 bits, if it can be imported. Not collective.

    If it is installed and cannot be imported, rank 0 prints why: it was built for another torch, or a folder has its
    name.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: F401
    except Exception as error:  # a mismatched build may raise anything
        if not (isinstance(error, ModuleNotFoundError) and error.name == "fla"):
            reason = " ".join(str(error).split())
            print0(f"note: torch's operations replace the kernels of fla, which cannot be imported: {reason}")
        return False
    return True


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
