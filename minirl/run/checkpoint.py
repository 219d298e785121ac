"""Checkpoints between steps, and exact resume from them.

    000050/                          a Hugging Face folder of the policy, in the compute dtype
    000050/value/                    the same for each further model, by its name
    000050/resume/policy-0-of-2.safetensors    one rank's shards of fp32 masters and optimizer state
    000050/resume/extra.json         the script's `extra`, with its tensors in extra.safetensors (`value_files`)
    000050/resume/records/0-of-2.json          one rank's `records`, with their tensors likewise
    000050/manifest.json             the run's progress, and size and SHA-256 of every file

Saving overlaps with training. In order:

1. `Checkpoints.save`, on each rank's main thread: copy the rank's shards to host memory, and on rank 0 the
   compute weights. Then training goes on.
2. `_Save`, a thread on each rank, without collectives: write the rank's files into the folder
   .tmp-000050-TOKEN-RANK, and sync each to the disk. files.json comes last, with the digests of the others.
3. `_Save._commit`, the thread of rank 0, once every rank's files.json exists: move all files into its own
   folder, write manifest.json, rename the folder to 000050, and delete the checkpoints that --keep-checkpoints drops.
4. `Checkpoints._wait`, on the main threads, before the next save and at the end of the run (collective):
   find out whether every rank could write its files and rank 0 could commit. If not, all ranks abandon this
   save with a warning, and the run continues with the checkpoints that it has.

The commit does not wait for the main threads: a step may take minutes, and a kill in it must not lose a checkpoint
whose files are all on the disk.

A kill at any moment leaves a whole checkpoint: only the rename in 3 gives a folder a name of digits, and by then all
of its files are on the disk. The names of unfinished folders begin with a dot, and the next start deletes them. An old
checkpoint is deleted only after the newer ones have their names, and gets a name with a dot first.

Nothing is pickled.
"""

import functools
import itertools
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.errors import SaveError, refuse
from minirl.files import durable
from minirl.files.durable import Digest
from minirl.files.json_files import read_json_object
from minirl.files.safetensors_files import open_tensors, write_tensors
from minirl.files.value_files import ValueCopy, read_values
from minirl.model.adapters import peft_config
from minirl.model.families import scalar_config
from minirl.model.folders import file_of
from minirl.model.weights import kept_tensors, read_tokenizer_files, write_folder
from minirl.ranks.process_group import broadcast_object, gather_objects, print0, rank, world_size
from minirl.ranks.time_account import spent_on
from minirl.run.run_folder import (
    EXTRA_FILE,
    FORMAT,
    PRIVATE,
    RECORDS_FOLDER,
    RunFolder,
    checkpoint_name,
    checkpoints_in,
    is_checkpoint,
    read_manifest,
)
from minirl.training.sharded_model import ShardedModel

_DIGESTS_FILE = "files.json"  # written by each rank after its other files
SHARED_S = 60.0  # seconds within which rank 0 must see a file that another rank has written
IN_FLIGHT = "in flight"  # the collector's name in `extra` and `records`
_NO_RECORD = object()  # fills up the records of a rank that has fewer than another


# Write files into the given folder, and return their digests by path within it.
_FileWriter = Callable[[Path], dict[str, Digest]]


