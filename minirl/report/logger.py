"""Log a run to the console, metrics.jsonl, rollouts/*.jsonl and optionally wandb.

Logging errors never stop a run. If metrics.jsonl cannot be written (for example on a full disk), the pending lines are
written with a later step. Rollouts that cannot be written are dropped with a warning. After the first wandb error,
wandb logging is disabled and a notice is printed to the console. A resumed run appends to its files and its wandb run,
starting with the first step after the checkpoint.
"""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minirl.errors import SaveError
from minirl.files import durable
from minirl.files.json_files import json_text, read_json_lines
from minirl.ranks.process_group import print0, rank, world_size
from minirl.ranks.time_account import spent_on

# Columns of a console line: title, metric and format.
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
    ("eval", "eval/reward", ".3f"),
)


class Logger:
    """Writer of a run's args.json, metrics, rollouts and console lines. Only rank 0 writes."""

    def __init__(
        self,
        folder: Path,
        args: dict[str, Any],
        *,
        wandb_mode: str = "off",
        after_step: int = 0,
    ):
        """Write args.json and open the logs in `folder`, which must exist.

        args: content of args.json, including the run's `wandb_id`.
        after_step: last step to keep in metrics.jsonl; later lines are deleted.
        wandb_mode: "off", or a `wandb.init` mode. Raises OSError if the folder is not writable.
        """
        self.folder = folder
        # Rank 0's `WandbRun`; None on other ranks, and while wandb is off.
        self._wandb: Any = None
        self._after_step = after_step
        self._started_at = time.monotonic()
        self._metrics_file = folder / "metrics.jsonl"
        # Lines not yet written to metrics.jsonl.
        self._pending_lines = b""
        if rank() == 0:
            (folder / "rollouts").mkdir(exist_ok=True)
            durable.replace_file(folder / "args.json", json_text(args, indent=2) + "\n")
            if self._metrics_file.exists():
                metric_records = read_json_lines(self._metrics_file)  # skips corrupt lines
                kept_lines = [
                    json.dumps(line) + "\n"
                    for line in metric_records
                    if line.get("step") in range(after_step + 1)
                ]
                durable.replace_file(self._metrics_file, "".join(kept_lines))
            self._metrics_file.touch()
            if wandb_mode != "off":
                with self._wandb_off_after_error():
                    from minirl.extras.wandb_run import WandbRun

                    self._wandb = WandbRun(folder, args, wandb_mode)

    def log(self, step: int, metrics: Mapping[str, float], *, num_steps: int) -> None:
        """Write a step's metrics to the console, metrics.jsonl and wandb."""
        if rank() != 0:
            return
        # JSON has no NaN or infinity.
        json_metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._pending_lines += json.dumps({"step": step, **json_metrics}).encode() + b"\n"
        self._write_metrics()
        if self._wandb:
            with self._wandb_off_after_error():
                self._wandb.log(step, metrics)
        seconds_per_step = (time.monotonic() - self._started_at) / max(1, step - self._after_step)
        remaining_s = seconds_per_step * (num_steps - step)
        print0(console_line(step, num_steps, metrics, left_s=remaining_s))

    def log_rollouts(
        self, step: int, records: Iterable[Mapping[str, Any]], *, to_wandb: bool = False
    ) -> None:
        """Write a step's records from all ranks, ordered by id, to rollouts/<step>.jsonl (collective).

        to_wandb: whether to also log a table of the first records to wandb, if wandb is enabled. The records then need
        an `advantage`.
        """
        # Each rank encodes its own records, and rank 0 only sorts the lines.
        lines = [(record["id"], json_text(record) + "\n") for record in records]
        # The lines can add up to megabytes, so only rank 0 gets them.
        gathered: list[Any] = [None] * world_size()
        with spent_on("wait_ranks"):
            dist.gather_object(lines, gathered if rank() == 0 else None)
        if rank() == 0:
            sorted_lines = [line for _, line in sorted(itertools.chain(*gathered))]
            path = self.folder / "rollouts" / f"{step:06d}.jsonl"
            try:
                path.write_text("".join(sorted_lines))
            except OSError as error:
                with contextlib.suppress(OSError):  # remove a partially written file
                    path.unlink()
                print0(
                    f"warning: {path}: {error.strerror or error}; the run continues without this step's rollouts"
                )
            if to_wandb and self._wandb:
                with self._wandb_off_after_error():
                    self._wandb.log_completions(step, sorted_lines)

    def finish(self) -> None:
        """Finish the wandb run, if any. Raises SaveError if lines of metrics.jsonl still cannot be written."""
        if self._wandb:
            with self._wandb_off_after_error():
                self._wandb.run.finish()
        if self._pending_lines and not self._write_metrics():
            num_steps = self._pending_lines.count(b"\n")
            raise SaveError(
                f"{self._metrics_file}: the metrics of the last {num_steps} steps could not be written"
            )

    def _write_metrics(self) -> bool:
        """Append the pending lines to metrics.jsonl; return whether the write succeeded."""
        try:
            durable.append_all_or_nothing(self._metrics_file, self._pending_lines)
        except OSError as error:
            retry_note = "the run continues, and the next step retries the write"
            print0(f"warning: {self._metrics_file}: {error.strerror or error}; {retry_note}")
            return False
        self._pending_lines = b""
        return True

    @contextlib.contextmanager
    def _wandb_off_after_error(self) -> Iterator[None]:
        """If the block raises an error, print the error instead of propagating it, and disable wandb."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Training continues even if wandb is not installed, the network is down, or wandb raises SystemExit.
            print0(f"wandb failed; disabling it for the rest of the run: {error!r}")
            self._wandb = None


def console_line(step: int, num_steps: int, metrics: Mapping[str, float], *, left_s: float) -> str:
    """Format a step's console line, with a column for each metric in COLUMNS that the step has."""
    columns = [f"step {step:>{len(str(num_steps))}}/{num_steps} {timedelta(seconds=round(left_s))} left"]
    for title, metric, spec in COLUMNS:
        if metric in metrics:
            columns.append(f"{title} {format(metrics[metric], spec)}")
    for cause in ("rewards", "replies"):
        fraction = metrics.get(f"time/wait_{cause}", 0.0) / metrics.get("time/step", math.inf)
        if fraction > 0.1:
            columns.append(f"wait {cause} {fraction:.0%}")
    return " ".join(columns)
