"""One weight storage, gradients that do not depend on the split, and collectives of two real ranks."""

import functools
import itertools
import random
import time
import warnings
from dataclasses import dataclass

import pytest
import torch

import train_grpo
import train_ppo
from minirl.episodes.step_groups import Groups
from minirl.errors import GuardError
from minirl.generation.engine import Request
from minirl.model.families import scalar_config
from minirl.model.transformer import is_batch_invariant
from minirl.model.weights import load_replica, named_parameters
from minirl.ranks import time_account
from minirl.ranks.process_group import broadcast_object, gather_objects, world_size
from minirl.rollouts import Rollout, RolloutId
from minirl.run.checkpoint import Checkpoints
from minirl.run.run import Progress
from minirl.training import batch as batching
from minirl.training.assignment import plan_updates
from minirl.training.batch import Batch, exchange, gather_table, pack
from minirl.training.losses import value_loss
from minirl.training.scoring import score_batch, value_batch
from support.engines import CPU, make_engine
from support.marks import slow
from support.models import RAW_CONFIG, adamw, make_folder, sharded
from support.rollouts import in_two_branches


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A model whose head is the embedding's only for the tests that ask so: to optimizers a tied head is nothing."""
    is_tied = getattr(request, "param", "untied") == "tied"
    return make_folder(
        tmp_path_factory.mktemp("model") / "folder", {**RAW_CONFIG, "tie_word_embeddings": is_tied}
    )