class Checkpoints:
    """Saves and restores models with their optimizers.

    models: by name; the first becomes the checkpoint's own Hugging Face folder.
    sources: for each model, the folder of its config and tokenizer. They are read once, here: a save needs only the
        run's folder.
    keep: the number of newest checkpoints to keep (0: all), besides the one with the best score.
    """

    def __init__(
        self,
        run: RunFolder,
        models: Mapping[str, tuple[ShardedModel, torch.optim.Optimizer]],
        *,
        sources: Mapping[str, Path],
        keep: int,
    ):
        self._run = run
        self._models = models
        self._write_model: dict[str, Callable[..., dict[str, Digest]]] = {}
        if rank() == 0:
            (run.path / "checkpoints").mkdir(exist_ok=True)
            for name, (model, _) in models.items():
                self._write_model[name] = _model_writer(model, sources[name])
        self._keep = keep
        self._current_save: _Save | None = None
        self._newest = run.checkpoint

    def restore(self, num_steps: int, *, decode_group: int = 1) -> dict[str, Any]:
        """Load models and optimizers from the run's checkpoint, which any number of ranks may have saved (collective).

        Returns the fields of `Progress`: the saved state, `extra` and this rank's share of `records`; {} in a new run.
        num_steps: steps of the whole run, for the message. decode_group: see `own_records`.
        """
        checkpoint = self._run.checkpoint
        if checkpoint is None:
            return {}
        manifest = read_manifest(checkpoint)
        state = manifest["state"]
        num_saved_ranks = manifest["world_size"]
        for name, (model, optimizer) in self._models.items():
            files = [checkpoint / path for path in _shard_files(name, num_saved_ranks)]
            model.load_state(optimizer, stored_tensors(files), place=str(files[0]))
        message = f"resuming after step {state['step']} of {num_steps}, from {checkpoint}"
        if num_saved_ranks != world_size():
            message += f", saved by {num_saved_ranks} ranks"
        if state["step"] >= num_steps:
            message += (
                ": already finished; a greater --num-steps continues it, another --run-name starts a new run"
            )
        print0(message)
        extra = read_values(checkpoint / EXTRA_FILE)
        records = [read_values(checkpoint / stem) for stem in _record_files(num_saved_ranks)]
        return state | {"extra": extra, "records": own_records(records, decode_group)}

    @spent_on("save")
    def save(
        self,
        state: Mapping[str, Any],
        *,
        extra: Mapping[str, Any] | None = None,
        records: Mapping[str, list[Any]] | None = None,
        score: float | None = None,
    ) -> None:
        """Start to save models, optimizers, `state`, `extra` and `records` (collective).

        Waits for the previous save, copies this rank's tensors and values, and returns.
        state: JSON values, among them `step`. extra, records: see `Run`. score: the held-out score, if the run
        evaluated this step. Raises InputError naming a value that cannot be saved.
        """
        self._wait()
        extra_copy, records_copy = copy_remembered(extra or {}, records or {})
        copies = {_record_files(world_size())[rank()]: records_copy}
        if rank() == 0:
            copies[EXTRA_FILE] = extra_copy
        writers: list[tuple[str, _FileWriter]] = [
            ("", functools.partial(copy.write, stem=stem)) for stem, copy in copies.items() if copy.plain
        ]
        for i, (name, (model, optimizer)) in enumerate(self._models.items()):
            path = _shard_files(name, world_size())[rank()]
            writers.append(("", functools.partial(_write_shards, path, model.state_tensors(optimizer))))
            weights = model.whole_weights(keep=rank() == 0)
            if rank() == 0:
                prefix = "" if i == 0 else f"{name}/"
                writers.append((prefix, functools.partial(self._write_model[name], tensors=weights)))
        manifest = {"format": FORMAT, "state": dict(state), "score": score, "world_size": world_size()}
        self._current_save = _Save(self._run, manifest, writers, keep=self._keep)

    def finish(self) -> Path | None:
        """Wait for the last save; returns the newest checkpoint (collective).

        Raises SaveError if the last save failed.
        """
        error = self._wait()
        if error is not None:
            raise SaveError(f"the last checkpoint was not saved: {error}")
        return self._newest

    def _wait(self) -> str | None:
        """Wait for every rank to end the current save; returns its error, or None (collective).

        The error is the same on all ranks.
        """
        save = self._current_save
        if save is None:
            return None
        self._current_save = None
        write_errors = gather_objects(save.wait_for_own_files())
        write_error: str | None = next(filter(None, write_errors), None)
        commit_error: str | None = broadcast_object(save.end(is_abandoned=write_error is not None))
        error = write_error or commit_error
        if error is None:
            self._newest = save.folder
        else:
            print0(f"warning: {save.folder} was not saved, the run continues without it: {error}")
        return error


def _shard_files(name: str, world_size: int) -> list[str]:
    """The path of each rank's shards of a model and its optimizer, within a checkpoint."""
    return [f"resume/{name}-{r}-of-{world_size}.safetensors" for r in range(world_size)]


def _record_files(world_size: int) -> list[str]:
    """The path of each rank's records within a checkpoint, without the ending."""
    return [f"{RECORDS_FOLDER}/{r}-of-{world_size}" for r in range(world_size)]


