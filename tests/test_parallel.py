"""One weight storage, gradients that do not depend on the split, and collectives of two real ranks."""

import random
from pathlib import Path

import pytest
import torch

from minirl import batch as batching
from minirl.advantages import loss_weights
from minirl.batch import Rollout, RolloutId, exchange, gather_table, plan_updates
from minirl.distributed import agree, all_gather_rows, world_size
from minirl.engine import Engine, Request
from minirl.losses import clipped_policy_loss, kl_penalty
from minirl.model import Transformer
from minirl.parallel import ShardedModel
from minirl.sampling import request_key
from minirl.scoring import score
from minirl.weights import config_from_dict, load_replica, named_parameters, read_config, save_folder

# Odd sizes on purpose: neither the vocabulary nor the MLP divides by two ranks.
RAW_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 33,
    "hidden_size": 32,
    "intermediate_size": 51,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = {**RAW_CONFIG, "tie_word_embeddings": request.param}
    torch.manual_seed(0)
    model = Transformer(config_from_dict(raw)).double()
    for param in named_parameters(model).values():
        torch.nn.init.normal_(param, std=0.3)
    folder = tmp_path_factory.mktemp("model") / "folder"
    save_folder(folder, named_parameters(model), config=raw, tokenizer_from=None)
    return folder


def make_rollouts(num_prompts: int, group_size: int) -> list[Rollout]:
    rng = random.Random(0)
    rollouts = []
    for prompt in range(num_prompts):
        num_prompt = rng.randint(1, 20)
        for sample in range(group_size):
            length = num_prompt + rng.randint(1, 150)
            tokens = torch.tensor([rng.randrange(33) for _ in range(length)])
            mask = torch.arange(length) >= num_prompt
            logprobs = torch.where(mask, torch.tensor([-rng.random() for _ in range(length)]), 0.0)
            versions = torch.zeros(length, dtype=torch.int32)
            rollouts.append(Rollout(tokens, mask, logprobs, versions, num_prompt, RolloutId(prompt, sample), "stop"))
    return rollouts


