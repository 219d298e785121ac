"""Run folders and checkpoints: each checkpoint is a Hugging Face folder in the compute dtype."""

import json
import os
from pathlib import Path

from minirl.distributed import barrier, rank
from minirl.errors import InputError
from minirl.parallel import ShardedModel
from minirl.weights import save_folder, scalar_config


def runs_root() -> Path:
    """Where runs go: $MINIRL_RUNS, or ./runs."""
    return Path(os.environ.get("MINIRL_RUNS", "runs"))


def new_run_folder(name: str) -> Path:
    """Make and return the folder of a new run (collective).

    Raises InputError for a name that is a path, or when a run is there already.
    """
    if Path(name).name != name:
        raise InputError(f"--run-name {name}: must be a plain name, not a path; $MINIRL_RUNS says where runs go")
    folder = runs_root() / name
    taken = folder.exists() and any(folder.iterdir())  # a run that could not load its model left it empty
    barrier()
    if taken:
        raise InputError(f"--run-name {name}: {folder} exists already; choose another name")
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    barrier()
    return folder


def save_checkpoint(run: Path, step: int, model: ShardedModel, *, source: Path, kind: str = "checkpoints") -> Path:
    """Save the weights after `step` steps as `run/<kind>/<step>`, config and tokenizer from `source` (collective).

    Rank 0 writes the compute weights that it holds; the folder appears whole or not at all.
    """
    folder = run / kind / f"{step:06d}"
    if rank() == 0 and not folder.exists():
        config = json.loads((source / "config.json").read_text())
        if model.module.config.scalar_head:
            config = scalar_config(config)
        save_folder(folder, model.compute_weights, config=config, tokenizer_from=source)
    barrier()
    return folder