def own_records(saved: Sequence[Mapping[str, list[Any]]], decode_group: int = 1) -> dict[str, list[Any]]:
    """This rank's share of the records that all ranks saved. Not collective.

    With as many ranks as before, a rank gets its own. Otherwise all records are dealt to the ranks in turn, each old
    rank's first record first, so that records of an early step still come before those of a late one. Rollouts in
    flight go to the first of each `decode_group` ranks, which samples for all of them.
    """
    dealt = {}
    for name in saved[0]:
        group = decode_group if name == IN_FLIGHT else 1
        if group == 1 and len(saved) == world_size():
            dealt[name] = saved[rank()][name]
            continue
        rows = itertools.zip_longest(*(records[name] for records in saved), fillvalue=_NO_RECORD)
        merged = [record for row in rows for record in row if record is not _NO_RECORD]
        taker, place = divmod(rank(), group)
        dealt[name] = merged[taker :: world_size() // group] if place == 0 else []
    return dealt


def copy_remembered(
    extra: Mapping[str, Any], records: Mapping[str, list[Any]]
) -> tuple[ValueCopy, ValueCopy]:
    """Copies of the script's `extra`, the same on every rank, and of this rank's `records` (collective).

    Raises InputError naming a value that cannot be saved or differs between ranks.
    """
    for name, own in records.items():
        refuse(
            type(own) is not list,
            f"records[{json.dumps(name)}]: must be a list; see `extra` for the rest",
        )
    extra_copy, records_copy = ValueCopy.of(extra, "extra"), ValueCopy.of(records, "records")
    fingerprints = gather_objects(extra_copy.fingerprints())
    for name in dict.fromkeys(itertools.chain(*fingerprints)):
        refuse(
            len({found.get(name) for found in fingerprints}) > 1,
            f"extra[{json.dumps(name)}]: differs between the ranks, and one value is saved for all; make it of "
            "what all ranks have (`gather_objects`), or put it into `records`",
        )
    names = gather_objects(sorted(records))
    refuse(names.count(names[0]) < len(names), f"records: other names on other ranks: {names}")
    return extra_copy, records_copy


def _write_shards(path: str, tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Digest]:
    return {path: write_tensors(folder / path, tensors)}


def _model_writer(model: ShardedModel, source: Path) -> Callable[..., dict[str, Digest]]:
    """What writes `tensors` into a folder: a Hugging Face model, or adapters beside the config of their base.

    It reads config, tokenizer and the tensors that no model uses in `source`, the model's folder, once.
    """
    model_config = model.module.config
    config = read_json_object(file_of(source, "config.json"))
    if model_config.scalar_head:
        config = scalar_config(config)
    peft = None
    if model_config.adapters is not None:
        peft = peft_config(model_config.adapters, model.masters, base=str(source.resolve()))
    return functools.partial(
        write_folder,
        config=config,
        tokenizer_files=read_tokenizer_files(source),
        kept=kept_tensors(model_config, source),
        peft_config=peft,
    )


class _Save:
    """A checkpoint being written. Each rank makes one, which starts the rank's thread.

    After `end` has returned None on rank 0, the checkpoint is at `folder`.
    """

    def __init__(
        self,
        run: RunFolder,
        manifest: dict[str, Any],
        writers: list[tuple[str, _FileWriter]],
        *,
        keep: int,
    ):
        """writers: they are taken out of the list. Each gets the folder with this path in the checkpoint."""
        self._run = run
        self._manifest = manifest
        self._writers = writers
        self._keep = keep
        self._rank = rank()
        name = checkpoint_name(manifest["state"]["step"])
        self.folder = run.path / "checkpoints" / name
        # The temporary folders of all ranks.
        self._half_made = [self.folder.with_name(f".tmp-{name}-{run.token}-{r}") for r in range(world_size())]
        self._has_written = threading.Event()  # this rank has written its files
        self._deadline = math.inf  # by time.monotonic(), for the other ranks' files to become visible
        self._error: str | None = "its thread died, see the traceback"
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_for_own_files(self) -> str | None:
        """Wait until the thread has written this rank's files; returns its error, or None. Not collective."""
        while self._thread.is_alive() and not self._has_written.wait(1.0):
            pass
        return None if self._has_written.is_set() else self._error

    def end(self, *, is_abandoned: bool) -> str | None:
        """Wait for the thread to end; returns its error, or None. Not collective.

        Called when every rank has written its files or failed to. is_abandoned: some rank failed, so the thread of
        rank 0 must not wait for that rank's files.
        """
        self._deadline = time.monotonic() + (0 if is_abandoned else SHARED_S)
        self._thread.join()
        if self._rank == 0:
            # A failed save leaves the other ranks' folders, which this rank's thread may have used until now.
            for path in self._half_made:
                shutil.rmtree(path, ignore_errors=True)
        return self._error

    def _write(self) -> None:
        """Write this rank's files, then on rank 0 commit the checkpoint. Runs on the thread."""
        half_made = self._half_made[self._rank]
        try:
            (half_made / "resume").mkdir(PRIVATE, parents=True)
            digests: dict[str, Digest] = {}
            while self._writers:
                # A writer holds copies of tensors: remove it to free them once they are written.
                prefix, write = self._writers.pop()
                written = write(half_made / prefix)
                digests |= {prefix + name: digest for name, digest in written.items()}
            durable.replace_file(half_made / _DIGESTS_FILE, json.dumps(digests))
            self._has_written.set()
            if self._rank == 0:
                self._commit(half_made)
            self._error = None
        except OSError as error:
            free = shutil.disk_usage(self._run.path).free
            what = error.filename or half_made
            self._error = f"{what}: {error.strerror or error} ({free:,} bytes are free)"
            shutil.rmtree(half_made, ignore_errors=True)

    def _commit(self, half_made: Path) -> None:
        """On rank 0, make one checkpoint of all ranks' files."""
        self._wait_for_digests()
        files: dict[str, Digest] = {}
        for path in self._half_made:
            digests = json.loads((path / _DIGESTS_FILE).read_text())
            files |= digests
            if path != half_made:
                for name in digests:
                    os.rename(path / name, half_made / name)
                shutil.rmtree(path)
        (half_made / _DIGESTS_FILE).unlink()
        manifest = self._manifest | {"files": files}
        durable.replace_file(half_made / "manifest.json", json.dumps(manifest, indent=1))
        if is_checkpoint(self.folder):  # a folder of the user's makes `publish` fail instead
            durable.remove_folder(self.folder)
        metrics = self._run.path / "metrics.jsonl"
        if metrics.is_file():
            # A resume from this checkpoint continues this file: it must not lose the lines up to this step.
            durable.sync(metrics)
        # A kill may have stopped an earlier save before its last line. Without this one the disk would briefly hold
        # two checkpoints too many.
        prune(self._run.path, keep=self._keep)
        durable.publish(half_made, self.folder)
        prune(self._run.path, keep=self._keep)

    def _wait_for_digests(self) -> None:
        """Wait until rank 0 sees the digests of every rank.

        Raises TimeoutError (an OSError) if a rank's digests do not become visible, or if the save is abandoned.
        """
        while missing := [path for path in self._half_made if not (path / _DIGESTS_FILE).exists()]:
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"{missing[0]} does not appear here; do all nodes share $MINIRL_RUNS?")
            time.sleep(0.02)


