"""Host and device tensors never mix in sampling, scoring and training, tested on a fake CUDA device."""

import dataclasses
import functools
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

import train_grpo
from minirl.generation.engine import Engine
from minirl.model.config import Adapters
from minirl.model.rotation import rope_table
from minirl.model.transformer import Transformer
from minirl.model.weights import fill_parameter
from minirl.report.metrics import StepMetrics, add_clip_metrics, add_token_metrics
from minirl.training.batch import Batch, sequence_infos_from_lengths
from minirl.training.frozen_models import FrozenModel
from minirl.training.losses import value_loss
from minirl.training.scoring import predict_values
from support.engines import make_engine, make_model, mixed_requests, score_at
from support.marks import slow
from support.models import RAW_CONFIG, adamw, make_folder, sharded
from support.pretended_cuda import CPU, CUDA, PretendedCuda, PretendedGraph, plain_decode


@pytest.fixture
def device():
    rope_table.cache_clear()
    unneeded = mock.Mock()
    with (
        mock.patch.multiple(
            torch.cuda,
            CUDAGraph=PretendedGraph,
            Event=unneeded,
            Stream=unneeded,
            stream=nullcontext,
            graph_pool_handle=unneeded,
            set_sync_debug_mode=unneeded,
        ),
        PretendedCuda(),
    ):
        yield CUDA
    rope_table.cache_clear()  # the cache holds fake device tensors


def test_what_is_pretended_is_noticed_where_it_meets_the_host(device):
    """Fake device tensors can be moved and added to numbers; mixing them with host tensors fails."""
    here, there = torch.ones(2), torch.ones(2, device=device)
    assert (
        there.device
        == (there + 1).device
        == here.to(device).device
        == torch.zeros_like(there).device
        == device
    )
    assert there.cpu().device == here.device == CPU
    for mixed in (lambda: here + there, lambda: torch.cat([here, there]), lambda: there[here.long()]):
        with pytest.raises(RuntimeError, match="two devices"):
            mixed()


ADAPTERS = Adapters(12, 1.0)


@pytest.mark.parametrize("reads", [False, True], ids=["", "reads"])
@pytest.mark.parametrize(
    ("attention", "adapters"),
    [("mixed", None), slow("mixed", ADAPTERS), slow("states", None)],
    ids=["", "adapters", "states"],
)
def test_an_engine_on_a_device_decodes_what_the_host_does(
    device, monkeypatch, capsys, attention, adapters, reads
):
    """Decoding is asynchronous, with a plain kernel instead of the decode kernel.

    CUDA graphs are used unless the model's forward reads from the device; the first graph empties torch's cache.
    """
    pytest.importorskip("triton")
    monkeypatch.setattr("minirl.extras.kernels.paged_attention.decode", plain_decode)
    monkeypatch.setattr("minirl.extras.kernels.cuda_graphs._print_once", functools.cache(print))
    monkeypatch.setattr(torch.cuda, "empty_cache", mock.Mock())
    model = make_model(attention, torch.float32, adapters=adapters)
    if reads:
        warn = functools.partial(warnings.warn, "called a synchronizing CUDA operation", stacklevel=1)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: warn())
    requests = mixed_requests()[::3]
    expected = make_engine(model).generate(requests)
    model.to(device)
    engine = Engine(model, max_running_requests=64, cache_tokens=8192, dtype=torch.float32, device=device)
    assert (engine.async_decoding, engine.cuda_graphs) == (True, True)
    for rollout, twin in zip(engine.generate(requests), expected, strict=True):
        assert rollout.tokens.tolist() == twin.tokens.tolist()
    assert torch.cuda.empty_cache.call_count == (not reads)
    assert capsys.readouterr().out.count("cannot use CUDA graphs") == reads


def test_a_stored_weight_moves_to_the_device_in_its_own_dtype(device):
    """Torch would cast the weight on the host and move the result."""
    weight = torch.zeros(2, 3, device=device)
    weight.copy_ = mock.Mock()
    fill_parameter(weight, torch.ones(2, 3, dtype=torch.bfloat16), "")
    (moved,) = weight.copy_.call_args.args
    assert (moved.device, moved.dtype) == (device, torch.bfloat16)


