"""Save checkpoints between steps, and resume from them exactly.

    runs/NAME/checkpoints/000050/    Hugging Face folder of the policy, in the compute dtype
    .../000050/value/                Hugging Face folder of an additional model, named after the model
    .../000050/resume/0-of-2.pt      one rank's shards of fp32 master weights and optimizer state
    .../000050/resume/progress.pt    `Progress` fields, including the script's `extra`; adapters' base models and shapes

Every rank writes its files into .half-000050-TOKEN and syncs the files to disk. Rank 0 then renames the folder to
000050, which turns the folder into a checkpoint. All checkpoints are therefore complete, even if the process is killed
or the disk is full. A run resumes from its newest checkpoint. Old checkpoints are deleted only after a new checkpoint
is complete; each old checkpoint is first renamed with a leading dot.

Saving blocks training. Files are read with `torch.load(weights_only=True)`, which never executes code from a file.
"""

import contextlib
import math
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from minirl.errors import InputError, SaveError, refuse
from minirl.files import durable
from minirl.files.json_files import read_json_object
from minirl.model.adapters import peft_config
from minirl.model.families import scalar_head_config
from minirl.model.folders import hub_id_or_path, model_file
from minirl.model.weights import passthrough_tensors, read_tokenizer_files, weights_fingerprint, write_folder
from minirl.ranks.process_group import barrier, broadcast_object, gather_objects, print0, rank, world_size
from minirl.ranks.time_account import spent_on
from minirl.training.sharded_model import ShardedModel

Models = Mapping[str, tuple[ShardedModel, torch.optim.Optimizer]]
PerModel = dict[str, dict[str, Any]]  # each model's named values, keyed by model name

PROGRESS_FILE = "resume/progress.pt"


def checkpoints_in(run_folder: Path) -> list[Path]:
    """Return a run's checkpoints, oldest first."""
    folders = (run_folder / "checkpoints").glob("[0-9]*")
    return sorted((path for path in folders if path.name.isdecimal()), key=lambda path: int(path.name))


