"""The CUDA path: its kernels mean what the portable one means, and a run trains."""

import dataclasses

import pytest
import torch

from minirl.generation.engine import Engine
from minirl.generation.sampling import inverse_cdf
from minirl.kernels import paged_attention
from minirl.kernels.fused_gate import FusedGate
from minirl.kernels.fused_head import FusedLogprobs
from minirl.kernels.fused_sampling import sample_logits
from minirl.model import portable_attention
from minirl.model.attention import PackedLayout, attend, kernel_for
from minirl.model.batch_invariance import silu
from minirl.model.rotation import rotate_pair
from minirl.training.frozen_models import unparked
from minirl.training.scoring import ChunkedLogprobs, score
from support.caches import make_cache, poison
from support.engines import make_model, mixed_requests
from support.layouts import FAMILIES, shared_layout
from support.scripts import FAST_LEARNING, ROOT, read_metrics, run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
    qkv = [
        torch.randn(len(layout.computed_tokens), heads, 64, generator=generator).bfloat16()
        for heads in (4, 2, 2)
    ]
    upstream = torch.randn(qkv[0].shape, generator=generator).bfloat16()
    results = []
    for here, dtype, where in (
        (layout, torch.float32, torch.device("cpu")),
        (dataclasses.replace(layout, device=device), torch.bfloat16, device),
    ):
        leaves = [x.to(where, dtype).requires_grad_() for x in qkv]
        out = attend(*leaves, here, layer=0, window=window)
        results.append(
            [x.float().cpu() for x in (out, *torch.autograd.grad(out, leaves, upstream.to(where, dtype)))]
        )
    for expected, got in zip(*results, strict=True):
        assert (got - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize(("groups", "dim"), [(1, 16), (2, 128), (7, 64), (3, 80)])
@pytest.mark.parametrize("window", [None, 1, 100, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_compiled_paged_kernel_equals_the_portable_one(window, groups, dim, dtype, tolerance):
    """As under the interpreter (test_paged), by the device: pools, tables and what must not be touched are the same."""
    pytest.importorskip("triton")
    cache, rows = make_cache(window, groups, dim, dtype)
    pool, cached = cache.pools[0], cache.decode_layout(torch.tensor(rows)).caches[0]
    read = cached.read
    q = 2 * torch.randn(len(rows), 2 * groups, dim, generator=torch.Generator().manual_seed(1))
    expected = portable_attention.decode(
        q, pool.keys[0].float(), pool.values[0].float(), read.index, read.mask
    )
    poison(cache, rows)
    inputs = (x.cuda() for x in (q.to(dtype), pool.keys[0], pool.values[0], read.blocks, read.lengths))
    got = paged_attention.decode(*inputs, window=window).float().cpu()
    assert (got - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernels_of_training_equal_their_twins(dtype):
    """Rotation, gate and head, with all gradients, on the device and as the CPU computes them in fp64."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(300, 256, generator=generator).to(dtype) for _ in range(3)]
    head = torch.randn(5000, 256, generator=generator).div(16).to(dtype)
    targets = torch.randint(0, 5000, (300,), generator=generator)
    angle = 100 * torch.rand(300, 1, 32, generator=generator)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    results = []
    for device, compute_dtype in (("cpu", torch.float64), ("cuda", dtype)):
        q, gate, up, weight = (x.to(device, compute_dtype).requires_grad_() for x in (*leaves, head))
        rotated, _ = rotate_pair(
            q.view(300, 4, 64), q.view(300, 4, 64)[:, :2], cos.to(device), sin.to(device)
        )
        product = silu(gate) * up if device == "cpu" else FusedGate.apply(gate, up)
        states = rotated.flatten(1) + product
        function, chunk = (ChunkedLogprobs, 512) if device == "cpu" else (FusedLogprobs, 2048)
        logprobs, entropies = function.apply(states, weight, targets.to(device), 0.7, chunk)
        gradients = torch.autograd.grad((logprobs - 0.1 * entropies).sum(), (q, gate, up, weight))
        results.append([x.double().cpu() for x in (logprobs, entropies, *gradients)])
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for expected, got in zip(*results, strict=True):
        assert (got - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("vocab", [500, 2049, 151_936])
def test_the_compiled_sampler_takes_the_tokens_of_the_portable_one(vocab):
    """Of a thousand draws at several temperatures; a uniform within rounding of a border may take its neighbour."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(1000, vocab, generator=generator)
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3, 0.25]).repeat(200)
    uniform = torch.rand(1000, dtype=torch.float64, generator=generator)
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax((logits / divisor).double(), -1)
    expected = torch.where(temperature == 0, logits.argmax(-1), inverse_cdf(logprobs, uniform))
    tokens, got = (x.cpu() for x in sample_logits(logits.cuda(), temperature.cuda(), uniform.cuda()))
    assert (tokens != expected).sum() <= 2
    torch.testing.assert_close(got.double(), logprobs.gather(1, tokens[:, None])[:, 0], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("attention", ["full", "mixed"])
@pytest.mark.parametrize("cache_tokens", [512, 8192])
def test_asynchronous_graphs_give_the_rollouts_of_plain_steps(attention, cache_tokens):
    """On the device, with weights that are certain enough for rounding not to turn a token; also when aborted."""
    model = make_model(attention, torch.float32).cuda()
    requests = [dataclasses.replace(r, temperature=0.0) for r in mixed_requests()]
    where = dict(
        max_running_requests=50, cache_tokens=cache_tokens, dtype=torch.float32, device=torch.device("cuda")
    )
    plain = Engine(model, **where, async_decoding=False, cuda_graphs=False).generate(requests)
    engine = Engine(model, **where)
    assert engine.async_decoding
    assert engine.cuda_graphs
    engine.submit(requests)
    rollouts = [rollout for _ in range(7) for rollout in engine.step()]
    rollouts += engine.generate(engine.abort())
    by_id = {r.rollout_id: r for r in rollouts}
    assert len(by_id) == len(rollouts) == len(requests)
    same = [r for r in plain if by_id[r.rollout_id].completion == r.completion]
    assert len(same) >= len(plain) - 1, "more than a tie that rounding may have turned"
    for rollout in same:
        assert (by_id[rollout.rollout_id].sample_logprobs - rollout.sample_logprobs).abs().max() <= 1e-4


def test_an_asynchronous_decode_step_waits_for_nothing():
    """Torch refuses every wait for the device while a step of known rows is launched: only `read` may wait."""
    model = make_model("full", torch.bfloat16).cuda()
    where = dict(
        max_running_requests=64, cache_tokens=8192, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    engine = Engine(model, **where)
    engine.submit([dataclasses.replace(r, stop_ids=frozenset()) for r in mixed_requests()])
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.abort()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_microbatch_without_tokens_gives_zero_gradients_on_cuda(dtype):
    """A rank without work runs the same forward and backward as the others."""
    model, nothing = make_model("mixed", dtype).cuda(), torch.empty(0, device="cuda")
    tokens, mask = nothing.long(), nothing.bool()
    layout = PackedLayout((), torch.device("cuda"))
    logprobs, entropies = score(model, tokens, layout, select=mask, temperature=1.0)
    (logprobs.sum() + entropies.sum()).backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_a_parked_model_comes_and_goes_with_the_same_pinned_tensors():
    """Its weights are on the device for the block; the host's are pinned at the first use and stay."""
    model = make_model("full", torch.bfloat16).requires_grad_(False)
    values = [parameter.clone() for parameter in model.parameters()]
    addresses = []
    for _ in range(2):
        with unparked(model, torch.device("cuda"), park=True):
            assert all(map(torch.equal, (p.cpu() for p in model.parameters()), values))
        assert all(parameter.is_pinned() for parameter in model.parameters())
        addresses.append([parameter.data_ptr() for parameter in model.parameters()])
    assert addresses[0] == addresses[1]


OFFLOADED = ("--offload-optimizer", "--shard-gradients", "on", "--max-tokens-per-microbatch", "256")


@pytest.mark.parametrize("flags", [(), OFFLOADED], ids=["plain", "optimizer on the host"])
def test_a_run_on_cuda_trains_with_a_small_gap(tmp_path, flags):
    """bf16 sampling and training differ by rounding only, and the reward rises."""
    run_script(
        ROOT / "train_grpo.py",
        "--run-name",
        "cuda",
        "--device",
        "cuda",
        FAST_LEARNING,
        *flags,
        runs=tmp_path,
        ranks=1,
    )
    metrics = read_metrics(tmp_path / "cuda")
    assert all(line["policy/logp_gap_mean"] <= 0.05 for line in metrics)
    rewards = [line["reward/mean"] for line in metrics]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 0.3