def make_batch():
    """Return a batch of three sequences with all streams that an objective reads."""
    lengths, generator = (9, 2, 140), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 48, (sum(lengths),), generator=generator)
    mask = torch.cat([torch.arange(length) >= length // 2 for length in lengths])
    streams = [torch.where(mask, -torch.rand(len(tokens), generator=generator), 0.0) for _ in range(7)]
    names = ("old_logprobs", "ref_logprobs", "advantages", "loss_weights", "values", "returns")
    batch = Batch(sequence_infos_from_lengths(lengths), tokens, mask, streams[0], weight_version=mask.int())
    return batch.replace(**dict(zip(names, streams[1:], strict=True)))


OBJECTIVES = {
    "token": train_grpo.Config(kl_coef=0.1, entropy_coef=0.01),
    "sequence": train_grpo.Config(
        ratio_level="sequence_mean", correction="sequence_truncate", loss_norm="sequence_mean"
    ),
}


@pytest.mark.parametrize("lengths", [[0, 1, 2], []], ids=str)
@pytest.mark.parametrize(
    ("attention", "config", "adapters"),
    [
        ("mixed", OBJECTIVES["token"], None),
        ("mixed", OBJECTIVES["sequence"], ADAPTERS),
        slow("states", OBJECTIVES["token"], None),
    ],
    ids=["token", "sequence, adapters", "states"],
)
def test_an_update_on_a_device_has_the_gradients_of_the_host(
    device, monkeypatch, attention, config, adapters, lengths
):
    """Covers microbatches, logprobs, loss, metrics and gradients, even for an empty microbatch."""
    # The fake device does not work in backward, so backward must not recompute anything.
    monkeypatch.setattr(
        "minirl.extras.delta_net.layer.checkpoint", lambda function, *args, use_reentrant: function(*args)
    )
    gradients = []
    for place in (CPU, device):
        model = make_model(attention, torch.float64, adapters=adapters).to(place)
        batch = make_batch().to(place)
        micro = batch.select([batch.sequences[i] for i in lengths])
        new, entropy = score_at(model, micro, 0.75)
        loss, ratio = train_grpo.token_loss(config, micro, new, entropy)
        objective = (micro.loss_weights * loss).sum()
        assert objective.device == place
        objective.backward()
        metrics = StepMetrics()
        metrics.add_total("policy/loss", objective.detach())
        add_token_metrics(metrics, micro, new, ratio, entropy, weight_version=1)
        add_clip_metrics(metrics, micro, ratio, clip_low=0.2, clip_high=0.2)
        metrics.reduce()
        trained = filter(lambda parameter: parameter.requires_grad, model.parameters())
        gradients.append([parameter.grad.cpu() for parameter in trained])
    assert_close(*gradients)


@pytest.mark.parametrize("lengths", [[0, 1, 2], []], ids=str)
def test_a_value_model_on_a_device_has_the_values_and_gradients_of_the_host(device, lengths):
    """The test scores all values, even after last tokens, and computes a microbatch's loss.

    Policy and value model share one RoPE table.
    """
    score_at(make_model("mixed", torch.float32), make_batch(), 1.0)
    config = dataclasses.replace(make_model("mixed", torch.float32).config, scalar_head=True)
    names = ["values", "end_values"]
    results = []
    for place in (CPU, device):
        torch.manual_seed(0)
        model = Transformer(config).to(place)
        batch = make_batch().to(place)
        scorer = FrozenModel(model, predict_values, names=names, device=place)
        first, second, third = batch.sequences
        scored = scorer.add_outputs(batch, [[third], [], [first, second]])
        micro = batch.select([batch.sequences[i] for i in lengths])
        values, _ = predict_values(model, micro)
        loss = value_loss(values, micro.values, micro.returns, clip=0.2)
        (micro.loss_weights * loss).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append([x.cpu() for x in (scored.values, scored.end_values, *gradients)])
    assert rope_table.cache_info().currsize == 2  # on the host and on the device
    assert_close(*results)


def assert_close(expected, got):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def updated_on_a_device(rank: int, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Update masters in host memory; return the device weights, and the masters that were copied to them."""
    model = sharded(folder, torch.bfloat16, offload_optimizer=True)
    optimizer = adamw(model, 0.1)
    with PretendedCuda():
        weights = {
            name: torch.zeros_like(weight, device=CUDA) for name, weight in model.compute_weights.items()
        }
        model.compute_weights = weights
        for master in model.masters.values():
            master.grad = torch.ones_like(master)
        model.step(optimizer, lr=0.1, max_grad_norm=1.0)
        assert {weight.device for weight in weights.values()} == {CUDA}
        copied = [weight.cpu() for weight in weights.values()]
    assert {value.device for state in optimizer.state.values() for value in state.values()} == {CPU}
    return copied, [master.full_tensor().detach().bfloat16() for master in model.masters.values()]


def test_masters_in_host_memory_are_updated_there_and_copied_to_the_weights_of_the_device(
    two_ranks, tmp_path
):
    """Norm, clipping and AdamW run on the host; all ranks' shards are gathered on the device.

    Pitfall 47.
    """
    folder = make_folder(tmp_path / "model", RAW_CONFIG)
    for copied, masters in two_ranks.run(updated_on_a_device, folder):
        assert all(torch.equal(weight, master) for weight, master in zip(copied, masters, strict=True))
