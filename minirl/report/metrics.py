"""Metrics of a training step, collected on each rank and reduced across ranks at the end of the step."""

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from minirl.generation.engine_stats import EngineStats
from minirl.ranks import launch, time_account
from minirl.ranks.process_group import gather_objects, world_size
from minirl.rollouts import Rollout
from minirl.training.advantages import have_zero_variance
from minirl.training.batch import Batch, SequenceInfo
from minirl.training.kl import kl_penalty

# Initial value and merge function for each kind of metric, used within a step and across ranks. At the end, each mean
# is divided by its weight. `np.maximum` propagates NaN.
KINDS: dict[str, tuple[float, Callable[[float, float], float]]] = {
    "mean": (0.0, operator.add),
    "total": (0.0, operator.add),
    "maximum": (-math.inf, np.maximum),
}
# ((kind, name), number, weight). The weight is the count of values that the entry summarizes; metrics with a total
# weight of 0 are omitted.
Entry = tuple[tuple[str, str], float | Tensor, float | Tensor]


class StepMetrics:
    """Metrics of one step on one rank: weighted means, maxima and totals, keyed by name.

    Added tensors stay on their device until `reduce`: reading each tensor immediately would synchronize with the device
    many times per microbatch.
    """

    def __init__(self, step: int = 0) -> None:
        self._step = step
        self._entries: list[Entry] = []

    def add(
        self, name: str, total: float | Tensor, weight: float | Tensor = 1.0, *, kind: str = "mean"
    ) -> None:
        """Add `total` to a metric: a mean by default, or another kind in KINDS.

        weight: the count of values that `total` summarizes.
        """
        detached_total = total.detach() if isinstance(total, Tensor) else total
        self._entries.append(((kind, name), detached_total, weight))

    def add_values(self, name: str, values: Tensor) -> None:
        """Add every element of `values` to a mean."""
        self.add(name, values.double().sum(), values.numel())

    def add_max(self, name: str, values: Tensor, weight: float | Tensor = 1.0) -> None:
        """Update a maximum with the elements of `values`, if any. weight: 0 if none of the elements counts."""
        if values.numel():
            self.add(name, values.max(), weight, kind="maximum")

    def add_total(self, name: str, amount: float | Tensor) -> None:
        """Add an amount to a total, which `reduce` sums across ranks."""
        self.add(name, amount, kind="total")

    def begin(self, phase: str) -> None:
        """Wait for the device to finish the previous phase, then begin a new phase.

        From now on, time is attributed to the phase (or to "host" if the phase is "generate"), except in
        `time_account.spent_on` blocks. If this rank hangs, other ranks report the phase (`launch.announce_phase`).
        """
        time_account.wait_for_device()
        time_account.this_process.switch("host" if phase == "generate" else phase)
        launch.announce_phase(f"step {self._step}, phase {phase}")

    def end(self) -> None:
        """Record how many seconds of the step went to each timing category, averaged over all ranks.

        A step lasts from the previous call of `end` to this call; later work belongs to the next step.
        """
        time_account.wait_for_device()
        seconds = time_account.this_process.take()
        for name, spent in {"step": sum(seconds.values()), **seconds}.items():
            # `add` would average only over the ranks that spent time on this cause.
            self.add_total(f"time/{name}", spent / world_size())

    def reduce(self) -> dict[str, float]:
        """Reduce all means, maxima and totals across ranks, and return them on every rank (collective).

        Means and maxima without values are omitted.
        """
        entries_per_rank = gather_objects(_merge_entries(self._entries))
        merged_entries = _merge_entries(itertools.chain(*entries_per_rank))
        return {
            name: number / weight if kind == "mean" else number
            for (kind, name), number, weight in merged_entries
            if weight
        }


