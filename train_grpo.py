r"""The GRPO family: group-relative policy optimization of language models (arXiv:2402.03300).

    torchrun --standalone --nproc-per-node 2 train_grpo.py    # bundled model and task
    torchrun --nproc-per-node 8 train_grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --chat --task gsm8k
    python train_grpo.py --model DIR --data my.jsonl --reward my_reward.py:score --algorithm dapo

Each step generates group_size completions per prompt, rewards them, scores them under the reference model (if there is
a KL term) and updates the policy on the sum over tokens of

    loss_weight * (max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + kl_coef * KL),   r = exp(new - old)

The defaults differ from the paper, which `--algorithm grpo` reproduces: (1) the loss is the token mean over all
completions of an update (DAPO), not the mean of sequence means; (2) there is no KL term; (3) clip_high > clip_low.

To try something else, copy this file and change `rollout`, `advantages`, `token_advantages`, `rollout_loss_weights` or
`token_loss`.

Shapes: P prompts, G rollouts per prompt, K rewards; N sequences (rollout branches), T tokens in a batch or microbatch.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from minirl.episodes.episode import Episode
from minirl.episodes.step_groups import Groups
from minirl.report.metrics import StepMetrics, add_clip_metrics, add_token_metrics
from minirl.report.progress_bar import show_progress
from minirl.run.checks import check_grpo
from minirl.run.config import RunConfig
from minirl.run.flags import run_script
from minirl.run.run import Run
from minirl.run.setup import Setup
from minirl.training.advantages import group_advantages, returns_to_go, whiten
from minirl.training.assignment import shuffled_minibatches
from minirl.training.batch import Batch, gather_to_rollouts
from minirl.training.kl import kl_penalty
from minirl.training.losses import (
    cispo_loss,
    clipped_policy_loss,
    importance_ratio,
    importance_weights,
    loss_weights,
    sequence_sums,
)
from minirl.training.scoring import check_skipped_gradient, score_batch

MAX_REFILLS = 10  # rounds of replacement prompts per step; after that, zero-variance groups are kept


@dataclass(frozen=True)
class Config(RunConfig):
    """The flags of this script."""

    algorithm: str = "default"
    """[Objective] preset of several flags (see ALGORITHMS); command-line flags take precedence"""
    dynamic_sampling: bool = False  # replace groups with zero variance in the first reward, using new prompts
    baseline: Literal["mean", "leave_one_out", "greedy", "none"] = "mean"
    """baseline to subtract: the mean of the group, or of its other rewards, or an extra greedy completion's reward"""
    advantage_norm: Literal["group_std", "batch_std", "whiten", "none"] = "group_std"
    """std to divide advantages by, per group or per step; whiten: mean 0 and variance 1 over the step's tokens"""
    kl_reward_coef: float = 0.0
    """coefficient of the k1 KL penalty in the reward (per completion; per token with --baseline none); 0 disables"""
    kl_coef: float = 0.0  # coefficient of the k3 KL penalty in the loss; 0 disables
    teacher: str | None = None  # folder or Hub id of the on-policy distillation teacher (same token ids)
    teacher_coef: float | None = None
    """coefficient of the teacher KL term if the run also trains on rewards (default: distillation only, no rewards)"""
    policy_loss: Literal["clip", "cispo"] = "clip"  # PPO's clipped surrogate, or CISPO (keeps all gradients)
    ratio_level: Literal["token", "sequence_mean", "sequence_sum"] = "token"
    """importance ratio per token (PPO), or per sequence from the mean (GSPO) or sum (RLOO) of log ratios"""
    clip_high: float = 0.28

    @property
    def has_reference_model(self) -> bool:
        """Whether a KL penalty needs the initial model as its reference."""
        return bool(self.kl_coef or self.kl_reward_coef)

    @property
    def needs_policy_logprobs(self) -> bool:
        """Whether advantages include a KL term, which requires scoring the policy before the update."""
        return bool(self.kl_reward_coef or self.teacher)

    @property
    def trains_on_rewards(self) -> bool:
        """Whether advantages depend on rewards."""
        return self.teacher is None or self.teacher_coef is not None

    @property
    def has_token_kl_penalty(self) -> bool:
        """Whether the --kl-reward-coef penalty is per token; with a baseline, the penalty is per completion."""
        return self.baseline == "none"


async def rollout(episode: Episode) -> None:
    """Generate one rollout by requesting turns. The engine batches turns across all rollouts.

    For another turn: turn = await episode.generate(); await episode.generate(after=reply_to(turn.text)). May return
    rewards: a number, or a dict of numbers.
    """
    await episode.generate()


