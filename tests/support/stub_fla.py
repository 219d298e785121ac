"""A package `fla` whose gated delta rule is the recurrence, a row at a time, in the dtype of the decays."""

import sys
import types

import torch
from torch import Tensor

from minirl.model import device_kernels

MODULE = "fla.ops.gated_delta_rule"


def install(monkeypatch):
    """Make the model use it for packed sequences, on any device and in any dtype."""
    module = types.SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(device_kernels, "has_fla", lambda device, dtype: True)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Arguments and checks of fla-core 0.4 and later, and that these are of packed sequences.

    fla scales and normalizes nothing here, so a caller that leaves it to fla is refused.
    """
    assert scale == 1
    assert not use_qk_l2norm_in_kernel
    assert cu_seqlens is not None
    num_rows, num_heads, key_dim = q.shape[1:]
    num_sequences = len(cu_seqlens) - 1
    assert q.shape == k.shape == (1, num_rows, num_heads, key_dim)
    assert v.shape[:3] == g.shape == beta.shape == (1, num_rows, num_heads)
    assert q.dtype == k.dtype == v.dtype
    assert g.dtype == beta.dtype == torch.promote_types(q.dtype, torch.float32)
    assert cu_seqlens.dtype == torch.int64
    lengths = cu_seqlens.diff().tolist()
    assert int(cu_seqlens[0]) == 0 < min(lengths)
    assert int(cu_seqlens[-1]) == num_rows
    state_shape = (num_sequences, num_heads, key_dim, v.shape[-1])
    initial = (
        torch.zeros(state_shape, dtype=g.dtype, device=g.device) if initial_state is None else initial_state
    )
    assert initial.shape == state_shape
    assert initial.dtype == g.dtype
    outputs, final_states = [], []
    rows = zip(*(x[0].to(g.dtype).unbind() for x in (q, k, v, g, beta)), strict=True)
    for length, state in zip(lengths, initial, strict=True):
        for _ in range(length):
            query, key, value, decay, strength = next(rows)
            state = state * decay.exp()[:, None, None]
            update = strength[:, None] * (value - torch.einsum("hk,hkv->hv", key, state))
            state = state + torch.einsum("hk,hv->hkv", key, update)
            outputs.append(torch.einsum("hk,hkv->hv", query, state))
        final_states.append(state)
    out = torch.stack(outputs)[None].to(q.dtype)
    return out, torch.stack(final_states) if output_final_state else None
