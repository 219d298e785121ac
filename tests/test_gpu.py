"""The CUDA path: its kernels mean what the portable one means, and a run trains."""

import dataclasses

import pytest
import torch
from test_attention import FAMILIES, shared_layout
from test_scripts import FAST_LEARNING, ROOT, read_metrics, run_script

from minirl.attention import PackedLayout, attend, kernel_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("window", [None, 100])
def test_cuda_attention_equals_the_portable_kernel(window):
    """bf16 on CUDA against the portable kernel in fp32 on the same values."""
    device = torch.device("cuda")
    assert kernel_for(device, torch.bfloat16) != "portable"
    lengths = (1, 17, 128, 300)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 64, generator=generator).bfloat16() for heads in (4, 2, 2))
    cpu_layout = PackedLayout(lengths, torch.device("cpu"))
    expected = attend(q.float(), k.float(), v.float(), cpu_layout, layer=0, window=window)
    layout = PackedLayout(lengths, device)
    got = attend(q.to(device), k.to(device), v.to(device), layout, layer=0, window=window)
    assert (got.float().cpu() - expected).abs().max() <= 2e-2


@pytest.mark.parametrize("window", [None, 100])
def test_cuda_attention_of_shared_prompts_equals_the_portable_kernel(window):
    """Queries are the last of their sequence's keys; gradients of a shared row are summed over those who share it."""
    device, layout = torch.device("cuda"), shared_layout(FAMILIES)
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(len(layout.kept), heads, 64, generator=generator).bfloat16() for heads in (4, 2, 2)]
    upstream = torch.randn(qkv[0].shape, generator=generator).bfloat16()
    results = []
    for here, dtype, where in (
        (layout, torch.float32, torch.device("cpu")),
        (dataclasses.replace(layout, device=device), torch.bfloat16, device),
    ):
        leaves = [x.to(where, dtype).requires_grad_() for x in qkv]
        out = attend(*leaves, here, layer=0, window=window)
        results.append([x.float().cpu() for x in (out, *torch.autograd.grad(out, leaves, upstream.to(where, dtype)))])
    for expected, got in zip(*results, strict=True):
        assert (got - expected).norm() <= 2e-2 * expected.norm()


def test_a_run_on_cuda_trains_with_a_small_gap(tmp_path):
    """bf16 sampling and training differ by rounding only, and the reward rises."""
    run_script(ROOT / "train_grpo.py", "--run-name", "cuda", "--device", "cuda", *FAST_LEARNING, runs=tmp_path, ranks=1)
    metrics = read_metrics(tmp_path / "cuda")
    assert all(line["policy/logp_gap_mean"] <= 0.05 for line in metrics)
    rewards = [line["reward/mean"] for line in metrics]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 0.3