def advantages(config: Config, groups: Groups, scores: Tensor) -> Tensor:
    """Return the advantages of all rollouts, fp64 [P, G], the same on every rank.

    scores [P, G]: weighted sums of rewards, minus any KL penalty; NaN where no reward applies. groups.rewards [P, G, K]
    has the individual rewards.
    """
    if not config.trains_on_rewards:
        return torch.zeros_like(scores)
    baseline = groups.weighted_greedy_rewards[:, 0] if config.baseline == "greedy" else config.baseline
    return group_advantages(scores, baseline=baseline, norm=config.advantage_norm)


def token_advantages(config: Config, groups: Groups, batch: Batch) -> Tensor:
    """Return the tokens' advantages fp64 [T] on the host, 0 outside the loss mask (collective).

    batch.rollout_index [N] indexes flattened [P, G] tensors: the branches of a rollout share its advantage.
    """
    scores = groups.weighted_rewards
    mask = batch.loss_mask
    if config.kl_reward_coef and not config.has_token_kl_penalty:
        kl = kl_penalty(batch.policy_logprobs, batch.ref_logprobs, "k1")
        sums = gather_to_rollouts(batch, sequence_sums(kl, batch.lengths), scores.numel())
        scores = scores - config.kl_reward_coef * sums.view_as(scores)
    stream = batch.rollouts_to_tokens(advantages(config, groups, scores))
    if config.kl_reward_coef and config.has_token_kl_penalty:  # each token also gets the KL of later tokens
        kl = kl_penalty(batch.policy_logprobs, batch.ref_logprobs, "k1")
        kl_to_go = returns_to_go(kl[mask].double(), batch.num_loss_tokens)
        stream[mask] -= config.kl_reward_coef * kl_to_go
    if config.advantage_norm == "whiten":
        is_scored = batch.rollouts_to_tokens(~scores.isnan())
        stream[is_scored] = whiten(stream[is_scored])
    if config.teacher:
        # The reverse KL at sampled tokens, without a baseline or the KL of later tokens.
        kl = kl_penalty(batch.policy_logprobs, batch.teacher_logprobs, "k1")
        stream[mask] -= (1.0 if config.teacher_coef is None else config.teacher_coef) * kl[mask].double()
    return stream


def rollout_loss_weights(config: Config, groups: Groups, max_new_tokens: int) -> Tensor:
    """Return the loss weight fp64 [P, G] of each rollout's tokens in its optimizer step; 0 drops a rollout."""
    keep = ~groups.weighted_rewards.isnan() | (config.teacher is not None)  # a teacher scores all rollouts
    keep &= ~(groups.is_truncated & config.drop_truncated)
    return loss_weights(
        groups.num_loss_tokens,
        norm=config.loss_norm,
        constant=max_new_tokens,
        keep=keep,
        num_minibatches=config.minibatches_per_epoch,
    )


