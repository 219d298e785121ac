"""The forks of docs/objectives.md train, resume bit for bit, and give the worked numbers of their items."""

import itertools
import math
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from minirl.rollouts import EpisodeRecord, Rollout, RolloutId, SampledSequence, TurnRecord
from minirl.training.batch import Batch, sequence_infos_from_lengths
from support.resuming import resume
from support.rollouts import sampled
from support.scripts import (
    ROOT,
    load_script,
    objective_fork,
    objectives,
    read_metrics,
    trained,
)
from support.worked import double, groups_of

ITEMS = objectives()
PATCHES = sorted((ROOT / "docs" / "objectives").iterdir())
OF_A_STEP = ("Clip-cov", "KL-cov", "80/20", "Adaptive entropy")
"""Objectives that depend on all tokens of a step."""
FLAGS = "--num-steps 2 --save-every 1 --keep-checkpoints 0 --prompts-per-step 4 --group-size 4"
FLAGS += " --lr 1e-3 --seed 1"  # with this seed, rewards differ within groups
LOG_2 = math.log(2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ITEMS)
def test_an_objective_of_the_page_trains_and_resumes(one_rank, two_ranks, runs, tmp_path, name):
    """A run killed after its first step ends like the uninterrupted run; step statistics do not depend on the split."""
    fork, run_name = objective_fork(tmp_path, name), re.sub(r"\W", "_", name)
    flags = (FLAGS, *re.findall("`(--[^`]*)`", ITEMS[name])[:1])
    folder = trained(one_rank, runs / run_name, fork, *flags)
    resume(one_rank, fork, folder, *flags)
    metrics = read_metrics(folder)
    assert metrics[0]["optim/grad_norm"] > 0
    if name in OF_A_STEP:
        split = trained(two_ranks, runs / f"{run_name}-split", fork, *flags, "--max-tokens-per-microbatch 64")
        lines = zip(metrics, read_metrics(split), strict=True)
        for (expected, found), metric in itertools.product(lines, ("optim/grad_norm", "policy/loss")):
            assert found[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric


def make_batch(lengths, sampled, **streams):
    """Return a batch of sequences that have only sampled tokens."""
    tokens = torch.arange(len(sampled))
    return Batch(sequence_infos_from_lengths(lengths), tokens, tokens >= 0, sampled, **streams)


def advantages_of_group(fork, rewards, **config):
    """Return a group's advantages, for completions of 3, 5, 2 and 4 tokens."""
    groups = groups_of(double([rewards]), torch.tensor([[3, 5, 2, 4]]))
    return fork.advantages(fork.Config(**config), groups, groups.weighted_rewards).flatten()


def advantages_of_two_rewards(fork):
    """Return the advantages of a group of four rollouts with two rewards each."""
    rewards = double([[[1.0, 10.0], [0.0, 30.0], [1.0, 20.0], [0.0, 40.0]]])
    groups = replace(groups_of(rewards[..., 0]), rewards=rewards, reward_weights=double([1.0, 0.5]))
    return fork.advantages(fork.Config(), groups, groups.weighted_rewards).flatten()


def loss_of(fork, log_ratios, advantage, *, old=0.5, drift=0.0, **fields):
    """Return a sequence's token losses and their gradients. old: probabilities; drift: sampled - old logprobs."""
    old = double(old).log().expand(len(log_ratios))
    new = (old + double(log_ratios)).requires_grad_()
    micro = make_batch(
        (len(old),),
        old + drift,
        old_logprobs=old,
        advantages=torch.full_like(old, advantage),
    )
    config = fork.Config(correction="none")
    if fields:
        micro = fork.KlCovBatch(**vars(micro) | fields)
    losses, _ = fork.token_loss(config, micro, new, torch.zeros_like(new))
    (gradients,) = torch.autograd.grad(losses.sum(), new)
    return losses.detach(), gradients


def covariance_example():
    """Return the advantages and the batch of three one-token rollouts."""
    return double([3.0, -1.0, -2.0]), make_batch((1, 1, 1), double([-0.5, -1.5, -1.0]))


def clip_cov(fork):
    rewards, batch = covariance_example()
    config = fork.Config(baseline="none", advantage_norm="none")
    return [fork.token_advantages(config, groups_of(rewards[None]), batch)]


def kl_cov(fork):
    advantages, batch = covariance_example()
    is_top = fork.top_covariances(batch.replace(advantages=advantages))
    assert is_top.tolist() == [1.0, 0.0, 0.0]
    return [loss_of(fork, [0.2], 3.0, is_top=is_top[:1])[0]]


def high_entropies(fork):
    entropy = torch.tensor([0.1, 0.5, 1.2, 0.05, 0.9])
    return [entropy[fork.has_high_entropy(entropy, entropy > 0)]]


def entropy_coefs(fork):
    coefs = [[0.0, 0.0]]
    for entropy in (0.15, 0.18, 0.25):
        coefs.append(fork.next_entropy_coefs(coefs[-1][0], entropy))
    return double(coefs[1:]).T


def turn_rewards(fork):
    """Return the turn advantages of two rollouts for one prompt."""
    rollouts = []
    for sample, rewards in enumerate(([1.0, 0.0], [0.5, 0.5])):
        turns = [TurnRecord(i, num_tokens=1, extra={"reward": reward}) for i, reward in enumerate(rewards)]
        sequence = SampledSequence(sampled([0, 1]), 0, RolloutId(0, sample), "stop")
        rollouts.append(Rollout((sequence,), "stop", EpisodeRecord(turns)))
    return [fork.turn_advantages(rollouts)]


WORKED = {
    "Dual clip": lambda fork: [loss_of(fork, [math.log(4)], advantage)[0] for advantage in (1.0, -1.0)],
    "GDPO": lambda fork: [advantages_of_two_rewards(fork)],
    "SAPO": lambda fork: [loss_of(fork, [LOG_2], advantage)[0] for advantage in (1.0, -1.0)],
    "GMPO": lambda fork: [loss_of(fork, [0.1, 0.7], advantage)[0][:1] for advantage in (1.0, -1.0)],
    "DPPO": lambda fork: [
        loss_of(fork, [LOG_2, -LOG_2, LOG_2], advantage, old=[0.3, 0.6, 0.01])[0] for advantage in (1.0, -1.0)
    ],
    "VESPO": lambda fork: [loss_of(fork, [0.1, 0.3], advantage)[1][:1].abs() for advantage in (1.0, -1.0)],
    "OPO": lambda fork: [advantages_of_group(fork, [1.0, 0.0, 0.5, 1.0], advantage_norm="none")],
    "MaxRL": lambda fork: [advantages_of_group(fork, [1.0, 0.0, 0.0, 0.0])],
    "Length penalty": lambda fork: [
        advantages_of_group(fork, [1.0, 0.0, 0.0, 1.0], baseline="none", advantage_norm="none")
        - double([1.0, 0.0, 0.0, 1.0])
    ],
    "Off-policy sequence mask": lambda fork: [
        torch.cat([loss_of(fork, [0.0, 0.0], -1.0, drift=drift)[0][:1] for drift in (0.6, 0.4)])
    ],
    "Clip-cov": clip_cov,
    "KL-cov": kl_cov,
    "80/20": high_entropies,
    "Adaptive entropy": entropy_coefs,
    "Turn rewards": turn_rewards,
}


def worked_numbers(rank, name, script):
    """Return the numbers as texts, in one list per example."""
    examples = WORKED[name](load_script(script))
    return [[f"{number:.6f}".rstrip("0").rstrip(".") for number in (row + 0.0).tolist()] for row in examples]


@pytest.mark.parametrize("name", WORKED)
def test_an_objective_gives_the_worked_numbers_of_its_item(one_rank, tmp_path, name):
    (examples,) = one_rank.run(worked_numbers, name, objective_fork(tmp_path, name))
    assert [", ".join(numbers) for numbers in examples] == re.findall(r"`(-?\d[^`]*)`", ITEMS[name])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_an_objective_is_a_patch_that_git_applies_and_an_item_of_the_page(tmp_path, patch):
    """After changing the script, apply the diff with `patch train_grpo.py`, and save `git diff train_grpo.py`."""
    shutil.copy(ROOT / "train_grpo.py", tmp_path)
    subprocess.run(["git", "apply", "--check", patch], cwd=tmp_path, check=True)
    assert f"(objectives/{patch.name})" in "".join(ITEMS.values())
    assert ITEMS.keys() == WORKED.keys()
