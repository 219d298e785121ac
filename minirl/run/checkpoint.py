"""Checkpoints between steps, and exact resume from them.

    000050/                          a Hugging Face folder of the policy, in the compute dtype
    000050/value/                    one of each further model
    000050/resume/policy-0-of-2.safetensors    a rank's shards of fp32 masters and optimizer state
    000050/manifest.json             the script's state and the digest of every file

A save copies this rank's tensors to host memory and returns; a thread writes them, without collectives: each rank
leaves a list of what it wrote, and rank 0's thread, when all lists are there, writes the manifest and renames the
folder. A failed save is said and given up: the run goes on, with the checkpoints that it has. Nothing is pickled.
"""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.errors import SaveError
from minirl.files import durable
from minirl.files.durable import Digest
from minirl.files.safetensors_files import open_tensors, write_tensors
from minirl.model.families import scalar_config
from minirl.model.weights import write_folder
from minirl.ranks import watchdog
from minirl.ranks.process_group import broadcast_object, gather_objects, print0, rank, world_size
from minirl.run.run_folder import FORMAT, RunFolder, checkpoints_in, read_manifest
from minirl.training.sharded_model import ShardedModel

_LIST = "files.json"  # the digests of what a rank has written
SHARED_S = 60.0  # for one rank's files to be seen by another
_DIED = "its thread died, see the traceback"
Part = Callable[[Path], dict[str, Digest]]  # writes files into a folder; their digests by path within it


class Checkpoints:
    """Saves and restores models with their optimizers, by name; the first one is the Hugging Face folder itself.

    `sources` are the folders that config and tokenizer come from. At most `keep` checkpoints stay (0: all), the newest
    ones and the one with the best score.
    """

    def __init__(
        self,
        run: RunFolder,
        models: Mapping[str, tuple[ShardedModel, torch.optim.Optimizer]],
        *,
        sources: Mapping[str, Path],
        keep: int,
    ):
        self._run, self._models, self._sources, self._keep = run, models, sources, keep
        self._writing: _Save | None = None
        self._saved = run.checkpoint
        self._blocked_s = 0.0

    def restore(self, num_steps: int) -> dict[str, Any]:
        """Load models and optimizers from the run's checkpoint; returns the state it was saved with, {} for a new run.

        Any number of ranks may have saved it (collective). num_steps: of the whole run.
        """
        checkpoint = self._run.checkpoint
        if checkpoint is None:
            return {}
        manifest = read_manifest(checkpoint)
        for name, (model, optimizer) in self._models.items():
            files = [checkpoint / path for path in _resume_files(name, manifest["world_size"])]
            model.load_state(optimizer, stored_tensors(files), place=str(files[0]))
        ranks = f", saved by {manifest['world_size']} ranks" if manifest["world_size"] != world_size() else ""
        step = manifest["state"]["step"]
        left = "" if step < num_steps else ": already finished, see --num-steps"
        print0(f"resuming after step {step} of {num_steps}, from {checkpoint}{ranks}{left}")
        return manifest["state"]

    def save(self, state: Mapping[str, Any], *, score: float | None = None) -> None:
        """Begin to save models, optimizers and `state`, JSON values with a `step`; waits for the save before.

        Collective.
        """
        began = time.perf_counter()
        self._wait()
        parts: list[Part] = []
        for i, (name, (model, optimizer)) in enumerate(self._models.items()):
            path = _resume_files(name, world_size())[rank()]
            parts.append(_shards_part(path, model.state_tensors(optimizer)))
            if rank() == 0:
                parts.append(_model_part("" if i == 0 else f"{name}/", model, self._sources[name]))
        manifest = dict(format=FORMAT, state=dict(state), score=score, world_size=world_size())
        self._writing = _Save(self._run, manifest, parts, keep=self._keep)
        self._blocked_s += time.perf_counter() - began

    def finish(self) -> Path | None:
        """Wait for the last save; returns the newest checkpoint (collective). Raises SaveError if the save failed."""
        if (error := self._wait()) is not None:
            raise SaveError(f"the last checkpoint was not saved: {error}")
        return self._saved

    def take_blocked_s(self) -> float:
        """Seconds that saves have kept this rank from training since the last call."""
        seconds, self._blocked_s = self._blocked_s, 0.0
        return seconds

    def _wait(self) -> str | None:
        """Let the save that is being written end on every rank; says what failed, if anything did (collective)."""
        if self._writing is None:
            return None
        failed: str | None = next(filter(None, gather_objects(self._writing.wait_for_own_files())), None)
        outcome = broadcast_object(self._writing.end(is_abandoned=failed is not None))
        failed = failed or outcome
        if failed is None:
            self._saved = self._writing.folder
        else:
            print0(f"warning: {self._writing.folder} was not saved, the run goes on without it: {failed}")
        self._writing = None
        return failed


def _resume_files(name: str, world_size: int) -> list[str]:
    return [f"resume/{name}-{r}-of-{world_size}.safetensors" for r in range(world_size)]


def _shards_part(path: str, tensors: Mapping[str, Tensor]) -> Part:
    return lambda folder: {path: write_tensors(folder / path, tensors)}


def _model_part(prefix: str, model: ShardedModel, source: Path) -> Part:
    """The Hugging Face folder of a model as it is now."""
    config = json.loads((source / "config.json").read_text())
    if model.module.config.scalar_head:
        config = scalar_config(config)
    weights = {name: weight.detach().cpu().clone() for name, weight in model.compute_weights.items()}

    def write(folder: Path) -> dict[str, Digest]:
        digests = write_folder(folder / prefix, weights, config=config, tokenizer_from=source)
        return {prefix + name: digest for name, digest in digests.items()}

    return write


