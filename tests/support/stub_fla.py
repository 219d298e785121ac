"""A package `fla` whose gated delta rule is the recurrence, a row at a time, in the dtype of the decays."""

import itertools
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
    *,
    scale: float,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """With the checks of fla-core 0.4 and later. fla scales and normalizes nothing here."""
    assert scale == 1
    assert q.shape[0] == 1
    assert q.dtype == k.dtype == v.dtype
    assert g.dtype == beta.dtype == torch.promote_types(q.dtype, torch.float32)
    assert cu_seqlens.dtype == torch.int64
    outputs, final_states = [], []
    rows = zip(*(x[0].to(g.dtype).unbind() for x in (q, k, v, g, beta)), strict=True)
    for length in cu_seqlens.diff().tolist():
        state = torch.zeros(*q.shape[2:], v.shape[-1], dtype=g.dtype, device=g.device)
        for query, key, value, decay, strength in itertools.islice(rows, length):
            state = state * decay.exp()[:, None, None]
            update = strength[:, None] * (value - torch.einsum("hk,hkv->hv", key, state))
            state = state + torch.einsum("hk,hv->hkv", key, update)
            outputs.append(torch.einsum("hk,hkv->hv", query, state))
        final_states.append(state)
    out = torch.stack(outputs)[None].to(q.dtype)
    return out, torch.stack(final_states) if output_final_state else None
