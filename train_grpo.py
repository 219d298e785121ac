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

To try something else, copy this file and change `rollout`, `branch_advantages`, `token_advantages`,
`rollout_weights`, `can_skip` or `token_loss`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from minirl.episodes.episode import Episode, Turns
from minirl.objective.advantages import (
    group_advantages,
    returns_to_go,
    weighted_scores,
    whiten,
)
from minirl.objective.kl import kl_penalty
from minirl.objective.loss_weights import loss_weights
from minirl.objective.losses import (
    cispo_loss,
    clipped_policy_loss,
    importance_ratio,
    importance_weights,
    sequence_sums,
)
from minirl.ranks.process_group import rank
from minirl.report.metrics import StepMetrics, add_clip, add_generation, add_skipped, add_tokens
from minirl.report.progress_bar import show_progress
from minirl.run.checks import check_grpo
from minirl.run.config import RunConfig
from minirl.run.dry_run import dry_run
from minirl.run.flags import run_script
from minirl.run.run import Run
from minirl.run.setup import Setup
from minirl.training.assignment import shuffled_minibatches
from minirl.training.batch import Batch, RolloutTable, exchange, gather_to_table
from minirl.training.distillation import score_with_teacher
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
    dynamic_sampling: bool = False  # replace groups of equal rewards by groups of new prompts
    baseline: Baseline = "mean"  # of a group; greedy: the reward of one more rollout
    advantage_norm: AdvantageNorm = "group_std"
    """the std that divides advantages; whiten: shift and scale them to mean 0 and variance 1 over the step's tokens"""
    kl_reward_coef: float = 0.0
    """weight of the KL term (k1) in the reward: of a completion before subtracting the baseline, without one of each
    token"""
    kl_coef: float = 0.0  # weight of the KL term (k3) in the loss; without KL terms no reference is loaded
    teacher: str | None = None
    """Hugging Face folder or hub id of a model with the same tokens, to be imitated on the policy's own completions"""
    teacher_kl: Literal["sampled", "reverse", "forward"] = "sampled"
    """sampled: the reverse KL at sampled tokens, as advantages; else a loss over the vocabulary"""
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
    def has_token_kl(self) -> bool:
        """True if the KL term in the reward is of each token, as no baseline is subtracted from their sum."""
        return self.baseline == "none"

    @property
    def is_rewarded(self) -> bool:
        """True if rewards make advantages."""
        return self.teacher is None or self.teacher_coef is not None

    @property
    def teacher_weight(self) -> float:
        """The factor of the KL to the teacher."""
        return 1.0 if self.teacher_coef is None else self.teacher_coef

    @property
    def has_kl_loss(self) -> bool:
        """True if the loss has the KL to the teacher, over the vocabulary."""
        return self.teacher is not None and self.teacher_kl != "sampled"


def rollout(episode: Episode) -> Turns:
    """Write one rollout: yield turns, which the engine samples together with those of all other rollouts.

    For another turn: turn = yield episode.generate(); yield episode.generate(after=reply_to(turn.text)).
    """
    yield episode.generate()


def branch_advantages(
    config: Config,
    scores: Tensor,
    rewards: Tensor,
    greedy_rewards: Tensor,
    reward_weights: Tensor,
    table: RolloutTable,
) -> Tensor:
    """Advantages fp64 [P, G, B] of the branches of all rollouts.

    scores [P, G, B]: the weighted sums of rewards, less a KL term per completion. The other arguments are those of
    `token_advantages`.
    """
    if not config.is_rewarded:
        return torch.zeros_like(scores)
    greedy_scores = weighted_scores(greedy_rewards, reward_weights)
    baseline = greedy_scores[:, 0] if config.baseline == "greedy" else config.baseline
    return group_advantages(scores, baseline=baseline, norm=config.advantage_norm)


