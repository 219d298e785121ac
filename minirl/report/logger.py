"""Log a run: console lines, metrics.jsonl, rollouts/*.jsonl and, on demand, wandb.

No logging stops a run. What metrics.jsonl cannot take (a full disk) is kept and written with a later step; a step's
rollouts that cannot be written are lost, and a warning says so. After wandb's first failure one line is printed and it
is not called again. A resumed run continues its files and its wandb run after the step of its checkpoint.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from minirl.errors import SaveError
from minirl.files import durable
from minirl.files.json_files import json_lines, read_json_lines
from minirl.ranks.process_group import print0, rank, world_size
from minirl.ranks.time_account import spent_on
from minirl.rewards.rewarded import RewardedRollouts

# Of a console line: titles, metrics and formats.
COLUMNS = (
    ("reward", "reward/mean", "6.3f"),
    ("gap", "policy/logp_gap_max", ".0e"),
    ("kl", "policy/kl_ref_k3", "5.3f"),
    ("kl", "teacher/kl_k1", "5.3f"),
    ("ent", "policy/entropy", "4.2f"),
    ("ev", "value/explained_var", "5.2f"),
    ("len", "len/mean", "4.0f"),
    ("cut", "len/truncated", "4.0%"),
    ("gnorm", "optim/grad_norm", "5.2f"),
    ("tok/s", "perf/tok_s_gen", "7,.0f"),
)


class Logger:
    """Writes args.json when constructed, then metrics, rollouts and console lines. Only rank 0 writes."""

    def __init__(
        self,
        folder: Path,
        args: Mapping[str, Any],
        *,
        wandb_mode: str,
        after_step: int = 0,
    ):
        """Open the logs in `folder`, which must exist.

        args: what args.json takes, with the run's `wandb_id`.
        after_step: the last step whose metrics stay in metrics.jsonl; those of later steps are deleted.
        wandb_mode: "off", or a mode of `wandb.init`. Raises OSError if the folder cannot be written to.
        """
        self.folder = folder
        self._wandb: Any = None
        # The names of the metrics that any step had.
        self._measured: set[str] = set()
        self._after_step = after_step
        self._began = time.monotonic()
        self._metrics_file = folder / "metrics.jsonl"
        # Lines that metrics.jsonl could not take yet.
        self._unwritten = b""
        if rank() == 0:
            (folder / "rollouts").mkdir(exist_ok=True)
            write_args(folder, args)
            for line in _cut_metrics(self._metrics_file, after_step):
                self._measured |= line.keys()
            if wandb_mode != "off":
                self._wandb = self._try_wandb(lambda: _start_wandb(folder, args, wandb_mode))

    def log(self, step: int, metrics: Mapping[str, float], *, num_steps: int) -> None:
        """Write a step's metrics to the console, metrics.jsonl and wandb."""
        if rank() != 0:
            return
        self._measured |= metrics.keys()
        # JSON has neither NaN nor infinity.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._unwritten += json.dumps({"step": step, **finite}).encode() + b"\n"
        self._write_metrics()
        if self._wandb is not None:
            self._try_wandb(lambda: self._wandb.log(dict(metrics), step=step))
        seconds_per_step = (time.monotonic() - self._began) / max(1, step - self._after_step)
        left_s = seconds_per_step * (num_steps - step)
        print0(console_line(step, num_steps, metrics, measured=self._measured, left_s=left_s))

    def log_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write all ranks' records of a step, in order of their ids, to rollouts/<step>.jsonl (collective)."""
        # Each rank encodes its own: rank 0 only puts the lines in order.
        lines = [(tuple(record["id"]), json.dumps(record) + "\n") for record in records]
        gathered: list[Any] = [None] * world_size()
        with spent_on("wait_ranks"):
            dist.gather_object(lines, gathered if rank() == 0 else None)
        if rank() == 0:
            all_lines = [line for rank_lines in gathered for line in rank_lines]
            all_lines.sort()
            text = "".join(line for _, line in all_lines)
            path = self.folder / "rollouts" / f"{step:06d}.jsonl"
            try:
                path.write_text(text)
            except OSError as error:
                with contextlib.suppress(OSError):  # a partly written file does not stay
                    path.unlink()
                reason = error.strerror or error
                print0(f"warning: {path}: {reason}; the run goes on without the rollouts of this step")

    def finish(self) -> None:
        """Close wandb, if it is on. Raises SaveError if metrics.jsonl still lacks lines."""
        if self._wandb is not None:
            self._try_wandb(lambda: self._wandb.finish())
        if self._unwritten and not self._write_metrics():
            num_steps = self._unwritten.count(b"\n")
            raise SaveError(
                f"{self._metrics_file}: the metrics of the last {num_steps} steps were not written"
            )

    def _write_metrics(self) -> bool:
        """Add the lines that metrics.jsonl lacks; returns whether that succeeded."""
        try:
            durable.append_whole(self._metrics_file, self._unwritten)
        except OSError as error:
            kept = "its lines are kept and written with a later step"
            print0(f"warning: {self._metrics_file}: {error.strerror or error}; the run goes on, {kept}")
            return False
        self._unwritten = b""
        return True

    def _try_wandb(self, action: Callable[[], Any]) -> Any:
        """Call wandb; returns what it returns. If that fails, print the error and turn wandb off."""
        try:
            return action()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # not installed, no network, SystemExit: training goes on
            print0(f"wandb failed and is off from here on: {error!r}")
            self._wandb = None


