"""Where a run's numbers go: one console line per step, metrics.jsonl and, if asked, wandb; texts to rollouts/*.jsonl.

wandb never stops a run: after its first failure one line is printed and it is left alone. A resumed run goes on in the
same files, and in the same wandb run, after the step of its checkpoint.
"""

import json
import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.files import durable
from minirl.files.redaction import redacted
from minirl.ranks.process_group import print0, rank, world_size
from minirl.rewards.rewarded import RewardedRollouts


def troubles(metrics: Mapping[str, float], first: Mapping[str, float]) -> Iterator[str]:
    """What is typical trouble in a step's metrics, given those of the run's first step, each with the flag to try."""
    m, begin = defaultdict(float, metrics), defaultdict(float, first)
    if m["reward/frac_equal_groups"] == 1:
        yield "the rewards of each prompt are all equal, nothing to learn: try easier prompts or a larger --group-size"
    if m["len/empty"] > 0.95:
        yield "nearly every completion is empty, the model ends at once: see --chat and the prompts"
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

    def __init__(
        self,
        folder: Path,
        args: Mapping[str, Any],
        *,
        wandb_mode: str,
        after_step: int = 0,
        keep_rollouts: int = 0,
    ):
        """`after_step`: the last step whose numbers stay; keep_rollouts: of that many newest steps (0: of all)."""
        self.folder, self._wandb, self._keep_rollouts = folder, None, keep_rollouts
        self._first: Mapping[str, float] = {}
        self._told: set[str] = set()
        if rank() == 0:
            (folder / "rollouts").mkdir(exist_ok=True)
            args = {**redacted(json.loads(json.dumps(args, default=str))), "wandb_id": _wandb_id(folder)}
            durable.replace_file(folder / "args.json", json.dumps(args, indent=2) + "\n")
            lines = _lines_until(folder / "metrics.jsonl", after_step)
            durable.replace_file(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
            self._first = next(({k: v for k, v in line.items() if v is not None} for line in lines), {})
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

    def log_rollouts(
        self, step: int, judged: RewardedRollouts, functions: Iterable[str], **columns: Tensor
    ) -> None:
        """Write all ranks' rollouts of a step, in order of ids, to rollouts/<step>.jsonl (collective).

        `columns` are further numbers [N] of this rank's.
        """
        numbers = [dict(zip(columns, x, strict=True)) for x in torch.stack([*columns.values()], 1).tolist()]
        scores = [dict(zip(functions, x, strict=True)) for x in judged.rewards.tolist()]
        lines = [
            {
                "id": [rollout.rollout_id.prompt_ordinal, rollout.rollout_id.sample],
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
            if self._keep_rollouts:
                (self.folder / "rollouts" / f"{step - self._keep_rollouts:06d}.jsonl").unlink(missing_ok=True)

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


def console_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """One line of at most 120 characters for a step."""
    m = defaultdict(float, metrics)
    parts = [
        f"step {step:>{len(str(num_steps))}}/{num_steps}",
        f"reward {m['reward/mean']:.3f}",
        f"eval {m['eval/reward']:.3f}" if "eval/reward" in metrics else "",
        f"kl {m['policy/kl_ref_k3']:.3f}" if "policy/kl_ref_k3" in metrics else "",
        f"ent {m['policy/entropy']:.2f}" if "policy/entropy" in metrics else "",
        f"ev {m['value/explained_var']:.2f}" if "value/explained_var" in metrics else "",
        f"clip {m['policy/clip_frac_low'] + m['policy/clip_frac_high']:.0%}"
        if "policy/clip_frac_low" in metrics
        else "",
        f"gap {m['policy/logp_gap_max']:.0e}" if "policy/logp_gap_max" in metrics else "",
        f"len {m['len/mean']:.0f} cut {m['len/truncated']:.0%}",
        f"gnorm {m['optim/grad_norm']:.2f}" if "optim/grad_norm" in metrics else "",
        f"gen {m['time/generate']:.1f}s upd {m['time/update']:.1f}s",
        f"{m['perf/tok_s_gen'] / 1000:.1f}k tok/s",
    ]
    return " ".join(part for part in parts if part)[:120]


def _start_wandb(folder: Path, args: Mapping[str, Any], mode: Any) -> Any:
    try:
        import wandb

        run = dict(project="minirl", name=folder.name, id=args["wandb_id"], resume="allow")
        return wandb.init(**run, dir=str(folder), config=dict(args), mode=mode)
    except Exception as error:  # not installed, not logged in, no network: one line, and the run goes on
        print0(f"wandb could not start and is off: {error}")
        return None


def _lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl up to this step; a line that a crash cut off is none."""
    lines = []
    for text in path.read_text().splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break
        if line["step"] <= step:
            lines.append(line)
    return lines


def _wandb_id(folder: Path) -> str:
    """The run's own in wandb, kept in args.json."""
    path = folder / "args.json"
    known = json.loads(path.read_text()).get("wandb_id") if path.is_file() else None
    return known or secrets.token_hex(4)
