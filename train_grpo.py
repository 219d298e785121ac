r"""GRPO and its family: group-relative policy optimization of a language model, arXiv:2402.03300.

    torchrun --standalone --nproc-per-node 2 train_grpo.py    # embedded model and task
    torchrun --nproc-per-node 8 train_grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --chat \
        --task gsm8k --data train.jsonl --eval-data test.jsonl
    python train_grpo.py --model DIR --data my.jsonl --reward my_reward.py:score --algorithm dapo

Each step: generate group_size completions of each prompt, reward them, score them under the reference (if
there is a KL term), update on the sum over tokens of

    loss_weight * (max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + kl_coef * KL),   r = exp(new - old)

Where this departs from the paper (`--algorithm grpo`): (1) the token mean over all completions of an update
replaces the mean of sequence means (DAPO); (2) no KL term by default; (3) clip_high > clip_low.

To try something else, copy this file and change `rollout`, `advantages`, `token_advantages`, `rollout_weights`,
`can_skip` or `token_loss`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from minirl.episodes.episode import Episode
from minirl.episodes.step_groups import Groups
from minirl.report.metrics import StepMetrics, add_clip, add_tokens
from minirl.report.progress_bar import show_progress
from minirl.run.checks import check_grpo
from minirl.run.config import RunConfig
from minirl.run.flags import run_script
from minirl.run.run import Run
from minirl.run.setup import Setup
from minirl.training.advantages import (
    group_advantages,
    returns_to_go,
    whiten,
)
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
from minirl.training.scoring import refuse_gradient, score_batch

ALGORITHMS: dict[str, dict[str, Any]] = {  # the fields of Config that each sets
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
MAX_REFILLS = 10  # most rounds of new prompts in a step; then groups of equal rewards fill it
Algorithm = Annotated[str, tyro.conf.arg(metavar="{" + ",".join(ALGORITHMS) + "}")]


Baseline = Literal["mean", "leave_one_out", "greedy", "none"]
AdvantageNorm = Literal["group_std", "batch_std", "whiten", "none"]
RatioLevel = Literal["token", "sequence_mean", "sequence_sum"]


@dataclass(frozen=True)
class Config(RunConfig):
    """Objective"""

    algorithm: Algorithm = "default"  # a preset of the flags below, see ALGORITHMS; flags given with it win
    dynamic_sampling: bool = False  # replace groups of equal first rewards by groups of new prompts
    baseline: Baseline = "mean"  # of a group; greedy: the reward of one more rollout
    advantage_norm: AdvantageNorm = "group_std"
    """the std that divides advantages; whiten: shift and scale them to mean 0 and variance 1 over the step's tokens"""
    kl_reward_coef: float = 0.0
    """weight of the KL term (k1) in the reward: of a completion before subtracting the baseline, without one of each
    token"""
    kl_coef: float = 0.0  # weight of the KL term (k3) in the loss; without KL terms no reference is loaded
    teacher: str | None = None
    """Hugging Face folder or hub id of a model with the same tokens, to be imitated on the policy's own completions"""
    teacher_coef: float | None = None
    """weight of the KL to the teacher beside the rewards; none: only the teacher teaches, and rewards are logged"""
    policy_loss: Literal["clip", "cispo"] = "clip"  # PPO's clipped surrogate, or CISPO's: all tokens learn
    ratio_level: RatioLevel = "token"  # token: PPO; sequence_mean: GSPO; sequence_sum: RLOO
    clip_high: float = 0.28  # ratios above 1 + clip_high lose their gradient if the advantage is positive

    @property
    def has_reference(self) -> bool:
        """True if a KL term needs the initial model."""
        return bool(self.kl_coef or self.kl_reward_coef)

    @property
    def needs_policy_logprobs(self) -> bool:
        """Whether a KL term is part of the advantages: in the loss, the update itself computes the logprobs."""
        return bool(self.kl_reward_coef or self.teacher)

    @property
    def is_rewarded(self) -> bool:
        """True if rewards make advantages."""
        return self.teacher is None or self.teacher_coef is not None

    @property
    def teacher_weight(self) -> float:
        """The factor of the KL to the teacher."""
        return 1.0 if self.teacher_coef is None else self.teacher_coef


