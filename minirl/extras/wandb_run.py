"""Log metrics, completion tables and the best held-out score to Weights & Biases."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl.files.json_files import read_json_lines

# Maximum number of rows in a completion table, and of characters per text.
TABLE_ROWS = 32
TABLE_CHARS = 4_000


class WandbRun:
    """Rank 0's wandb run. Methods may raise any exception that wandb raises, including SystemExit."""

    def __init__(self, folder: Path, args: dict[str, Any], mode: Any):
        """Start or resume the run. args: the run's config, including its `wandb_id`. mode: see `wandb.init`."""
        import wandb

        self._metrics_file = folder / "metrics.jsonl"
        self.run = wandb.init(
            # Arguments override WANDB_* variables, so entity, group and tags are left to those variables.
            project=os.environ.get("WANDB_PROJECT") or "minirl",
            name=folder.name,
            id=args["wandb_id"],
            resume="allow",
            dir=folder,
            config=args,
            mode=mode,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step's metrics, already written to metrics.jsonl, and update the best held-out score in the summary."""
        self.run.log(metrics, step=step)
        if "eval/reward" in metrics:
            # Unlike this object, the file also covers steps before a resume.
            lines = read_json_lines(self._metrics_file)
            self.run.summary["best/eval_reward"], self.run.summary["best/step"] = max(
                (line["eval/reward"], line["step"]) for line in lines if line.get("eval/reward") is not None
            )

    def log_completions(self, step: int, lines: Sequence[str]) -> None:
        """Log a table of a step's first records, given as lines of rollouts/*.jsonl; truncate long texts."""
        import wandb

        records = [json.loads(line) for line in lines[:TABLE_ROWS]]
        names = ["step", "row", "prompt", "completion", *records[0]["rewards"], "advantage"]
        table = wandb.Table(columns=names)
        for record in records:
            texts = [str(record[key])[:TABLE_CHARS] for key in ("row", "prompt", "completion")]
            table.add_data(step, *texts, *record["rewards"].values(), record["advantage"])
        self.run.log({"completions": table}, step=step)
