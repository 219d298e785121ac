"""What a step reports: (sum, weight) pairs reduced once, and the seconds of its phases."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from minirl.errors import GuardError
from minirl.generation.engine_stats import EngineStats
from minirl.objective.advantages import are_equal
from minirl.objective.kl import kl_penalty
from minirl.objective.losses import is_clipped
from minirl.ranks import watchdog
from minirl.ranks.process_group import gather_objects
from minirl.rollouts import Rollout
from minirl.training.batch import Batch


class StepMetrics:
    """The metrics of one step on one rank: weighted means, maxima and totals."""

    def __init__(self, step: int = 0) -> None:
        self._step = step
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._phase = ""
        self._began = 0.0

    def add(self, name: str, total: float | Tensor, weight: float = 1.0) -> None:
        """Add to a mean `weight` observations that sum to `total`."""
        before, weight_before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before + float(total), weight_before + weight)

    def add_values(self, name: str, values: Tensor) -> None:
        """Add to a mean every element as one observation."""
        self.add(name, values.double().sum(), values.numel())

    def add_max(self, name: str, values: Tensor) -> None:
        """Raise a maximum to the greatest of `values`, if there are any."""
        if values.numel():
            self._maxima[name] = _max_or_nan(self._maxima.get(name, -math.inf), float(values.max()))

    def add_total(self, name: str, amount: float | Tensor) -> None:
        """Add to a total over steps' parts and ranks."""
        self._totals[name] = self._totals.get(name, 0.0) + float(amount)

    def refuse_nonfinite(self, *, update: int) -> None:
        """Raise GuardError if a number that this rank's update is made of is not finite. Not collective."""
        for name, number in (
            self._totals | self._maxima | {name: x for name, (x, _) in self._sums.items()}
        ).items():
            if name.startswith(("policy/", "value/loss")) and not math.isfinite(number):
                raise GuardError(
                    f"{name} is {number} before update {update}, which was not made. Try a lower --lr"
                )

    def begin(self, phase: str) -> None:
        """End the phase before and begin this one; its wall seconds are added to `time/<phase>`, a mean over ranks."""
        self.end()
        watchdog.heartbeat(phase=f"step {self._step}, phase {phase}")
        self._phase = phase
        self._began = _now()

    def end(self) -> None:
        """End the present phase, if there is one."""
        if not self._phase:
            return
        name = f"time/{self._phase}"
        before, _ = self._sums.get(name, (0.0, 1.0))
        self._sums[name] = (before + _now() - self._began, 1.0)
        self._phase = ""

    def reduce(self) -> dict[str, float]:
        """Means, maxima and totals over all ranks, the same on each (collective)."""
        sums: dict[str, tuple[float, float]] = {}
        maxima, totals = dict[str, float](), dict[str, float]()
        for rank_sums, rank_maxima, rank_totals in gather_objects((self._sums, self._maxima, self._totals)):
            for name, (total, weight) in rank_sums.items():
                before, weight_before = sums.get(name, (0.0, 0.0))
                sums[name] = (before + total, weight_before + weight)
            for name, value in rank_maxima.items():
                maxima[name] = _max_or_nan(maxima.get(name, value), value)
            for name, value in rank_totals.items():
                totals[name] = totals.get(name, 0.0) + value
        return {name: total / weight for name, (total, weight) in sums.items() if weight} | maxima | totals


def add_rollouts(metrics: StepMetrics, rollouts: Sequence[Rollout], *, grouped_rewards: Tensor) -> None:
    """Add this rank's rollouts, and the rewards [P, G] that every rank holds."""
    lengths = torch.tensor([len(rollout.completion) for rollout in rollouts])
    metrics.add_values("len/mean", lengths)
    metrics.add_max("len/max", lengths)
    is_cut = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])
    metrics.add_values("len/truncated", is_cut)
    metrics.add_values("len/empty", (lengths == 1) & ~is_cut.bool())
    metrics.add_total("count/tokens", lengths.sum())
    metrics.add_total("count/rollouts", len(rollouts))
    metrics.add("reward/mean", grouped_rewards.mean())
    metrics.add("reward/std", grouped_rewards.std())
    if grouped_rewards.shape[1] > 1:
        metrics.add("reward/frac_equal_groups", are_equal(grouped_rewards).double().mean())