def grpo_gradients(
    rank: int, folder: Path, dtype: torch.dtype, max_tokens: int, norm: str, num_prompts: int
) -> dict[str, torch.Tensor]:
    """Full gradients of one GRPO minibatch with a KL term, its rollouts first spread unevenly over the ranks."""
    model = ShardedModel(read_config(folder), folder, dtype=dtype, device=torch.device("cpu"))
    rollouts = make_rollouts(num_prompts, 3)
    share = rollouts[: len(rollouts) // 4] if rank == 0 else rollouts[len(rollouts) // 4 :]
    mine = share if world_size() > 1 else rollouts
    table = gather_table(mine, [float(r.rollout_id.sample == 0) for r in mine])
    lengths = table.num_tokens.tolist()
    plan = plan_updates(lengths, num_minibatches=1, num_ranks=world_size(), max_tokens=max_tokens)
    weights = loss_weights(table.num_loss_tokens, norm=norm, constant=64)
    batch = exchange(mine, table, plan.rank_of)
    advantages = table.reward - 1 / 3
    batch = batch.replace(
        advantages=batch.spread(advantages[batch.row].to(dtype)), loss_weights=batch.spread(weights[batch.row])
    )
    (minibatch,) = plan.of_rank(rank)
    for i, sequences in enumerate(minibatch):
        micro = batch.select(sequences)
        new, _ = score(model.module, micro.tokens, micro.layout(), select=micro.loss_mask, temperature=1.0)
        old = new.detach() - 0.1
        loss = clipped_policy_loss(new, old, micro.advantages, clip_low=0.2, clip_high=0.28)
        loss = loss + 0.04 * kl_penalty(new, micro.sample_logprobs.to(dtype), "k3")
        model.backward((micro.loss_weights.to(dtype) * loss).sum(), is_last=i == len(minibatch) - 1)
    return {name: master.grad.full_tensor() for name, master in model.masters.items()}


def assert_close_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, gradient in expected.items():
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, f"{name}: relative L2 error {error:.1e}"


@pytest.mark.parametrize("norm", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
def test_gradient_does_not_depend_on_ranks_or_microbatches(one_rank, two_ranks, folder, dtype, tolerance, norm):
    """The same rollouts give the same gradient on 1 rank, on 2 ranks and at any microbatch budget."""
    (expected,) = one_rank.run(grpo_gradients, folder, dtype, 10_000, norm, 7)
    (small,) = one_rank.run(grpo_gradients, folder, dtype, 200, norm, 7)
    assert_close_gradients(small, expected, tolerance)
    for max_tokens in (10_000, 300):
        for gradients in two_ranks.run(grpo_gradients, folder, dtype, max_tokens, norm, 7):
            assert_close_gradients(gradients, expected, tolerance)


def plain_gradients(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients of the plain double-precision model, one sequence at a time, by autograd through full logits."""
    model = load_replica(folder, dtype=torch.float64).requires_grad_()
    rollouts = make_rollouts(7, 3)
    num_tokens = sum(int(r.loss_mask.sum()) for r in rollouts)
    for r in rollouts:
        layout = batching.PackedLayout((len(r.tokens),), torch.device("cpu"))
        logits = model(r.tokens, layout.positions, layout) @ model.lm_head.weight.T
        new = logits.log_softmax(-1)[:-1].gather(1, r.tokens[1:, None])[:, 0][r.loss_mask[1:]]
        advantage = float(r.rollout_id.sample == 0) - 1 / 3
        ratio = torch.exp(new - new.detach() + 0.1)
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        d = new - r.sample_logprobs[r.loss_mask]
        ((loss + 0.04 * (torch.exp(-d) + d - 1)).sum() / num_tokens).backward()
    return {name: param.grad for name, param in named_parameters(model).items()}


def test_gradient_equals_that_of_an_unsharded_unpacked_model(one_rank, two_ranks, folder):
    """Sharding, packing and the chunked head change no gradient: float64 against plain autograd."""
    (expected,) = one_rank.run(plain_gradients, folder)
    for gradients in two_ranks.run(grpo_gradients, folder, torch.float64, 300, "token_mean", 7):
        assert_close_gradients(gradients, expected, 1e-12)


def test_a_rank_without_rollouts_takes_part(one_rank, two_ranks, folder):
    """One rollout on two ranks: one rank trains on nothing, and the gradient is the same."""

    (expected,) = one_rank.run(single_rollout_gradients, folder)
    for gradients in two_ranks.run(single_rollout_gradients, folder):
        assert_close_gradients(gradients, expected, 1e-12)


def single_rollout_gradients(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    model = ShardedModel(read_config(folder), folder, dtype=torch.float64, device=torch.device("cpu"))
    mine = make_rollouts(1, 1) if rank == 0 else []
    table = gather_table(mine, [1.0] * len(mine))
    plan = plan_updates(table.num_tokens.tolist(), num_minibatches=1, num_ranks=world_size(), max_tokens=1000)
    batch = exchange(mine, table, plan.rank_of)
    for sequences in plan.of_rank(rank)[0]:
        micro = batch.select(sequences)
        new, _ = score(model.module, micro.tokens, micro.layout(), select=micro.loss_mask, temperature=1.0)
        model.backward(-new.sum(), is_last=True)
    return {name: master.grad.full_tensor() for name, master in model.masters.items()}


def refresh_report(rank: int, folder: Path, dtype: torch.dtype) -> dict[str, bool]:
    model = ShardedModel(read_config(folder), folder, dtype=dtype, device=torch.device("cpu"))
    optimizer = model.make_optimizer(betas=(0.9, 0.95), weight_decay=0.0)
    original = named_parameters(load_replica(folder, dtype=dtype))
    report = {"loaded": all(torch.equal(model.compute_weights[n], original[n]) for n in original)}
    addresses = {name: weight.data_ptr() for name, weight in model.compute_weights.items()}
    engine = Engine(model.module, max_rows=4, cache_tokens=1024, dtype=dtype, device=torch.device("cpu"))
    request = Request((1, 2, 3), RolloutId(0, rank), 7, 20, 1.0, frozenset())
    for _ in range(3):
        versions = {name: weight._version for name, weight in model.compute_weights.items()}
        (rollout,) = engine.generate([request])
        layout = batching.PackedLayout((len(rollout.tokens),), torch.device("cpu"))
        new, _ = score(model.module, rollout.tokens, layout, select=rollout.loss_mask, temperature=1.0)
        model.backward(-new.sum(), is_last=True)
        report["unwritten"] = all(w._version == versions[n] for n, w in model.compute_weights.items())
        model.step(optimizer, lr=0.1, max_grad_norm=1.0)
    masters = {name: master.full_tensor().to(dtype) for name, master in model.masters.items()}
    report["stable"] = all(weight.data_ptr() == addresses[name] for name, weight in model.compute_weights.items())
    report["used"] = all(dict(model.module.named_parameters())[n] is w for n, w in model.compute_weights.items())
    report["fresh"] = all(torch.equal(model.compute_weights[n], masters[n]) for n in masters)
    report["moved"] = not torch.equal(model.compute_weights["model.norm.weight"], original["model.norm.weight"])
    return report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_are_one_storage_refreshed_in_place(two_ranks, folder, dtype):
    """Generate, score and backward write no weight; a step refreshes them once, at the same addresses."""
    for report in two_ranks.run(refresh_report, folder, dtype):
        assert report == dict.fromkeys(("loaded", "unwritten", "stable", "used", "fresh", "moved"), True)


def sampled_after_update(rank: int, folder: Path) -> tuple[list[list[int]], list[torch.Tensor], float]:
    """Rollouts of 10 requests, this rank's share, after an update; and the gap to the training forward."""
    model = ShardedModel(read_config(folder), folder, dtype=torch.float32, device=torch.device("cpu"))
    device = torch.device("cpu")
    engine = Engine(model.module, max_rows=4, cache_tokens=1024, dtype=torch.float32, device=device)
    requests = [
        Request(
            (1, 2, 3 + i), RolloutId(i, 0), request_key(0, purpose="train", prompt=i, sample=0), 40, 1.0, frozenset()
        )
        for i in range(10)
    ]
    rollouts = engine.generate(requests[rank :: world_size()])
    layout = batching.PackedLayout(tuple(len(r.tokens) for r in rollouts), torch.device("cpu"))
    tokens, mask = (torch.cat([getattr(r, n) for r in rollouts]) for n in ("tokens", "loss_mask"))
    new, _ = score(model.module, tokens, layout, select=mask, temperature=1.0)
    gap = float((new - torch.cat([r.sample_logprobs for r in rollouts])).abs().max())
    return [r.tokens.tolist() for r in rollouts], [r.sample_logprobs for r in rollouts], gap


def test_rollouts_do_not_depend_on_the_world_size(one_rank, two_ranks, folder):
    """At equal weights 1 and 2 ranks sample the same tokens with the same logprobs, bit for bit."""
    ((tokens, logprobs, gap),) = one_rank.run(sampled_after_update, folder)
    (even, odd) = two_ranks.run(sampled_after_update, folder)
    assert tokens[::2] == even[0]
    assert tokens[1::2] == odd[0]
    assert all(torch.equal(a, b) for a, b in zip(logprobs[::2] + logprobs[1::2], even[1] + odd[1], strict=True))
    assert max(gap, even[2], odd[2]) <= 1e-5


def clipped_norms(rank: int, folder: Path, max_grad_norm: float) -> tuple[float, float]:
    model = ShardedModel(read_config(folder), folder, dtype=torch.float64, device=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.masters.values(), lr=0.0)
    before = {name: master.full_tensor().clone() for name, master in model.masters.items()}
    tokens = torch.arange(20)
    layout = batching.PackedLayout((20,), torch.device("cpu"))
    new, _ = score(model.module, tokens, layout, select=tokens > 0, temperature=1.0)
    model.backward(-new.sum() / world_size(), is_last=True)
    norm = model.step(optimizer, lr=1.0, max_grad_norm=max_grad_norm)
    moved = sum((master.full_tensor() - before[name]).square().sum() for name, master in model.masters.items())
    return norm, float(moved**0.5)


def test_gradient_norm_and_clipping_are_global(one_rank, two_ranks, folder):
    """Every rank count sees the same norm, and a step of plain SGD is as long as the clip allows."""
    ((norm, moved),) = one_rank.run(clipped_norms, folder, 0.5)
    for other_norm, other_moved in two_ranks.run(clipped_norms, folder, 0.5):
        assert other_norm == pytest.approx(norm, rel=1e-9)
        assert other_moved == pytest.approx(moved, rel=1e-9)
    assert norm > 0.5
    assert moved == pytest.approx(0.5, rel=1e-6)


def stop_on_nan(rank: int, folder: Path) -> bool:
    model = ShardedModel(read_config(folder), folder, dtype=torch.float32, device=torch.device("cpu"))
    optimizer = model.make_optimizer(betas=(0.9, 0.95), weight_decay=0.0)
    before = {name: weight.clone() for name, weight in model.compute_weights.items()}
    tokens = torch.arange(20)
    layout = batching.PackedLayout((20,), torch.device("cpu"))
    new, _ = score(model.module, tokens, layout, select=tokens > 0, temperature=1.0)
    model.backward(new.sum() * float("nan"), is_last=True)
    with pytest.raises(FloatingPointError, match="gradient norm"):
        model.step(optimizer, lr=1.0, max_grad_norm=1.0)
    return all(torch.equal(weight, before[name]) for name, weight in model.compute_weights.items())


def test_a_gradient_that_is_not_finite_updates_nothing(two_ranks, folder):
    """NaN in the loss stops every rank before the optimizer's step."""
    assert two_ranks.run(stop_on_nan, folder) == [True, True]


def gathered(rank: int) -> tuple[torch.Tensor, str]:
    return all_gather_rows(torch.arange(3 * rank).view(-1, 1) + 10 * rank), agree(f"rank {rank}")


def test_ranks_gather_uneven_rows_and_agree_on_rank_0s_value(two_ranks):
    """A rank may have no rows at all."""
    for rows, name in two_ranks.run(gathered):
        assert rows[:, 0].tolist() == [10, 11, 12]
        assert name == "rank 0"


def exchanged(rank: int) -> list[tuple[int, list[int], list[float]]]:
    rollouts = make_rollouts(5, 2)
    mine = rollouts[::-1][: 3 if rank == 0 else 0] + (rollouts[:7] if rank == 1 else [])
    table = gather_table(mine, [float(r.num_prompt_tokens) for r in mine])
    batch = exchange(mine, table, [int(i in (1, 2, 8)) for i in range(10)])
    return [
        (row, (part := batch.select([i])).tokens.tolist(), part.sample_logprobs.tolist())
        for i, row in enumerate(batch.row.tolist())
    ]


def test_exchange_brings_every_rollout_whole_to_its_rank_in_order(two_ranks):
    """Whoever made a rollout and in whatever order, its rank gets it with all its streams."""
    expected = [(i, r.tokens.tolist(), r.sample_logprobs.tolist()) for i, r in enumerate(make_rollouts(5, 2))]
    first, second = two_ranks.run(exchanged)
    assert first == [expected[i] for i in (0, 3, 4, 5, 6, 7, 9)]
    assert second == [expected[i] for i in (1, 2, 8)]