async def rollout(episode: Episode) -> None:
    """Write one rollout: ask for turns, which the engine samples together with those of all other rollouts.

    For another turn: turn = await episode.generate(); await episode.generate(after=reply_to(turn.text)). It may return
    rewards: a number, or a dict of them.
    """
    await episode.generate()


def advantages(config: Config, groups: Groups, scores: Tensor) -> Tensor:
    """Advantages fp64 [P, G] of all rollouts, the same on every rank.

    scores [P, G]: the weighted sums of rewards, less a KL term per completion; NaN where no reward applies. groups also
    has each reward by itself, [P, G, K], and the rollouts' lengths.
    """
    if not config.is_rewarded:
        return torch.zeros_like(scores)
    baseline = groups.greedy_scores[:, 0] if config.baseline == "greedy" else config.baseline
    return group_advantages(scores, baseline=baseline, norm=config.advantage_norm)


def token_advantages(config: Config, groups: Groups, batch: Batch) -> Tensor:
    """Advantages fp64 [T] of the tokens of this rank's batch, 0 outside its loss mask. Host tensors.

    batch.rollout [N]: the rollout of each sequence, as an index into flat tensors [P * G]; the branches of a rollout
    share its advantage. A KL term per token counts up to the end of its sequence. All ranks call it (collective).
    """
    scores = groups.scores
    logprobs = batch.sample_logprobs if batch.old_logprobs is None else batch.old_logprobs
    has_token_kl = config.baseline == "none"  # no baseline is subtracted from the sum over a completion
    token_kl = None
    if config.kl_reward_coef:
        token_kl = kl_penalty(logprobs, batch.ref_logprobs, "k1")
    if token_kl is not None and not has_token_kl:
        kl = gather_to_rollouts(batch, sequence_sums(token_kl, batch.lengths), scores.numel())
        scores = scores - config.kl_reward_coef * kl.view_as(scores)

    stream = batch.spread_rollouts(advantages(config, groups, scores))

    if token_kl is not None and has_token_kl:
        mask = batch.loss_mask
        kl_to_go = returns_to_go(token_kl[mask].double(), batch.num_loss_tokens)
        stream[mask] -= config.kl_reward_coef * kl_to_go
    if config.advantage_norm == "whiten":
        mask = batch.spread_rollouts(~scores.isnan())
        stream[mask] = whiten(stream[mask])

    if config.teacher:
        # The reverse KL at sampled tokens. A token's term depends on no baseline and no later token.
        mask = batch.loss_mask
        teacher_kl = kl_penalty(logprobs, batch.teacher_logprobs, "k1")
        stream[mask] -= config.teacher_weight * teacher_kl[mask].double()
    return stream


def rollout_weights(config: Config, groups: Groups, max_new_tokens: int) -> Tensor:
    """Weights fp64 [P, G] of the rollouts' tokens in the loss of their optimizer step; 0: the loss leaves it out.

    That is a rollout to which no reward applies, unless a teacher judges it.
    """
    keep = ~groups.scores.isnan() | (config.teacher is not None)
    keep &= ~(groups.is_truncated & config.drop_truncated)
    return loss_weights(
        groups.num_loss_tokens,
        norm=config.loss_norm,
        constant=max_new_tokens,
        keep=keep,
        num_minibatches=config.minibatches_per_epoch,
    )


