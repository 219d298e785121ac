"""Shared weights, gradients that do not depend on the split, and optimizer steps, on several real ranks."""

import functools
import itertools
import random

import pytest
import torch

import train_grpo
from minirl.episodes.step_groups import Groups
from minirl.errors import GuardError
from minirl.generation.engine import Request
from minirl.model.transformer import is_batch_invariant
from minirl.model.weights import load_unsharded_model
from minirl.ranks.process_group import world_size
from minirl.rollouts import RolloutId
from minirl.training.assignment import plan_microbatches
from minirl.training.batch import (
    Batch,
    exchange_rollouts,
    gather_rollout_infos,
    pack,
    sequence_infos_from_lengths,
)
from minirl.training.scoring import score_batch
from support.engines import CPU, make_engine
from support.marks import slow
from support.models import RAW_CONFIG, adamw, full_tensor, make_folder, sharded
from support.rollouts import in_two_branches, rollout_of, sampled


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of two models, one with tied embeddings."""
    root = tmp_path_factory.mktemp("models")
    tied = RAW_CONFIG | {"tie_word_embeddings": True}
    return {"tied": make_folder(root / "tied", tied), "untied": make_folder(root / "untied", RAW_CONFIG)}


def make_rollouts():
    """Return three rollouts for each of seven prompts; two thirds have two branches, the first never truncated."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    rollouts = []
    for prompt in range(7):
        opening = torch.randint(33, (rng.randint(1, 60),), generator=generator).tolist()
        for sample in range(3):
            n = rng.randint(1, 130)
            logprobs = -torch.rand(n, generator=generator)
            tokens = torch.randint(33, (n,), generator=generator).tolist()
            completion = sampled(tokens, logprobs=logprobs, versions=torch.arange(n) % 3)
            end = "length" if (prompt + sample) % 4 == 0 else "stop"
            rollout = rollout_of(RolloutId(prompt, sample), opening, completion, end)
            rollouts.append(in_two_branches(rollout) if len(rollouts) % 3 else rollout)
    return rollouts