def _merge_entries(entries: Iterable[Entry]) -> list[tuple[tuple[str, str], float, float]]:
    """Merge each metric's entries in order. Reading the first tensor on a device synchronizes with the device."""
    merged: dict[tuple[str, str], tuple[float, float]] = {}
    for key, number, weight in entries:
        start, merge = KINDS[key[0]]
        merged_number, merged_weight = merged.get(key, (start, 0.0))
        merged[key] = merge(merged_number, float(number)), merged_weight + float(weight)
    return [(key, *number_and_weight) for key, number_and_weight in merged.items()]


def add_rollout_metrics(
    metrics: StepMetrics,
    rollouts: Sequence[Rollout],
    *,
    grouped_rewards: Tensor,
) -> None:
    """Add the metrics of this rank's rollouts and of all groups' rewards [P, G], which are the same on every rank.

    NaN rewards (no reward function applied) are excluded from the statistics and counted separately.
    """
    for rollout in rollouts:
        num_sampled, turns = rollout.num_sampled_tokens, rollout.episode.turns
        metrics.add("len/mean", num_sampled)
        metrics.add("len/max", num_sampled, kind="maximum")
        metrics.add("len/truncated", rollout.is_truncated)
        metrics.add_total("count/tokens", num_sampled)
        metrics.add_total("count/rollouts", 1)
        metrics.add_total(f"finish/{rollout.finish_reason}", 1)
        metrics.add("env/turns_mean", len(turns) or 1)
        metrics.add_total("env/tokens", len(rollout.completion) - num_sampled)
        for turn in turns:
            if turn.parse_error is not None:
                metrics.add_total("count/parse_errors", 1)
    if grouped_rewards.isnan().any():
        metrics.add_values("reward/not_applicable", grouped_rewards.isnan())
    _add_mean_and_std(metrics, grouped_rewards, "reward/mean", "reward/std")
    if grouped_rewards.shape[1] > 1:
        metrics.add_values("reward/frac_equal_groups", have_zero_variance(grouped_rewards))


def add_generation_metrics(metrics: StepMetrics, stats: EngineStats) -> None:
    """Add this rank's wasted decode tokens, decode occupancy, and counts of preempted and evicted requests."""
    metrics.add("perf/decode_waste", stats.wasted_tokens, stats.computed_tokens)
    metrics.add("perf/decode_occupancy", stats.decode_tokens, stats.decode_steps * stats.peak_running)
    if stats.preemptions:
        metrics.add_total("count/preempted", stats.preemptions)
    if stats.evictions:
        metrics.add_total("count/dropped", stats.evictions)


def add_skipped_token_metrics(
    metrics: StepMetrics, sequences: Iterable[SequenceInfo], skipped: Collection[SequenceInfo]
) -> None:
    """Add the fraction of the step's completion tokens that the update skips.

    sequences: all ranks' sequences, the same on every rank. skipped: the sequences that the update skips.
    """
    num_loss_tokens = sum(sequence.num_loss_tokens for sequence in sequences)
    metrics.add("perf/skipped_tokens", sum(sequence.num_loss_tokens for sequence in skipped), num_loss_tokens)


def add_reward_metrics(metrics: StepMetrics, functions: Collection[str], rewards: Tensor) -> None:
    """Add the mean and std of the rewards from each of the K reward functions, as reward/NAME and reward/NAME/std.

    rewards: fp64 [P, G, K], the rewards of all groups. Every rank has the same rewards, so the metrics do not depend on
    how rollouts are distributed. NaN rewards, which do not apply to their completions, are excluded.
    """
    for name, values in zip(functions, rewards.flatten(0, 1).T, strict=True):
        _add_mean_and_std(metrics, values, f"reward/{name}", f"reward/{name}/std")


def _add_mean_and_std(metrics: StepMetrics, rewards: Tensor, mean: str, std: str) -> None:
    """Add the mean and std of the non-NaN rewards; the std needs at least two rewards."""
    valid_rewards = rewards[~rewards.isnan()]
    metrics.add_values(mean, valid_rewards)
    if len(valid_rewards) > 1:
        metrics.add(std, valid_rewards.std())