def can_skip(config: Config, groups: Groups, weights: Tensor) -> Tensor:
    """Return bool [P, G]: the rollouts that teach this script's loss nothing; no rank computes them, but for one.

    They have no weight in the loss (weights [P, G], from `rollout_weights`), or an advantage of 0 and no term that
    teaches without one. If you add such a term, return False for its rollouts, or for all. Each step computes a
    sequence of one of them all the same, and refuses a gradient there.
    """
    # These are of all tokens of the step.
    if config.advantage_norm == "whiten" or config.kl_reward_coef:
        return torch.zeros_like(weights, dtype=torch.bool)
    if config.kl_coef or config.entropy_coef or config.teacher:
        return weights == 0
    return (weights == 0) | (advantages(config, groups, groups.scores) == 0)


def token_loss(config: Config, micro: Batch, new: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Loss [T] of each token of a microbatch, and its importance ratio [T]; `main` weights and sums the loss.

    new [T]: logprobs under the policy, with gradient; entropy [T]. micro has advantages, old and sampled logprobs, and
    with a KL term those of the reference.
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
    if config.importance_correction != "none":
        loss = loss * importance_weights(
            old,
            micro.sample_logprobs,
            correction=config.importance_correction,
            lengths=micro.lengths,
        )
    if config.kl_coef:
        loss = loss + config.kl_coef * kl_penalty(new, micro.ref_logprobs, "k3")
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    return loss, ratio


def main(config: Config) -> int:
    """Train; returns the exit code. Every rank runs it."""
    check_grpo(config)
    if config.dry_run:
        from minirl.extras.dry_run import print_plan

        return print_plan(config)
    setup = Setup(config, name="grpo")
    policy = setup.load_model(setup.model_config, setup.model_folder)
    optimizer = policy.make_optimizer()
    frozen = setup.load_frozen(policy)  # the reference and the teacher, if there are any
    collector = setup.make_collector(
        policy,
        rollout,
        num_greedy=1 if config.baseline == "greedy" else 0,
        max_refills=MAX_REFILLS if config.dynamic_sampling else None,
    )
    run = Run(setup, {"policy": (policy, optimizer)}, collector)
    progress = run.progress

    for step in run.steps():
        metrics = StepMetrics(step)
        metrics.begin("generate")
        groups = collector.collect(config.prompts_per_step, weight_version=progress.update)

        metrics.begin("score")
        weights = rollout_weights(config, groups, run.max_new_tokens)
        is_skipped = can_skip(config, groups, weights)
        # This rank's share of the others, and which of it each minibatch has, in which microbatch.
        batch, minibatches = run.distribute(groups, metrics, is_skipped)
        # Adds the logprobs that the loss needs: of the old policy, the reference, the teacher.
        batch = run.score(batch, minibatches, policy, frozen)
        batch = batch.replace(
            advantages=token_advantages(config, groups, batch).float(),
            loss_weights=batch.spread_rollouts(weights).float(),
        )

        run.log_rollouts(step, groups, batch)  # before the update, which may be refused
        batch = batch.to(run.device)

        metrics.begin("update")
        weight_version = progress.update
        for minibatch in shuffled_minibatches(minibatches, config.num_epochs, seed=f"{config.seed} {step}"):
            for i, sequences in enumerate(show_progress("update", minibatch)):
                micro = batch.select(sequences)
                new, entropy = score_batch(policy.module, micro)
                if micro.old_logprobs is None:  # one update a step: the old policy is this one
                    micro = micro.replace(old_logprobs=new.detach())
                loss, ratio = token_loss(config, micro, new, entropy)
                objective = (micro.loss_weights * loss).sum()
                refuse_gradient(objective, new, entropy, micro, is_skipped)
                policy.backward(objective, is_last=i == len(minibatch) - 1)
                metrics.add_total("policy/loss", objective / config.updates_per_step)
                add_tokens(metrics, micro, new, ratio, entropy, weight_version=weight_version)
                add_clip(
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
            if grad_norm != 0:  # without a gradient, the weights are the same
                weight_version = progress.update

        run.finish_step(step, metrics, groups)

    return run.close()


if __name__ == "__main__":
    run_script(main, Config, description=__doc__ or "", presets=ALGORITHMS)
