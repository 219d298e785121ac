"""Log a run to Weights & Biases: metrics, tables of completions, and the best held-out score in the summary."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl.files.json_files import read_json_lines

# Limits of a table of completions: its rows, and the characters of each text.
TABLE_ROWS = 32
TABLE_CHARS = 4_000


class WandbRun:
    """A run in wandb, of rank 0. Methods raise what wandb raises, even SystemExit."""

    def __init__(self, folder: Path, args: dict[str, Any], mode: Any):
        """Start the run, or resume it. args: its config, with its `wandb_id`. mode: see `wandb.init`."""
        import wandb

        self._metrics_file = folder / "metrics.jsonl"
        self.run = wandb.init(
            # An argument hides its environment variable: entity, group and tags have only these.
            project=os.environ.get("WANDB_PROJECT") or "minirl",
            name=folder.name,
            id=args["wandb_id"],
            resume="allow",
            dir=folder,
            config=args,
            mode=mode,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step's metrics, which metrics.jsonl already has, and update the best held-out score in the summary."""
        self.run.log(metrics, step=step)
        if "eval/reward" in metrics:
            # The file also has the steps before a resume.
            lines = read_json_lines(self._metrics_file)
            self.run.summary["best/eval_reward"], self.run.summary["best/step"] = max(
                (line["eval/reward"], line["step"]) for line in lines if line.get("eval/reward") is not None
            )

    def log_completions(self, step: int, lines: Sequence[str]) -> None:
        """Log a table of the first records of a step, which are lines of rollouts/*.jsonl. Long texts are cut."""
        import wandb

        records = [json.loads(line) for line in lines[:TABLE_ROWS]]
        names = ["step", "row", "prompt", "completion", *records[0]["rewards"], "advantage"]
        table = wandb.Table(columns=names)
        for record in records:
            texts = [str(record[key])[:TABLE_CHARS] for key in ("row", "prompt", "completion")]
            table.add_data(step, *texts, *record["rewards"].values(), record["advantage"])
        self.run.log({"completions": table}, step=step)