def add_generation(metrics: StepMetrics, rollouts: Sequence[Rollout], stats: EngineStats) -> None:
    """Add what this rank's engine did in a step: all tokens that it sampled, and those it computed for nothing."""
    metrics.add_total("count/sampled_tokens", sum(len(rollout.completion) for rollout in rollouts))
    metrics.add("perf/decode_waste", stats.wasted_tokens, stats.computed_tokens)


def add_rewards(metrics: StepMetrics, prefix: str, functions: Iterable[str], rewards: Tensor) -> None:
    """Add each function's rewards [N, K] under its name, where there are several."""
    for name, values in zip(functions, rewards.T, strict=True):
        if rewards.shape[1] > 1:
            metrics.add_values(f"{prefix}/{name}", values)


@torch.no_grad()
def add_tokens(
    metrics: StepMetrics, micro: Batch, new: Tensor, ratio: Tensor, entropy: Tensor, *, is_on_policy: bool
) -> None:
    """Add what one forward of an update tells about a microbatch's tokens: new logprobs, ratio and entropy [T].

    is_on_policy: no update was made since the tokens were sampled, so that the gap between the logprobs of sampling
    and of training can be measured (`add_gap`).
    """
    chosen = micro.loss_mask
    old = new if micro.old_logprobs is None else micro.old_logprobs
    metrics.add_values("policy/entropy", entropy[chosen])
    metrics.add_values("policy/kl_old_k3", kl_penalty(old, new, "k3")[chosen])
    metrics.add_max("policy/ratio_max", ratio[chosen])
    if micro.ref_logprobs is not None:
        metrics.add_values("policy/kl_ref_k1", kl_penalty(new, micro.ref_logprobs, "k1")[chosen])
        metrics.add_values("policy/kl_ref_k3", kl_penalty(new, micro.ref_logprobs, "k3")[chosen])
    if is_on_policy:
        add_gap(metrics, micro, new)


@torch.no_grad()
def add_clip(
    metrics: StepMetrics,
    micro: Batch,
    ratio: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    is_weight: bool = False,
) -> None:
    """Add the shares of a microbatch's tokens that the clip acts on, as `losses.is_clipped` says; ratio [T]."""
    low, high = is_clipped(
        ratio, micro.advantages, clip_low=clip_low, clip_high=clip_high, is_weight=is_weight
    )
    metrics.add_values("policy/clip_frac_low", low[micro.loss_mask])
    metrics.add_values("policy/clip_frac_high", high[micro.loss_mask])


@torch.no_grad()
def add_gap(metrics: StepMetrics, micro: Batch, new: Tensor) -> None:
    """Add the gap between the logprobs of sampling and of training [T], under the same weights.

    And of the importance weights rho = exp(training - sampling): KL(sampling || training), the moments, the maximum.
    """
    log_rho = (new - micro.sample_logprobs)[micro.loss_mask]
    metrics.add_values("policy/logp_gap_mean", log_rho.abs())
    metrics.add_max("policy/logp_gap_max", log_rho.abs())
    metrics.add_values("policy/logp_equal_frac", log_rho == 0)
    metrics.add_values("importance/mean", log_rho.exp())
    metrics.add_values("importance/square", log_rho.double().exp().square())
    metrics.add_values("importance/kl_k1", -log_rho)
    metrics.add_values("importance/kl_k3", kl_penalty(torch.zeros_like(log_rho), log_rho, "k3"))
    metrics.add_max("importance/max", log_rho.exp())


def derived(metrics: Mapping[str, float]) -> dict[str, float]:
    """Reduced metrics and what follows from them.

    The step's seconds, completion tokens per second, and of the importance weights chi2 = E[rho^2] - 1 and the
    effective share of the sample, ESS = E[rho]^2 / E[rho^2].
    """
    out = {
        **metrics,
        "time/step": sum(value for name, value in metrics.items() if name.startswith("time/")),
        "perf/tok_s_gen": metrics["count/sampled_tokens"] / metrics["time/generate"],
        "perf/tok_s_train": metrics["count/tokens"] / metrics["time/update"],
    }
    if "importance/square" in out:
        mean, square = out.pop("importance/mean"), out.pop("importance/square")
        out |= {"importance/chi2": square - 1, "importance/ess": mean**2 / square}
    return out


def _now() -> float:
    """Seconds, when all kernels started so far have ended."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _max_or_nan(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