class Checkpoints:
    """Writes and reads a run's checkpoints, which contain models and optimizers.

    models: (model, optimizer) pairs, keyed by name; the checkpoint folder itself is the first model's Hugging Face
        folder. Configs and tokenizer files are read once, in `__init__`, because a model's folder may be an old
        checkpoint that is deleted before the next save.
    keep: number of newest checkpoints to keep (0: all), in addition to the checkpoint with the best held-out score.
    """

    def __init__(self, run_folder: Path, models: Models, *, keep: int):
        self._run_folder = run_folder
        self._models = models
        self._keep = keep
        # Each launch has a unique token, so a rank that survives from an earlier launch writes to a different folder.
        self._token = broadcast_object(secrets.token_hex(4))
        self._adapters: PerModel = {}
        # Files that `write_folder` writes next to each model's weights, on rank 0 only.
        self._contents: PerModel = {}
        for name, (model, _) in models.items():
            model_config = model.module.config
            raw_config = read_json_object(model_file(model.folder, "config.json"))
            adapter_config = None
            if model_config.adapters:
                adapter_config = peft_config(
                    model_config, raw_config, model.masters, hub_id_or_path(model.folder)
                )
                self._adapters[name] = {**adapter_config, "base_weights": weights_fingerprint(model.folder)}
            if rank() != 0:
                continue
            if model_config.scalar_head:
                raw_config = scalar_head_config(raw_config)
            self._contents[name] = {
                "config": raw_config,
                "tokenizer_files": read_tokenizer_files(model.folder),
                "passthrough": passthrough_tensors(model_config, model.folder),
                "peft_config": adapter_config,
            }

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Load models and optimizers from a checkpoint; return the saved fields of `Progress` (collective).

        The checkpoint may have been saved by any number of ranks. Raises InputError if the checkpoint's models or
        adapters differ from the script's. The base model of adapters may have moved to another path, however.
        """
        progress = _load_file(checkpoint / PROGRESS_FILE)
        saved_world_size = progress.pop("world_size")
        adapters = progress.pop("adapters", {})
        rank_checkpoints = [
            _load_file(checkpoint / _rank_file(r, saved_world_size)) for r in range(saved_world_size)
        ]
        saved_names = list(rank_checkpoints[0]["models"])
        refuse(
            saved_names != list(self._models),
            f"{checkpoint} has the models {saved_names}, but this script has {list(self._models)}; use another "
            "--run-name",
        )
        for name, (model, optimizer) in self._models.items():
            old, new = adapters.get(name, {}), self._adapters.get(name, {})
            changed_settings = {
                key: (old.get(key), value) for key, value in new.items() if old.get(key) != value
            }
            if "base_weights" not in changed_settings:
                changed_settings.pop("base_model_name_or_path", None)  # the same weights at another path
            differences = ", ".join(
                f"{key} (saved {saved!r}, current {value!r})"
                for key, (saved, value) in changed_settings.items()
            )
            refuse(
                changed_settings,
                f"{checkpoint} has different adapters for the {name}: {differences}; use another --run-name",
            )
            model.load_state(
                optimizer, [file["models"][name] for file in rank_checkpoints], origin=str(checkpoint)
            )
        print0(f"resuming after step {progress['step']}, from {checkpoint} (world size {saved_world_size})")
        return progress

    @spent_on("save")
    def save(self, progress: Mapping[str, Any]) -> None:
        """Save models, optimizers and `Progress` fields as the checkpoint of step `progress["step"]` (collective).

        The checkpoint is complete on return. Raises SaveError, naming the file that cannot be written.
        """
        folder = self._run_folder / "checkpoints" / f"{progress['step']:06d}"
        staging_folder = folder.with_name(f".half-{folder.name}-{self._token}")
        try:
            self._write_files(staging_folder, progress)
            barrier()
            if rank() == 0:
                durable.publish(staging_folder, folder)
                prune_checkpoints(self._run_folder, keep=self._keep)
            barrier()
        except OSError as error:
            raise SaveError(
                f"{error.filename}: {error.strerror} ({shutil.disk_usage(self._run_folder).free:,} bytes are free); "
                f"the checkpoint of step {progress['step']} is not saved; earlier checkpoints are intact"
            ) from None

    def _write_files(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Write this rank's checkpoint files (collective).

        Raises OSError if a file cannot be written, and InputError if `extra` has values that a checkpoint cannot store
        or that differ between ranks.
        """
        (folder / "resume").mkdir(0o700, parents=True, exist_ok=True)
        shards: PerModel = {}
        for name, (model, optimizer) in self._models.items():
            weights = model.full_weights(keep=rank() == 0)
            if rank() == 0:
                model_folder = folder / name if shards else folder
                write_folder(model_folder, weights, **self._contents[name])
            shards[name] = model.state_tensors(optimizer)
        _save_file(folder / _rank_file(rank(), world_size()), {"models": shards})
        if rank() == 0:
            _save_file(
                folder / PROGRESS_FILE, {**progress, "world_size": world_size(), "adapters": self._adapters}
            )
        if progress["extra"]:
            if rank() == 0:
                try:
                    _load_file(folder / PROGRESS_FILE)
                except InputError as error:
                    raise InputError(
                        f"progress.extra: use only numbers, strings and tensors, nested in lists and dicts: {error}"
                    ) from None
            extra_values = tree_map_only(Tensor, Tensor.tolist, progress["extra"])
            refuse(
                len({*gather_objects(repr(extra_values))}) > 1,
                "progress.extra: differs between ranks; store only values that are the same on all ranks, such as "
                "results of `metrics.reduce()`",
            )


def _rank_file(rank: int, world_size: int) -> str:
    """Return the path of a rank's file within a checkpoint."""
    return f"resume/{rank}-of-{world_size}.pt"


def _save_file(path: Path, values: Mapping[str, Any]) -> None:
    """Save values to a file that `_load_file` can read, and sync the file to disk. Raises OSError, naming the file."""
    with durable.open_new_file(path) as file:
        try:
            torch.save(values, file)
        except RuntimeError as error:
            # torch hides the file's own error, such as a full disk, behind a RuntimeError.
            raise error.__context__ or error from None


def _load_file(path: Path) -> dict[str, Any]:
    """Load a file's values; tensors are memory-mapped on the host. Raises InputError if the file cannot be read."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a corrupt file may raise anything
        raise InputError(
            f"{path} cannot be read ({error}); delete {path.parent.parent} to resume from the previous checkpoint"
        ) from None


def prune_checkpoints(run_folder: Path, *, keep: int) -> None:
    """Delete a run's checkpoints except the newest `keep` (0: keep all) and the one with the best held-out score.

    If several checkpoints share the best score, the newest is kept. Unreadable checkpoints are never deleted.
    """
    checkpoints = checkpoints_in(run_folder)
    if keep == 0 or len(checkpoints) <= keep:
        return
    held_out_scores = {}
    for path in checkpoints:
        with contextlib.suppress(Exception):  # a corrupt file may contain anything
            held_out_scores[path] = _load_file(path / PROGRESS_FILE)["evaluated"].get(
                "eval/reward", -math.inf
            )
    best_checkpoint = max(reversed(held_out_scores), key=held_out_scores.__getitem__)
    for path in checkpoints[:-keep]:
        if path in held_out_scores and path != best_checkpoint:
            durable.remove_folder(path)
