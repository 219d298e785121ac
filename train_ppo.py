r"""PPO with a value model (arXiv:1707.06347), as applied to language models (arXiv:2203.02155).

    torchrun --standalone --nproc-per-node 2 train_ppo.py     # bundled model and task
    torchrun --nproc-per-node 8 train_ppo.py --model Qwen/Qwen2.5-1.5B-Instruct --chat --task gsm8k
    python train_ppo.py --model DIR --data my.jsonl --reward-model RM_DIR --value-model RM_DIR \
        --kl-reward-coef 0.05

Each step generates completions, rewards them, scores them under the reference (if there is a KL term) and the value
model, and updates both models on sums over tokens of

    loss_weight * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),   r = exp(new - old)
    loss_weight * max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2) / 2

A is the generalised advantage estimate, whitened over the step's tokens. R is the advantage estimate before whitening,
plus V_old. A token's reward is -kl_reward_coef * (old - ref); the last token of each branch also gets the rollout's
reward. The policy and the value model share no weights.

To try something else, copy this file and change `rollout`, `advantages_and_returns`, `rollout_loss_weights` or
`token_loss`.

Shapes: P prompts per step, G rollouts per prompt; N sequences (rollout branches), T tokens and M sampled tokens in this
rank's batch or in a microbatch.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minirl.data.tokenizer import Tokenizer
from minirl.episodes.episode import Episode
from minirl.episodes.step_groups import Groups
from minirl.errors import refuse
from minirl.model.config import ModelConfig
from minirl.model.families import read_config
from minirl.report.metrics import StepMetrics, add_clip_metrics, add_token_metrics
from minirl.report.progress_bar import show_progress
from minirl.run.checks import check_shared_flags
from minirl.run.config import RunConfig, model_folder_from_config
from minirl.run.flags import run_script
from minirl.run.run import Run
from minirl.run.setup import Setup
from minirl.training.advantages import explained_variance, gae, token_rewards, whiten
from minirl.training.assignment import shuffled_minibatches
from minirl.training.batch import Batch, gather_to_rollouts
from minirl.training.kl import kl_penalty
from minirl.training.losses import (
    clipped_policy_loss,
    importance_ratio,
    importance_weights,
    loss_weights,
    sequence_sums,
    value_loss,
)
from minirl.training.scoring import predict_values, score_batch


@dataclass(frozen=True)
class Config(RunConfig):
    """The flags of this script."""

    prompts_per_step: int = 128  # number of prompts per step, across all ranks
    group_size: int = 1  # number of completions per prompt
    value_model: str | None = None
    """[Objective] folder or Hub id to initialize the value model from; a scalar head is optional (default: the policy)
    """
    value_lr: float | None = None
    """peak learning rate of the value model (default: 1e-5; 1e-3 for the bundled model)"""
    value_warmup_steps: int = 0  # number of initial steps that update only the value model
    value_clip: float = 0.2
    """clip range of values: values farther than this from the old values get no gradient; 0 disables clipping"""
    kl_reward_coef: float = 0.0  # coefficient of the k1 KL penalty in each token's reward; 0 disables
    gamma: float = 1.0  # discount per token
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    bootstrap_truncated: bool = False
    """bootstrap completions truncated at --max-new-tokens from the value of their last state, not from 0"""

    num_value_models = 1

    @property
    def has_reference_model(self) -> bool:
        """Whether the KL penalty needs the initial model as its reference."""
        return bool(self.kl_reward_coef)

    @property
    def value_peak_lr(self) -> float:
        """Peak learning rate of the value model: `value_lr`, or the model's default."""
        return self.value_lr or (1e-3 if self.uses_bundled_model else 1e-5)


async def rollout(episode: Episode) -> None:
    """Generate one rollout by requesting turns. The engine batches turns across all rollouts.

    For another turn: turn = await episode.generate(); await episode.generate(after=reply_to(turn.text)). May return
    rewards: a number, or a dict of numbers.
    """
    await episode.generate()