def token_advantages(
    config: Config,
    rewards: Tensor,
    greedy_rewards: Tensor,
    reward_weights: Tensor,
    table: RolloutTable,
    batch: Batch,
) -> Tensor:
    """Advantages fp64 [T] of the tokens of this rank's batch, 0 outside its loss mask. Host tensors.

    rewards [P, G, B, K] of branch b of each rollout, greedy_rewards [P, 0 or 1, K] and reward_weights [K], all fp64,
    are the same on every rank; a reward that does not apply is NaN. For each sequence of the batch,
    table.episode[batch.table_index] is its rollout of the P x G, and table.branch[batch.table_index] its branch. A KL
    term per token counts up to the end of its branch. All ranks call it (collective).
    """
    episode, branch = table.episode[batch.table_index], table.branch[batch.table_index]
    scores = weighted_scores(rewards, reward_weights)
    logprobs = batch.sample_logprobs if batch.old_logprobs is None else batch.old_logprobs
    token_kl = None
    if config.kl_reward_coef:
        token_kl = kl_penalty(logprobs, batch.ref_logprobs, "k1")
    if token_kl is not None and not config.has_token_kl:
        kl = gather_to_table(batch, sequence_sums(token_kl, batch.lengths), len(table.episode))
        scores = scores - config.kl_reward_coef * table.sum_branches(kl).view(*scores.shape[:2], 1)

    advantages = branch_advantages(config, scores, rewards, greedy_rewards, reward_weights, table)
    stream = batch.spread(advantages.flatten(0, 1)[episode, branch])

    if token_kl is not None and config.has_token_kl:
        mask = batch.loss_mask
        kl_to_go = returns_to_go(token_kl[mask].double(), batch.num_loss_tokens)
        stream[mask] -= config.kl_reward_coef * kl_to_go
    if config.advantage_norm == "whiten":
        has_score = ~scores.isnan().flatten(0, 1)
        mask = batch.spread(has_score[episode, branch])
        stream[mask] = whiten(stream[mask])

    if config.teacher and not config.has_kl_loss:
        # A token's term depends on no baseline and no later token.
        mask = batch.loss_mask
        teacher_kl = kl_penalty(logprobs, batch.teacher_logprobs, "k1")
        stream[mask] -= config.teacher_weight * teacher_kl[mask].double()
    return stream


def rollout_weights(config: Config, table: RolloutTable, scores: Tensor, max_new_tokens: int) -> Tensor:
    """Weights fp64 [N] in the loss of the tokens of each of the N branches in an optimizer step.

    scores [N] of the branches: NaN where no reward applies to the rollout, which the loss then leaves out unless a
    teacher judges it.
    """
    keep = ~scores.isnan() | (config.teacher is not None)
    keep &= ~(table.is_truncated & config.drop_truncated)
    return loss_weights(
        table.num_loss_tokens,
        norm=config.loss_norm,
        constant=max_new_tokens,
        keep=keep,
        episode=table.episode,
    )


def can_skip(
    config: Config,
    rewards: Tensor,
    greedy_rewards: Tensor,
    reward_weights: Tensor,
    table: RolloutTable,
    weights: Tensor,
) -> Tensor:
    """Return bool [N]: the branches that teach this script's loss nothing; no rank computes them.

    They have no weight in the loss (weights [N], from `rollout_weights`), or an advantage of 0 and no term that teaches
    without one. If you add such a term, return False for its branches, or for all. Each step computes one of the
    branches all the same, and refuses a gradient there. The other arguments are those of `token_advantages`.
    """
    # These are of all tokens of the step.
    if config.advantage_norm == "whiten" or config.kl_reward_coef:
        return torch.zeros(len(weights), dtype=torch.bool)
    if config.kl_coef or config.entropy_coef or config.teacher:
        return weights == 0
    scores = weighted_scores(rewards, reward_weights)
    advantages = branch_advantages(config, scores, rewards, greedy_rewards, reward_weights, table)
    return (weights == 0) | (advantages.flatten(0, 1)[table.episode, table.branch] == 0)


