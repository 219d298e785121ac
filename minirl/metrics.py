"""What a step reports: (sum, weight) pairs reduced once, phase timers, and where the numbers go.

Numbers go to the console (one line per step), metrics.jsonl and, if asked, wandb; texts go to rollouts/*.jsonl.
wandb never stops a run: after its first failure one line is printed and it is left alone.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minirl import watch
from minirl.advantages import are_equal
from minirl.batch import Batch, Rollout
from minirl.distributed import print0, rank, world_size
from minirl.errors import GuardError
from minirl.losses import is_clipped, kl_penalty
from minirl.rewards import Judged


class StepMetrics:
    """The metrics of one step on one rank: weighted means, maxima and totals."""

    def __init__(self, step: int = 0) -> None:
        self._step = step
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._totals: dict[str, float] = {}

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
        for name, number in (self._totals | self._maxima | {name: x for name, (x, _) in self._sums.items()}).items():
            if name.startswith(("policy/", "value/loss")) and not math.isfinite(number):
                raise GuardError(f"{name} is {number} before update {update}, which was not made. Try a lower --lr")

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Add the wall seconds of the block to `time/<phase>`: their sum, as a mean over ranks; the `watch`'s phase."""
        watch.beat(phase=f"step {self._step}, phase {phase}")
        start, name = _now(), f"time/{phase}"
        yield
        before, _ = self._sums.get(name, (0.0, 1.0))
        self._sums[name] = (before + _now() - start, 1.0)

    def reduce(self) -> dict[str, float]:
        """Means, maxima and totals over all ranks, the same on each (collective)."""
        gathered: list[Any] = [None] * world_size()
        dist.all_gather_object(gathered, (self._sums, self._maxima, self._totals))
        sums: dict[str, tuple[float, float]] = {}
        maxima, totals = dict[str, float](), dict[str, float]()
        for rank_sums, rank_maxima, rank_totals in gathered:
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
    metrics.add_values("len/truncated", torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]))
    metrics.add_total("count/tokens", lengths.sum())
    metrics.add_total("count/rollouts", len(rollouts))
    metrics.add("reward/mean", grouped_rewards.mean())
    metrics.add("reward/std", grouped_rewards.std())
    if grouped_rewards.shape[1] > 1:
        metrics.add("reward/frac_equal_groups", are_equal(grouped_rewards).double().mean())


def add_rewards(metrics: StepMetrics, prefix: str, functions: Iterable[str], rewards: Tensor) -> None:
    """Add each function's rewards [N, K] under its name, where there are several."""
    for name, values in zip(functions, rewards.T, strict=True):
        if rewards.shape[1] > 1:
            metrics.add_values(f"{prefix}/{name}", values)


@torch.no_grad()
def add_tokens(
    metrics: StepMetrics,
    micro: Batch,
    new: Tensor,
    old: Tensor,
    ratio: Tensor,
    entropy: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    is_weight: bool = False,
) -> None:
    """Add what one forward of an update says of a microbatch's tokens; new, old, ratio and entropy [T].

    The clip as in `losses.is_clipped`.
    """
    chosen = micro.loss_mask
    low, high = is_clipped(ratio, micro.advantages, clip_low=clip_low, clip_high=clip_high, is_weight=is_weight)
    metrics.add_values("policy/entropy", entropy[chosen])
    metrics.add_values("policy/clip_frac_low", low[chosen])
    metrics.add_values("policy/clip_frac_high", high[chosen])
    metrics.add_values("policy/kl_old_k3", kl_penalty(old, new, "k3")[chosen])
    metrics.add_max("policy/ratio_max", ratio[chosen])
    if micro.ref_logprobs is not None:
        metrics.add_values("policy/kl_ref_k1", kl_penalty(new, micro.ref_logprobs, "k1")[chosen])
        metrics.add_values("policy/kl_ref_k3", kl_penalty(new, micro.ref_logprobs, "k3")[chosen])


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


def troubles(metrics: Mapping[str, float], first: Mapping[str, float]) -> Iterator[str]:
    """What is typical trouble in a step's metrics, given those of the run's first step, each with the flag to try."""
    m, begin = defaultdict(float, metrics), defaultdict(float, first)
    if m["reward/frac_equal_groups"] == 1:
        yield "the rewards of each prompt are all equal, nothing to learn: try easier prompts or a larger --group-size"
    if m["len/truncated"] > 0.95:
        yield "nearly every completion was cut off before it ended: raise --max-new-tokens"
    if m["policy/entropy"] < 0.1 * begin["policy/entropy"] and m["reward/mean"] <= begin["reward/mean"]:
        yield "entropy is collapsing and the reward does not rise: lower --lr, raise --clip-high or set --entropy-coef"
    if m["policy/kl_old_k3"] > 0.2 or m["policy/kl_ref_k3"] > 2:
        yield "the KL divergence is exploding: lower --lr, take fewer --num-minibatches or raise the KL coefficient"
    if m["policy/logp_gap_mean"] > 0.05:
        yield "sampled and training logprobs differ by over 0.05 on average: try --correction token_truncate"
    if metrics.get("optim/grad_norm") == 0 and m["reward/frac_equal_groups"] < 1:
        yield "no token has a gradient: see --drop-truncated, --correction-low and --correction-high"
    elif m["policy/ratio_max"] == 1 and abs(m["policy/loss"]) < 1e-3 * m["optim/grad_norm"]:
        yield (
            "policy/loss is about 0, and that is as it should be: with one update per step the ratio is 1 and the "
            "advantages of a group sum to 0; the gradient (gnorm) is not 0. Watch the reward"
        )