def kl_to_reference(batch: Batch) -> Tensor:
    """Return the k1 estimate of the KL divergence from the reference at each token [T]; 0 without a reference."""
    if batch.ref_logprobs is None:
        return torch.zeros_like(batch.policy_logprobs)
    return kl_penalty(batch.policy_logprobs, batch.ref_logprobs, "k1")


def advantages_and_returns(
    config: Config, scores: Tensor, kl: Tensor, end_values: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns fp64 [M] of sampled tokens, on the host (collective).

    scores fp64 [P, G]: NaN where no reward applies; a sequence's last sampled token gets its rollout's score.
    kl [T]: old - ref logprobs. end_values [N]: the value of the state after each sequence's last token.

    Estimates propagate from sampled token to sampled token and skip appended tokens, as in verl.
    """
    old_values = batch.values[batch.loss_mask].double()
    sequence_scores = scores.flatten()[batch.rollout_index]
    rewards = token_rewards(
        sequence_scores.nan_to_num(0.0),
        kl[batch.loss_mask].double(),
        batch.num_loss_tokens,
        kl_coef=config.kl_reward_coef,
    )
    is_bootstrapped = batch.is_truncated & config.bootstrap_truncated
    estimates = gae(
        rewards,
        old_values,
        batch.num_loss_tokens,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        bootstrap=torch.where(is_bootstrapped, end_values.double(), 0.0),
    )
    advantages = torch.zeros_like(estimates)
    has_score = ~sequence_scores.isnan().repeat_interleave(batch.num_loss_tokens)
    advantages[has_score] = whiten(estimates[has_score])
    return advantages, estimates + old_values


def rollout_loss_weights(config: Config, groups: Groups, max_new_tokens: int) -> Tensor:
    """Return the loss weight fp64 [P, G] of each rollout's tokens in its optimizer step; 0 drops a rollout."""
    keep = ~groups.weighted_rewards.isnan() & ~(groups.is_truncated & config.drop_truncated)
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
    the old and sampled logprobs.
    """
    old = micro.old_logprobs
    ratio = importance_ratio(new, old, lengths=micro.lengths, loss_mask=micro.loss_mask)
    loss = clipped_policy_loss(ratio, micro.advantages, clip_low=config.clip_low, clip_high=config.clip_high)
    loss = loss * importance_weights(
        old, micro.sample_logprobs, correction=config.importance_correction, lengths=micro.lengths
    )
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    return loss, ratio


def main(config: Config) -> int:
    """Train on every rank and return the exit code."""
    check_shared_flags(config)
    if config.dry_run:
        from minirl.extras.dry_run import print_plan

        return print_plan(config)
    setup = Setup(config, name="ppo")
    policy = setup.load_model(setup.model_config, setup.model_folder)
    optimizer = policy.make_optimizer()
    value_config, value_folder = value_model_source(config, setup)
    value = setup.load_model(value_config, value_folder, base=policy)
    value_optimizer = value.make_optimizer()
    frozen = [setup.frozen_model(value, predict_values, ["values", "end_values"]), *setup.load_frozen(policy)]
    collector = setup.make_collector(policy, rollout)
    models = {"policy": (policy, optimizer), "value": (value, value_optimizer)}
    run = Run(setup, models, collector)
    progress = run.progress

    for step in run.steps():
        metrics = StepMetrics(step)
        metrics.begin("generate")
        groups = collector.collect(config.prompts_per_step, weight_version=progress.update)

        metrics.begin("score")
        # This rank's sequences, and their minibatches and microbatches.
        batch, minibatches = run.distribute(groups, metrics)
        # Add the values, and the logprobs of the old policy and the reference.
        batch = run.score(batch, minibatches, policy, frozen)
        kl = kl_to_reference(batch)
        end_values = batch.end_values[batch.last_token_index]
        advantages, returns = advantages_and_returns(config, groups.weighted_rewards, kl, end_values, batch)
        add_value_metrics(metrics, groups, batch, kl, returns)
        weights = rollout_loss_weights(config, groups, run.max_new_tokens)
        batch = batch.replace(
            advantages=batch.scatter_to_tokens(advantages.float()),
            returns=batch.scatter_to_tokens(returns.float()),
            loss_weights=batch.rollouts_to_tokens(weights).float(),
        )

        run.log_rollouts(step, groups, batch)  # before the update, which may raise an error
        batch = batch.to(run.device)

        metrics.begin("update")
        trains_policy = step > config.value_warmup_steps
        for minibatch in shuffled_minibatches(minibatches, config.num_epochs, seed=f"{config.seed} {step}"):
            for i, sequences in enumerate(show_progress("update", minibatch)):
                micro = batch.select(sequences)
                is_last = i == len(minibatch) - 1
                values, _ = predict_values(value.module, micro)
                loss = value_loss(values, micro.values, micro.returns, clip=config.value_clip)
                objective = (micro.loss_weights * loss).sum()
                value.backward(objective, is_last=is_last)
                metrics.add_total("value/loss", objective / config.updates_per_step)
                if trains_policy:
                    new, entropy = score_batch(policy.module, micro)
                    if micro.old_logprobs is None:  # with one update per step, the policy is unchanged
                        micro = micro.replace(old_logprobs=new.detach())
                    loss, ratio = token_loss(config, micro, new, entropy)
                    objective = (micro.loss_weights * loss).sum()
                    policy.backward(objective, is_last=is_last)
                    metrics.add_total("policy/loss", objective / config.updates_per_step)
                    add_token_metrics(metrics, micro, new, ratio, entropy, weight_version=progress.update)
                    add_clip_metrics(
                        metrics, micro, ratio, clip_low=config.clip_low, clip_high=config.clip_high
                    )
            lr = config.learning_rate(progress, config.value_peak_lr)
            metrics.add("value/lr", lr)
            grad_norm = value.step(value_optimizer, lr=lr, max_grad_norm=config.max_grad_norm)
            metrics.add("value/grad_norm", grad_norm)
            if trains_policy:
                lr = config.learning_rate(progress, config.peak_lr, first_step=config.value_warmup_steps)
                metrics.add("optim/lr", lr)
                grad_norm = policy.step(optimizer, lr=lr, max_grad_norm=config.max_grad_norm)
                metrics.add("optim/grad_norm", grad_norm)
            progress.update += 1

        run.finish_step(step, metrics, groups)

    return run.close()


def add_value_metrics(
    metrics: StepMetrics, groups: Groups, batch: Batch, kl: Tensor, returns: Tensor
) -> None:
    """Add metrics for the value model and, if there is a reference, for the KL [T] (collective). returns: [M]."""
    old_values = batch.values[batch.loss_mask].double()
    has_score = batch.rollouts_to_tokens(~groups.weighted_rewards.isnan())[batch.loss_mask]
    explained = explained_variance(old_values[has_score], returns[has_score])
    metrics.add("value/explained_var", explained)
    if batch.ref_logprobs is not None:
        kl_sums = sequence_sums(kl, batch.lengths)
        rollout_kl = gather_to_rollouts(batch, kl_sums, groups.weighted_rewards.numel())
        metrics.add("policy/kl_ref_completion", float(rollout_kl.mean()))


def value_model_source(config: Config, setup: Setup) -> tuple[ModelConfig, Path]:
    """Return the value model's config and folder. Raises InputError if tokens or positions are missing."""
    folder = (
        setup.checkpoint_folder("value")
        or model_folder_from_config(config, "value_model")
        or setup.model_folder
    )
    model_config = dataclasses.replace(read_config(folder), scalar_head=True, adapters=config.adapters)
    vocabulary = setup.tokenizer.backend.get_vocab().items()
    value_vocabulary = Tokenizer(folder).backend.get_vocab().items()
    refuse(
        model_config.max_position_embeddings < setup.prompts.max_tokens or not vocabulary <= value_vocabulary,
        f"--value-model {folder}: must support the policy's vocabulary and {setup.prompts.max_tokens} positions",
    )
    return model_config, folder


if __name__ == "__main__":
    run_script(main, Config, description=__doc__ or "")