def token_loss(config: Config, micro: Batch, new: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Loss [T] of each token of a microbatch, and its importance ratio [T]; `main` weights and sums the loss.

    new [T]: logprobs under the policy, with gradient; entropy [T]. micro has advantages, old and sampled logprobs, and
    with a KL term those of the reference; with --teacher-kl reverse or forward `teacher_kl`, with gradient.
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
    if config.has_kl_loss:
        loss = loss + config.teacher_weight * micro.teacher_kl
    return loss, ratio


def main(config: Config) -> int:
    """Train; returns the exit code. Every rank runs it."""
    check_grpo(config)
    if config.dry_run:
        return dry_run(config)
    setup = Setup(config, name="grpo")
    policy, optimizer = setup.load_trainable(setup.model_config, setup.model_folder)
    engine = setup.make_engine(policy)
    frozen = []
    if config.has_reference:
        frozen.append(setup.load_reference())
    teacher = None
    if config.teacher:
        teacher = setup.load_teacher()
        frozen.append(teacher)
    collector = setup.make_collector(
        engine,
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
        add_generation(metrics, collector.take_count("sampled_tokens"), engine.take_stats())

        metrics.begin("score")
        table = groups.table
        scores = weighted_scores(groups.rewards, run.reward_weights)
        branch_scores = weighted_scores(table.branch_rewards, run.reward_weights)
        weights = torch.cat(
            [
                rollout_weights(config, table.select(i), branch_scores[i], run.max_new_tokens)
                for i in run.minibatches(table)
            ]
        )
        rewards = (groups.branch_rewards, groups.greedy_rewards, run.reward_weights)
        is_skipped = can_skip(config, *rewards, table, weights)
        plan = run.plan_updates(table, is_skipped)
        add_skipped(metrics, table.num_loss_tokens, plan.rank_of)
        batch = exchange(groups.rewarded.rollouts, table, plan.rank_of).to(run.device)
        minibatches = plan.of_rank(rank())
        batch = run.score(batch, minibatches, policy, frozen)  # advantages may have a KL term
        batch = batch.to(torch.device("cpu"))
        advantages = token_advantages(config, *rewards, table, batch)
        batch = batch.replace(
            advantages=advantages.float(),
            loss_weights=batch.spread(weights[batch.table_index]).float(),
        )

        metrics.begin("report")  # before the update, which may be refused
        run.log_rollouts(step, groups.rewarded, table, batch)
        batch = batch.to(run.device)

        metrics.begin("update")
        sampled_version: int | None = progress.update
        for minibatch in shuffled_minibatches(minibatches, config.num_epochs, seed=f"{config.seed} {step}"):
            for i, sequences in enumerate(show_progress("update", minibatch)):
                micro = batch.select(sequences)
                if teacher is not None and config.has_kl_loss:
                    new, entropy, kl = score_with_teacher(
                        policy.module,
                        micro,
                        teacher.model,
                        is_forward=config.teacher_kl == "forward",
                    )
                    micro = micro.replace(teacher_kl=kl)
                else:
                    new, entropy = score_batch(policy.module, micro)
                if micro.old_logprobs is None:  # one update a step: the old policy is this one
                    micro = micro.replace(old_logprobs=new.detach())
                loss, ratio = token_loss(config, micro, new, entropy)
                objective = (micro.loss_weights * loss).sum()
                refuse_gradient(objective, new, entropy, micro, is_skipped)
                policy.backward(objective, is_last=i == len(minibatch) - 1)
                metrics.add_total("policy/loss", objective.detach() / config.updates_per_step)
                add_tokens(metrics, micro, new, ratio, entropy, sampled_version=sampled_version)
                add_clip(
                    metrics,
                    micro,
                    ratio,
                    clip_low=config.clip_low,
                    clip_high=config.clip_high,
                    is_weight=config.policy_loss == "cispo",
                )
            metrics.refuse_nonfinite(update=progress.update)
            lr = run.learning_rate(config.peak_lr)
            grad_norm = policy.step(optimizer, lr=lr, max_grad_norm=config.max_grad_norm)
            metrics.add("optim/lr", lr)
            metrics.add("optim/grad_norm", grad_norm)
            progress.update += 1
            if grad_norm != 0:  # without a gradient, the weights are the same
                sampled_version = None

        del batch  # a teacher's states need not stay for the next step
        metrics.begin("report")
        run.finish_step(step, metrics, groups, scores)

    return run.close()


if __name__ == "__main__":
    run_script(main, Config, description=__doc__ or "", presets=ALGORITHMS)