class _Save:
    """One checkpoint being written by a thread of each rank; `folder` is there when rank 0's has ended well."""

    def __init__(self, run: RunFolder, manifest: dict[str, Any], parts: Iterable[Part], *, keep: int):
        self._run, self._manifest, self._parts, self._keep = run, manifest, list(parts), keep
        self._rank, self._world_size = rank(), world_size()
        name = f"{manifest['state']['step']:06d}"
        self.folder = run.path / "checkpoints" / name
        self._half_made = [
            self.folder.with_name(f".tmp-{name}-{run.token}-{r}") for r in range(self._world_size)
        ]
        self._has_written, self._is_abandoned = threading.Event(), threading.Event()
        self._until = math.inf
        self._files_error: str | None = _DIED
        self._error: str | None = _DIED
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        watchdog.this_process.saving = self._thread
        self._thread.start()

    def wait_for_own_files(self) -> str | None:
        """What has kept this rank from writing its files, or None. Blocks until it has done with them."""
        while not self._has_written.wait(1.0):
            watchdog.heartbeat()
        return self._files_error

    def end(self, *, is_abandoned: bool) -> str | None:
        """Wait for the thread, which commits (rank 0) unless told that the save is abandoned; what failed there."""
        if is_abandoned:
            self._is_abandoned.set()
        self._until = time.monotonic() + SHARED_S
        while self._thread.is_alive():
            self._thread.join(1.0)
            watchdog.heartbeat()
        if self._rank == 0:  # whose thread may have been taking the others' files until now
            for path in self._half_made:
                shutil.rmtree(path, ignore_errors=True)
        return self._error

    def _write(self) -> None:
        half_made = self._half_made[self._rank]
        try:
            (half_made / "resume").mkdir(parents=True)
            digests: dict[str, Digest] = {}
            while self._parts:  # each holds copies, to be let go of
                digests |= self._parts.pop()(half_made)
            durable.replace_file(half_made / _LIST, json.dumps(digests))
            self._files_error = None
            self._has_written.set()
            if self._rank == 0:
                self._commit(half_made)
            self._error = None
        except OSError as error:
            free = shutil.disk_usage(self._run.path).free
            self._error = (
                f"{error.filename or half_made}: {error.strerror or error} ({free:,} bytes are free)"
            )
            self._files_error = self._files_error and self._error
            shutil.rmtree(half_made, ignore_errors=True)
        finally:
            self._has_written.set()

    def _commit(self, half_made: Path) -> None:
        """When every rank's list is there, collect the files, write the manifest, give the folder its name, prune."""
        while missing := [path for path in self._half_made if not (path / _LIST).exists()]:
            if self._is_abandoned.wait(0.02):
                return
            if time.monotonic() > self._until:
                raise TimeoutError(f"{missing[0]} does not appear here; do all nodes share $MINIRL_RUNS?")
        files: dict[str, Digest] = {}
        for path in self._half_made:
            digests = json.loads((path / _LIST).read_text())
            files |= digests
            if path != half_made:
                for name in digests:
                    os.rename(path / name, half_made / name)
                shutil.rmtree(path)
        (half_made / _LIST).unlink()
        durable.replace_file(
            half_made / "manifest.json", json.dumps(self._manifest | {"files": files}, indent=1)
        )
        if self.folder.exists():
            durable.remove_folder(self.folder)
        if (
            metrics := self._run.path / "metrics.jsonl"
        ).is_file():  # its lines up to this step must not be lost
            durable.sync(metrics)
        prune(
            self._run.path, keep=self._keep
        )  # what a kill has left, so that there is never more than one too many
        durable.publish(half_made, self.folder)
        prune(self._run.path, keep=self._keep)


def prune(folder: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints of a run (0: none) and the one with the best score."""
    checkpoints = checkpoints_in(folder)
    scored = [(read_manifest(path)["score"], path) for path in checkpoints]
    best = max(((score, path) for score, path in scored if score is not None), default=(None, None))[1]
    for path in checkpoints[:-keep] if keep else []:
        if path != best:
            durable.remove_folder(path)


@dataclass(frozen=True)
class _StoredRows:
    """A tensor that lies in several files, rows end to end; like safetensors' slices."""

    parts: list[Any] = field(default_factory=list)

    def get_shape(self) -> list[int]:
        shape = list(self.parts[0].get_shape())
        return [sum(part.get_shape()[0] for part in self.parts), *shape[1:]] if shape else shape

    def __getitem__(self, rows: slice) -> Tensor:
        if not self.parts[0].get_shape():
            return self.parts[0][...]
        found, start = [], 0
        first, last, _ = rows.indices(self.get_shape()[0])
        for part in self.parts:
            length = part.get_shape()[0]
            if first < start + length and start < last:
                found.append(part[max(first - start, 0) : min(last - start, length)])
            start += length
        return torch.cat(found)


def stored_tensors(files: Iterable[Path]) -> dict[str, Any]:
    """The tensors of safetensors files of one rank each, as if there were one file: has `get_shape`, is sliced."""
    stored: dict[str, _StoredRows] = {}
    for path in files:
        file = open_tensors(path)
        for name in sorted(file.keys()):
            stored.setdefault(name, _StoredRows()).parts.append(file.get_slice(name))
    return dict(stored)