def write_args(folder: Path, args: Mapping[str, Any]) -> None:
    """Write args.json; paths and other values that JSON cannot hold become text."""
    durable.replace_file(folder / "args.json", json.dumps(args, indent=2, default=str) + "\n")


def rollout_records(
    rewarded: RewardedRollouts,
    functions: Iterable[str],
    *,
    views: Sequence[Mapping[str, Any]] = (),
    **columns: Tensor,
) -> list[dict[str, Any]]:
    """The records of this rank's N rollouts, JSON values, as in rollouts/*.jsonl. Not collective.

    functions: the names of the K rewards of `rewarded`. views: the rollouts' texts (`view_of`), if any are written.
    columns: further numbers [N] of the rollouts.
    """
    numbers = {name: _json_numbers(column.tolist()) for name, column in columns.items()}
    rewards = _json_numbers(rewarded.rewards.tolist())
    records = []
    for i, rollout in enumerate(rewarded.rollouts):
        record: dict[str, Any] = {
            "id": (rollout.rollout_id.prompt_ordinal, rollout.rollout_id.sample),
            "row": rewarded.rows[i].place,
            "prompt": rewarded.rows[i].prompt,
            "completion": rewarded.texts[i],
            **{name: values[i] for name, values in numbers.items()},
            "rewards": dict(zip(functions, rewards[i], strict=True)),
            "num_tokens": rollout.num_sampled,
            "finish_reason": rollout.finish_reason,
        }
        if rollout.earlier:
            record["branches"] = [
                {"branch": branch.rollout_id.branch, "finish_reason": branch.own_end}
                for branch in rollout.branches
            ]
        if views and views[i]:
            record |= views[i]
        records.append(record)
    return records


def _json_numbers(values: Any) -> Any:
    """Return a tensor's `tolist` with None for NaN, which JSON lacks."""
    if isinstance(values, list):
        return [_json_numbers(value) for value in values]
    return None if math.isnan(values) else values


def console_line(
    step: int, num_steps: int, metrics: Mapping[str, float], *, measured: Container[str], left_s: float
) -> str:
    """One line about a step: the columns of the metrics that any step `measured`, then what only some steps have."""
    columns = [f"step {step:>{len(str(num_steps))}}/{num_steps} {timedelta(seconds=round(left_s))} left"]
    for title, metric, spec in COLUMNS:
        if metric in measured:
            value = metrics.get(metric)
            text = "-" if value is None else format(value, spec)
            columns.append(f"{title} {text:>{len(format(0, spec))}}")
    if "eval/reward" in metrics:
        columns.append(f"eval {metrics['eval/reward']:.3f}")
    for cause in ("rewards", "replies"):
        share = metrics.get(f"time/wait_{cause}", 0.0) / metrics.get("time/step", math.inf)
        if share > 0.1:
            columns.append(f"wait {cause} {share:.0%}")
    return " ".join(columns)


def _start_wandb(folder: Path, args: Mapping[str, Any], mode: Any) -> Any:
    """Start or resume the run in wandb."""
    import wandb

    return wandb.init(
        project="minirl",
        name=folder.name,
        id=args["wandb_id"],
        resume="allow",
        dir=str(folder),
        config=dict(args),
        mode=mode,
    )


def _cut_metrics(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Cut metrics.jsonl back to this step, without the lines that a kill cut off; returns what stays."""
    steps: list[dict[str, Any]] = []
    if path.is_file():
        steps, damaged = read_json_lines(path)
        if damaged:
            places = ", ".join(f"{path}:{number}" for number in damaged[:5])
            print0(f"warning: {places}: not a whole line, left out")
    steps = [step for step in steps if step["step"] <= last_step]
    durable.replace_file(path, json_lines(steps))
    return steps