class Logger:
    """Writes on rank 0: args.json at once, then metrics, rollouts and console lines. The folder must exist."""

    def __init__(self, folder: Path, args: Mapping[str, Any], *, wandb_mode: str):
        self.folder, self._wandb = folder, None
        self._first: Mapping[str, float] = {}
        self._told: set[str] = set()
        if rank() == 0:
            (folder / "rollouts").mkdir()
            (folder / "args.json").write_text(json.dumps(args, indent=2, default=str) + "\n")
            self._wandb = _start_wandb(folder, args, wandb_mode) if wandb_mode != "off" else None

    def log(self, step: int, metrics: Mapping[str, float], *, num_steps: int) -> None:
        """One line on the console and in metrics.jsonl, the same to wandb; say once what looks like trouble."""
        if rank() != 0:
            return
        self._first = {**metrics, **self._first}
        for sentence in troubles(metrics, self._first):
            if sentence not in self._told:
                self._told.add(sentence)
                print0(f"note: {sentence}")
        with (self.folder / "metrics.jsonl").open("a") as file:
            finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}  # JSON has no NaN
            file.write(json.dumps({"step": step, **finite}) + "\n")
        if self._wandb is not None:
            self._try_wandb(lambda: self._wandb.log(dict(metrics), step=step))
        print0(console_line(step, num_steps, metrics))

    def log_rollouts(self, step: int, judged: Judged, functions: Iterable[str], **columns: Tensor) -> None:
        """Write all ranks' rollouts of a step, in order of ids, to rollouts/<step>.jsonl (collective).

        `columns` are further numbers [N] of this rank's.
        """
        numbers = [dict(zip(columns, x, strict=True)) for x in torch.stack([*columns.values()], 1).tolist()]
        scores = [dict(zip(functions, x, strict=True)) for x in judged.rewards.tolist()]
        lines = [
            {
                "id": [rollout.rollout_id.prompt, rollout.rollout_id.sample],
                "row": judged.rows[i].place,
                "prompt": judged.rows[i].prompt,
                "completion": judged.texts[i],
                **numbers[i],
                "rewards": scores[i],
                "num_tokens": len(rollout.completion),
                "finish_reason": rollout.finish_reason,
            }
            for i, rollout in enumerate(judged.rollouts)
        ]
        gathered: list[Any] = [None] * world_size()
        dist.gather_object(lines, gathered if rank() == 0 else None)
        if rank() == 0:
            ordered = sorted((line for part in gathered for line in part), key=lambda line: line["id"])
            text = "".join(json.dumps(line) + "\n" for line in ordered)
            (self.folder / "rollouts" / f"{step:06d}.jsonl").write_text(text)

    def finish(self) -> None:
        """Close wandb, if it is on."""
        if self._wandb is not None:
            self._try_wandb(lambda: self._wandb.finish())

    def _try_wandb(self, action: Any) -> None:
        try:
            action()
        except Exception as error:  # whatever a tracker raises, training goes on
            print0(f"wandb failed and is off from here on: {error}")
            self._wandb = None


def _now() -> float:
    """Seconds, when all kernels started so far have ended."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _max_or_nan(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def console_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """One line of at most 120 characters for a step."""
    m = defaultdict(float, metrics)
    clip = m["policy/clip_frac_low"] + m["policy/clip_frac_high"]
    parts = [
        f"step {step:>{len(str(num_steps))}}/{num_steps} reward {m['reward/mean']:.3f}",
        f"eval {m['eval/reward']:.3f}" if "eval/reward" in metrics else "",
        f"kl {m['policy/kl_ref_k3']:.3f}" if "policy/kl_ref_k3" in metrics else "",
        f"ent {m['policy/entropy']:.2f}" if "policy/entropy" in metrics else "",
        f"ev {m['value/explained_var']:.2f}" if "value/explained_var" in metrics else "",
        f"clip {clip:.0%}" if "policy/clip_frac_low" in metrics else "",
        f"gap {m['policy/logp_gap_max']:.0e}" if "policy/logp_gap_max" in metrics else "",
        f"len {m['len/mean']:.0f} cut {m['len/truncated']:.0%}",
        f"gnorm {m['optim/grad_norm']:.2f}" if "optim/grad_norm" in metrics else "",
        f"gen {m['time/generate']:.1f}s upd {m['time/update']:.1f}s {m['perf/tok_s_gen'] / 1000:.1f}k tok/s",
    ]
    return " ".join(part for part in parts if part)[:120]


def _start_wandb(folder: Path, args: Mapping[str, Any], mode: Any) -> Any:
    try:
        import wandb

        return wandb.init(project="minirl", name=folder.name, dir=str(folder), config=dict(args), mode=mode)
    except Exception as error:  # not installed, not logged in, no network: one line, and the run goes on
        print0(f"wandb could not start and is off: {error}")
        return None