def prune(run_folder: Path, *, keep: int) -> None:
    """Delete a run's checkpoints, except the newest `keep` (0: delete none) and the best by score.

    Of equal scores the newest is the best. A folder without a readable manifest is left alone.
    """
    checkpoints = []
    scores: dict[Path, float] = {}
    for path in checkpoints_in(run_folder):
        try:
            score = read_manifest(path)["score"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        checkpoints.append(path)
        if score is not None:
            scores[path] = score
    best = max(reversed(scores), key=scores.__getitem__, default=None)
    old = checkpoints[:-keep] if keep else []
    for path in old:
        if path != best:
            durable.remove_folder(path)


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor whose shards are in several files, with the interface of a slice of a safetensors file.

    shards: slices of safetensors files, concatenated along dimension 0. A scalar has a copy in each file.
    """

    shards: list[Any] = field(default_factory=list)

    def get_shape(self) -> list[int]:
        shape = list(self.shards[0].get_shape())
        if not shape:
            return shape
        return [sum(shard.get_shape()[0] for shard in self.shards), *shape[1:]]

    def __getitem__(self, rows: slice) -> Tensor:
        """Rows of the tensor; only they are read. Of a scalar, the whole."""
        if not self.shards[0].get_shape():
            return self.shards[0][...]
        first, last, _ = rows.indices(self.get_shape()[0])
        found = []
        for shard in self.shards:
            found.append(shard[max(first, 0) : max(last, 0)])
            # From here on they count from the next shard's first row.
            length = shard.get_shape()[0]
            first -= length
            last -= length
        return torch.cat(found)


def stored_tensors(files: Iterable[Path]) -> dict[str, Any]:
    """The tensors of safetensors files, one per rank, as if they were one file. It does not read them yet.

    Each tensor has `get_shape` and is read by slicing.
    """
    stored: dict[str, _StoredTensor] = {}
    for path in files:
        file = open_tensors(path)
        for name in sorted(file.keys()):
            stored.setdefault(name, _StoredTensor()).shards.append(file.get_slice(name))
    return dict(stored)