def shared_out(rank, max_tokens, config, skippable_rollouts=None):
    """Exchange 21 rollouts that ranks hold unevenly; return the groups, and this rank's batch and microbatches.

    Three groups have different rewards.
    """
    last = world_size() - 1
    mine = [rollout for i, rollout in enumerate(make_rollouts()) if min(i // 5, last) == rank]
    rewards = [[0.1 if r.rollout_id.prompt_ordinal < 4 else r.rollout_id.sample == 0] for r in mine]
    infos = gather_rollout_infos(zip(mine, [""] * len(mine), rewards, strict=True))
    rewards = torch.tensor([info.rewards for info in infos], dtype=torch.float64).view(7, 3, 1)
    groups = Groups(None, infos, rewards, rewards[:, :0], torch.ones(1, dtype=torch.float64))
    is_skipped = torch.zeros(21, dtype=torch.bool)
    if skippable_rollouts is not None:
        is_skipped = skippable_rollouts(
            config, groups, train_grpo.rollout_loss_weights(config, groups, 64)
        ).flatten()
    trained = [sequence for sequence in groups.sequences if not is_skipped[sequence.rollout_index]]
    plan = plan_microbatches(trained, num_ranks=world_size(), max_tokens=max_tokens)
    return groups, exchange_rollouts(mine, [plan]), plan[rank]


def moved_since_old(micro, scale=0.6):
    """Return random log ratios to the old policy, around 0 and the same for every split."""
    return torch.where(micro.loss_mask, scale * (micro.sample_logprobs + 0.5), 0.0)


def full_gradients(model):
    return {name: full_tensor(master.grad) for name, master in model.masters.items()}


def assert_close_gradients(of_ranks, expected, tolerance):
    for got, (name, gradient) in itertools.product(of_ranks, expected.items()):
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, f"{name}: relative L2 error {error:.1e}"


def gradients_of(rank, max_tokens, folder, flags, skippable_rollouts=None, dtype=torch.float64, **options):
    """Return the full gradients of one minibatch, computed with the script's functions."""
    config = train_grpo.Config(num_minibatches=1, **flags)
    model = sharded(folder, dtype, **options)
    groups, batch, microbatches = shared_out(rank, max_tokens, config, skippable_rollouts)
    weights = train_grpo.rollout_loss_weights(config, groups, 64)
    batch = batch.replace(ref_logprobs=0.9 * batch.sample_logprobs)
    batch = batch.replace(
        advantages=train_grpo.token_advantages(config, groups, batch).to(dtype),
        loss_weights=batch.rollouts_to_tokens(weights).to(dtype),
    )
    for i, sequences in enumerate(microbatches):
        micro = batch.select(sequences)
        new, entropy = score_batch(model.module, micro)
        old = new.detach() - moved_since_old(micro, 0.05 if config.ratio_level == "sequence_sum" else 0.6)
        loss, _ = train_grpo.token_loss(config, micro.replace(old_logprobs=old), new, entropy)
        model.backward((micro.loss_weights * loss).sum(), is_last=i == len(microbatches) - 1)
    return full_gradients(model)


@pytest.mark.parametrize(
    "flags",
    [
        {"drop_truncated": True},
        {"kl_coef": 0.04, "ratio_level": "sequence_mean", "loss_norm": "sequence_mean"},
        slow({"ratio_level": "sequence_sum", "loss_norm": "constant", "drop_truncated": True}),
    ],
    ids=str,
)
def test_a_gradient_depends_neither_on_the_split_nor_on_what_is_skipped(one_rank, two_ranks, folders, flags):
    """This holds on 1 and 2 ranks, for any token budget, and without zero-gradient rollouts. Pitfall 33."""
    where = folders["tied"], flags
    (expected,) = one_rank.run(gradients_of, 10_000, *where)
    for pool, max_tokens in ((one_rank, 200), (two_ranks, 10_000), (two_ranks, 300)):
        gradients = pool.run(gradients_of, max_tokens, *where, train_grpo.skippable_rollouts)
        assert_close_gradients(gradients, expected, 1e-12)


SHARDED = {"shard_gradients": True}
# Pools of ranks, and how models are sharded over the ranks.
LAYOUTS = [
    slow("one_rank", SHARDED),
    slow("two_ranks", {}),
    slow("two_ranks", {"bucket_size": 100_000}),  # a small model, which is a single FSDP unit
    pytest.param("two_ranks", SHARDED),
    slow("four_ranks", SHARDED),
]


@pytest.mark.parametrize(("pool", "options"), LAYOUTS, ids=str)
def test_gradients_do_not_depend_on_how_models_are_sharded(request, one_rank, folders, pool, options):
    """Microbatches do not matter either, even if a rank's last microbatches are empty.

    Advantages are whitened over all ranks. Pitfall 29.
    """
    where = folders["untied"], {"advantage_norm": "whiten", "kl_reward_coef": 0.05, "baseline": "none"}, None
    ranks = request.getfixturevalue(pool)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        (expected,) = one_rank.run(gradients_of, 10_000, *where, dtype)
        for max_tokens in (10_000, 200):
            found = ranks.run(functools.partial(gradients_of, **options), max_tokens, *where, dtype)
            assert_close_gradients(found, expected, tolerance)


def loss_of_one_sequence(model, tokens=None):
    """Return the loss of a sequence of 20 tokens, by default the same tokens on every rank."""
    tokens = torch.arange(20) if tokens is None else tokens
    new, _ = score_batch(model.module, Batch(sequence_infos_from_lengths([20]), tokens, torch.arange(20) > 0))
    return -new.sum()


def stepped(model, optimizer, *, lr, scale=1.0):
    """Step on one sequence's loss times `scale`; return the gradient norm."""
    model.backward(loss_of_one_sequence(model) * scale, is_last=True)
    return model.step(optimizer, lr=lr, max_grad_norm=1.0)


FROZEN = "model.norm.weight"


def two_updates(rank, folder, options):
    """Make two updates on microbatches that differ between ranks; return norms, weights and the saved state.

    One weight is frozen. All other weights have moments before the first update.
    """
    model = sharded(folder, torch.bfloat16, is_frozen=FROZEN.__eq__, **options)
    optimizer = adamw(model, weight_decay=0.1)
    frozen = model.compute_weights[FROZEN].clone()
    assert FROZEN not in model.masters
    assert sum("exp_avg_sq" in state for state in optimizer.state.values()) == len(model.masters)
    norms = []
    for update in range(2):
        for is_last in (False, True):
            tokens = (torch.arange(20) * (2 + is_last) + 5 * update + rank) % 33
            model.backward(loss_of_one_sequence(model, tokens), is_last=is_last)
        norms.append(model.step(optimizer, lr=0.01, max_grad_norm=1.0))
    assert min(norms) > 0
    assert torch.equal(model.compute_weights[FROZEN], frozen)
    weights = {name: weight.detach().clone() for name, weight in model.compute_weights.items()}
    return {"norms": torch.tensor(norms), **weights}, model.state_tensors(optimizer)


@pytest.mark.parametrize(("pool", "options"), LAYOUTS, ids=str)
def test_host_memory_changes_no_bit(request, folders, pool, options):
    """This covers weights, moments, step counts and norms. Pitfall 47.

    With bf16 compute, masters and moments are fp32, because small updates would vanish in bf16. Pitfall 43.
    """
    ranks = request.getfixturevalue(pool)
    expected, found = (
        ranks.run(two_updates, folders["untied"], {**options, "offload_optimizer": is_offloaded})
        for is_offloaded in (False, True)
    )
    # This compares dtypes too.
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for weights, saved in expected:
        torch.testing.assert_close(weights, expected[0][0], rtol=0, atol=0)
        assert all(tensor.dtype == torch.float32 for tensor in saved.values())


def check_refreshes(rank, folder, dtype):
    model = sharded(folder, dtype)
    optimizer = adamw(model)
    weights = model.compute_weights
    reference = dict(load_unsharded_model(folder, dtype=dtype).named_parameters())
    original = {name: weight.clone() for name, weight in reference.items()}
    assert all(torch.equal(weights[name], weight) for name, weight in original.items())
    addresses = {name: weight.data_ptr() for name, weight in weights.items()}
    engine = make_engine(model.decoder)
    request = Request((1, 2, 3), RolloutId(0, rank), 7, 20, 1.0, frozenset())
    for _ in range(3):
        versions = {name: weight._version for name, weight in weights.items()}
        (rollout,) = engine.generate([request])
        new, _ = score_batch(model.module, pack([rollout]))
        if is_batch_invariant(model.module.config, dtype, CPU):
            assert torch.equal(new, pack([rollout]).sample_logprobs)
        model.backward(-new.sum(), is_last=True)
        assert versions == {name: weight._version for name, weight in weights.items()}
        model.step(optimizer, lr=0.1, max_grad_norm=1.0)
    decoder = dict(model.decoder.named_parameters())
    for name, weight in model.module.named_parameters():
        assert weight.data_ptr() == decoder[name].data_ptr() == addresses[name]
        assert torch.equal(weight, full_tensor(model.masters[name]).to(dtype))
        assert not torch.equal(weight, original[name])
        assert torch.equal(reference[name], original[name])


@pytest.mark.parametrize("ranks", [slow("one_rank"), "two_ranks"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("tied", torch.float32), slow("untied", torch.float32), ("untied", torch.bfloat16)]
)
def test_weights_are_one_storage_refreshed_in_place(request, ranks, folders, name, dtype):
    """Only a step writes weights, once and in place; sampled logprobs then equal training logprobs. Pitfall 10.

    Steps that change every policy tensor change no tensor of a reference from the same folder. Pitfall 9.
    """
    request.getfixturevalue(ranks).run(check_refreshes, folders[name], dtype)


def bf16_gradients(rank, folder, scales):
    """Return a bf16 policy's gradients, summed over one backward pass per scale of this rank."""
    model = sharded(folder, torch.bfloat16)
    for i, scale in enumerate(scales[rank]):
        model.backward(loss_of_one_sequence(model) * scale, is_last=i == len(scales[rank]) - 1)
    return full_gradients(model)


def test_gradients_of_bf16_compute_are_summed_in_fp32(one_rank, two_ranks, folders):
    """Microbatches and ranks add parts 512 times smaller than the rest, which bf16 would round off. Pitfall 44."""
    (whole,) = one_rank.run(bf16_gradients, folders["untied"], [[1.0]])
    for gradients in two_ranks.run(bf16_gradients, folders["untied"], [[1.0, 2**-9], [2**-8]]):
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, whole[name] * (1 + 2**-9 + 2**-8)), name


def clipped_step(rank, folder, names):
    """Take an SGD step on these masters; return the step's norm, the masters' gradient norm, and the distance moved."""
    model = sharded(folder, torch.float64)
    masters = [model.masters[name] for name in names or model.masters]
    model.backward(loss_of_one_sequence(model) / world_size(), is_last=True)

    def joined(tensors):
        return torch.cat([full_tensor(tensor).flatten() for tensor in tensors])

    before = joined(masters)
    gradient = joined(master.grad for master in masters)
    norm = model.step(torch.optim.SGD(masters, lr=1.0), lr=1.0, max_grad_norm=0.01)
    return norm, float(gradient.norm()), float((joined(masters) - before).norm())


@pytest.mark.parametrize("names", [None, [FROZEN]])
def test_gradient_norm_and_clipping_are_global(one_rank, two_ranks, folders, names):
    """The norm does not depend on the number of ranks, and an SGD step is as long as the clip allows. Pitfall 44.

    Weights that the optimizer leaves out are frozen; their gradients do not count toward the norm.
    """
    ((expected, *_),) = one_rank.run(clipped_step, folders["untied"], names)
    for norm, norm_of_gradients, moved in two_ranks.run(clipped_step, folders["untied"], names):
        assert [norm, norm_of_gradients] == pytest.approx([expected] * 2, rel=1e-9)
        assert norm > moved == pytest.approx(0.01, rel=1e-6)


def poisoned_gradient(rank, folder, value):
    """Return `step`'s error for a gradient with this value in rank 1's shard, and whether the weights stayed."""
    model = sharded(folder)
    before = {name: weight.clone() for name, weight in model.compute_weights.items()}
    model.backward(loss_of_one_sequence(model), is_last=True)
    if rank == 1:
        model.masters["model.layers.1.self_attn.k_proj.bias"].grad.to_local()[-1] = value
    with pytest.raises(GuardError) as error:
        model.step(adamw(model), lr=1.0, max_grad_norm=1.0)
    stayed = all(torch.equal(weight, before[name]) for name, weight in model.compute_weights.items())
    return str(error.value), stayed


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_row_31_a_gradient_that_is_not_finite_is_named_and_updates_nothing(two_ranks, folders, value):
    """Every rank names the parameter and stops before the optimizer's step."""
    expected = f"gradient norm is {value}: first in model.layers.1.self_attn.k_proj.bias."
    for message, stayed in two_ranks.run(poisoned_gradient, folders["untied"], float(value)):
        assert message.startswith(expected)
        assert stayed


def check_zero_gradient(rank, folder):
    """Take a step with a zero gradient, after a step that gave momentum."""
    model = sharded(folder)
    optimizer = adamw(model, weight_decay=0.1)
    norms, states = [], []
    for scale in (1.0, 0.0):
        norms.append(stepped(model, optimizer, lr=0.1, scale=scale))
        weights = {name: weight.clone() for name, weight in model.compute_weights.items()}
        states.append({**model.state_tensors(optimizer), **weights})
    assert norms[0] > norms[1] == 0
    assert states[0]["exp_avg.model.norm.weight"].any()
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())


def test_a_gradient_of_zero_takes_no_step(two_ranks, folders):
    """With a zero gradient, no weight moves by momentum or weight decay, and the optimizer state stays. Pitfall 45."""
    two_ranks.run(check_zero_gradient, folders["untied"])


def check_decay(rank, folder):
    """Compare a step without weight decay and a step with weight decay."""
    plain, decayed = (sharded(folder) for _ in range(2))
    stepped(plain, adamw(plain), lr=0.1)
    stepped(decayed, adamw(decayed, weight_decay=0.5), lr=0.1)
    for name, weight in plain.compute_weights.items():
        assert torch.equal(weight, decayed.compute_weights[name]) == (weight.ndim == 1), name


def test_weight_decay_leaves_out_norms_and_biases(two_ranks, folders):
    """Weight decay changes every matrix."""
    two_ranks.run(check_decay, folders["untied"])