def token_loss(config: Config, micro: Batch, new: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Return a microbatch's token losses [T], to be weighted and summed by `main`, and its importance ratios [T].

    new [T]: the policy's logprobs, attached to the autograd graph. micro: the microbatch, including its advantages and
    the old, sampled and reference logprobs.
    """
    old = micro.old_logprobs
    ratio = importance_ratio(
        new, old, level=config.ratio_level, lengths=micro.lengths, loss_mask=micro.loss_mask
    )
    if config.policy_loss == "cispo":
        loss = cispo_loss(new, ratio, micro.advantages, clip_low=config.clip_low, clip_high=config.clip_high)
    else:
        loss = clipped_policy_loss(
            ratio, micro.advantages, clip_low=config.clip_low, clip_high=config.clip_high
        )
    loss = loss * importance_weights(
        old, micro.sample_logprobs, correction=config.importance_correction, lengths=micro.lengths
    )
    if config.kl_coef:
        loss = loss + config.kl_coef * kl_penalty(new, micro.ref_logprobs, "k3")
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    return loss, ratio


def main(config: Config) -> int:
    """Train on every rank and return the exit code."""
    check_grpo(config)
    if config.dry_run:
        from minirl.extras.dry_run import print_plan

        return print_plan(config)
    setup = Setup(config, name="grpo")
    policy = setup.load_model(setup.model_config, setup.model_folder)
    optimizer = policy.make_optimizer()
    frozen = setup.load_frozen(policy)  # the reference and the teacher, if any
    num_greedy = 1 if config.baseline == "greedy" else 0
    max_refills = MAX_REFILLS if config.dynamic_sampling else None
    collector = setup.make_collector(policy, rollout, num_greedy=num_greedy, max_refills=max_refills)
    run = Run(setup, {"policy": (policy, optimizer)}, collector)
    progress = run.progress

    for step in run.steps():
        metrics = StepMetrics(step)
        metrics.begin("generate")
        groups = collector.collect(config.prompts_per_step, weight_version=progress.update)

        metrics.begin("score")
        weights = rollout_loss_weights(config, groups, run.max_new_tokens)
        # If the loss has a gradient where advantages are 0, set `is_skipped` to None to train on all rollouts.
        is_skipped = skippable_rollouts(config, groups, weights)
        # This rank's sequences without the skipped rollouts, and their minibatches and microbatches.
        batch, minibatches = run.distribute(groups, metrics, is_skipped)
        # Add the logprobs that the loss needs: old policy, reference, teacher.
        batch = run.score(batch, minibatches, policy, frozen)
        batch = batch.replace(
            advantages=token_advantages(config, groups, batch).float(),
            loss_weights=batch.rollouts_to_tokens(weights).float(),
        )

        run.log_rollouts(step, groups, batch)  # before the update, which may raise an error
        batch = batch.to(run.device)

        metrics.begin("update")
        weight_version = progress.update
        for minibatch in shuffled_minibatches(minibatches, config.num_epochs, seed=f"{config.seed} {step}"):
            for i, sequences in enumerate(show_progress("update", minibatch)):
                micro = batch.select(sequences)
                new, entropy = score_batch(policy.module, micro)
                if micro.old_logprobs is None:  # with one update per step, the policy is unchanged
                    micro = micro.replace(old_logprobs=new.detach())
                loss, ratio = token_loss(config, micro, new, entropy)
                objective = (micro.loss_weights * loss).sum()
                check_skipped_gradient(objective, new, entropy, micro, is_skipped)
                policy.backward(objective, is_last=i == len(minibatch) - 1)
                metrics.add_total("policy/loss", objective / config.updates_per_step)
                add_token_metrics(metrics, micro, new, ratio, entropy, weight_version=weight_version)
                add_clip_metrics(
                    metrics,
                    micro,
                    ratio,
                    clip_low=config.clip_low,
                    clip_high=config.clip_high,
                    is_weight=config.policy_loss == "cispo",
                )
            lr = config.learning_rate(progress, config.peak_lr)
            grad_norm = policy.step(optimizer, lr=lr, max_grad_norm=config.max_grad_norm)
            metrics.add("optim/lr", lr)
            metrics.add("optim/grad_norm", grad_norm)
            progress.update += 1
            if grad_norm != 0:  # a zero gradient leaves the weights unchanged
                weight_version = progress.update

        run.finish_step(step, metrics, groups)

    return run.close()


def skippable_rollouts(config: Config, groups: Groups, weights: Tensor) -> Tensor:
    """Return a mask [P, G] of rollouts with zero gradient, which the update can skip to save time.

    A rollout's gradient is zero if its weight is 0 (weights [P, G], from `rollout_loss_weights`), or if its advantage
    is 0 and no other term of the loss has a gradient. Each step still runs the forward and backward pass
    on one skipped sequence; if that sequence has a nonzero gradient, `check_skipped_gradient` raises InputError.
    """
    if config.advantage_norm == "whiten" or config.kl_reward_coef:  # both depend on all tokens of the step
        return torch.zeros_like(weights, dtype=torch.bool)
    if config.kl_coef or config.entropy_coef or config.teacher:
        return weights == 0
    return (weights == 0) | (advantages(config, groups, groups.weighted_rewards) == 0)


ALGORITHMS: dict[str, dict[str, Any]] = {  # the fields of Config that each preset sets
    "default": {},
    "grpo": {"loss_norm": "sequence_mean", "clip_high": 0.2, "kl_coef": 0.04},
    "dr_grpo": {"advantage_norm": "none", "loss_norm": "constant", "clip_high": 0.2},
    "dapo": {"dynamic_sampling": True, "overlong_buffer": 0.2, "drop_truncated": True},
    "rloo": {
        "baseline": "leave_one_out",
        "advantage_norm": "none",
        "clip_high": 0.2,
        "kl_reward_coef": 0.05,
        "ratio_level": "sequence_sum",
        "loss_norm": "sequence_mean",
    },
    "reinforce++": {
        "baseline": "none",
        "advantage_norm": "whiten",
        "clip_high": 0.2,
        "kl_reward_coef": 0.01,
    },
    "reinforce++_baseline": {"advantage_norm": "whiten", "clip_high": 0.2},
    "remax": {"baseline": "greedy", "advantage_norm": "none", "group_size": 1},
    "gspo": {
        "ratio_level": "sequence_mean",
        "loss_norm": "sequence_mean",
        "num_minibatches": 4,
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
}

if __name__ == "__main__":
    run_script(main, Config, description=__doc__ or "", presets=ALGORITHMS)
