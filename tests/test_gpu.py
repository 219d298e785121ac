"""CUDA kernels agree with the portable kernel. `benchmarks/gpu_check.py` checks that runs train on a GPU."""

import dataclasses

import numpy as np
import pytest
import torch

from minirl.generation.engine import Engine
from minirl.model.attention import PackedLayout, Sequence, attend, kernel_for
from minirl.model.batch_invariance import apply_activation
from minirl.model.layers import GatedActivation
from minirl.training.scoring import head_logprobs
from support.caches import decoded_both_ways
from support.engines import make_model, mixed_requests
from support.layouts import shared_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


CUDA = torch.device("cuda")


def random_tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def assert_near(got, expected, tolerance):
    for x, y in zip(got, expected, strict=True):
        assert (x.double().cpu() - y.double()).norm() <= tolerance * y.double().norm()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shares", [False, True])
def test_cuda_attention_equals_the_portable_kernel(window, shares):
    """bf16 results on CUDA are compared with fp32 results for the same values.

    With shared prompts, queries belong to a sequence's last keys, and a shared row sums all sequences' gradients.
    """
    assert kernel_for(CUDA, torch.bfloat16, 64) != "portable"
    layout = (
        shared_layout()
        if shares
        else PackedLayout(tuple(map(Sequence, (1, 17, 128, 300))), torch.device("cpu"))
    )
    tokens = len(layout.computed_tokens)
    *qkv, upstream = random_tensors(*((tokens, heads, 64) for heads in (4, 2, 2, 4)))
    results = []
    for here, dtype in ((layout, torch.float32), (dataclasses.replace(layout, device=CUDA), torch.bfloat16)):
        leaves = [x.bfloat16().to(here.device, dtype).requires_grad_() for x in qkv]
        out = attend(*leaves, here, layer=0, window=window)
        gradients = torch.autograd.grad(out, leaves, upstream.bfloat16().to(here.device, dtype))
        results.append([out, *gradients])
    assert_near(results[1], results[0], 2e-2)


@pytest.mark.parametrize(("groups", "dim"), [(1, 16), (2, 128), (7, 64), (3, 80)])
@pytest.mark.parametrize("window", [None, 1, 100, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_compiled_paged_kernel_equals_the_portable_one(window, groups, dim, dtype, tolerance):
    """The pools, tables and NaN slots are the same as in the test with the interpreter."""
    pytest.importorskip("triton")
    got, expected = decoded_both_ways(CUDA, window, groups, dim, dtype, range(25))
    assert_near([got], [expected], tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_training_computes_on_cuda_is_what_the_cpu_computes(dtype, monkeypatch):
    """Gate and head, in vocabulary chunks and with all gradients, are compared with fp64 on the CPU."""
    monkeypatch.setattr("minirl.model.logprobs.MAX_LOGITS", 300 * 2048)
    gate, up, head = random_tensors((300, 256), (300, 256), (5000, 256))
    targets = torch.randint(0, 5000, (300,), generator=torch.Generator().manual_seed(0))
    results = []
    for device, compute_dtype in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = [x.to(dtype).to(device, compute_dtype).requires_grad_() for x in (gate, up, head / 16)]
        divisor = torch.full((300, 1), 0.7, device=device)
        states = GatedActivation.apply(*leaves[:2], apply_activation)
        logprobs, entropies = head_logprobs(states, leaves[2], targets.to(device), divisor)
        gradients = torch.autograd.grad((logprobs - 0.1 * entropies).sum(), leaves)
        results.append([x.cpu() for x in (logprobs, entropies, *gradients)])
    assert_near(results[1], results[0], 1e-4 if dtype == torch.float32 else 2e-2)


def make_engine(model, **options):
    return Engine(model, max_running_requests=64, dtype=model.lm_head.weight.dtype, device=CUDA, **options)


@pytest.mark.parametrize("attention", ["full", "mixed"])
@pytest.mark.parametrize("cache_tokens", [512, 8192])
def test_asynchronous_graphs_give_the_rollouts_of_plain_steps(attention, cache_tokens):
    """The weights are certain enough that rounding hardly ever changes a token."""
    model = make_model(attention, torch.float32).cuda()
    requests = [dataclasses.replace(r, temperature=0.0) for r in mixed_requests()]
    engine = make_engine(model, cache_tokens=cache_tokens)
    assert engine.async_decoding
    assert engine.cuda_graphs
    by_id = {r.rollout_id: r for r in engine.generate(requests)}
    plain = make_engine(model, cache_tokens=cache_tokens, async_decoding=False, cuda_graphs=False)
    num_turned = 0
    for rollout in plain.generate(requests):
        twin = by_id[rollout.rollout_id]
        if twin.completion != rollout.completion:
            num_turned += 1
        else:
            assert np.abs(twin.stream["logprob"] - rollout.stream["logprob"]).max() <= 1e-4
    assert num_turned <= 1, "rounding explains one changed rollout at most"


def test_an_asynchronous_decode_step_waits_for_nothing():
    """Torch's sync debug mode raises an error if a decode step waits for the device."""
    engine = make_engine(make_model("full", torch.bfloat16).cuda(), cache_tokens=8192)
    engine.submit([dataclasses.replace(r, stop_ids=frozenset()) for r in mixed_requests()])
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