tied_and_untied = pytest.mark.parametrize("folder", [slow("tied"), "untied"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def value_folder(tmp_path_factory):
    """A value model with a head that is not 0."""
    return make_folder(tmp_path_factory.mktemp("value") / "folder", scalar_config(RAW_CONFIG))


def make_rollouts(num_prompts, group_size):
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    rollouts = []
    for prompt in range(num_prompts):
        num_prompt = rng.randint(1, 60)
        opening = torch.randint(33, (num_prompt,), generator=generator)
        for sample in range(group_size):
            length = num_prompt + rng.randint(1, 130)
            completion = torch.randint(33, (length - num_prompt,), generator=generator)
            mask = torch.arange(length) >= num_prompt
            logprobs = -torch.rand(length, generator=generator) * mask
            versions = (torch.arange(length, dtype=torch.int32) % 3 + sample) * mask
            rollout_id = RolloutId(prompt, sample)
            end = "length" if (prompt + sample) % 4 == 0 else "stop"
            tokens = torch.cat([opening, completion])
            streams = (mask, logprobs, versions)
            rollouts.append(Rollout(tokens, *streams, num_prompt, rollout_id, end))
    return rollouts


@dataclass(frozen=True)
class Case:
    """A config; whether two thirds of the rollouts have two branches, of which the first is never cut off; and how
    many first groups have equal rewards, which leaves them out of the microbatches."""

    config: train_grpo.Config
    has_branches: bool = False
    num_equal: int = 0

    def rollouts(self):
        rollouts = make_rollouts(7, 3)
        return [in_two_branches(r) if self.has_branches and i % 3 else r for i, r in enumerate(rollouts)]

    def reward(self, rollout_id):
        """1 for the first of a group and 0 for the other two, or 0.1 for all."""
        return 0.1 if rollout_id.prompt_ordinal < self.num_equal else float(rollout_id.sample == 0)


def shared_out(rank, max_tokens, case):
    """One minibatch of 21 rollouts, first spread unevenly over the ranks: their groups, this rank's batch, and its
    microbatches."""
    rollouts = case.rollouts()
    last = world_size() - 1
    mine = [rollout for i, rollout in enumerate(rollouts) if min(i // 5, last) == rank]
    rewards = torch.tensor([case.reward(r.rollout_id) for r in mine], dtype=torch.float64)
    table = gather_table(mine, rewards.view(-1, 1))
    rewards = table.by_rollout().rewards.view(7, 3, 1)
    groups = Groups(None, table, rewards, rewards[:, :0], torch.ones(1, dtype=torch.float64))
    minibatch = range(len(table.num_tokens))
    if case.num_equal:
        weights = train_grpo.rollout_weights(case.config, groups, 64)
        is_trained = ~train_grpo.can_skip(case.config, groups, weights).flatten()[table.rollout]
        assert 6 <= is_trained.sum() <= 9
        minibatch = is_trained.nonzero()[:, 0].tolist()
    split = dict(num_ranks=world_size(), max_tokens=max_tokens)
    plan = plan_updates([minibatch], table.num_tokens.tolist(), table.prefixes, **split)
    return groups, exchange(mine, table, plan.rank_of), plan.of_rank(rank)[0]


def loss_of_one_sequence(model, tokens=None):
    """Of 20 tokens; if none are given, of the same ones on every rank."""
    tokens = torch.arange(20) if tokens is None else tokens
    new, _ = score_batch(model.module, Batch((20,), tokens, torch.arange(20) > 0))
    return -new.sum()


def stepped(model, optimizer, *, lr, scale=1.0):
    """The gradient norm of a step on the loss of one sequence, times `scale`."""
    model.backward(loss_of_one_sequence(model) * scale, is_last=True)
    return model.step(optimizer, lr=lr, max_grad_norm=1.0)


def since_old(sample_logprobs, mask, level):
    """How far the policy has moved since it was the old one: random numbers around 0, the same for every split."""
    return torch.where(mask, (sample_logprobs + 0.5) * (0.05 if level == "sequence_sum" else 0.6), 0.0)


def objective(**flags):
    """What of the GRPO family's objective depends on more than a token, with a KL term in the loss."""
    return train_grpo.Config(**{"advantage_norm": "none", "kl_coef": 0.04, "num_minibatches": 1, **flags})


BY_SEQUENCE, DROPPED = {"loss_norm": "sequence_mean"}, {"drop_truncated": True}
FAST = ("drop_truncated of branches", "sequence_mean of some")
CASES = {
    "token_mean": Case(objective()),
    "sequence_mean": Case(objective(**BY_SEQUENCE)),
    "constant": Case(objective(loss_norm="constant")),
    "mean_ratio": Case(objective(**BY_SEQUENCE, ratio_level="sequence_mean")),
    "sum_ratio": Case(objective(**BY_SEQUENCE, ratio_level="sequence_sum")),
    "drop_truncated": Case(objective(**BY_SEQUENCE, **DROPPED)),
    "token_mean of branches": Case(objective(), has_branches=True),
    "sequence_mean of branches": Case(objective(**BY_SEQUENCE), has_branches=True),
    "drop_truncated of branches": Case(objective(**BY_SEQUENCE, **DROPPED), has_branches=True),
    "token_mean of some": Case(objective(kl_coef=0.0, **DROPPED), num_equal=4),
    "sequence_mean of some": Case(objective(kl_coef=0.0, **BY_SEQUENCE), num_equal=4),
}


def grpo_gradients(rank, max_tokens, folder, case):
    """Full gradients of one GRPO minibatch in fp64, by the script's own functions."""
    config = case.config
    model = sharded(folder, torch.float64)
    groups, batch, microbatches = shared_out(rank, max_tokens, case)
    weights = train_grpo.rollout_weights(config, groups, 64)
    batch = batch.replace(
        advantages=train_grpo.token_advantages(config, groups, batch),
        loss_weights=batch.spread(weights.flatten()[batch.rollout]),
        ref_logprobs=batch.sample_logprobs.double(),
    )
    for i, sequences in enumerate(microbatches):
        micro = batch.select(sequences)
        new, entropy = score_batch(model.module, micro)
        old = new.detach() - since_old(micro.sample_logprobs, micro.loss_mask, config.ratio_level)
        loss, _ = train_grpo.token_loss(config, micro.replace(old_logprobs=old), new, entropy)
        model.backward((micro.loss_weights * loss).sum(), is_last=i == len(microbatches) - 1)
    return full_gradients(model)


def full_gradients(model):
    return {name: master.grad.full_tensor() for name, master in model.masters.items()}


def assert_close_gradients(of_ranks, expected, tolerance):
    for got in of_ranks:
        for name, gradient in expected.items():
            error = (got[name] - gradient).norm() / gradient.norm()
            assert error <= tolerance, f"{name}: relative L2 error {error:.1e}"


def plain_gradients(rank, folder, case):
    """Gradients of the plain double-precision model, one rollout at a time, by autograd through full logits."""
    config = case.config
    model = load_replica(folder, dtype=torch.float64).requires_grad_()
    kept = [r for r in make_rollouts(7, 3) if not (config.drop_truncated and r.is_truncated)]
    num_tokens = sum(r.num_sampled for r in kept)
    for r in kept:
        mask = r.loss_mask
        layout = batching.PackedLayout((len(r.tokens),), CPU)
        logits = model(r.tokens, layout.positions, layout) @ model.lm_head.weight.T
        new = logits.log_softmax(-1)[:-1].gather(1, r.tokens[1:, None])[:, 0][mask[1:]]
        group = [case.reward(r.rollout_id._replace(sample=sample)) for sample in range(3)]
        advantage = 0.0 if len(set(group)) == 1 else case.reward(r.rollout_id) - 1 / 3
        x = new - new.detach() + since_old(r.sample_logprobs, r.loss_mask, config.ratio_level)[mask]
        ratio = {"token": x, "sequence_mean": x.mean(), "sequence_sum": x.sum()}[config.ratio_level].exp()
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        d = new - r.sample_logprobs[mask]
        loss = (loss + config.kl_coef * (torch.exp(-d) + d - 1)).sum()
        divisors = {
            "token_mean": num_tokens,
            "sequence_mean": len(kept) * len(new),
            "constant": len(kept) * 64,
        }
        (loss / divisors[config.loss_norm]).backward()
    return {name: param.grad for name, param in named_parameters(model).items()}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        slow("tied", "token_mean"),
        *(("untied", name) if name in FAST else slow("untied", name) for name in CASES),
    ],
    indirect=["folder"],
    scope="module",
)
def test_gradient_is_that_of_an_unsharded_unpacked_model(one_rank, two_ranks, folder, name):
    """On 1 rank and 2, at any microbatch budget: neither sharding, packing nor the chunked head changes it. Pitfall 33.

    Nor do branches, of which the second goes on where the first one ends, nor leaving out rollouts without a gradient.
    """
    case = CASES[name]
    (expected,) = one_rank.run(plain_gradients, folder, case)
    for pool, max_tokens in ((one_rank, 10_000), (one_rank, 200), (two_ranks, 10_000), (two_ranks, 300)):
        gradients = pool.run(grpo_gradients, max_tokens, folder, case)
        assert_close_gradients(gradients, expected, 1e-12)


def numbers_of_rollouts(batch):
    """Random numbers for every token of a batch that depend on its rollout alone."""
    generators = [torch.Generator().manual_seed(rollout) for rollout in batch.rollout.tolist()]
    parts = [torch.randn(n, generator=g) for n, g in zip(batch.lengths, generators, strict=True)]
    return torch.where(batch.loss_mask, torch.cat([torch.zeros(0), *parts]), 0.0)


def ppo_backward(rank, max_tokens, folder, value_folder, dtype, options, value_scale=1.0):
    """Policy and value model after one minibatch's backward passes, as `train_ppo.py` makes them.

    Rewards have a KL term, truncated completions a bootstrap value, and advantages are whitened over the ranks.
    """
    policy = sharded(folder, dtype, **options)
    value = sharded(value_folder, dtype, scalar_head=True, **options)
    groups, batch, microbatches = shared_out(rank, max_tokens, CASES["token_mean"])

    config = train_ppo.Config(gamma=0.99, bootstrap_truncated=True, num_minibatches=1)
    batch = batch.replace(
        values=numbers_of_rollouts(batch).to(dtype), ref_logprobs=0.9 * batch.sample_logprobs
    )
    advantages, returns = train_ppo.advantages_and_returns(
        config,
        groups.scores,
        train_ppo.kl_to_reference(batch),
        torch.full((len(batch.lengths),), 0.7),
        batch,
        kl_coef=0.05,
    )
    weights = train_ppo.rollout_weights(config, groups, 64)
    batch = batch.replace(
        advantages=batch.scatter(advantages.to(dtype)),
        returns=batch.scatter(returns.to(dtype)),
        loss_weights=batch.spread(weights.flatten()[batch.rollout]).to(dtype),
    )
    for i, sequences in enumerate(microbatches):
        micro = batch.select(sequences)
        is_last = i == len(microbatches) - 1
        values, _ = value_batch(value.module, micro)
        loss = value_loss(values, micro.values, micro.returns, clip=config.value_clip)
        value.backward(value_scale * (micro.loss_weights * loss).sum(), is_last=is_last)
        new, entropy = score_batch(policy.module, micro)
        old = new.detach() - since_old(micro.sample_logprobs, micro.loss_mask, "token")
        loss, _ = train_ppo.token_loss(config, micro.replace(old_logprobs=old), new, entropy)
        policy.backward((micro.loss_weights * loss).sum(), is_last=is_last)
    return {"policy": policy, "value": value}


def ppo_gradients(rank, *args):
    models = ppo_backward(rank, *args).items()
    return {
        f"{name} {key}": gradient for name, model in models for key, gradient in full_gradients(model).items()
    }


SHARDED = {"shard_gradients": True}
# Ranks, and how models are sharded over them; num_shards: the ranks of a node.
LAYOUTS = [
    slow("one_rank", SHARDED),
    slow("two_ranks", {}),
    slow("two_ranks", SHARDED),
    slow("two_ranks", {"num_shards": 1}),
    pytest.param("two_ranks", {"num_shards": 1, **SHARDED}),
    slow("four_ranks", SHARDED),
    slow("four_ranks", {"num_shards": 2}),
    slow("four_ranks", {"num_shards": 2, **SHARDED}),
]


@pytest.fixture(scope="module")
def of_one_rank(one_rank, folder, value_folder):
    """Makes the gradients of one rank, once for each dtype."""

    @functools.cache
    def make(dtype):
        (gradients,) = one_rank.run(ppo_gradients, 10_000, folder, value_folder, dtype, {})
        return gradients

    return make


@pytest.mark.parametrize(
    ("folder", "pool", "options"),
    [
        slow("tied", "four_ranks", {"num_shards": 2, **SHARDED}),
        *(pytest.param("untied", *layout.values, marks=layout.marks) for layout in LAYOUTS),
    ],
    ids=str,
    indirect=["folder"],
    scope="module",
)
def test_gradients_do_not_depend_on_how_models_are_sharded(
    request, folder, value_folder, of_one_rank, pool, options
):
    """Nor on microbatches, also where a rank's last ones are empty: policy and value model.

    PPO's advantages are whitened over all ranks. Between nodes each gradient is summed once.
    """
    ranks = request.getfixturevalue(pool)
    # On one layout also in fp32.
    tolerances = {torch.float64: 1e-12} | ({torch.float32: 2e-6} if pool == "four_ranks" else {})
    for dtype, max_tokens in itertools.product(tolerances, (10_000, 200)):
        found = ranks.run(ppo_gradients, max_tokens, folder, value_folder, dtype, options)
        assert_close_gradients(found, of_one_rank(dtype), tolerances[dtype])


def two_updates(rank, folder, dtype, options, is_lazy=False):
    """Of two microbatches each, on texts that differ between ranks: norms and weights, and all that is saved.

    A weight is frozen, and there are all moments, of the others, before the first update. is_lazy: torch makes them.
    """
    model = sharded(folder, dtype, is_frozen=FROZEN.__eq__, **options)
    optimizer = adamw(model, weight_decay=0.1)
    frozen = model.compute_weights[FROZEN]
    before = frozen.clone()
    assert FROZEN not in model.masters
    assert sum("exp_avg_sq" in state for state in optimizer.state.values()) == len(model.masters)
    if is_lazy:
        optimizer.state.clear()
    norms = []
    for update in range(2):
        for is_last in (False, True):
            tokens = (torch.arange(20) * (2 + is_last) + 5 * update + rank) % 33
            model.backward(loss_of_one_sequence(model, tokens), is_last=is_last)
        norms.append(model.step(optimizer, lr=0.01, max_grad_norm=1.0))
    assert not frozen.requires_grad
    assert torch.equal(frozen, before)
    weights = {name: weight.detach().clone() for name, weight in model.compute_weights.items()}
    return {"norms": torch.tensor(norms), **weights}, model.state_tensors(optimizer)


FROZEN = "model.norm.weight"


@pytest.mark.parametrize(("pool", "options"), LAYOUTS, ids=str)
def test_neither_host_memory_nor_moments_made_with_the_optimizer_change_a_bit(request, folder, pool, options):
    """Of weights, moments, step counts and norms, on one rank and several, and on nodes. Pitfall 47.

    torch would make the moments in its first step, when a cache may have taken their place.
    """
    ranks = request.getfixturevalue(pool)
    for dtype in (torch.bfloat16, torch.float32) if options == SHARDED else (torch.bfloat16,):
        expected, *others = (
            ranks.run(two_updates, folder, dtype, {**options, "offload_optimizer": is_offloaded}, is_lazy)
            for is_offloaded, is_lazy in ((False, False), (True, False), (False, True))
        )
        assert expected[0][0]["norms"].min() > 0
        for found in others:
            # And the same dtypes.
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("pool", "num_shards"), [("two_ranks", 1), slow("four_ranks", 2)])
def test_nodes_that_each_hold_the_model_stay_equal_bit_for_bit(request, folder, pool, num_shards):
    """Weights and norms, and those of one model over all ranks to rounding. The first node's ranks save it."""
    ranks = request.getfixturevalue(pool)
    (expected, saved_whole), *_ = ranks.run(two_updates, folder, torch.float64, {})
    results = ranks.run(two_updates, folder, torch.float64, {"num_shards": num_shards})
    for rank, (weights, saved) in enumerate(results):
        assert len(saved) == (len(saved_whole) if rank < num_shards else 0)
        for name, weight in weights.items():
            assert torch.equal(weight, results[0][0][name]), name
            assert torch.allclose(weight, expected[name], rtol=0, atol=1e-9), name


def ppo_update(rank, *args):
    """The policy's weights after an update of both models, and both gradient norms."""
    models = ppo_backward(rank, *args)
    norms = [model.step(adamw(model), lr=0.01, max_grad_norm=0.01) for model in models.values()]
    return {name: master.full_tensor().detach() for name, master in models["policy"].masters.items()}, *norms


def test_a_value_loss_of_another_scale_leaves_the_policy_alone(two_ranks, folder, value_folder):
    """Each model clips by its own norm: a value loss a million times greater moves no policy bit. Pitfall 49."""
    where = (1000, folder, value_folder, torch.float32, {})
    for (expected, norm, value_norm), (weights, same_norm, great_norm) in zip(
        two_ranks.run(ppo_update, *where), two_ranks.run(ppo_update, *where, 1e6), strict=True
    ):
        assert great_norm == pytest.approx(1e6 * value_norm, rel=1e-4)
        assert same_norm == norm > 0.01
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def check_refreshes(rank, folder, dtype):
    model = sharded(folder, dtype)
    optimizer = adamw(model)
    weights = model.compute_weights
    reference = named_parameters(load_replica(folder, dtype=dtype))
    original = {name: weight.clone() for name, weight in reference.items()}
    assert all(torch.equal(weights[name], weight) for name, weight in original.items())
    addresses = {name: weight.data_ptr() for name, weight in weights.items()}
    engine = make_engine(model.decoder)
    request = Request((1, 2, 3), RolloutId(0, rank), 7, 20, 1.0, frozenset())
    tolerance = (
        0.0
        if is_batch_invariant(model.module.config, dtype, CPU)
        else 1e-5
        if dtype == torch.float32
        else 0.1
    )
    for _ in range(3):
        versions = {name: weight._version for name, weight in weights.items()}
        (rollout,) = engine.generate([request])
        new, _ = score_batch(model.module, pack([rollout]))
        assert float((new - rollout.sample_logprobs).abs().max()) <= tolerance
        model.backward(-new.sum(), is_last=True)
        assert versions == {name: weight._version for name, weight in weights.items()}
        model.step(optimizer, lr=0.1, max_grad_norm=1.0)
    of_modules = [dict(module.named_parameters()) for module in (model.module, model.decoder)]
    for name, weight in weights.items():
        assert weight.data_ptr() == addresses[name]
        assert all(parameters[name] is weight for parameters in of_modules)
        assert torch.equal(weight, model.masters[name].full_tensor().to(dtype))
        assert not torch.equal(weight, original[name])
        assert torch.equal(reference[name], original[name])


@tied_and_untied
@pytest.mark.parametrize("ranks", [slow("one_rank"), "two_ranks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_one_storage_refreshed_in_place(request, ranks, folder, dtype):
    """Only a step writes weights: once, in place; after it the sampler's logprobs are the trainer's. Pitfall 10.

    Steps that move every tensor of the policy move none of a reference from the same folder. Pitfall 9.
    """
    request.getfixturevalue(ranks).run(check_refreshes, folder, dtype)


def tiny_steps(rank, folder):
    """How far five steps with a learning rate of 1e-6 lead each master of a policy that computes in bf16; warnings."""
    model = sharded(folder, torch.bfloat16)
    before = {name: master.full_tensor().double() for name, master in model.masters.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = adamw(model)
        for _ in range(5):
            stepped(model, optimizer, lr=1e-6)
    moved = {n: float((m.full_tensor().double() - before[n]).abs().max()) for n, m in model.masters.items()}
    return moved, [str(warning.message) for warning in caught]


def test_updates_too_small_for_bf16_add_up_and_print_no_warning(two_ranks, folder):
    """Five Adam steps of 1e-6 move every master by 5e-6, far below a bf16 weight's spacing. Pitfall 43."""
    for moved, printed in two_ranks.run(tiny_steps, folder):
        assert moved == pytest.approx(dict.fromkeys(moved, 5e-6), rel=0.1)
        assert printed == []


def bf16_gradients(rank, folder, scales):
    """Gradients of a policy that computes in bf16 for one text, as often as this rank has scales."""
    model = sharded(folder, torch.bfloat16)
    for i, scale in enumerate(scales[rank]):
        model.backward(loss_of_one_sequence(model) * scale, is_last=i == len(scales[rank]) - 1)
    return full_gradients(model)


def test_gradients_of_bf16_compute_are_summed_in_fp32(one_rank, two_ranks, folder):
    """Over microbatches and ranks: a part 512 times smaller than the rest, which bf16 would round off. Pitfall 44."""
    (whole,) = one_rank.run(bf16_gradients, folder, [[1.0]])
    for gradients in two_ranks.run(bf16_gradients, folder, [[1.0, 2**-9], [2**-8]]):
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, whole[name] * (1 + 2**-9 + 2**-8)), name


def clipped_step(rank, folder, names):
    """A step of plain SGD on these masters: the gradient norm, the norm of their gradients, and how far they moved."""
    model = sharded(folder, torch.float64)
    masters = [model.masters[name] for name in names or model.masters]
    model.backward(loss_of_one_sequence(model) / world_size(), is_last=True)
    before = torch.cat([master.full_tensor().flatten() for master in masters])
    gradient = torch.cat([master.grad.full_tensor().flatten() for master in masters])
    norm = model.step(torch.optim.SGD(masters, lr=1.0), lr=1.0, max_grad_norm=0.01)
    assert all(master.grad is None for master in model.masters.values())
    after = torch.cat([master.full_tensor().flatten() for master in masters])
    return norm, float(gradient.norm()), float((after - before).norm())


@pytest.mark.parametrize("names", [None, ["model.norm.weight"]])
def test_gradient_norm_and_clipping_are_global(one_rank, two_ranks, folder, names):
    """Every rank count sees the same norm, and a step of plain SGD is as long as the clip allows. Pitfall 44.

    Weights are frozen by leaving them out of the optimizer: their gradients do not shrink those of the others.
    """
    results = [pool.run(clipped_step, folder, names) for pool in (one_rank, two_ranks)]
    expected = results[0][0][0]
    for norm, norm_of_gradients, moved in itertools.chain(*results):
        assert norm == pytest.approx(expected, rel=1e-9)
        assert norm == pytest.approx(norm_of_gradients, rel=1e-9)
        assert norm > moved == pytest.approx(0.01, rel=1e-6)


def waiting_for_a_late_rank(rank, folder, shard_gradients):
    """A rank's time account of a training step; rank 1 comes late to the sum of gradients and to an exchange."""
    model = sharded(folder, shard_gradients=shard_gradients)
    optimizer = adamw(model)
    model.backward(loss_of_one_sequence(model), is_last=True)  # the cost of a first time
    account = time_account.this_process
    account.begin()
    account.switch("update")
    loss = loss_of_one_sequence(model)
    time.sleep(0.5 * rank)
    model.backward(loss, is_last=True)
    model.step(optimizer, lr=1e-3, max_grad_norm=1.0)
    account.switch("report")
    time.sleep(0.5 * rank)
    gather_objects(rank)
    elapsed, seconds = account.take()
    return seconds, elapsed


@pytest.mark.parametrize("shard_gradients", [False, True])
def test_waiting_for_a_late_rank_is_told_from_computing(two_ranks, folder, shard_gradients):
    """In the sum of gradients it is the update's communication, elsewhere waiting for ranks; it all adds up."""
    (early, early_s), (late, late_s) = two_ranks.run(waiting_for_a_late_rank, folder, shard_gradients)
    for seconds, elapsed in ((early, early_s), (late, late_s)):
        assert sum(seconds.values()) == pytest.approx(elapsed)
        assert seconds["refresh"] > 0
    assert early["update_comm"] > 0.2
    assert early["wait_ranks"] > 0.2
    assert late["update"] >= 0.5
    assert late["report"] >= 0.5


def poisoned_gradient(rank, folder, value):
    """What `step` says of a gradient with this value in one place, in rank 1's shard; whether the weights stayed."""
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
def test_row_31_a_gradient_that_is_not_finite_is_named_and_updates_nothing(two_ranks, folder, value):
    """Parameter and rank; every rank says the same and stops before the optimizer's step."""
    expected = (
        f"gradient norm is {value}: first in model.layers.1.self_attn.k_proj.bias, in the shard of rank 1."
    )
    for message, stayed in two_ranks.run(poisoned_gradient, folder, float(value)):
        assert message.startswith(expected)
        assert stayed


def check_zero_gradient(rank, folder):
    """A step with a gradient of exactly 0, after one that gave momentum."""
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
    assert all(master.grad is None for master in model.masters.values())


def test_a_gradient_of_zero_takes_no_step(two_ranks, folder):
    """Nothing to learn: neither momentum nor weight decay moves a weight; the optimizer's state stays. Pitfall 45."""
    two_ranks.run(check_zero_gradient, folder)


def check_weight_decay(rank, folder):
    after = []
    for weight_decay in (0.0, 0.5):
        model = sharded(folder)
        stepped(model, adamw(model, weight_decay=weight_decay), lr=0.1)
        after.append({name: master.full_tensor() for name, master in model.masters.items()})
    plain, decayed = after
    changed = {name for name in plain if not torch.equal(plain[name], decayed[name])}
    assert changed == {name for name, master in plain.items() if master.ndim == 2}


def test_weight_decay_leaves_out_norms_and_biases(two_ranks, folder):
    """And changes every matrix."""
    two_ranks.run(check_weight_decay, folder)


def trained_value_model(rank, folder, run):
    """A value model that starts from a language model: its checkpoint, and its scores of three texts."""
    model = sharded(folder, scalar_head=True)
    optimizer = adamw(model)
    is_first = torch.cat([torch.arange(len(text)) == 0 for text in VALUED_TEXTS])
    batch = Batch(tuple(map(len, VALUED_TEXTS)), torch.cat(VALUED_TEXTS), loss_mask=~is_first)
    for step in range(5):
        values, end_values = value_batch(model.module, batch)
        assert end_values.any() == (step > 0)
        loss = (values - 1).square().sum() / world_size()
        model.backward(loss, is_last=True)
        model.step(optimizer, lr=0.01, max_grad_norm=1.0)
    checkpoints = Checkpoints(run, {"policy": (model, optimizer)}, sources={"policy": folder}, keep=0)
    checkpoints.save(vars(Progress(step=20)))
    _, end_values = value_batch(model.module, batch)
    return end_values[batch.last_index].tolist()


VALUED_TEXTS = [torch.arange(n) * 7 % 33 for n in (5, 1, 30)]


@tied_and_untied
def test_a_value_model_from_a_language_model_is_saved_as_a_classifier(two_ranks, folder, tmp_path):
    """Its head starts at 0 and moves; transformers loads every tensor of the checkpoint and gives equal scores."""
    from transformers import AutoModelForSequenceClassification

    saved = tmp_path / "checkpoints" / "000020"
    for scores in two_ranks.run(trained_value_model, folder, tmp_path):
        classifier, info = AutoModelForSequenceClassification.from_pretrained(saved, output_loading_info=True)
        assert not any(info.values()), info
        theirs = [classifier(text[None]).logits.item() for text in VALUED_TEXTS]
        assert scores == pytest.approx(theirs, abs=1e-5)
        assert len(set(scores)) == 3


def gathered(rank):
    return torch.cat(gather_objects(torch.arange(3 * rank) + 10 * rank)), broadcast_object(f"rank {rank}")


def test_ranks_gather_uneven_rows_and_agree_on_rank_0s_value(two_ranks):
    """A rank may have no rows at all."""
    for rows, name in two_ranks.run(gathered):
        assert rows.tolist() == [10, 11, 12]
        assert name == "rank 0"