@torch.no_grad()
def add_token_metrics(
    metrics: StepMetrics,
    micro: Batch,
    logprobs: Tensor,
    ratio: Tensor,
    entropy: Tensor,
    *,
    weight_version: int,
) -> None:
    """Add metrics for a microbatch's logprobs, importance ratios and entropies (each [T]), as computed in the forward
    pass.

    weight_version: version of the weights in this pass. The gap between sampled and training logprobs is measured only
    for tokens sampled with these weights, hence only before the step's first update.
    """
    loss_index = micro.loss_index
    metrics.add_values("policy/entropy", entropy[loss_index])
    metrics.add_values("policy/kl_old_k3", kl_penalty(micro.old_logprobs, logprobs, "k3")[loss_index])
    metrics.add_max("policy/ratio_max", ratio[loss_index])
    if micro.ref_logprobs is not None:
        metrics.add_values("policy/kl_ref_k3", kl_penalty(logprobs, micro.ref_logprobs, "k3")[loss_index])
    if micro.teacher_logprobs is not None:
        metrics.add_values("teacher/kl_k1", kl_penalty(logprobs, micro.teacher_logprobs, "k1")[loss_index])
    logprob_gap = (logprobs - micro.sample_logprobs)[loss_index].abs()
    is_current_version = micro.weight_version[loss_index] == weight_version
    num_current_tokens = is_current_version.sum()
    # Boolean-mask indexing would force a host-device synchronization.
    metrics.add(
        "policy/logp_gap_mean", logprob_gap.where(is_current_version, 0.0).double().sum(), num_current_tokens
    )
    metrics.add_max(
        "policy/logp_gap_max", logprob_gap.where(is_current_version, -math.inf), num_current_tokens
    )
    metrics.add("policy/logp_equal_frac", (is_current_version & (logprob_gap == 0)).sum(), num_current_tokens)


@torch.no_grad()
def add_clip_metrics(
    metrics: StepMetrics,
    micro: Batch,
    ratio: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    is_weight: bool = False,
) -> None:
    """Add the fractions of a microbatch's sampled tokens affected by the lower clip and by the upper clip. ratio: [T].

    With advantage A, the lower clip applies where ratio < 1 - clip_low and A < 0, the upper clip where
    ratio > 1 + clip_high and A > 0.
    is_weight: whether the ratio only weights the loss (CISPO) and is clipped for any advantage.
    """
    is_clipped_low = ratio < 1 - clip_low
    is_clipped_high = ratio > 1 + clip_high
    if not is_weight:
        is_clipped_low = is_clipped_low & (micro.advantages < 0)
        is_clipped_high = is_clipped_high & (micro.advantages > 0)
    metrics.add_values("policy/clip_frac_low", is_clipped_low[micro.loss_index])
    metrics.add_values("policy/clip_frac_high", is_clipped_high[micro.loss_index])


def with_derived_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the reduced metrics together with derived metrics.

    Adds completion tokens per second of generation time and of update time, omitting a phase that took no time.
    Converts the counts of finish reasons to fractions.
    """
    all_metrics = dict(metrics)
    for name in metrics:
        if name.startswith("finish/"):
            all_metrics[name] /= metrics["count/rollouts"]
    metrics_or_zero = defaultdict(float, metrics)  # counts that are 0 on every rank are omitted
    num_trained_tokens = metrics_or_zero["count/tokens"] * (1 - metrics_or_zero["perf/skipped_tokens"])
    generation_s = sum(metrics_or_zero[f"time/{cause}"] for cause in time_account.GENERATION_CAUSES)
    if generation_s > 0:
        all_metrics["perf/tok_s_gen"] = metrics_or_zero["count/sampled_tokens"] / generation_s
    if metrics_or_zero["time/update"] > 0:
        all_metrics["perf/tok_s_train"] = num_trained_tokens / metrics_or_zero["time/update"]
    return all_metrics
